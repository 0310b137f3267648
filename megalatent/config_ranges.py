"""Ranges of Megatron's numbers, one row each, and the checker for all of them.

Megatron itself takes `train_iters: -5` or an infinite learning rate, and fails hours later, far
away, or not at all. Only what is certain stands here: a value outside its range means nothing.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass

from megalatent.config_megatron import options
from megalatent.errors import UserError

__all__ = ["RANGES", "Range", "check_range", "check_ranges", "read_split"]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `least` to `most`; a bound that is `open` is outside itself."""

    least: float = -math.inf
    most: float = math.inf
    open_below: bool = False
    open_above: bool = False

    def holds(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        above = value > self.least if self.open_below else value >= self.least
        return above and (value < self.most if self.open_above else value <= self.most)

    def __str__(self) -> str:
        least = f"{'more than ' if self.open_below else ''}{self.least:.15g}"
        if self.most == math.inf:
            return least if self.open_below else f"{least} or more"
        most = f"{'less than ' if self.open_above else ''}{self.most:.15g}"
        return f"{least} to {most}"


_COUNT = Range(least=1)
_MAYBE_NONE = Range(least=0)
_NOT_NEGATIVE = Range(least=0)
_POSITIVE = Range(least=0, open_below=True)
_PROBABILITY = Range(least=0, most=1, open_above=True)
_SEED = Range(least=0, most=2**32 - 1)  # NumPy takes no other

# The name under `megatron:` -> what it may be. An option that is not given is not looked at.
RANGES: dict[str, Range] = {
    # The model.
    "num_layers": _COUNT,
    "hidden_size": _COUNT,
    "ffn_hidden_size": _COUNT,
    "num_attention_heads": _COUNT,
    "num_query_groups": _COUNT,
    "kv_channels": _COUNT,
    "seq_length": _COUNT,
    "max_position_embeddings": _COUNT,
    "vocab_size": _COUNT,
    "padded_vocab_size": _COUNT,
    "make_vocab_size_divisible_by": _COUNT,
    "norm_epsilon": _NOT_NEGATIVE,
    "init_method_std": _NOT_NEGATIVE,
    "hidden_dropout": _PROBABILITY,
    "attention_dropout": _PROBABILITY,
    "rotary_base": _POSITIVE,
    "rotary_percent": Range(least=0, most=1, open_below=True),
    "rotary_seq_len_interpolation_factor": _COUNT,
    "mtp_num_layers": _MAYBE_NONE,
    "mtp_loss_scaling_factor": _NOT_NEGATIVE,
    "num_experts": _COUNT,
    "moe_router_topk": _COUNT,
    "moe_ffn_hidden_size": _COUNT,
    "moe_z_loss_coeff": _NOT_NEGATIVE,
    "seed": _SEED,
    # The layout.
    "tensor_model_parallel_size": _COUNT,
    "pipeline_model_parallel_size": _COUNT,
    "context_parallel_size": _COUNT,
    "expert_model_parallel_size": _COUNT,
    "expert_tensor_parallel_size": _COUNT,
    "num_layers_per_virtual_pipeline_stage": _COUNT,
    "num_virtual_stages_per_pipeline_rank": _COUNT,
    "recompute_num_layers": _COUNT,
    "distributed_timeout_minutes": _COUNT,
    # The run and its batches.
    "train_iters": _COUNT,
    "train_samples": _COUNT,
    "micro_batch_size": _COUNT,
    "global_batch_size": _COUNT,
    "eval_iters": _MAYBE_NONE,
    "eval_interval": _COUNT,
    "eval_micro_batch_size": _COUNT,
    "eval_global_batch_size": _COUNT,
    "log_interval": _COUNT,
    "save_interval": _COUNT,
    "exit_interval": _COUNT,
    "exit_duration_in_mins": _COUNT,
    "ckpt_step": _MAYBE_NONE,
    "num_workers": _MAYBE_NONE,
    "num_dataset_builder_threads": _COUNT,
    "tensorboard_queue_size": _COUNT,
    "tensorboard_log_interval": _COUNT,
    # The optimiser.
    "lr": _NOT_NEGATIVE,
    "min_lr": _NOT_NEGATIVE,
    "lr_decay_iters": _COUNT,
    "lr_decay_samples": _COUNT,
    "lr_wsd_decay_iters": _COUNT,
    "lr_wsd_decay_samples": _COUNT,
    "lr_warmup_iters": _MAYBE_NONE,
    "lr_warmup_samples": _MAYBE_NONE,
    "lr_warmup_fraction": Range(least=0, most=1),
    "lr_warmup_init": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "start_weight_decay": _NOT_NEGATIVE,
    "end_weight_decay": _NOT_NEGATIVE,
    "clip_grad": _NOT_NEGATIVE,
    "adam_beta1": _PROBABILITY,
    "adam_beta2": _PROBABILITY,
    "adam_eps": _NOT_NEGATIVE,
    "sgd_momentum": _PROBABILITY,
    "loss_scale": _POSITIVE,
    "initial_loss_scale": _POSITIVE,
    "min_loss_scale": _POSITIVE,
    "loss_scale_window": _POSITIVE,
    "hysteresis": _COUNT,
}


def check_ranges(args: argparse.Namespace) -> None:
    """Raise a `UserError` for the first option that is outside its range."""
    for name in RANGES:
        check_range(name, getattr(args, options()[name].action.dest))
    if args.split is not None:
        read_split(args.split)


def check_range(name: str, value: float | None) -> None:
    """Raise a `UserError` if the option cannot have this value."""
    allowed = RANGES[name]
    if value is not None and not allowed.holds(value):
        raise UserError(f"megatron.{name}: {value} is out of range: give {allowed}")


def read_split(text: str) -> list[float]:
    """Shares of training, validation and test, as in `90,10,0`.

    Raises:
        UserError: it is no split.
    """
    try:
        shares = [float(part) for part in re.split(r"[,/\s]+", text.strip())]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares):
        raise UserError(
            f"megatron.split: {text!r} is no split: give the shares of training, validation and"
            " test, as 90,10,0"
        )
    if not shares[0]:
        raise UserError(f"megatron.split: {text!r} leaves nothing to train on: give a first share")
    return shares
