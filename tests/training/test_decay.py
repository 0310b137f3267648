"""Learning rate, weight decay and z-loss of 1,000 steps against their closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalatent import platform

platform.install()

from megatron.training import training  # noqa: E402

from megalatent.config import DecayPhaseConfig, NorMuonConfig  # noqa: E402
from megalatent.training import optimizer  # noqa: E402
from megalatent.training.decay import scheduler_class  # noqa: E402
from tests.training.runs import configuration, losses, train  # noqa: E402

STEPS, WARMUP, DECAY, BATCH = 1000, 200, 250, 8
MATRICES, REST = 1e-2, 5e-4  # peaks of the two learning rates
DECAYS = 0.01
Z_LOSS = 1e-5


def _walk(
    monkeypatch: pytest.MonkeyPatch,
    section: DecayPhaseConfig,
    peaks: tuple[float, float] = (MATRICES, REST),
    **changed: Any,
) -> Iterator[tuple[int, list[dict[str, Any]], float]]:
    """Step (0-based), parameter groups and z-loss coefficient as each step finds them."""
    options = {
        "train_iters": STEPS,
        "lr_decay_iters": None,
        "lr_warmup_iters": WARMUP,
        "lr_warmup_fraction": None,
        "lr_warmup_init": 0.0,
        "lr_wsd_decay_iters": DECAY,
        "lr_decay_style": "WSD",
        "lr_wsd_decay_style": "linear",
        "global_batch_size": BATCH,
        "lr": MATRICES,
        "min_lr": 0.0,
        "start_weight_decay": DECAYS,
        "end_weight_decay": DECAYS,
        "weight_decay_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": False,
    }
    args = SimpleNamespace(**{**options, **changed})
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "OptimizerParamScheduler", scheduler_class(section))
    groups: list[dict[str, Any]] = [
        {"max_lr": peaks[0], "min_lr": 0.0, "wd_mult": 1.0},
        {"max_lr": peaks[1], "min_lr": 0.0, "wd_mult": 1.0, "start_wd": 0.0, "end_wd": 0.0},
    ]
    scheduler = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=groups))
    for step in range(STEPS):
        yield step, groups, scheduler.z_loss
        scheduler.step(increment=BATCH)


def test_every_step_of_a_wsd_run(monkeypatch: pytest.MonkeyPatch) -> None:
    section = DecayPhaseConfig(weight_decay_follows_lr=True, z_loss=Z_LOSS)
    for step, (matrices, rest), z_loss in _walk(monkeypatch, section):
        share = min(step / WARMUP, 1.0, (STEPS - step) / DECAY)
        assert matrices["lr"] == pytest.approx(MATRICES * share, rel=1e-12)
        assert rest["lr"] == pytest.approx(REST * share, rel=1e-12)
        # Weight decay does not warm up.
        follows = min(1.0, (STEPS - step) / DECAY)
        assert matrices["weight_decay"] == pytest.approx(DECAYS * follows, rel=1e-12)
        assert rest["weight_decay"] == 0.0
        assert z_loss == (Z_LOSS if step >= STEPS - DECAY else 0.0)


def test_weights_that_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate of zero, for all weights or for some, is no peak to compare with."""
    section = DecayPhaseConfig(weight_decay_follows_lr=True)
    for _, (matrices, rest), _z in _walk(monkeypatch, section, (0.0, REST), lr=0.0):
        assert matrices["lr"] == 0.0
        assert rest["lr"] >= 0.0
    settings = NorMuonConfig(adam_lr=REST)
    for lr, least, expected in ((0.0, 0.0, 0.0), (MATRICES, MATRICES / 10, REST / 10)):
        config = SimpleNamespace(lr=lr, min_lr=least)
        make = optimizer._with_adam_settings(lambda _, config=config: (config, {}), settings)
        (override,) = make(None)[1].values()
        assert override["max_lr"] == REST
        assert override["min_lr"] == pytest.approx(expected)


def test_weight_decay_stays_where_it_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, (matrices, _rest), z_loss in _walk(monkeypatch, DecayPhaseConfig()):
        assert matrices["weight_decay"] == DECAYS
        assert z_loss == 0.0


def test_styles_that_decay_all_along(monkeypatch: pytest.MonkeyPatch) -> None:
    section = DecayPhaseConfig(weight_decay_follows_lr=True, z_loss=Z_LOSS)
    walk = _walk(monkeypatch, section, lr_decay_style="linear")
    for step, (matrices, _rest), z_loss in walk:
        share = (STEPS - step) / (STEPS - WARMUP)
        assert matrices["weight_decay"] == pytest.approx(DECAYS * min(share, 1.0), rel=1e-12)
        assert z_loss == (Z_LOSS if step >= WARMUP else 0.0)


def test_no_decay_phase_at_a_constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    section = DecayPhaseConfig(weight_decay_follows_lr=True, z_loss=Z_LOSS)
    for _, (matrices, _rest), z_loss in _walk(monkeypatch, section, lr_decay_style="constant"):
        assert matrices["weight_decay"] == DECAYS
        assert z_loss == 0.0


def test_a_run_has_the_z_loss_in_its_decay_phase_alone(tmp_path: Path) -> None:
    """Steps 3 and 4 of 4 decay: losses are the same up to step 3, gradients up to step 2."""
    found = []
    for coefficient in (0.0, 0.1):
        save = tmp_path / f"z{coefficient}"
        given = configuration(
            tmp_path,
            {
                "passes": {"schedule": 2, "timeout_seconds": 300},
                "decay_phase": {"z_loss": coefficient},
            },
            train_iters=4,
            lr_decay_iters=None,
            lr_decay_style="WSD",
            lr_wsd_decay_style="linear",
            lr_wsd_decay_iters=2,
            save=str(save),
        )
        log = train(given)[0].log
        found.append((losses(save), {step: seen["grad_norm"] for step, seen in log.items()}))
    (plain, plain_norms), (with_z, norms) = found
    for step in range(1, 5):
        assert (with_z[step] == plain[step]) == (step <= 3), step
        assert (norms[step] == plain_norms[step]) == (step <= 2), step
