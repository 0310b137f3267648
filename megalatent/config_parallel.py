"""Checks of the parallel layout: which sizes must divide which."""

from __future__ import annotations

import argparse
import math

from megalatent.errors import UserError

__all__ = ["check_parallel", "model_parallel_size", "smallest_world_size"]


def model_parallel_size(args: argparse.Namespace) -> int:
    """Ranks that hold one copy of the model: TP x PP x CP."""
    return (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )


def smallest_world_size(args: argparse.Namespace) -> int:
    """The fewest processes on which the layout fits, experts included."""
    experts = _expert_model_size(args)
    return math.lcm(model_parallel_size(args), experts)


def _expert_model_size(args: argparse.Namespace) -> int:
    if not args.num_experts:
        return 1
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size


def check_parallel(args: argparse.Namespace, world_size: int) -> None:
    """Raise a `UserError` for the first size that does not fit; sets `args.data_parallel_size`."""
    _check_world(args, world_size)
    _check_tensor(args)
    _check_sequence(args)
    _check_experts(args)
    _check_pipeline(args)


def _check_world(args: argparse.Namespace, world_size: int) -> None:
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    size = model_parallel_size(args)
    if world_size % size:
        raise UserError(
            f"{world_size} processes cannot hold copies of a model spread over {size} = tensor {tp}"
            f" x pipeline {pp} x context {cp} ranks: start a multiple of {size}, or change"
            " megatron.tensor_model_parallel_size, pipeline_model_parallel_size or"
            " context_parallel_size"
        )
    experts = _expert_model_size(args)
    if world_size % experts:
        raise UserError(
            f"megatron.expert_model_parallel_size: {args.expert_model_parallel_size}: experts are"
            f" spread over {experts} ranks (expert tensor x expert x pipeline), which does not"
            f" divide {world_size} processes: start a multiple of {experts}, or change it"
        )
    args.data_parallel_size = world_size // size


def _divides(args: argparse.Namespace, name: str, value: int, by: str, size: int) -> None:
    if value % size:
        raise UserError(
            f"megatron.{name}: {value} is not a multiple of {by}: {size}: change one of them"
        )


def _check_tensor(args: argparse.Namespace) -> None:
    tp, key = args.tensor_model_parallel_size, "tensor_model_parallel_size"
    _divides(args, "num_attention_heads", args.num_attention_heads, key, tp)
    _divides(args, "hidden_size", args.hidden_size, key, tp)
    if args.ffn_hidden_size is not None:
        _divides(args, "ffn_hidden_size", args.ffn_hidden_size, key, tp)
    if args.group_query_attention and args.num_query_groups % tp and tp % args.num_query_groups:
        raise UserError(
            f"megatron.num_query_groups: {args.num_query_groups} and {key}: {tp}: neither is a"
            " multiple of the other: change one of them"
        )
    if args.sequence_parallel and tp == 1:
        raise UserError(
            f"megatron.sequence_parallel: true needs tensor parallelism, but {key} is 1:"
            " leave it out, or raise the size"
        )
    if args.padded_vocab_size is not None:
        _divides(args, "padded_vocab_size", args.padded_vocab_size, key, tp)
    if args.vocab_size is not None and not args.pad_vocab_size:
        _divides(args, "vocab_size", args.vocab_size, key, tp)


def _check_sequence(args: argparse.Namespace) -> None:
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if cp > 1 and args.seq_length % (2 * cp):
        raise UserError(
            f"megatron.seq_length: {args.seq_length} is not a multiple of {2 * cp} = 2 x"
            f" context_parallel_size {cp} (every rank takes two pieces): change one of them"
        )
    # Without SP too, the fusion works on sequence slices over TP.
    pieces = tp * cp
    if args.seq_length % pieces:
        raise UserError(
            f"megatron.seq_length: {args.seq_length} is not a multiple of {pieces} ="
            f" tensor_model_parallel_size {tp} x context_parallel_size {cp}: change one of them"
        )


def _check_experts(args: argparse.Namespace) -> None:
    if not args.num_experts:
        if args.expert_model_parallel_size > 1:
            raise UserError(
                f"megatron.expert_model_parallel_size: {args.expert_model_parallel_size} without"
                " experts: give num_experts, or leave it out"
            )
        return
    _divides(
        args,
        "num_experts",
        args.num_experts,
        "expert_model_parallel_size",
        args.expert_model_parallel_size,
    )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise UserError(
            f"megatron.num_experts: {args.num_experts} with tensor_model_parallel_size:"
            f" {args.tensor_model_parallel_size} needs sequence parallelism (Megatron refuses to"
            " train experts without it): add sequence_parallel: true"
        )
    _check_expert_layers(args)
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if width is not None:
        name = "moe_ffn_hidden_size" if args.moe_ffn_hidden_size else "ffn_hidden_size"
        _divides(args, name, width, "expert_tensor_parallel_size", tensor)


def _check_expert_layers(args: argparse.Namespace) -> None:
    every = args.moe_layer_freq
    if isinstance(every, int) and every < 1:
        raise UserError(
            f"megatron.moe_layer_freq: {every} is no distance between layers with experts: give N"
            " for experts in every Nth layer"
        )
    if isinstance(every, list) and args.num_layers is not None and len(every) != args.num_layers:
        raise UserError(
            f"megatron.moe_layer_freq: {len(every)} entries for num_layers: {args.num_layers}: give"
            " one a layer (1: experts, 0: none), or one number N for experts in every Nth layer"
        )
    if args.add_bias_linear and args.swiglu and args.bias_swiglu_fusion:
        raise UserError(
            f"megatron.num_experts: {args.num_experts} with swiglu: true and biases, which"
            " Megatron's fused activation of experts does not know: add disable_bias_linear: true"
        )


def _check_pipeline(args: argparse.Namespace) -> None:
    pp = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if args.hybrid_layer_pattern or args.pipeline_model_parallel_layout or args.num_layers is None:
        return  # Megatron checks these layouts itself
    given = [
        name
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
        )
        if getattr(args, name) is not None
    ]
    if len(given) > 1:
        raise UserError(f"megatron.{given[1]}: is given besides {given[0]}: keep one")
    if given and pp == 1:
        raise UserError(
            f"megatron.{given[0]}: {getattr(args, given[0])} needs pipeline parallelism, but"
            " pipeline_model_parallel_size is 1: leave it out, or raise the size"
        )
    if given and (first is not None or last is not None) and given[0].startswith("num_layers"):
        raise UserError(
            f"megatron.{given[0]}: cannot be combined with decoder_first_pipeline_num_layers or"
            " decoder_last_pipeline_num_layers: use num_virtual_stages_per_pipeline_rank"
        )
    layers, stages, counted = args.num_layers, pp, [str(args.num_layers)]
    for flag, what in (
        ("account_for_embedding_in_pipeline_split", "the embedding"),
        ("account_for_loss_in_pipeline_split", "the loss"),
    ):
        if getattr(args, flag):
            layers += 1
            counted.append(f"plus 1 for {what}")
    for name, own in (
        ("decoder_first_pipeline_num_layers", first),
        ("decoder_last_pipeline_num_layers", last),
    ):
        if own is not None:
            _check_own_stage(args, name, own, pp)
            layers -= own
            stages -= 1
            counted.append(f"minus {own} of {name}")
    _check_split(args, layers, stages, ", ".join(counted))


def _check_own_stage(args: argparse.Namespace, name: str, own: int, pp: int) -> None:
    if pp == 1:
        raise UserError(
            f"megatron.{name}: {own} needs pipeline parallelism, but pipeline_model_parallel_size"
            " is 1: leave it out, or raise the size"
        )
    if not 1 <= own <= args.num_layers:
        raise UserError(
            f"megatron.{name}: {own} is not between 1 and num_layers: {args.num_layers}: change it"
        )
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    if own % chunks:
        raise UserError(
            f"megatron.{name}: {own} is not a multiple of num_virtual_stages_per_pipeline_rank:"
            f" {chunks}: change one of them"
        )


def _check_split(args: argparse.Namespace, layers: int, stages: int, counted: str) -> None:
    if stages == 0:
        if layers:
            raise UserError(
                f"megatron.num_layers: {counted}: {layers} layers are left and no stage to hold"
                " them: change the layers of the first or last stage"
            )
        return
    if layers <= 0 or layers % stages:
        raise UserError(
            f"megatron.num_layers: {counted}: {layers} layers do not fill {stages} pipeline stages"
            " evenly: change num_layers or pipeline_model_parallel_size, or give"
            " decoder_first_pipeline_num_layers or decoder_last_pipeline_num_layers"
        )
    each = layers // stages
    size = args.num_layers_per_virtual_pipeline_stage
    if size is not None and (size < 1 or each % size):
        raise UserError(
            f"megatron.num_layers_per_virtual_pipeline_stage: {size} does not divide the {each}"
            " layers of a pipeline stage: give a divisor"
        )
    chunks = args.num_virtual_stages_per_pipeline_rank
    if chunks is not None and (chunks < 1 or each % chunks):
        raise UserError(
            f"megatron.num_virtual_stages_per_pipeline_rank: {chunks} does not divide the {each}"
            " layers of a pipeline stage: give a divisor"
        )
