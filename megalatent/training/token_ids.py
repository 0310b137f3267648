"""Token ids that the model has no row for are an error where they enter, and nowhere later.

With the vocabulary split over TP ranks, each rank masks the ids of the others, so that an id that
belongs to none passes as a token that is never there, and training goes on with wrong losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalatent.errors import UserError

__all__ = ["check_ids"]


def check_ids(batch: Mapping[str, Any], vocabulary: int) -> None:
    """Check one micro-batch as the data loader gives it.

    It is in host memory then, so that this waits for no device.

    Args:
        batch: ``tokens`` and ``labels``, ``[b, S]``; ``loss_mask`` says which labels count (those
            of prompts are negative in Megatron's fine-tuning data).
        vocabulary: number of tokens of the tokenizer; the padded rows of the model do not count.

    Raises:
        UserError: an id outside ``0 ... vocabulary - 1``.
    """
    tokens, labels, mask = (batch.get(key) for key in ("tokens", "labels", "loss_mask"))
    if torch.is_tensor(tokens):
        _check(tokens, vocabulary)
    if torch.is_tensor(labels):
        _check(labels if mask is None else labels.masked_fill(mask == 0, 0), vocabulary)


def _check(ids: Tensor, vocabulary: int) -> None:
    if not ids.numel():
        return
    least, most = (int(bound) for bound in torch.aminmax(ids))
    if least >= 0 and most < vocabulary:
        return
    wrong = most if most >= vocabulary else least
    needed = f", or megatron.vocab_size: {most + 1} or more" if least >= 0 else ""
    raise UserError(
        f"the data hold token {wrong}, and the vocabulary is 0 to {vocabulary - 1}: give the"
        f" tokenizer that the data were made with{needed}"
    )
