"""`latent.model:`, the parts of a layer that Megatron's own options cannot describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalatent.config_values import describe, require
from megalatent.errors import UserError

__all__ = ["ModelConfig", "check_model", "depth_multiplier"]

_DEPTH = "depth"


def _read_multiplier(value: object, where: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number:
        raise UserError(
            f"{where}: {describe(value)} is no factor: give a number, or {_DEPTH}"
            " (1 / sqrt(num_layers))"
        )
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a layer has besides Megatron's options; names as in the Hugging Face configuration.

    Attributes:
        attention_gate: one sigmoid gate per head on the attention output, from the normed layer
            input, before the output projection.
        sandwich_norm: a norm also on the output of both residual branches.
        residual_multiplier: each branch is multiplied by it after its norm. In the file also
            `depth`: 1 / sqrt(num_layers), which keeps the residual stream at RMS O(1).
    """

    attention_gate: bool = False
    sandwich_norm: bool = False
    residual_multiplier: float = field(default=1.0, metadata={"read": _read_multiplier})

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.residual_multiplier) and self.residual_multiplier > 0,
            "latent.model.residual_multiplier",
            self.residual_multiplier,
            "is not positive or not finite",
            f"give a number above 0, or {_DEPTH}",
        )


def depth_multiplier(given: object, num_layers: object) -> object:
    """The section `latent.model:` with `residual_multiplier: depth` as a number.

    Args:
        given: the section as the file has it.
        num_layers: Megatron's option; None leaves the default multiplier.

    Raises:
        UserError: the depth is not known.
    """
    if not isinstance(given, Mapping) or given.get("residual_multiplier") != _DEPTH:
        return given
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UserError(
            f"latent.model.residual_multiplier: '{_DEPTH}' needs megatron.num_layers: give it, or"
            " write a number"
        )
    return {**given, "residual_multiplier": num_layers**-0.5}


def check_model(model: ModelConfig, args: argparse.Namespace) -> None:
    """Raise a `UserError` where the layers cannot be what both sections ask for.

    Args:
        args: Megatron's options as parsed.
    """
    _check_gate(model, args)
    _check_window(args)
    _check_mask(args)
    if args.transformer_impl == "transformer_engine":
        _check_heads_exchange(args)
    elif args.transformer_impl == "local":
        _check_local(args)
    else:
        raise UserError(
            f"megatron.transformer_impl: {args.transformer_impl!r} cannot be trained: write"
            " transformer_engine (GPU) or local"
        )


def _check_gate(model: ModelConfig, args: argparse.Namespace) -> None:
    if not model.attention_gate:
        return
    for name, reason in (
        ("attention_output_gate", "would be a second gate on the same output, one per channel"),
        ("multi_latent_attention", "is another attention, which has no gate per head"),
        ("fused_single_qkv_rope", "leaves query, key and value in one piece, past the gate"),
    ):
        value: Any = getattr(args, name, None)
        if value:
            raise UserError(
                f"megatron.{name}: {describe(value)} {reason} of latent.model.attention_gate: true:"
                " leave one of them out"
            )


def _check_window(args: argparse.Namespace) -> None:
    window, skip = args.window_size, args.window_attn_skip_freq
    if window is None:
        if skip is not None:
            raise UserError(
                f"megatron.window_attn_skip_freq: {skip} has no effect without window_size: give"
                " window_size: [W - 1, 0] for a window of W keys, or leave it out"
            )
        return
    if len(window) != 2 or window[0] < -1 or window[1] < -1:
        raise UserError(
            f"megatron.window_size: {list(window)} is not two counts of keys, before and after the"
            " position: give [W - 1, 0] for a window of W keys"
        )
    if isinstance(skip, list) and args.num_layers is not None and len(skip) != args.num_layers:
        raise UserError(
            f"megatron.window_attn_skip_freq: {len(skip)} entries for num_layers:"
            f" {args.num_layers}: give one a layer (1: window, 0: full), or one number N for every"
            " Nth layer full"
        )
    if isinstance(skip, int) and skip < 1:
        raise UserError(
            f"megatron.window_attn_skip_freq: {skip} is no distance between full layers: give N"
            " for every Nth layer full, or leave it out for a window everywhere"
        )
    _check_window_exchange(args)


def _check_mask(args: argparse.Namespace) -> None:
    """Without a mask, or with attention that looks at none, documents see each other unnoticed."""
    if not args.reset_attention_mask:
        return
    if not args.create_attention_mask_in_dataloader:
        raise UserError(
            "megatron.reset_attention_mask: true has no effect with"
            " no_create_attention_mask_in_dataloader: true: keep one"
        )
    if args.transformer_impl == "transformer_engine":
        remedy = "dataloader_inter_document_masking: true, which packs documents"
        if args.context_parallel_size > 1:
            remedy += " (with context_parallel_size: 1)"
        raise UserError(
            "megatron.reset_attention_mask: true has no effect with transformer_impl:"
            f" transformer_engine: documents would see each other: write {remedy}"
        )


def _check_local(args: argparse.Namespace) -> None:
    """What layers without Transformer Engine lack."""
    if args.layernorm_zero_centered_gamma:
        raise UserError(
            "megatron.apply_layernorm_1p: true needs transformer_impl: transformer_engine, and it"
            " is 'local': leave it out"
        )
    cp = args.context_parallel_size
    if cp > 1 and args.attention_dropout:
        raise UserError(
            f"megatron.attention_dropout: {args.attention_dropout} with context_parallel_size:"
            f" {cp} needs transformer_impl: transformer_engine, and it is 'local': write"
            " attention_dropout: 0"
        )
    packed = args.sft or args.dataloader_inter_document_masking
    if args.softmax_type != "vanilla" and (cp > 1 or packed):
        raise UserError(
            f"megatron.softmax_type: {args.softmax_type!r} with"
            f" {f'context_parallel_size: {cp}' if cp > 1 else 'packed documents'} needs"
            " transformer_impl: transformer_engine, and it is 'local': write softmax_type: vanilla"
        )


def _exchanges(args: argparse.Namespace) -> list[str]:
    """How Transformer Engine's layers exchange over context-parallel ranks; empty without both."""
    if args.context_parallel_size == 1 or args.transformer_impl != "transformer_engine":
        return []
    kinds = args.cp_comm_type
    return kinds if isinstance(kinds, list) else [kinds or "p2p"]


def _check_heads_exchange(args: argparse.Namespace) -> None:
    """`a2a` gives each context-parallel rank whole heads; Transformer Engine asks in training."""
    if "a2a" not in _exchanges(args) or args.multi_latent_attention:
        return
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    counts = {"num_attention_heads": args.num_attention_heads}
    if args.group_query_attention:
        counts["num_query_groups"] = args.num_query_groups
    for name, count in counts.items():
        each = max(count // tp, 1)
        if each % cp:
            raise UserError(
                f"megatron.cp_comm_type: a2a spreads whole heads over context_parallel_size: {cp},"
                f" and {name}: {count} leaves {each} on each of {tp} tensor-parallel ranks: write"
                " cp_comm_type: all_gather, or change a size"
            )


def _check_window_exchange(args: argparse.Namespace) -> None:
    """Transformer Engine's point-to-point exchange over context-parallel ranks has no window."""
    kinds = _exchanges(args)
    if any(kind not in ("a2a", "all_gather") for kind in kinds):
        raise UserError(
            f"megatron.cp_comm_type: {' '.join(kinds)} has no sliding window (window_size:"
            f" {list(args.window_size)} with context_parallel_size: {args.context_parallel_size}):"
            " write cp_comm_type: a2a, or all_gather"
        )
