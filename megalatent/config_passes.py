"""Passes of a config against the length of the run, the pipeline and the machine."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalatent.checkpoint.arguments import export_obstacles
from megalatent.config_costs import virtual_chunks
from megalatent.config_megatron import parse
from megalatent.errors import UserError

if TYPE_CHECKING:
    from megalatent.config import Config, PhaseConfig

__all__ = ["check_kernel", "check_passes_of_run", "notes", "phase_starts"]


def check_passes_of_run(config: Config, args: argparse.Namespace) -> None:
    """Raise a `UserError` for phases or caps that cannot be.

    Needs `args.data_parallel_size`, which `check_parallel` sets.
    """
    _check_phases(config, args)
    _check_recomputation(config, args)
    _check_plan(config, args)
    if config.latent.sft.k_prefill is not None and not args.sft:
        raise UserError(
            f"latent.sft.k_prefill: {config.latent.sft.k_prefill} has no effect without prompts"
            " and responses: add megatron.sft: true, or leave it out"
        )


def phase_starts(phases: Sequence[PhaseConfig], train_iters: int) -> list[int]:
    """The first iteration of each phase, in a run of `train_iters`."""
    from megalatent.passes.sampling import PassSampler

    given = [(phase.start, phase.mixture) for phase in phases]
    return [phase.start for phase in PassSampler(given, train_iters=train_iters, seed=0).phases]


def _check_phases(config: Config, args: argparse.Namespace) -> None:
    phases = config.latent.passes.schedule
    if args.train_iters is None:
        return
    starts = phase_starts(phases, args.train_iters)
    for i, (before, after) in enumerate(itertools.pairwise(starts), 1):
        if after <= before:
            raise UserError(
                f"latent.passes.schedule.{i}.start: {phases[i].start} does not come after"
                f" {phases[i - 1].start} in a run of {args.train_iters} iterations (they begin at"
                f" iterations {after} and {before}): order the phases by their start, or train"
                " longer"
            )


def _check_recomputation(config: Config, args: argparse.Namespace) -> None:
    given = args.recompute_granularity or ("selective" if args.recompute_activations else None)
    if given is not None and config.latent.passes.recomputes:
        raise UserError(
            f"megatron.recompute_granularity: {given!r} is given besides latent.passes.recompute,"
            " which switches full recomputation pass by pass: keep one"
        )


def _check_plan(config: Config, args: argparse.Namespace) -> None:
    """The largest step of the run can be planned, although it may come late."""
    from megalatent.passes.plan import check_sizes

    passes = config.latent.passes
    stages, chunks = args.pipeline_model_parallel_size, virtual_chunks(args)
    least = chunks * passes.max_passes
    if passes.max_in_flight is not None and passes.max_in_flight < least:
        raise UserError(
            f"latent.passes.max_in_flight: {passes.max_in_flight}: a micro-batch of"
            f" {passes.max_passes} passes through {chunks} chunk(s) of a rank keeps {least}"
            f" activations there: give {least} or more"
        )
    replicas = args.micro_batch_size * args.data_parallel_size
    micro_batches = max(1, (args.global_batch_size or replicas) // replicas)
    for name, count in (("schedule", passes.max_passes), ("eval_passes", passes.eval_passes)):
        try:
            check_sizes(stages, chunks, (count,) * micro_batches)
        except UserError as error:
            raise UserError(f"latent.passes.{name}: K = {count}: {error}") from None


def check_kernel(config: Config, args: argparse.Namespace) -> None:
    """The fusion's kernel that the config names runs here. Opens no device."""
    import torch

    from megalatent.kernels.choice import compiled_op_obstacle, triton_obstacle
    from megalatent.kernels.extension import cuda_library
    from megalatent.platform import on_cpu

    name = config.latent.fusion.kernel
    if not config.latent.fusion.fuses or name not in ("cuda", "triton"):
        return
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    device = "cpu" if on_cpu() else "cuda"
    if name == "triton":
        obstacle = triton_obstacle(device, dtype)
    elif device == "cpu":
        obstacle = compiled_op_obstacle(device, dtype)
    else:
        # Whether it serves this card is asked by the ranks: asking opens the card.
        library = cuda_library()
        obstacle = None if library.loaded else library.reason
    if obstacle is not None:
        raise UserError(
            f"latent.fusion.kernel: {name!r} does not run for {dtype} on {device}: {obstacle};"
            " or write auto"
        )


def notes(config: Config) -> list[str]:
    """What a config asks for and its run will not do, a line each."""
    passes = config.latent.passes
    total = config.megatron.get("train_iters")
    found = []
    if total is not None:
        found += [
            f"latent.passes.schedule.{i}.start: the phase begins at iteration {phase.start}, after"
            f" the run's {total}"
            for i, phase in enumerate(passes.schedule)
            if not isinstance(phase.start, float) and phase.start >= total
        ]
    if not isinstance(passes.recompute, str):
        drawn = {k for phase in passes.schedule for k, share in phase.mixture.items() if share > 0}
        found += [
            f"latent.passes.recompute.{k}: no phase draws K = {k}"
            for k in passes.recompute
            if k not in drawn
        ]
    return found + _about_export(config)


def _about_export(config: Config) -> list[str]:
    """Better known before a run of weeks than after it."""
    obstacles = export_obstacles(parse(config.megatron_argv()))
    if not obstacles:
        return []
    listed = ", ".join(
        f"{name}: {value!r} (but {' or '.join(map(repr, values))})"
        for name, (value, values) in obstacles.items()
    )
    return [f"checkpoints cannot be exported to Hugging Face, which has no model with {listed}"]
