"""A drop-in ``forward_backward_func`` for Megatron that runs multi-pass plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megalatent.config import LatentConfig
from megalatent.model.wrapper import LatentModel
from megalatent.passes.channels import Ring
from megalatent.passes.execute import Executor, HandOver
from megalatent.passes.plan import Costs, Plan, Planner
from megalatent.passes.sampling import PassSampler
from megalatent.passes.watch import Watch
from megalatent.training.data import (
    BatchReader,
    DataSettings,
    group_size,
    read_micro_batch,
    sample_indices,
)
from megalatent.training.gradients import GradientSync
from megalatent.training.losses import PassLoss, PassSums
from megalatent.training.program import MegatronProgram, PartRecorder
from megalatent.training.recompute import RecomputeSwitch

__all__ = ["LatentSchedule", "StepPosition", "loss_key"]


@dataclass(frozen=True)
class StepPosition:
    """Where training stands: all keyed draws of a step depend on this and nothing else.

    Attributes:
        iteration: 0-based.
        consumed_samples: samples that earlier steps consumed.
    """

    iteration: int
    consumed_samples: int


def loss_key(k: int) -> str:
    """Megatron's log key of the loss of pass ``k``; pass 1 is the ordinary loss."""
    return "lm loss" if k == 1 else f"lm loss pass {k}"


class LatentSchedule:
    """Runs training and evaluation steps with several passes.

    Has the signature of Megatron's ``forward_backward_func``; ``forward_step_func`` is not used,
    because a step is not a sequence of independent forward and backward calls.

    Args:
        latent: our configuration.
        sampler: draws K.
        data: how rows become micro-batches.
        kernels: pointwise kernels of the fusion.
        position: tells where training stands.
        watch: notices stalls, or None.
        check_losses: called once a training step with the losses, ``[passes]``, on the last stage.
        costs: stage costs for the planner.

    Attributes:
        recorder: takes the times of training steps; or None, which costs nothing.
        last_passes, last_plan: of the last training step.
    """

    def __init__(
        self,
        latent: LatentConfig,
        *,
        sampler: PassSampler,
        data: DataSettings,
        kernels: Any,
        position: Callable[[], StepPosition],
        pick_iterator: Callable[[Any], Any] = lambda iterator: iterator,
        reads_data: bool = True,
        watch: Watch | None = None,
        check_losses: Callable[[Tensor], None] | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.latent = latent
        self.sampler = sampler
        self.data = data
        self.kernels = kernels
        self.position = position
        self.pick_iterator = pick_iterator
        self.reads_data = reads_data
        self.watch = watch
        self.check_losses = check_losses
        self.costs = costs or Costs()
        self.recorder: PartRecorder | None = None
        self.last_passes: tuple[int, ...] = ()
        self.z_loss = 0.0  # coefficient in the next training step
        self.last_plan: Plan | None = None
        # By iteration: a replayed step takes its own place, and is not counted twice.
        self.train_sums: dict[int, PassSums] = {}
        self.eval_sums: list[PassSums] = []
        self._ring: Ring | None = None
        self._planner: Planner | None = None
        self._recompute: RecomputeSwitch | None = None

    def __call__(
        self,
        *,
        forward_step_func: Any = None,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[dict[str, Tensor]]:
        """One step over ``num_microbatches`` micro-batches.

        Returns:
            On the last stage, per micro-batch a report ``{key: [loss sum, tokens]}``, the same keys
            for every micro-batch; elsewhere an empty list.

        Raises:
            ValueError: an argument that multi-pass steps cannot serve.
        """
        del forward_step_func, decoder_seq_length, first_val_step, p2p_communicator
        if collect_non_loss_data or adjust_tensor_shapes_fn is not None:
            raise ValueError(
                "non-loss data collection and adjusted tensor shapes (distillation) do not work "
                "with latent passes: switch them off, or set latent.fusion.kind: none and train "
                "with Megatron's own schedule"
            )
        chunks = model if isinstance(model, list) else [model]
        models = [_unwrapped(chunk) for chunk in chunks]
        config = get_model_config(chunks[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        position = self.position()
        if forward_only:
            passes: Sequence[int] = (self.latent.passes.eval_passes,) * num_microbatches
        else:
            passes = self.sampler.passes(position.iteration, num_microbatches)
        plan = self._plans(config, len(chunks)).get(passes, forward_only=forward_only)
        loss = PassLoss(
            config,
            micro_batches=num_microbatches,
            weighting=self.latent.passes.loss_weighting,
            lambda_=self.latent.passes.lambda_,
            cp_group=_group(parallel_state.get_context_parallel_group),
            measure_change=forward_only,
            z_loss=0.0 if forward_only else self.z_loss,
        )
        sync = GradientSync(chunks, models, config)

        def last_backward(chunk: int) -> None:
            if chunk == len(chunks) - 1:
                # All losses are known, and Megatron has not yet looked at the gradients, of which
                # it could not say which pass spoilt them.
                self._check(loss)
            sync.last_backward(chunk)

        batches = self._batches(
            data_iterator, position.consumed_samples, num_microbatches, micro_batch_size
        )
        recorder = None if forward_only else self.recorder
        program = MegatronProgram(
            models,
            batches,
            passes,
            kernels=self.kernels,
            loss=loss,
            recompute=self._recompute_switch(config),
            recorder=recorder,
            training=not forward_only,
            on_last_backward=last_backward,
            on_chunk_finished=sync.chunk_finished,
        )
        ring = self._channels()
        executor = Executor(ring, watch=self.watch, recorder=recorder)
        hand_over = self._hand_over(config, seq_length, micro_batch_size)
        with self.watch.step(plan, ring.rank) if self.watch else nullcontext():
            if forward_only:
                with torch.no_grad():
                    executor.run(plan, program, hand_over)
            else:
                sync.dispatch_parameters()
                with sync.step():
                    executor.run(plan, program, hand_over)
                sync.close_parameter_gathers()
                if recorder is not None:
                    recorder.begin("reduce")
                self._finalize(config, chunks, loss, pg_collection, force_all_reduce)
                if recorder is not None:
                    recorder.end("reduce")
                self._plan_ahead(position.iteration + 1, num_microbatches)
                self.last_passes, self.last_plan = tuple(passes), plan
            batches.exhaust()
            if config.timers is not None:
                config.timers("forward-backward").stop()
            if forward_only:
                self.eval_sums.append(loss.sums)
            else:
                self.train_sums[position.iteration] = loss.sums
            return self._reports(loss, passes, forward_only)

    # -- parts ------------------------------------------------------------------------------

    def _plans(self, config: Any, chunks: int) -> Planner:
        if self._planner is None:
            self._planner = Planner(
                parallel_state.get_pipeline_model_parallel_world_size(),
                chunks,
                costs=self.costs,
                max_in_flight=self.latent.passes.max_in_flight,
            )
        return self._planner

    def _plan_ahead(self, iteration: int, micro_batches: int) -> None:
        assert self._planner is not None
        self._planner.prefetch(self.sampler.passes(iteration, micro_batches))

    def _channels(self) -> Ring:
        if self._ring is None:
            # The watch, which can say more, is to speak before the communication library does.
            timeout = timedelta(seconds=2 * self.latent.passes.timeout_seconds + 60)
            self._ring = Ring.create(
                _group(parallel_state.get_pipeline_model_parallel_group), timeout
            )
            if self.watch is not None:
                self.watch.connect(self._ring.rank)
        return self._ring

    def _recompute_switch(self, config: Any) -> RecomputeSwitch:
        if self._recompute is None:
            self._recompute = RecomputeSwitch(self.latent.passes.recompute, config)
        return self._recompute

    def _batches(
        self, data_iterator: Any, consumed: int, count: int, micro_batch_size: int
    ) -> BatchReader:
        iterator = self.pick_iterator(data_iterator)
        first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        device = torch.device(torch.cuda.current_device())

        def read(index: int) -> Any:
            if not self.reads_data:
                from megalatent.model.batch import MicroBatch

                return MicroBatch()
            return read_micro_batch(
                iterator,
                self.data,
                samples=sample_indices(consumed, index, micro_batch_size, device),
                micro_batch_size=micro_batch_size,
                first_stage=first_stage,
            )

        return BatchReader(read, count)

    def _hand_over(self, config: Any, seq_length: int, micro_batch_size: int) -> HandOver:
        rows = seq_length // group_size(_group(parallel_state.get_context_parallel_group))
        batch = micro_batch_size
        if self.data.packed:
            rows, batch = rows * batch, 1
        if config.sequence_parallel:
            rows //= config.tensor_model_parallel_size
        dtype = config.pipeline_dtype or config.params_dtype
        if config.fp32_residual_connection:
            dtype = torch.float32
        device = torch.device(torch.cuda.current_device())
        return HandOver((rows, batch, config.hidden_size), dtype, device)

    def _finalize(
        self, config: Any, chunks: list[Any], loss: PassLoss, pg_collection: Any, force: Any
    ) -> None:
        if config.finalize_model_grads_func is None:
            return
        tokens = None
        if config.calculate_per_token_loss:
            tokens = loss.tokens
            if tokens is None:
                tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        kwargs = {} if pg_collection is None else {"pg_collection": pg_collection}
        config.finalize_model_grads_func(chunks, tokens, force_all_reduce=force, **kwargs)

    def _check(self, loss: PassLoss) -> None:
        if loss.reports and self.check_losses is not None:
            per_pass = [sums[0] for _, sums in sorted(loss.sums.loss.items())]
            self.check_losses(torch.stack(per_pass))

    def _reports(
        self, loss: PassLoss, passes: Sequence[int], forward_only: bool
    ) -> list[dict[str, Tensor]]:
        if not loss.reports:
            return []
        # Megatron takes the keys of the first micro-batch and divides by all iterations: only
        # pass 1, which every micro-batch has, may be among the keys of a training step.
        kept = range(1, (max(passes) if forward_only else 1) + 1)
        return [
            {loss_key(k): loss.reports[micro_batch][k] for k in kept}
            for micro_batch in range(len(passes))
        ]


def _unwrapped(chunk: Any) -> LatentModel:
    while not isinstance(chunk, LatentModel):
        chunk = chunk.module
    return chunk


def _group(getter: Callable[..., dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """A process group, or None where it was not made (a single process without one)."""
    return getter(check_initialized=False)
