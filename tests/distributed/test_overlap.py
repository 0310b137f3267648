"""Gradients of layers are reduced while the last backward of their chunk goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megalatent.training.gradients import GradientSync
from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import Rig, Setup

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 3000}


def _reductions(rank: int, layout: Layout, steps: Sequence[tuple[int, ...]]) -> list[Any]:
    """Of each step: buckets of layers, and whether each reduction began before its chunk's end.

    ``steps`` gives the passes of each step's micro-batches.
    """
    init(layout)
    rig = Rig(Setup(passes=steps[0], masked=False, ddp=SHARDED), layout)
    inside: list[bool] = []
    events: list[tuple[bool, bool]] = []
    layers = {p for chunk in rig.chunks for p in chunk.module.decoder.parameters()}
    last_backward, finished = GradientSync.last_backward, GradientSync.chunk_finished
    start = _ParamAndGradBucketGroup.start_grad_sync

    def begins(sync: GradientSync, chunk: int) -> None:
        inside.append(True)
        last_backward(sync, chunk)

    def ends(sync: GradientSync, chunk: int) -> None:
        inside.clear()
        finished(sync, chunk)

    def starts(group: Any, **kwargs: Any) -> None:
        if group.grad_reduce_handle is None:  # else Megatron's repeated call, which does nothing
            events.append((group.params <= layers, bool(inside)))
        start(group, **kwargs)

    seen = []
    with (
        mock.patch.object(GradientSync, "last_backward", begins),
        mock.patch.object(GradientSync, "chunk_finished", ends),
        mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", starts),
    ):
        for passes in steps:
            rig.schedule.sampler.given = passes  # type: ignore[attr-defined]
            rig.run()
            seen.append(list(events))
            events.clear()
    groups = sum(len(chunk.bucket_groups) for chunk in rig.chunks)
    return [groups, seen]


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), pytest.param(Layout(dp=2, pp=2), marks=pytest.mark.full)],
    ids=str,
)
def test_layers_are_reduced_during_the_last_backward(layout: Layout) -> None:
    """Whatever K is: also after a first step without a fused pass, which fires fewer hooks."""
    steps = ((1, 1), (2, 1), (3, 2), (1, 1))
    for groups, seen in run_ranks(layout.world_size, _reductions, layout, steps):
        for events in seen:
            assert len(events) == groups  # every bucket once
            assert all(of_layers == early for of_layers, early in events)
        of_layers = [is_of_layers for is_of_layers, _ in seen[0]]
        if layout.pp == 1:
            assert sum(of_layers) > 4
            assert not all(of_layers)  # embedding and fusion come after
