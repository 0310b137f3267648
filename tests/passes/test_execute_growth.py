"""Hundreds of steps leave nothing behind: no open files, threads, objects or memory."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from megalatent.passes.channels import Ring
from megalatent.passes.execute import Executor
from megalatent.passes.plan import Plan, make_plan
from megalatent.passes.watch import Watch
from tests.passes.standin import HAND_OVER, StandIn, launch
from tests.waiting import HANG

STEPS, SETTLED = 200, 60
# Memory that is used for the first time; a leak of 8 KiB a step would be more.
SLACK_BYTES = 1 << 20


@dataclass
class Held:
    """What a process holds."""

    files: int
    threads: int
    objects: int
    own_bytes: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        # Not the pages of libraries, which the system takes away and gives back as it likes.
        kib = [int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")]
        return Held(
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(gc.get_objects()),
            1024 * sum(kib),
        )


def hold(rank: int, plans: Sequence[Plan]) -> tuple[Held, Held]:
    """What this rank holds after `SETTLED` steps and after all."""
    ring = Ring.create(dist.group.WORLD)
    watch = Watch(HANG, name=f"rank {rank}")
    watch.connect(ring.rank)
    executor = Executor(ring, watch=watch)
    before = Held.now()
    for step in range(STEPS):
        plan = plans[step % len(plans)]
        with watch.step(plan, ring.rank):
            executor.run(plan, StandIn(plan, ring.rank), HAND_OVER)
        if step + 1 == SETTLED:
            before = Held.now()
    after = Held.now()
    watch.close()
    dist.barrier()
    return before, after


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_two_hundred_steps(stages: int) -> None:
    plans = [make_plan(stages, 1, passes) for passes in ((1, 1, 1), (2, 2), (3, 1))]
    for rank, end in enumerate(launch(stages, lambda rank: hold(rank, plans))):
        assert end.code == 0, end.stderr
        before, after = end.result
        assert after.files <= before.files, f"rank {rank}"
        assert after.threads <= before.threads, f"rank {rank}"
        # Caches of the interpreter move by a few; one object per step would be 140.
        assert after.objects - before.objects < (STEPS - SETTLED) // 4, f"rank {rank}"
        assert after.own_bytes - before.own_bytes < SLACK_BYTES, f"rank {rank}"
