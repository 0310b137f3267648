"""An interrupted run goes on as if it had not been: losses, weights and counts to the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import RankError
from tests.training.runs import (
    configuration,
    last_stage,
    losses,
    metrics,
    same_state,
    train,
)

# K = 1, 2, 3 from the first step on, other shares in the second half; jitter and prefix mixin on.
PASSES = {
    "schedule": [
        {"start": 0, "mixture": {1: 0.5, 2: 0.3, 3: 0.2}},
        {"start": 0.5, "mixture": {1: 0.2, 2: 0.4, 3: 0.4}},
    ],
    "lambda": 0.5,
    "timeout_seconds": 300,
}
LATENT = {"passes": PASSES}
PER_MICRO_BATCH = {"passes": {**PASSES, "draw": "micro_batch"}}
SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}


def _counts(folder: Path) -> dict[int, Any]:
    return {
        step: (record["pass_counts"], record["token_equivalent_tokens"], record["learning_rate"])
        for step, record in metrics(folder).items()
    }


def _assert_goes_on(folder: Path, done: int, total: int) -> None:
    """The records of `resumed` are those of `whole` after step `done`."""
    whole, resumed = losses(folder / "whole"), losses(folder / "resumed")
    assert set(whole) == set(range(1, total + 1))
    assert resumed == {step: whole[step] for step in range(done + 1, total + 1)}
    # K must have varied before and after the interruption for the test to mean something.
    drawn = [{len(whole[step]) for step in part} for part in (list(whole)[:done], list(resumed))]
    assert all(len(passes) > 1 for passes in drawn)
    counts = _counts(folder / "whole")
    assert _counts(folder / "resumed") == {step: counts[step] for step in resumed}


def test_a_longer_run_must_say_so(tmp_path: Path) -> None:
    """The learning rate decays until the end, which would move: and the phases move with it."""
    save = str(tmp_path / "run")
    options = {"lr_decay_iters": None, "save": save, "load": save, "seed": 7}
    train(configuration(tmp_path, {"seed": 5, **LATENT}, train_iters=2, **options))
    longer = configuration(tmp_path, {"seed": 6, **LATENT}, train_iters=4, **options)
    with pytest.raises(RankError) as caught:
        train(longer)
    said = str(caught.value)
    assert "UserError: megatron.train_iters" in said
    assert "the checkpoint was trained with 8, and this run has 16 samples" in said
    assert "megatron.override_opt_param_scheduler: true" in said
    # Said before, and on one line each.
    assert "latent options changed since the checkpoint: latent.seed: 5 -> 6\n" in said
    assert "begin at iterations 0, 2 instead of 0, 1\n" in said


OVERRIDE = {"override_opt_param_scheduler": True}
KEEP = {"use_checkpoint_opt_param_scheduler": True}
NORMUON = {"optimizer": "adaptive_muon", "use_distributed_optimizer": True}
full = pytest.mark.full


@pytest.mark.parametrize(
    ("options", "changed", "rates"),
    [
        pytest.param({}, OVERRIDE, {1e-3}, id="the-runs", marks=full),
        pytest.param(SHARDED, OVERRIDE, {1e-3}, id="the-runs-sharded", marks=full),
        pytest.param(SHARDED, KEEP, {3e-3}, id="the-checkpoints-sharded"),
        pytest.param(NORMUON, OVERRIDE, {1e-3}, id="the-runs-normuon"),
        pytest.param(NORMUON, KEEP, {3e-3}, id="the-checkpoints-normuon", marks=full),
        pytest.param(SHARDED, {}, None, id="neither"),
    ],
)
def test_another_learning_rate(
    tmp_path: Path, options: dict[str, Any], changed: dict[str, Any], rates: set[float] | None
) -> None:
    """Whose rate holds is as asked, also that of weights with a rate of their own."""
    adam = "optimizer" if "optimizer" in options else None
    save = str(tmp_path / "run")
    options = {**options, "lr_decay_style": "constant", "save": save}

    def latent(rate: float) -> dict[str, Any]:
        return LATENT | ({adam: {"adam_lr": rate}} if adam else {})

    train(configuration(tmp_path, latent(2e-3), train_iters=2, **options))
    given = configuration(
        tmp_path, latent(5e-4), train_iters=3, load=save, **{**options, "lr": 1e-3, **changed}
    )
    if rates is None:
        with pytest.raises(RankError, match=r"UserError: megatron\.lr: the checkpoint was trained"):
            train(given)
        return
    ((*_, seen),) = [outcome.kept for outcome in train(given, each_step=_rates)]
    assert {rate for optimizer, rate in seen if optimizer != "adam"} == rates
    of_adam = {rate for optimizer, rate in seen if optimizer == "adam"}
    assert of_adam == ({2e-3 if changed == KEEP else 5e-4} if adam else set())
    assert metrics(tmp_path / "run")[3]["learning_rate"] in rates


@full
def test_a_fresh_optimizer_goes_on_in_the_schedule(tmp_path: Path) -> None:
    """Warm-up of 2 steps, decay in the last 3 of 6; 2 are done when the state is left behind."""
    save = str(tmp_path / "run")
    schedule = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 3}
    options = {**schedule, "lr_warmup_iters": 2, "lr_decay_iters": None, "train_iters": 6}
    train(configuration(tmp_path, LATENT, save=save, exit_interval=2, **options))
    train(configuration(tmp_path, LATENT, save=save, load=save, no_load_optim=True, **options))
    found = [record["learning_rate"] for record in metrics(tmp_path / "run").values()]
    # As logged: the rate of the step to come.
    assert found == pytest.approx([3e-3 * share for share in (1 / 2, 1, 1, 2 / 3, 1 / 3, 0)])


def _rates(chunks: list[Any], optimizer: Any, step: int) -> list[tuple[str | None, float]]:
    return [(group.get("optimizer"), group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("ranks", "steps", "latent", "options"),
    [
        pytest.param(1, 20, LATENT, {}, id="one"),
        pytest.param(2, 12, PER_MICRO_BATCH, SHARDED, id="dp2-sharded"),
        pytest.param(
            2, 12, LATENT, {**SHARDED, "bf16": True}, id="dp2-sharded-bf16", marks=pytest.mark.full
        ),
        pytest.param(
            2,
            12,
            LATENT,
            {
                "pipeline_model_parallel_size": 2,
                "num_layers": 4,
                "num_layers_per_virtual_pipeline_stage": 1,
            },
            id="pp2-vp2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            2,
            12,
            LATENT,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            id="tp2-sp",
            marks=pytest.mark.full,
        ),
    ],
)
def test_half_save_restart_half(
    tmp_path: Path, ranks: int, steps: int, latent: dict[str, Any], options: dict[str, Any]
) -> None:
    half = steps // 2
    given = configuration(tmp_path, latent, train_iters=steps, save_interval=half, **options)
    given["megatron"]["save"] = str(tmp_path / "whole")
    whole = train(given, ranks)
    given["megatron"] |= {"load": str(tmp_path / "whole"), "ckpt_step": half}
    given["megatron"]["save"] = str(tmp_path / "resumed")
    resumed = train(given, ranks)
    same_state(last_stage(resumed), last_stage(whole))
    _assert_goes_on(tmp_path, half, steps)


def _stop_while_training(rank: int) -> None:
    """SIGTERM to one rank in the middle of a step with several passes."""
    from megalatent.model.wrapper import LatentModel

    forward, fused = LatentModel.forward, [0]

    def counted(self: LatentModel, action: str, *args: Any) -> Any:
        fused[0] += action == "fuse"
        if rank == 0 and action == "fuse" and fused[0] == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, action, *args)

    LatentModel.forward = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, SHARDED, id="dp2-sharded", marks=pytest.mark.full),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2", marks=pytest.mark.full),
    ],
)
def test_stopped_by_sigterm_in_the_middle_of_a_step(
    tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    given = configuration(tmp_path, LATENT, train_iters=12, exit_signal_handler=True, **options)
    given["megatron"]["save"] = str(tmp_path / "whole")
    whole = train(given, ranks)
    given["megatron"]["save"] = str(tmp_path / "resumed")
    stopped = last_stage(train(given, ranks, prepare=_stop_while_training))
    assert stopped.exit_code == 0
    done = max(stopped.log)
    assert 1 < done < 12
    tracker = tmp_path / "resumed" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == str(done)
    # Restarted as a job is: the same configuration, which loads what it has saved.
    (tmp_path / "resumed" / "metrics.jsonl").unlink()
    given["megatron"]["load"] = given["megatron"]["save"]
    resumed = train(given, ranks)
    same_state(last_stage(resumed), last_stage(whole))
    _assert_goes_on(tmp_path, done, 12)
