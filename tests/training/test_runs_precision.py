"""Number formats, loss scaling, per-token normalisation and replayed steps, in whole runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import MIXED, configuration, last_stage, losses, metrics, same_state, train

TWO = {"passes": {"schedule": 2, "lambda": 0.5, "timeout_seconds": 300}}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
full = pytest.mark.full


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a checkpoint: layouts initialise differently, and load alike."""
    folder = tmp_path_factory.mktemp("start")
    train(configuration(folder, TWO, save=str(folder / "start"), train_iters=1))
    return folder


def _run(start: Path, save: Path, ranks: int, latent: Any, **options: Any) -> Any:
    options = {"load": str(start / "start"), "finetune": True, **options}
    given = configuration(start, latent, save=str(save), **options)
    return last_stage(train(given, ranks)), losses(save)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param(2, TP2_SP, id="tp2-sp", marks=full),
    ],
)
def test_bf16_trains_as_fp32(
    start: Path, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    """bf16 has 8 bits: losses of about 4 agree to 2e-2 at first; a wrong scale would show."""
    exact, expected = _run(start, tmp_path / "fp32", 1, TWO, train_iters=6)
    rough, found = _run(start, tmp_path / "bf16", ranks, TWO, train_iters=6, bf16=True, **options)
    for step in expected:
        assert found[step] == pytest.approx(expected[step], abs=2e-2), step
        norms = rough.log[step]["grad_norm"], exact.log[step]["grad_norm"]
        assert norms[0] == pytest.approx(norms[1], rel=5e-2), step
    # The weights are in bf16, the masters are not.
    for weight in rough.weights.values():
        assert torch.equal(weight, weight.bfloat16().float())
    masters = rough.optimizer["param"]["fusion.state_proj.weight"]
    assert not torch.equal(masters, masters.bfloat16().float())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2", marks=full),
    ],
)
def test_fp16_scales_the_loss_of_every_pass(
    start: Path, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    """A loss that missed the scale, or got it twice, would change the norm of the gradient."""
    exact, expected = _run(start, tmp_path / "fp32", 1, TWO, train_iters=4)
    for scale in (64, 1024):
        scaled = {"fp16": True, "loss_scale": scale, "train_iters": 4, **options}
        rough, found = _run(start, tmp_path / f"fp16-{scale}", ranks, TWO, **scaled)
        for step in expected:
            assert found[step] == pytest.approx(expected[step], abs=5e-3), step
            norms = rough.log[step]["grad_norm"], exact.log[step]["grad_norm"]
            assert norms[0] == pytest.approx(norms[1], rel=1e-2), step


def test_fp16_skips_steps_that_overflow(tmp_path: Path) -> None:
    """Skipped steps change nothing, count as no update, and the run goes on afterwards."""
    latent = {**TWO, "fusion": {"warmup_iters": 2}}
    options = {"fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1, "train_iters": 30}
    given = configuration(tmp_path, latent, save=str(tmp_path / "run"), **options)

    def look(chunks: list[Any], optimizer: Any, step: int) -> Any:
        scale = float(optimizer.get_loss_scale())
        weights = {n: p.detach().clone() for n, p in chunks[0].named_parameters() if "fusion" in n}
        return scale, weights

    outcome = train(given, each_step=look)[0]
    scales = [scale for scale, _ in outcome.kept]
    skipped = sum(after < before for before, after in itertools.pairwise(scales))
    assert 3 < skipped < 27
    first, last = outcome.kept[0][1], outcome.kept[-1][1]
    assert all(torch.equal(outcome.kept[3][1][name], first[name]) for name in first)
    assert not any(torch.equal(last[name], first[name]) for name in first)
    assert outcome.steps == {30.0 - skipped}
    assert "fusion_updates" not in metrics(tmp_path / "run")[30]
    found = losses(tmp_path / "run")
    assert found[30]["2"] < found[1]["2"]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one", marks=full),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param(2, {}, id="dp2", marks=full),
        pytest.param(2, TP2_SP, id="tp2-sp", marks=full),
    ],
)
def test_per_token_loss_does_not_depend_on_micro_batches(
    start: Path, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    """Rows have masked tokens: means over micro-batches of 1 and of 4 rows would differ."""
    latent = {"passes": MIXED}
    means = {"eod_mask_loss": True, "train_iters": 5}
    tokens = {**means, "calculate_per_token_loss": True}
    one, each = {"micro_batch_size": 4}, {"micro_batch_size": 1}
    whole, expected = _run(start, tmp_path / "whole", 1, latent, **tokens, **one)
    split, found = _run(start, tmp_path / "split", ranks, latent, **tokens, **each, **options)
    other, _ = _run(start, tmp_path / "means", 1, latent, **means, **each)
    assert {len(passes) for passes in expected.values()} == {1, 2, 3}
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=1e-5), step
        norm = whole.log[step]["grad_norm"]
        assert split.log[step]["grad_norm"] == pytest.approx(norm, rel=1e-4), step
    assert other.log[1]["grad_norm"] != pytest.approx(whole.log[1]["grad_norm"], rel=1e-4)


_CALLS = [0]


def _run_every_step_twice(rank: int) -> None:
    """Ask Megatron for a replay of every step, which then goes on with the replay's result."""
    from megatron.core.rerun_state_machine import RerunState, RerunStateMachine

    from megalatent.training.schedule import LatentSchedule

    should_run, call = RerunStateMachine.should_run_forward_backward, LatentSchedule.__call__

    def twice(self: Any, data_iterator: Any) -> bool:
        self.rerun_requested = self.state == RerunState.INITIAL_RUN
        self.continue_requested = self.state == RerunState.RERUNNING_IN_PLACE
        return should_run(self, data_iterator)

    def counted(self: Any, **kwargs: Any) -> Any:
        _CALLS[0] += 1
        return call(self, **kwargs)

    RerunStateMachine.should_run_forward_backward = twice
    LatentSchedule.__call__ = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2", marks=full),
    ],
)
def test_a_replayed_step_is_the_same_step(
    start: Path, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    """Draws have keys and count no calls; nothing is counted twice."""
    latent = {"passes": {**MIXED, "draw": "micro_batch"}}
    once, expected = _run(start, tmp_path / "once", ranks, latent, train_iters=5, **options)
    load = {"load": str(start / "start"), "finetune": True, "train_iters": 5}
    given = configuration(start, latent, save=str(tmp_path / "twice"), **load, **options)
    outcomes = train(given, ranks, prepare=_run_every_step_twice, each_step=lambda *_: _CALLS[0])
    twice = last_stage(outcomes)
    assert twice.kept == [0, 2, 4, 6, 8, 10]
    assert twice.log == once.log
    assert losses(tmp_path / "twice") == expected
    same_state(twice, once)
    for name in ("pass_counts", "token_equivalent_tokens"):
        assert metrics(tmp_path / "twice")[5][name] == metrics(tmp_path / "once")[5][name]


def _poison(heads: set[int]) -> Any:
    """Losses of these calls of the head, from 1, are not a number."""

    def prepare(rank: int) -> None:
        from megalatent.model.wrapper import LatentModel

        head, calls = LatentModel._head, [0]

        def poisoned(self: Any, *args: Any) -> Any:
            calls[0] += 1
            return head(self, *args) * (float("nan") if calls[0] in heads else 1.0)

        model: Any = LatentModel
        model._head = poisoned

    return prepare


# Each step has two micro-batches of two passes, hence four heads: the sixth is in step 2.
@pytest.mark.parametrize(
    ("heads", "exit_code"),
    [
        pytest.param({6}, 17, id="transient"),  # gone in the replay: stop
        pytest.param({6, 10}, 16, id="persistent"),  # the same again: save, resume elsewhere
    ],
)
def test_a_loss_that_is_not_finite_is_replayed(
    start: Path,
    tmp_path: Path,
    heads: set[int],
    exit_code: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = configuration(start, TWO, save=str(tmp_path / "run"), train_iters=4)
    outcome = train(given, prepare=_poison(heads))[0]
    assert outcome.exit_code == exit_code
    assert list(outcome.log) == [1]
    assert "is not finite at iteration 2" in capfd.readouterr().err
    saved = (tmp_path / "run" / "latest_checkpointed_iteration.txt").exists()
    assert saved == (exit_code == 16)
