"""Checks of FP8: what Megatron would find out only on the way, or not at all."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megalatent.errors import UserError

if TYPE_CHECKING:
    from megalatent.config import Config

__all__ = ["check_fp8"]

# Transformer Engine multiplies in FP8 only where rows are a multiple of 8 and columns of 16.
_ROWS, _COLUMNS = 8, 16


def check_fp8(config: Config, args: argparse.Namespace, *, here: bool = False) -> None:
    """Raise a `UserError` for the first contradiction. Needs a checked parallel layout.

    Args:
        here: the run is to start on this machine.
    """
    _check_fusion(config, args)
    if args.fp8 is None:
        return
    from megalatent.platform import on_cpu

    given = f"megatron.fp8_format: {args.fp8!r}"
    if here and on_cpu():
        raise UserError(
            f"{given} needs a GPU with FP8 (Hopper or newer), and there is no CUDA device here:"
            " leave it out"
        )
    if args.transformer_impl != "transformer_engine":
        raise UserError(
            f"{given} needs transformer_impl: transformer_engine, and it is"
            f" {args.transformer_impl!r}: change it, or leave fp8_format out"
        )
    if not args.bf16:
        raise UserError(f"{given} computes on bf16 weights: add bf16: true")
    _check_shapes(config, args)


def _check_fusion(config: Config, args: argparse.Namespace) -> None:
    fusion = config.latent.fusion
    if not fusion.fp8:
        return
    if args.fp8 is None:
        raise UserError(
            "latent.fusion.fp8: true has no effect without megatron.fp8_format: add"
            " fp8_format: hybrid, or leave it out"
        )
    if fusion.kind not in ("gated", "additive"):
        raise UserError(
            f"latent.fusion.fp8: true does not work with the fusion {fusion.kind!r}, whose matrix"
            " is applied one half at a time: leave it out (the layers still compute in FP8)"
        )


def _check_shapes(config: Config, args: argparse.Namespace) -> None:
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    _multiple("hidden_size", args.hidden_size, _COLUMNS)
    # Experts may be split less than the rest; a multiple for the rest fits them too.
    split = "" if tp == 1 else f" x tensor_model_parallel_size {tp}"
    _multiple("ffn_hidden_size", args.ffn_hidden_size, _COLUMNS * tp, split)
    if args.num_experts:
        _multiple("moe_ffn_hidden_size", args.moe_ffn_hidden_size, _COLUMNS * tp, split)
        _multiple(
            "moe_shared_expert_intermediate_size",
            args.moe_shared_expert_intermediate_size,
            _COLUMNS * tp,
            split,
        )
    if not args.multi_latent_attention:
        _check_heads(args, tp)
    # The fusion works on slices of the sequence over TP.
    ranks = cp * tp if config.latent.fusion.fp8 else cp
    rows = args.seq_length * args.micro_batch_size
    if rows % (_ROWS * ranks):
        raise UserError(
            f"megatron.seq_length: {args.seq_length} x micro_batch_size {args.micro_batch_size} is"
            f" not a multiple of {_ROWS * ranks}, and products in FP8 need {_ROWS} positions on"
            f" each of {ranks} ranks: change one of them, or leave fp8_format out"
        )


def _check_heads(args: argparse.Namespace, tp: int) -> None:
    """The queries alone are what the output projection reads."""
    head = args.kv_channels or args.hidden_size // args.num_attention_heads
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    together = ("heads, with their keys and values,", heads + 2 * groups)
    for what, count in (("heads", heads), together):
        if count * head % (_COLUMNS * tp):
            raise UserError(
                f"megatron.kv_channels: {head} x {count} {what} are no multiple of"
                f" {_COLUMNS * tp} = {_COLUMNS} x tensor_model_parallel_size {tp}, as products in"
                " FP8 need: change a size, or leave fp8_format out"
            )


def _multiple(name: str, width: int | None, of: int, split: str = "") -> None:
    if width is not None and width % of:
        raise UserError(
            f"megatron.{name}: {width} is not a multiple of {of} = {_COLUMNS}{split}, as products"
            " in FP8 need: change it, or leave fp8_format out"
        )
