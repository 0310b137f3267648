"""Makes the schedule and the metrics of a run from its configuration and Megatron's arguments."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megalatent import kernels
from megalatent.config import Config, FusionConfig
from megalatent.kernels.choice import sentence
from megalatent.launch.rank import report
from megalatent.model.batch import RowSettings
from megalatent.passes.costs import Costs
from megalatent.passes.sampling import PassSampler
from megalatent.passes.watch import Watch
from megalatent.training.data import (
    DataSettings,
    needs_documents_everywhere,
    pick_iterator,
)
from megalatent.training.metrics import MetricsLog, RunState
from megalatent.training.pretrain import local_device, save_folder
from megalatent.training.schedule import LatentSchedule, StepPosition

__all__ = ["make_metrics", "make_schedule"]


def make_schedule(config: Config, args: Any) -> LatentSchedule:
    """The schedule of this rank. Megatron's process groups exist."""
    from megatron.training import get_tokenizer

    latent = config.latent
    sampler = PassSampler(
        [(phase.start, phase.mixture) for phase in latent.passes.schedule],
        # Where nothing is trained Megatron does not count them.
        train_iters=args.train_iters or args.train_samples // args.global_batch_size,
        seed=latent.seed,
        draw=latent.passes.draw,
    )
    rows = None
    if latent.fusion.fuses:
        rows = RowSettings(
            seed=latent.seed,
            jitter=latent.fusion.jitter,
            prefix_mixin=latent.fusion.prefix_mixin,
        )
    data = DataSettings(
        seq_length=args.seq_length,
        end_of_document=get_tokenizer().eod,
        vocabulary=get_tokenizer().vocab_size,
        packed=bool(args.sft or args.dataloader_inter_document_masking),
        attention_mask=args.create_attention_mask_in_dataloader,
        rows=rows,
        sequence_parallel=args.sequence_parallel,
        plain_prompts=latent.sft.k_prefill == 1,
    )

    def position() -> StepPosition:
        iteration = getattr(args, "curr_iteration", args.iteration)
        return StepPosition(iteration, args.consumed_train_samples)

    ends = parallel_state.is_pipeline_first_stage(
        ignore_virtual=True
    ) or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    folder = save_folder(args)
    return LatentSchedule(
        latent,
        sampler=sampler,
        data=data,
        kernels=_kernels(latent.fusion, args.params_dtype),
        position=position,
        pick_iterator=lambda iterators: pick_iterator(iterators, args),
        reads_data=ends or data.packed or needs_documents_everywhere(args),
        watch=Watch(
            latent.passes.timeout_seconds,
            folder / "stalls" if folder else None,
            name=f"rank {torch.distributed.get_rank()}",
            report=lambda text, follows: report(text, follows=follows),
        ),
        check_losses=_check_losses(args),
        costs=_costs(latent.passes.costs),
    )


def _kernels(fusion: FusionConfig, dtype: torch.dtype) -> kernels.Backend:
    """The pointwise kernels of the fusion; rank 0 says which they are and why."""
    from megatron.training import print_rank_0

    chosen = kernels.select(fusion.kernel, local_device(), dtype)
    if fusion.fuses:
        print_rank_0(f" fusion kernels: {sentence(chosen)}")
    return chosen


def _costs(path: str | None) -> Costs:
    """What the planner assumes; rank 0 says what it has from a file."""
    if path is None:
        return Costs()
    from megatron.training import print_rank_0

    costs = Costs.load(path)
    print_rank_0(f" plans are made for the stage costs in {path}: {costs.summary()}")
    return costs


def _check_losses(args: Any) -> Any:
    """One check of all losses of a step, because each check waits for the device."""
    if not args.check_for_nan_in_loss_and_grad:
        return None
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    def reject(losses: Tensor) -> bool:
        finite = torch.isfinite(losses).tolist()
        if all(finite):
            return False
        passes = ", ".join(str(k) for k, fine in enumerate(finite, 1) if not fine)
        iteration = getattr(args, "curr_iteration", args.iteration) + 1
        print(
            f" loss of pass {passes} is not finite at iteration {iteration}",
            file=sys.stderr,
            flush=True,
        )
        return True

    def check(losses: Tensor) -> None:
        get_rerun_state_machine().validate_result(
            result=losses,
            rejection_func=reject,
            message="found a loss that is not finite in the local forward passes",
            comparison_func=_difference,
            tolerance=0.0,
            fatal=True,
        )

    return check


def _difference(first: Tensor, second: Tensor) -> float:
    """Largest relative difference between the losses of a step and of its replay, ``[passes]``.

    Megatron's own comparison takes single numbers. Two that are not a number are the same.
    """
    same = (first == second) | (first.isnan() & second.isnan())
    relative = (2 * (first - second) / (first + second)).abs().nan_to_num(nan=math.inf)
    return float(torch.where(same, 0.0, relative).max())


def make_metrics(args: Any, state: RunState) -> MetricsLog:
    """The metrics log of this rank. Megatron's process groups exist."""
    loss_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tp_group = parallel_state.get_tensor_model_parallel_group() if args.sequence_parallel else None
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return MetricsLog(
        folder=save_folder(args),
        loss_group=loss_group,
        change_group=[tp_group, loss_group],
        last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        speaks=rank == world - 1,
        state=state,
        ranks=world,
        peak_flops=_peak_flops(),
    )


def _peak_flops() -> float | None:
    from megalatent.launch.mfu import peak_flops

    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
