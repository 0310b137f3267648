"""The harness itself: results, failures with their rank, hangs with their stacks, no left-overs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import Layout, RankError, run_ranks
from tests.waiting import patiently, wait_until


def test_results_come_by_rank() -> None:
    def total(rank: int, offset: int) -> tuple[int, torch.Tensor]:
        x = torch.tensor([float(rank + offset)])
        dist.all_reduce(x)
        return rank, x

    assert run_ranks(3, total, 10) == [(rank, torch.tensor([33.0])) for rank in range(3)]


def test_a_failure_names_its_rank_and_comes_first() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("the reason")
        dist.all_reduce(torch.zeros(1))

    with pytest.raises(RankError) as caught:
        run_ranks(2, fail)
    first = str(caught.value).split("--- rank")[1]
    assert first.startswith(" 1:")
    assert "KeyError: 'the reason'" in first


def test_a_hang_shows_the_stack_of_every_rank() -> None:
    def hang(rank: int) -> None:
        if rank == 0:
            _waits_for_nothing()
        dist.all_reduce(torch.zeros(1))

    def check(seconds: float) -> None:
        with pytest.raises(RankError, match="did not finish") as caught:
            run_ranks(2, hang, timeout=seconds)
        assert "_waits_for_nothing" in str(caught.value)
        assert "all_reduce" in str(caught.value)

    # After one second the ranks of a busy machine may not yet be where they hang.
    patiently(check, (1, 10, 100))


def _waits_for_nothing() -> None:
    time.sleep(1000)


def test_a_dead_rank_is_reported() -> None:
    def die(rank: int) -> None:
        os._exit(7)

    with pytest.raises(RankError, match="exit code 7"):
        run_ranks(1, die)


def test_what_a_rank_started_ends_with_it() -> None:
    def start(rank: int) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    (pid,) = run_ranks(1, start)
    wait_until("the end of the process", lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    """Running, and not just waiting to be reaped by whoever inherited it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_layouts_have_readable_names() -> None:
    assert str(Layout()) == "single"
    assert str(Layout(tp=2, sp=True, pp=2, vp=2)) == "tp2xpp2xvp2xsp"
    assert Layout(tp=2, cp=2, pp=2, dp=3, ep=3).world_size == 24
