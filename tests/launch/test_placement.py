"""Whether a process starts ranks or is one of the ranks of torchrun or srun."""

from __future__ import annotations

import pytest

from megalatent.errors import UserError
from megalatent.launch.placement import find_place, first_host

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}


def test_alone() -> None:
    assert find_place({}) is None


def test_torchrun() -> None:
    place = find_place(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "MASTER_ADDR": "node1",
            "MASTER_PORT": "29500",
        }
    )
    assert place is not None
    assert (place.launcher, place.rank, place.local_rank, place.world_size) == ("torchrun", 5, 1, 8)


def test_srun() -> None:
    place = find_place(STEP)
    assert place is not None
    assert (place.launcher, place.rank, place.local_rank, place.world_size) == ("srun", 9, 1, 16)
    assert place.environment == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": str(20_000 + 1234567 % 20_000),
    }


def test_all_ranks_of_a_job_agree_on_where_to_meet() -> None:
    places = [find_place({**STEP, "SLURM_PROCID": str(rank)}) for rank in range(16)]
    meeting = {
        (place.environment["MASTER_ADDR"], place.environment["MASTER_PORT"])
        for place in places
        if place is not None
    }
    assert len(meeting) == 1


def test_srun_keeps_a_given_meeting_point() -> None:
    place = find_place({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert place is not None
    assert place.environment["MASTER_ADDR"] == "10.0.0.1"
    assert place.environment["MASTER_PORT"] == "29500"


def test_one_task_of_srun_starts_its_own_ranks() -> None:
    assert find_place({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_batch_script_starts_its_own_ranks() -> None:
    """It has a task number too, and nobody to join."""
    batch = {k: v for k, v in STEP.items() if not k.startswith("SLURM_STEP")}
    assert find_place(batch) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("localhost", "localhost"),
        ("gpu12", "gpu12"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-007,12],login", "gpu003"),
        ("gpu[9,11]", "gpu9"),
        ("rack1-n[01-04]-ib", "rack1-n01-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK: 'a'"),
        ({k: v for k, v in STEP.items() if k != "SLURM_JOB_ID"}, "SLURM_JOB_ID"),
    ],
)
def test_broken_environments(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        find_place(environment)
