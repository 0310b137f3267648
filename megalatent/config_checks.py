"""Contradictions of a configuration, found before any process starts.

Our own checks come first, because they name the keys as the user wrote them. Megatron's come last:
they know hundreds of options that are none of our business here.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import linecache
import os
import traceback
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megalatent.config_costs import check_costs
from megalatent.config_files import check_files, missing_files
from megalatent.config_fp8 import check_fp8
from megalatent.config_megatron import options, parse
from megalatent.config_model import check_model
from megalatent.config_optimizer import check_optimizer
from megalatent.config_parallel import check_parallel
from megalatent.config_passes import check_kernel, check_passes_of_run
from megalatent.config_profile import check_profile
from megalatent.config_ranges import check_ranges
from megalatent.errors import UserError

if TYPE_CHECKING:
    from megalatent.config import Config

__all__ = ["check", "validated"]

_REQUIRED = {
    "num_layers": "the number of transformer layers",
    "hidden_size": "the width of the model",
    "num_attention_heads": "the number of attention heads",
    "seq_length": "the tokens in a sequence",
    "micro_batch_size": "the sequences in a micro-batch",
    "lr": "the learning rate",
    "tokenizer_type": "the kind of tokenizer",
    "train_iters": "the number of training steps",
}


_EMERGING_OPTIMIZERS = ("muon", "dist_muon", "adaptive_muon", "soap", "lion")


def check(
    config: Config,
    world_size: int,
    *,
    checkpoints_repaired: bool = False,
    missing: list[str] | None = None,
) -> None:
    """Raise a `UserError` for the first contradiction in `config` on `world_size` processes.

    Args:
        checkpoints_repaired, missing: as for `Config.check`.
    """
    args = parse(config.megatron_argv())
    # A dry run or a submission may come from a machine that lacks what the run's own have.
    here = missing is None and not checkpoints_repaired
    meant = copy.copy(args)
    if not here and "transformer_impl" in config.filled_in:
        meant.transformer_impl = "transformer_engine"
    _check_required(args)
    check_ranges(args)
    _check_values(args)
    check_model(config.latent.model, meant)
    _check_packages(args)
    check_optimizer(config, args)
    check_parallel(args, world_size)
    check_fp8(config, meant, here=here)
    _check_batches(args)
    check_passes_of_run(config, args)
    if here:
        check_kernel(config, args)
        _check_grouped_gemm(args)
    costs = config.latent.passes.costs
    if missing is None:
        check_files(args, costs, checkpoints_repaired=checkpoints_repaired)
    else:
        missing += missing_files(args, costs)
    check_costs(args, costs)
    check_profile(config.latent.profile, args)
    _check_by_megatron(args, world_size)


def _check_required(args: argparse.Namespace) -> None:
    missing = {name: what for name, what in _REQUIRED.items() if getattr(args, name) is None}
    if args.hybrid_layer_pattern:
        missing.pop("num_layers", None)
    if args.train_samples is not None:
        missing.pop("train_iters", None)
    if len(missing) == 1:
        ((name, what),) = missing.items()
        raise UserError(f"megatron.{name}: missing: give {what}")
    if missing:
        listed = ", ".join(f"{name} ({what})" for name, what in missing.items())
        raise UserError(f"megatron: {len(missing)} options are missing: give {listed}")
    if args.wandb_project and not args.wandb_exp_name:
        raise UserError(
            f"megatron.wandb_exp_name: missing with wandb_project: {args.wandb_project!r}: give the"
            " run a name"
        )
    if args.wandb_project and not (args.save or args.wandb_save_dir):
        raise UserError(
            f"megatron.wandb_save_dir: missing with wandb_project: {args.wandb_project!r}: give a"
            " folder, or save"
        )
    if args.train_iters is not None and args.train_samples is not None:
        raise UserError(
            f"megatron.train_samples: {args.train_samples} is given besides train_iters:"
            f" {args.train_iters}: keep one"
        )


def _check_values(args: argparse.Namespace) -> None:
    if args.bf16 and args.fp16:
        raise UserError("megatron.fp16: true is given besides bf16: true: keep one")
    if args.min_lr > args.lr:
        raise UserError(
            f"megatron.min_lr: {args.min_lr:g} is above lr: {args.lr:g}: give less, or leave it out"
        )
    if args.hybrid_layer_pattern is not None:
        raise UserError(
            f"megatron.hybrid_layer_pattern: {args.hybrid_layer_pattern!r} builds a hybrid model,"
            " which cannot be fused yet: leave it out"
        )
    if args.dataloader_inter_document_masking and args.context_parallel_size > 1:
        masks = "use reset_attention_mask and reset_position_ids, or"
        masks = masks if args.transformer_impl == "local" else "use"  # the other reads no mask
        raise UserError(
            f"megatron.context_parallel_size: {args.context_parallel_size} splits each document in"
            f" {2 * args.context_parallel_size} equal parts, and with"
            f" dataloader_inter_document_masking documents have any length: {masks}"
            " context_parallel_size: 1"
        )
    if args.max_position_embeddings < args.seq_length:
        raise UserError(
            f"megatron.max_position_embeddings: {args.max_position_embeddings} is below seq_length:"
            f" {args.seq_length}: give at least as much, or leave it out"
        )
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise UserError(
            f"megatron.num_attention_heads: {args.num_attention_heads} does not divide hidden_size:"
            f" {args.hidden_size}: change one, or give kv_channels"
        )
    if args.num_query_groups != 1 and not args.group_query_attention:
        raise UserError(
            f"megatron.num_query_groups: {args.num_query_groups} has no effect without"
            " group_query_attention: add group_query_attention: true"
        )
    if args.group_query_attention and args.num_attention_heads % args.num_query_groups:
        raise UserError(
            f"megatron.num_query_groups: {args.num_query_groups} does not divide"
            f" num_attention_heads: {args.num_attention_heads}: give a divisor"
        )
    if args.save is not None and args.save_interval is None:
        raise UserError(
            f"megatron.save: {args.save!r} is given without save_interval: give the number of steps"
            " between checkpoints"
        )
    if args.num_experts and args.moe_router_topk > args.num_experts:
        raise UserError(
            f"megatron.moe_router_topk: {args.moe_router_topk} is more than num_experts:"
            f" {args.num_experts}: give at most as many"
        )


def _check_packages(args: argparse.Namespace) -> None:
    """Optional packages that an option asks for; `pip install 'megalatent[extra]'` brings them."""
    hf_tokenizers = ("HuggingFaceTokenizer", "SFTTokenizer")
    for package, name, asked, extra in (
        ("transformer_engine", "transformer_impl", ("transformer_engine",), "gpu"),
        ("emerging_optimizers", "optimizer", _EMERGING_OPTIMIZERS, "optim"),
        ("transformers", "tokenizer_type", hf_tokenizers, "hf"),
        ("wandb", "wandb_project", (args.wandb_project or None,), "wandb"),
    ):
        value = getattr(args, name)
        if value is None or value not in asked:
            continue
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"megatron.{name}: {value!r} needs the package {package}, which is not installed:"
                f" install it (pip install 'megalatent[{extra}]'), or change {name}"
            )


def _check_grouped_gemm(args: argparse.Namespace) -> None:
    from megalatent.platform import on_cpu

    if args.moe_grouped_gemm and on_cpu():
        raise UserError(
            "megatron.moe_grouped_gemm: true needs a GPU, and there is no CUDA device here: write"
            " false"
        )


def _check_batches(args: argparse.Namespace) -> None:
    """Needs `args.data_parallel_size`, which `check_parallel` sets."""
    sample_slice = args.micro_batch_size * args.data_parallel_size
    if args.step_batch_size_schedule is not None and args.global_batch_size is not None:
        raise UserError(
            f"megatron.step_batch_size_schedule: {args.step_batch_size_schedule!r} is given besides"
            f" global_batch_size: {args.global_batch_size}: keep one"
        )
    if args.step_batch_size_schedule is not None and not args.skip_train:
        _check_growing_batch(args)
    total = args.global_batch_size
    if total is not None and total % sample_slice and not args.decrease_batch_size_if_needed:
        raise UserError(
            f"megatron.global_batch_size: {total} is not a multiple of {sample_slice} ="
            f" micro_batch_size {args.micro_batch_size} x {args.data_parallel_size} data-parallel"
            f" ranks: give {max(total // sample_slice, 1) * sample_slice}, or change the others"
        )
    if args.multiple_validation_sets and not args.full_validation:
        raise UserError(
            "megatron.multiple_validation_sets: true needs the sets read whole: add"
            " full_validation: true"
        )
    rows = args.eval_micro_batch_size or args.micro_batch_size
    if args.full_validation and rows != 1:
        raise UserError(
            f"megatron.eval_micro_batch_size: {rows} with full_validation: true, which reads rows"
            " one by one: write 1, and eval_global_batch_size: the number of data-parallel ranks"
        )
    evaluated = args.eval_global_batch_size or total
    each = (args.eval_micro_batch_size or args.micro_batch_size) * args.data_parallel_size
    if evaluated is not None and evaluated % each:
        raise UserError(
            f"megatron.eval_global_batch_size: {evaluated} is not a multiple of {each} ="
            f" eval_micro_batch_size {each // args.data_parallel_size} x {args.data_parallel_size}"
            " data-parallel ranks: change one"
        )


def _check_growing_batch(args: argparse.Namespace) -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    given = f"megatron.step_batch_size_schedule: {args.step_batch_size_schedule!r}"
    if args.train_samples is None:
        raise UserError(
            f"{given}: the learning rate would decay as if all batches were as small as can be:"
            " give train_samples instead of train_iters"
        )
    try:
        StepBatchsizeNumMicroBatchesCalculator(
            args.micro_batch_size,
            args.data_parallel_size,
            args.decrease_batch_size_if_needed,
            -1,
            args.step_batch_size_schedule,
            args.seq_length,
        )
    except (AssertionError, ValueError, LookupError) as error:
        raise UserError(
            f"{given}: {' '.join(str(error).split())}: write the tokens from which on a batch has"
            " a size, as 0:256 10B:512"
        ) from None


def validated(config: Config, world_size: int) -> tuple[argparse.Namespace, Any]:
    """Megatron's arguments and `TransformerConfig` of a run that has been checked."""
    return _check_by_megatron(parse(config.megatron_argv()), world_size)


# Its checks divide, index and look up before they have checked.
_MEGATRONS_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    SystemExit,
    TypeError,
    ValueError,
)


def _check_by_megatron(args: argparse.Namespace, world_size: int) -> tuple[argparse.Namespace, Any]:
    """Megatron's own validation of its arguments and of the model's configuration."""
    from megatron.training import arguments

    args = copy.deepcopy(args)
    args.rank, args.world_size = 0, world_size
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    try:
        with _without_device(arguments), _quiet():
            arguments.validate_args(args)
            return args, arguments.core_transformer_config_from_args(args)
    except _MEGATRONS_REFUSALS as error:
        raise UserError(f"megatron: {_explain(error)}: correct the option") from None


@contextlib.contextmanager
def _without_device(arguments: Any) -> Iterator[None]:
    """Answers what Megatron asks the GPU about, so that this process never opens it.

    The processes that will train are forked from this one, and CUDA does not survive a fork. They
    ask the real device when they start.
    """
    import torch

    kept = arguments.get_device_arch_version, torch.cuda.get_device_capability
    environment = os.environ.copy()
    newest = 10
    arguments.get_device_arch_version = lambda: newest
    torch.cuda.get_device_capability = lambda device=None: (newest, 0)
    try:
        yield
    finally:
        arguments.get_device_arch_version, torch.cuda.get_device_capability = kept
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron prints what it decides; the processes that train will print it again."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _explain(error: BaseException) -> str:
    """Megatron's message in one line, with option names as they are written in the file.

    Some of its assertions carry no message: then the condition itself has to do.
    """
    message = " ".join(str(error).split())
    if not message or isinstance(error, SystemExit):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        message = f"refused by `{line.rstrip(' \\,')}`"
    for option in sorted(options().values(), key=lambda o: -len(o.flag)):
        if option.flag in message:
            message = message.replace(option.flag, option.name)
    return message.rstrip(".:")
