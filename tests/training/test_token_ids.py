"""Tokens that the model has no row for end the run, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalatent.errors import UserError
from megalatent.training.token_ids import check_ids
from tests.distributed.harness import RankError
from tests.training.runs import VOCAB, configuration, train


def batch(tokens: list[int], labels: list[int], mask: list[int]) -> dict[str, Any]:
    return {
        "tokens": torch.tensor([tokens]),
        "labels": torch.tensor([labels]),
        "loss_mask": torch.tensor([mask], dtype=torch.float32),
    }


@pytest.mark.parametrize(
    ("tokens", "labels", "wrong"),
    [
        ([0, 10, 1], [1, 1, 1], "token 10"),
        ([0, 1, 2], [1, 12, 1], "token 12"),
        ([0, -1, 2], [1, 1, 1], "token -1"),
    ],
)
def test_an_id_outside_the_vocabulary(tokens: list[int], labels: list[int], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong) as caught:
        check_ids(batch(tokens, labels, [1, 1, 1]), 10)
    assert "0 to 9" in str(caught.value)


def test_labels_that_do_not_count_may_be_anything() -> None:
    check_ids(batch([0, 9, 3], [-100, 9, 500], [0, 1, 0]), 10)


def test_what_is_not_there_is_not_checked() -> None:
    check_ids({"tokens": None, "labels": None, "loss_mask": None}, 10)


def test_a_vocabulary_split_over_two_ranks(tmp_path: Path) -> None:
    """Each rank masks the ids of the other, and would mask these too and train on."""
    given = configuration(
        tmp_path, vocab_size=VOCAB // 2, tensor_model_parallel_size=2, train_iters=1
    )
    with pytest.raises(RankError, match=r"UserError: the data hold token \d\d.* 0 to 31"):
        train(given, 2)
