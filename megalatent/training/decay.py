"""What follows the learning rate in the decay phase: weight decay (AdamC) and the z-loss."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megalatent.config import DecayPhaseConfig
from megalatent.errors import UserError

__all__ = ["DecayScheduler", "scheduler_class"]


# What Megatron calls a setting -> the options that decide it.
_SETTINGS = {
    "learning rate": "megatron.lr",
    "minimum learning rate": "megatron.min_lr",
    "warmup iterations": "megatron.lr_warmup_iters",
    "total number of iterations": "megatron.train_iters (or lr_decay_iters, where it is given)",
    "learning rate decay style": "megatron.lr_decay_style",
    "start weight decay": "megatron.weight_decay",
    "end weight decay": "megatron.weight_decay",
    "total number of weight decay iterations": "megatron.train_iters",
    "weight decay incr style": "megatron.weight_decay_incr_style",
}


class DecayScheduler(OptimizerParamScheduler):
    """Megatron's scheduler, which also knows its decay phase.

    Megatron counts samples: ``num_steps`` are the samples consumed before a step. The decay phase
    is the last ``--lr-wsd-decay-iters`` steps of ``--lr-decay-iters`` with WSD, everything after
    the warm-up with the styles that decay all along, and no step with ``constant``.

    Class attributes:
        section: ``latent.decay_phase``.
    """

    section = DecayPhaseConfig()

    @property
    def decay_start(self) -> float:
        """Samples before the decay phase."""
        if self.lr_decay_style == "constant":
            return math.inf
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            return float(self.lr_decay_steps - self.wsd_decay_steps)
        return float(self.lr_warmup_steps)

    @property
    def z_loss(self) -> float:
        """Coefficient of the z-loss in the step to come."""
        return self.section.z_loss if self.num_steps >= self.decay_start else 0.0

    def _check_and_set(self, cls_value: Any, sd_value: Any, name: str) -> Any:
        """Of a setting, the value to go on with: the run's or the checkpoint's."""
        try:
            return super()._check_and_set(cls_value, sd_value, name)
        except AssertionError:
            raise UserError(
                f"{_SETTINGS.get(name, name)}: the checkpoint was trained with {sd_value}, and"
                f" this run has {cls_value}{' samples' if 'iterations' in name else ''}: set"
                " megatron.override_opt_param_scheduler: true to take the run's value, or"
                " use_checkpoint_opt_param_scheduler: true to keep the checkpoint's"
            ) from None

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Weight decay of a group; in the decay phase it shrinks as the learning rate does."""
        decay = float(super().get_wd(param_group))
        if not self.section.weight_decay_follows_lr or self.num_steps < self.decay_start:
            return decay
        group = param_group or {}
        peak = group.get("max_lr", self.max_lr)
        # Weights that never move have no decay either.
        return decay * self.get_lr(group) / peak if peak else 0.0


def scheduler_class(section: DecayPhaseConfig) -> type[DecayScheduler]:
    """The scheduler with the settings of a run, to take the place of Megatron's."""
    return type("DecayScheduler", (DecayScheduler,), {"section": section})
