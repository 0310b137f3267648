"""The operations that a run reports, against torch's own count of what it executed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalatent.training.flops import attention_pairs
from tests.training.runs import SEQ, configuration, metrics, train

full = pytest.mark.full

WINDOW = 8
WINDOWED = {"window_size": [WINDOW - 1, 0], "window_attn_skip_freq": 2, "num_layers": 4}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": "[0,1,1,1]",
    "num_layers": 4,
}
PASSES = [{"start": k - 1, "mixture": {k: 1.0}} for k in (1, 2, 3)]

_STEPS: list[dict[str, int]] = []


def _count_every_step(rank: int) -> None:
    from megalatent.training.schedule import LatentSchedule

    call = LatentSchedule.__call__

    def counted(self: Any, **kwargs: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = call(self, **kwargs)
        by_operator = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
        _STEPS.append(by_operator)
        return result

    LatentSchedule.__call__ = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("latent", "options", "layers_with_window"),
    [
        pytest.param(
            {"fusion": {"kind": "gated"}, "model": {"attention_gate": True}},
            WINDOWED,
            (1, 3),
            id="gated-window",
        ),
        pytest.param({"fusion": {"kind": "additive"}}, {}, (), id="additive", marks=full),
        pytest.param({"fusion": {"kind": "concat"}}, EXPERTS, (), id="concat-moe", marks=full),
    ],
)
def test_steps_of_one_two_and_three_passes(
    tmp_path: Path, latent: dict[str, Any], options: dict[str, Any], layers_with_window: Any
) -> None:
    """The products with weights to the last one; in the attention, what the mask leaves of them.

    Attention on CPUs computes all scores and hides most. The pairs that are seen are counted here
    one by one.
    """
    latent = {**latent, "passes": {"schedule": PASSES, "timeout_seconds": 300}}
    given = configuration(tmp_path, latent, save=str(tmp_path / "run"), train_iters=3, **options)
    outcome = train(given, prepare=_count_every_step, each_step=lambda *_: list(_STEPS))[0]
    records = metrics(tmp_path / "run")
    layers = given["megatron"]["num_layers"]
    seen = sum(
        not (layer in layers_with_window and key <= query - WINDOW)
        for layer in range(1, layers + 1)
        for query in range(SEQ)
        for key in range(query + 1)
    )
    for step, (counted, record) in enumerate(zip(outcome.kept[-1], records.values(), strict=True)):
        attention = sum(n for op, n in counted.items() if "bmm" in op)
        products = sum(n for op, n in counted.items() if "bmm" not in op)
        assert attention > 0
        expected = products + attention * seen / (layers * SEQ**2)
        assert record["flops"] == pytest.approx(expected, rel=1e-9), f"K = {step + 1}: {counted}"
        per_second = record["flops"] / record["seconds"]
        assert record["flops_per_second_and_rank"] == pytest.approx(per_second)
    assert [record["passes_per_step"] for record in records.values()] == [1, 2, 3]


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
def test_pairs_of_a_row(window: int | None) -> None:
    """Attention position by position, over the keys that each one sees, forward and backward."""
    length, width = 12, 4
    query, key, value = torch.randn(3, length, width, requires_grad=True).unbind()
    with FlopCounterMode(display=False) as counter:
        rows = []
        for t in range(length):
            first = 0 if window is None else max(t + 1 - window, 0)
            scores = query[t : t + 1] @ key[first : t + 1].T
            rows.append(scores.softmax(-1) @ value[first : t + 1])
        torch.cat(rows).sum().backward()
    # Two products, each with two gradients; a multiplication and an addition each.
    assert counter.get_total_flops() == 2 * 3 * 2 * width * attention_pairs(length, window)


_THROUGHPUT: list[float] = []


def _keep_throughput(rank: int) -> None:
    """What Megatron takes for its line, before it divides by the mean time."""
    from megatron.training import training

    log = training.training_log

    @functools.wraps(log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        count = training.num_floating_point_operations

        def kept(*given: Any, **options: Any) -> float:
            _THROUGHPUT.append(count(*given, **options))
            return _THROUGHPUT[-1]

        training.num_floating_point_operations = kept
        try:
            return log(*args, **kwargs)
        finally:
            training.num_floating_point_operations = count

    training.training_log = training_log


def test_megatrons_throughput_is_of_all_steps_since_its_last_line(tmp_path: Path) -> None:
    """It divides by their mean time, and K varies."""
    passes = {"schedule": PASSES, "timeout_seconds": 300}
    options = {"train_iters": 6, "log_interval": 3, "save": str(tmp_path / "run")}
    given = configuration(tmp_path, {"passes": passes}, **options)
    outcome = train(given, prepare=_keep_throughput, each_step=lambda *_: list(_THROUGHPUT))[0]
    one, two_and_three, threes = (metrics(tmp_path / "run")[i]["flops"] for i in (1, 3, 6))
    lines = [one, (one + two_and_three) / 3, threes / 3]
    assert outcome.kept[-1] == pytest.approx(lines)
    assert one < lines[1] < lines[2]
