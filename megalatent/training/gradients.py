"""Gradient and parameter synchronisation of a multi-pass step with Megatron's DDP.

Megatron starts a bucket's reduction when each of its weights has fired its backward hook as often
as in the first batch. With several passes a weight fires K times, K varies, and a K = 1 batch
never fires the fusion's hooks, so such counts mean nothing. The step therefore runs inside every
chunk's ``no_sync``. A chunk's last backward walks its layers for the last time, each weight once:
for that action alone, buckets that hold nothing but weights of layers listen to their hooks, and
are reduced while the backward goes on. All other buckets (embedding, fusion, head) start after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel

__all__ = ["GradientSync"]


class GradientSync:
    """Synchronisation around one step.

    Args:
        chunks: model chunks as Megatron wrapped them (DDP or not).
        models: the latent models inside.
        config: the model's ``TransformerConfig``.
    """

    def __init__(self, chunks: Sequence[Any], models: Sequence[Any], config: Any) -> None:
        self.chunks = chunks
        self.models = models
        self.config = config

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all actions of a training step."""
        with ExitStack() as stack:
            for chunk in self._wrapped():
                stack.enter_context(chunk.no_sync())
            yield

    def dispatch_parameters(self) -> None:
        """Start gathering parameters where the gather is aligned across stages.

        Megatron then leaves the dispatch to the schedule, once per chunk and step.
        """
        functions = self.config.param_sync_func
        if functions is None:
            return
        functions = functions if isinstance(functions, list) else [functions]
        for function, chunk in zip(functions, self.chunks, strict=True):
            function(chunk.parameters())

    def last_backward(self, chunk: int) -> None:
        """Let the buckets of layers start their reductions as the coming backward fills them."""
        layers = set(self.models[chunk].decoder.parameters())
        for group in self._overlapped(chunk):
            if group.params <= layers:
                group.is_first_batch = False
                group.per_param_grad_ready_counts = {}
                group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
                group.is_last_microbatch = True

    def chunk_finished(self, chunk: int) -> None:
        """Reduce what is left of a chunk's gradients: they are final on this rank."""
        self.models[chunk].sum_fusion_gradients()
        for group in self._overlapped(chunk):
            counts = group.per_param_grad_ready_counts
            if not counts or counts != group.golden_per_param_grad_ready_counts:
                group.start_grad_sync()
            # Its hooks have nothing to say any more: another chunk may share a weight.
            group.is_last_microbatch = False

    def _overlapped(self, chunk: int) -> list[Any]:
        """Bucket groups whose reduction overlaps with the backward, in Megatron's order."""
        wrapped = self.chunks[chunk]
        if isinstance(wrapped, DistributedDataParallel) and wrapped.ddp_config.overlap_grad_reduce:
            return _groups(wrapped)
        return []

    def close_parameter_gathers(self) -> None:
        """Wait for gathers that no module of this step waited for (the fusion's, if K = 1)."""
        for chunk in self._wrapped():
            for group in _groups(chunk):
                if group.param_gather_handle is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _wrapped(self) -> list[Any]:
        return [c for c in self.chunks if isinstance(c, DistributedDataParallel)]


def _groups(wrapped: DistributedDataParallel) -> list[Any]:
    return wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups
