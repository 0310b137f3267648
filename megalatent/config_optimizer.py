"""The sections `latent.optimizer` and `latent.decay_phase`, and their checks."""

from __future__ import annotations

import argparse
import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalatent.config_values import require
from megalatent.errors import UserError

if TYPE_CHECKING:
    from megalatent.config import Config

__all__ = ["DecayPhaseConfig", "NorMuonConfig", "check_optimizer"]

_NORMUON = "adaptive_muon"
# Megatron's flags of NorMuon, which nothing else reads.
_UNSUPPORTED = (
    ("fp16", "it trains in bf16 or fp32", "write bf16: true"),
    (
        "overlap_param_gather",
        "its ranks update whole matrices and gather them right after the update",
        "leave it out",
    ),
    ("use_precision_aware_optimizer", "its states are fp32", "leave it out"),
    (
        "fp8_param_gather",
        "it updates fp32 masters of bf16 weights",
        "leave it out: the layers still compute in FP8 with fp8_format",
    ),
)


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig:
    """What Megatron has no option for with `optimizer: adaptive_muon`, which is NorMuon here.

    Attributes:
        adam_lr: peak learning rate of what NorMuon does not train (embeddings, output layer,
            vectors); None: `megatron.lr`.
        adam_weight_decay: weight decay of embeddings and the output layer; None:
            `megatron.weight_decay`. Vectors have none.
        beta2: decay of NorMuon's second moment.
    """

    adam_lr: float | None = None
    adam_weight_decay: float | None = None
    beta2: float = 0.95

    def __post_init__(self) -> None:
        where = "latent.optimizer"
        for name in ("adam_lr", "adam_weight_decay"):
            value = getattr(self, name)
            ok = value is None or (math.isfinite(value) and value >= 0)
            require(ok, f"{where}.{name}", value, "is negative or not finite", "give 0 or more")
        require(
            0 <= self.beta2 < 1,
            f"{where}.beta2",
            self.beta2,
            "is no decay of a moment",
            "give 0 up to 1 (not 1 itself)",
        )


@dataclass(frozen=True, kw_only=True)
class DecayPhaseConfig:
    """What happens while the learning rate decays.

    Attributes:
        weight_decay_follows_lr: weight decay shrinks in proportion to the learning rate (AdamC).
        z_loss: coefficient of the LM head's z-loss, in the decay phase only.
    """

    weight_decay_follows_lr: bool = False
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.z_loss) and self.z_loss >= 0,
            "latent.decay_phase.z_loss",
            self.z_loss,
            "is negative or not finite",
            "give 0 or more",
        )


def check_optimizer(config: Config, args: argparse.Namespace) -> None:
    """Raise a `UserError` for the first contradiction between our sections and Megatron's options.

    Needs values that Megatron's parser has read and nothing has validated.
    """
    _check_state(args)
    _check_normuon(config, args)
    _check_schedule(args)
    _check_decay_phase(config, args)


def _check_state(args: argparse.Namespace) -> None:
    """SOAP's has not the weights' shape, and SGD's nothing makes before it is read."""
    saves = args.save and not args.no_save_optim
    loads = args.load and not (args.no_load_optim or args.finetune)
    if args.optimizer in ("sgd", "soap") and (saves or loads or args.use_distributed_optimizer):
        raise UserError(
            f"megatron.optimizer: {args.optimizer!r} has a state that Megatron 0.19 can neither"
            " spread over ranks nor save and load again: write another optimizer"
        )


def _check_normuon(config: Config, args: argparse.Namespace) -> None:
    section, default = config.latent.optimizer, NorMuonConfig()
    if args.optimizer != _NORMUON:
        for name in ("adam_lr", "adam_weight_decay", "beta2"):
            value = getattr(section, name)
            if value != getattr(default, name):
                raise UserError(
                    f"latent.optimizer.{name}: {value:g} has no effect with megatron.optimizer:"
                    f" {args.optimizer}: leave it out, or write optimizer: {_NORMUON} (NorMuon)"
                )
        return
    for name, reason, remedy in _UNSUPPORTED:
        if getattr(args, name):
            raise UserError(
                f"megatron.{name}: true does not work with optimizer: {_NORMUON}, because {reason}:"
                f" {remedy}"
            )
    if args.muon_scalar_optimizer != "adam":
        raise UserError(
            f"megatron.muon_scalar_optimizer: {args.muon_scalar_optimizer!r} is not supported,"
            " because steps of one pass could not leave the fusion's norms alone: leave it out"
        )
    if section.adam_lr is not None and args.decoupled_lr is not None:
        raise UserError(
            f"megatron.decoupled_lr: {args.decoupled_lr:g} is given besides"
            f" latent.optimizer.adam_lr: {section.adam_lr:g}, and both are learning rates of"
            " embeddings: keep one"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    tp = args.tensor_model_parallel_size
    if args.muon_tp_mode == "distributed" and args.muon_split_qkv and groups % tp:
        raise UserError(
            f"megatron.muon_tp_mode: 'distributed' needs whole query groups on each rank, and"
            f" {groups} groups are no multiple of tensor_model_parallel_size: {tp}: leave it out"
            " (duplicated), or write muon_no_split_qkv: true"
        )
    if args.muon_num_ns_steps < 1:
        raise UserError(
            f"megatron.muon_num_ns_steps: {args.muon_num_ns_steps} orthogonalises nothing: give 1"
            " or more"
        )
    if importlib.util.find_spec("emerging_optimizers") is not None:
        from megatron.core.optimizer.emerging_optimizers import get_supported_coefficient_types

        known = [kind for kind in get_supported_coefficient_types() if kind != "custom"]
        if args.muon_coefficient_type not in known:
            raise UserError(
                f"megatron.muon_coefficient_type: {args.muon_coefficient_type!r} is no set of"
                f" Newton-Schulz coefficients: write one of {', '.join(known)}"
            )


def _check_schedule(args: argparse.Namespace) -> None:
    counted = "samples" if args.train_iters is None else "iters"
    total = getattr(args, f"lr_decay_{counted}") or getattr(args, f"train_{counted}")
    warmup = _check_warmup(args, counted, total)
    name = f"lr_wsd_decay_{counted}"
    decays = getattr(args, name)
    if args.lr_decay_style != "WSD":
        if decays is not None:
            raise UserError(
                f"megatron.{name}: {decays} has no effect with lr_decay_style:"
                f" {args.lr_decay_style}: leave it out, or write lr_decay_style: WSD"
            )
        return
    if decays is None:
        raise UserError(
            f"megatron.{name}: missing with lr_decay_style: WSD: give the {counted} of the decay at"
            f" the end, for example {total // 4} of {total}"
        )
    if not 0 < decays <= total:
        raise UserError(
            f"megatron.{name}: {decays} is not between 1 and the {total} {counted} of"
            f" lr_decay_{counted} or train_{counted}: change it"
        )
    if decays > total - warmup:
        raise UserError(
            f"megatron.{name}: {decays} reaches into the warm-up, which is the first {warmup:g} of"
            f" {total} {counted}: give at most {total - warmup:g}, or warm up for less"
        )


def _check_warmup(args: argparse.Namespace, counted: str, total: int) -> float:
    """Length of the warm-up in what the schedule counts, iterations or samples."""
    name = f"lr_warmup_{counted}" if args.lr_warmup_fraction is None else "lr_warmup_fraction"
    given = getattr(args, name)
    warmup = given * total if name == "lr_warmup_fraction" else given
    if warmup >= total:
        raise UserError(
            f"megatron.{name}: {given} leaves nothing of the {total} {counted} of"
            f" lr_decay_{counted} or train_{counted}: give less"
        )
    least, most = args.start_weight_decay, args.end_weight_decay
    if least is not None and most is not None and least > most:
        raise UserError(
            f"megatron.end_weight_decay: {most:g} is below start_weight_decay: {least:g}: give at"
            " least as much"
        )
    if args.lr_warmup_init > args.lr:
        raise UserError(
            f"megatron.lr_warmup_init: {args.lr_warmup_init:g} is above lr: {args.lr:g}: give less,"
            " or leave it out"
        )
    return warmup


def _check_decay_phase(config: Config, args: argparse.Namespace) -> None:
    section = config.latent.decay_phase
    given = {
        "z_loss": section.z_loss > 0,
        "weight_decay_follows_lr": section.weight_decay_follows_lr,
    }
    for name, asked in given.items():
        if asked and args.lr_decay_style == "constant":
            value = "true" if getattr(section, name) is True else f"{getattr(section, name):g}"
            raise UserError(
                f"latent.decay_phase.{name}: {value} has no effect with megatron.lr_decay_style:"
                " constant, which has no decay phase: leave it out, or write lr_decay_style: WSD"
            )
