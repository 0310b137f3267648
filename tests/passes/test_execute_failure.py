"""When a rank dies, hangs or fails, every other one ends, with exit code 1, and says why."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalatent.passes.channels import Ring
from megalatent.passes.costs import Costs
from megalatent.passes.execute import Executor
from megalatent.passes.plan import make_plan
from megalatent.passes.watch import Watch
from tests.passes.standin import HAND_OVER, Ended, StandIn, launch
from tests.waiting import HANG, patiently

# A step of 0.2 s or more, so that there is something left to wait for.
COSTS = Costs(forward=0.004, backward=0.006)
PLAN = make_plan(4, 1, (2, 1, 3, 1, 2))
# A rank that would have to wait for this does not end before the test does.
NEVER = 10 * HANG
Where = tuple[int, str, int]  # step, part of the step, index of the action


def train(
    rank: int,
    folder: Path,
    timeout: float,
    at: Callable[[Where], None],
    *,
    pipelines: int = 1,
    steps: int = 2,
) -> str:
    """Steps as training makes them: actions, a reduction, and something between steps.

    `at` is called at every place. Stages of one pipeline are `pipelines` apart.
    """
    stages = dist.get_world_size() // pipelines
    groups = [
        dist.new_group(list(range(i, dist.get_world_size(), pipelines))) for i in range(pipelines)
    ]
    ring = Ring.create(groups[rank % pipelines])
    watch = Watch(timeout, folder, name=f"rank {rank}")
    watch.connect(ring.rank)
    plan = PLAN if stages == PLAN.stages else make_plan(stages, 1, PLAN.passes)
    for step in range(steps):
        at((step, "between", 0))
        with watch.step(plan, ring.rank):
            on_action = partial(_at_action, at, step)
            program = StandIn(plan, ring.rank, COSTS, on_action=on_action)
            Executor(ring, watch=watch).run(plan, program, HAND_OVER)
            at((step, "after", 0))
            dist.all_reduce(torch.zeros(1))
    watch.close()
    dist.barrier()
    return "success"


def _at_action(at: Callable[[Where], None], step: int, index: int) -> None:
    at((step, "action", index))


def run(
    folder: Path,
    victim: int,
    where: Where,
    what: Callable[[], object],
    *,
    timeout: float = NEVER,
    world: int = 4,
    pipelines: int = 1,
    stopped: bool = False,
) -> list[Ended]:
    """Let `victim` do `what` at that place."""

    def stage(rank: int) -> str:
        def at(place: Where) -> None:
            if rank == victim and place == where:
                what()

        return train(rank, folder, timeout, at, pipelines=pipelines)

    ended = launch(world, stage, stopped=(victim,) if stopped else ())
    for rank, end in enumerate(ended):
        if rank != victim:
            assert end.code == 1, f"rank {rank} at {where}: {end.code}\n{end.stderr}"
            assert end.result is None
    return ended


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


PLACE = (
    r"was (between steps|(before its first|after its last) action of the step"
    r"|inside its action \d+, [FBH]\(.*\)"
    r"|at its action \d+, [FB]\(.*\), waiting for ([FB]\(.*\) of stage \d"
    r"|stage \d to receive the input of [FB]\(.*\)))"
)


def check_message(end: Ended, cause: str, folder: Path, rank: int) -> None:
    """One line that names the cause and where the rank was, and a grid with that cell marked."""
    assert cause in end.stderr, end.stderr
    line = rf"megalatent: error: rank {rank}: .*; rank {rank} \(stage \d\) {PLACE}"
    found = re.search(line, end.stderr)
    assert found, end.stderr
    at = re.search(
        r"waiting for (?P<made>.*) of stage (?P<maker>\d)"
        r"|waiting for stage (?P<receiver>\d) to receive the input of (?P<received>.*\))"
        r"|inside its action \d+, (?P<own>.*\))",
        found[1],
    )
    if at is None:
        return
    grid = (folder / f"rank-{rank}.txt").read_text()
    assert cause in grid
    action = at["made"] or at["received"] or at["own"]
    stage = at["maker"] or at["receiver"]
    marked = re.search(r"^marked: stage (\d), action \d+, (.*)$", grid, re.MULTILINE)
    assert marked
    assert marked[2] == action
    if stage is not None:
        assert marked[1] == stage
    row = next(line for line in grid.splitlines() if line.startswith(f"stage {marked[1]}"))
    kind, micro_batch, k = re.findall(r"[FBH]|\d+", action)
    assert f">{kind}{micro_batch}.{k}<" in row


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.full] if seed >= 8 else []) for seed in range(20)],
)
def test_killed_at_a_random_action(seed: int, tmp_path: Path) -> None:
    """Nobody waits for the timeout, which is far away, and everybody names the dead."""
    draw = random.Random(seed)
    victim = draw.randrange(4)
    where = (draw.randrange(2), "action", draw.randrange(len(PLAN.actions[victim])))
    ended = run(tmp_path, victim, where, kill)
    assert ended[victim].code == -signal.SIGKILL
    for rank, end in enumerate(ended):
        if rank != victim:
            cause = f"rank {victim} (stage {victim}) is gone: its process has ended without a word"
            check_message(end, cause, tmp_path, rank)


def test_killed_outside_the_actions(tmp_path: Path) -> None:
    for where in ((0, "after", 0), (1, "between", 0)):
        ended = run(tmp_path, 2, where, kill)
        for rank in (0, 1, 3):
            assert "rank 2 (stage 2) is gone" in ended[rank].stderr, ended[rank].stderr


def test_other_pipelines_stop_too(tmp_path: Path) -> None:
    """Two pipelines of two stages: the one without the dead rank would wait in the reduction."""
    ended = run(tmp_path, 1, (0, "action", 2), kill, pipelines=2)
    for rank in (0, 2, 3):
        assert "rank 1 (stage 0) is gone" in ended[rank].stderr, ended[rank].stderr


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    time.sleep(NEVER)


@pytest.mark.parametrize(
    ("where", "what", "cause"),
    [
        ((1, "action", 5), _stop, "no answer from rank 1 (stage 1): the process is stopped"),
        (
            (1, "action", 5),
            _hang,
            f"standing still: rank 1 (stage 1), inside its action 5, {PLAN.actions[1][5]}",
        ),
        (
            (0, "after", 0),
            _hang,
            "standing still: rank 0 (stage 0), rank 1 (stage 1), rank 2 (stage 2), rank 3 (stage 3)"
            ", after its last action of the step",
        ),
        ((1, "between", 0), _hang, "standing still: rank 1 (stage 1), between steps"),
    ],
    ids=["stopped", "endless action", "endless reduction", "endless pause"],
)
def test_stalled(where: Where, what: Callable[[], None], cause: str, tmp_path: Path) -> None:
    def check(timeout: float) -> None:
        folder = tmp_path / f"{timeout:g}"
        ended = run(folder, 1, where, what, timeout=timeout, stopped=what is _stop)
        # Who noticed first says how long it waited, the others whom they have it from.
        waited = rf"no progress for \d+ s \(latent.passes.timeout_seconds {timeout:g}\)"
        told = rf"rank \d: ({waited}|rank \d \(stage \d\) saw no progress for \d+ s): "
        assert all(re.search(told, end.stderr) for end in ended if end.code == 1)
        for rank, end in enumerate(ended):
            if rank != 1 or what is _hang:
                check_message(end, cause, folder, rank)

    # A fifth of the time is for the ranks' answers, which a busy machine may hold up.
    patiently(check, (2, 10, 60))


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_error_on_one_rank(error: type[BaseException], tmp_path: Path) -> None:
    """The failing rank keeps its own error; the others name it."""

    def fail() -> None:
        raise error("told to")

    ended = run(tmp_path, 2, (1, "action", 6), fail)
    action = PLAN.actions[2][6]
    cause = f"rank 2 (stage 2) failed inside its action 6, {action}: {error.__name__}: told to"
    for rank in (0, 1, 3):
        check_message(ended[rank], cause, tmp_path, rank)
    own = ended[2].stderr
    assert ended[2].code == 1
    assert f"{error.__name__}: told to" in own
    assert "is gone" not in own
    if error is not KeyboardInterrupt:
        assert f"stage 2, in its action 6, {action}" in own


def test_error_after_the_actions(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("told to")

    ended = run(tmp_path, 0, (0, "after", 0), fail)
    for rank in (1, 2, 3):
        cause = "rank 0 (stage 0) failed after its last action of the step: ValueError: told to"
        assert cause in ended[rank].stderr, ended[rank].stderr


def test_rank_that_is_alone_notices_an_endless_action(tmp_path: Path) -> None:
    plan = make_plan(1, 1, (2,))

    def stage(rank: int) -> None:
        watch = Watch(1.0, tmp_path, name="rank 0")
        watch.connect(0)
        program = StandIn(plan, 0, on_action=lambda index: _hang() if index == 2 else None)
        Executor(Ring(0, 1, 0, 0), watch=watch).run(plan, program, HAND_OVER)

    (end,) = launch(1, stage)
    assert end.code == 1
    assert "rank 0: no progress for 1 s (latent.passes.timeout_seconds 1)" in end.stderr
    assert f"was inside its action 2, {plan.actions[0][2]}" in end.stderr
    assert ">" in (tmp_path / "rank-0.txt").read_text()


def test_what_a_launcher_shows_is_not_printed_too(tmp_path: Path) -> None:
    """The reports say which rank's end is the cause, and which only follow from it."""

    def stage(rank: int) -> None:
        def report(text: str, follows: bool) -> bool:
            (tmp_path / f"report{rank}").write_text(f"{follows} {text}")
            return True

        watch = Watch(NEVER, tmp_path, name=f"rank {rank}", report=report)
        watch.connect(rank)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _hang()

    first, second = launch(2, stage)
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    assert first.stderr == ""
    said = (tmp_path / "report0").read_text()
    assert said.startswith("True rank 1 (stage 1) is gone"), said
    assert not (tmp_path / "report1").exists()


def test_slow_but_moving_is_no_stall(tmp_path: Path) -> None:
    """A step that takes longer than the timeout in all."""
    plan = make_plan(2, 1, (1,) * 6)

    def check(factor: float) -> None:
        def stage(rank: int) -> str:
            ring = Ring.create(dist.group.WORLD)
            watch = Watch(2.0 * factor, tmp_path, name=f"rank {rank}")
            watch.connect(rank)
            costs = Costs(forward=0.15 * factor, backward=0.3 * factor)
            Executor(ring, watch=watch).run(plan, StandIn(plan, rank, costs), HAND_OVER)
            watch.close()
            dist.barrier()
            return "success"

        for end in launch(2, stage):
            assert end.code == 0, end.stderr
            assert end.result == "success"
            assert end.stderr == ""

    patiently(check, (1, 5, 25))


def test_ranks_that_finish_early_are_not_missed(tmp_path: Path) -> None:
    """The others go on for a while after one has left in order."""

    def stage(rank: int) -> str:
        watch = Watch(NEVER, tmp_path, name=f"rank {rank}")
        watch.connect(rank)
        if rank:
            time.sleep(0.5)
        watch.close()
        names = [thread.name for thread in threading.enumerate()]
        return f"success {'latent-watch' in names}"

    for end in launch(3, stage):
        assert end.code == 0, end.stderr
        assert end.stderr == ""
