"""Whether this process starts a run's ranks itself, or is one of the ranks of torchrun or srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megalatent.errors import UserError

__all__ = ["Joined", "find_place", "first_host", "meeting_point"]

# Ports for jobs of Slurm, by job number: two jobs on one node rarely meet.
_FIRST_PORT, _PORTS = 20_000, 20_000


@dataclass(frozen=True, kw_only=True)
class Joined:
    """This process is one rank of a run that something else started.

    Attributes:
        launcher: `torchrun` or `srun`.
        environment: what `torch.distributed` reads, to be set where it is not.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    environment: Mapping[str, str]


def find_place(environ: Mapping[str, str]) -> Joined | None:
    """The place of this process in a run, or None where it is to start the ranks itself.

    Raises:
        UserError: the environment names a place and leaves out what is needed to find the others.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                raise UserError(
                    f"RANK and WORLD_SIZE are set and {name} is not: start with torchrun, which"
                    " sets them all, or unset RANK"
                )
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        _check_place("RANK", rank, "WORLD_SIZE", world_size)
        local_rank = environ.get("LOCAL_RANK", "0")
        return Joined(
            launcher="torchrun",
            rank=rank,
            local_rank=_number({"LOCAL_RANK": local_rank}, "LOCAL_RANK"),
            world_size=world_size,
            environment={"LOCAL_RANK": local_rank},
        )
    # A batch script has SLURM_PROCID and SLURM_NTASKS too; only inside a step of srun are there
    # other processes to join.
    in_step = environ.get("SLURM_STEP_ID", "").isdigit()
    if in_step and "SLURM_PROCID" in environ:
        tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
        world_size = _number({"SLURM_NTASKS": tasks}, "SLURM_NTASKS")
        if world_size > 1:
            return _join_slurm(environ, world_size)
    return None


def _join_slurm(environ: Mapping[str, str], world_size: int) -> Joined:
    rank = _number(environ, "SLURM_PROCID")
    _check_place("SLURM_PROCID", rank, "SLURM_NTASKS", world_size)
    local_rank = _number(environ, "SLURM_LOCALID")
    return Joined(
        launcher="srun",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        environment={
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            **meeting_point(environ),
        },
    )


def meeting_point(environ: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT: as they are set, else the job's first node and a port of it.

    Raises:
        UserError: Slurm's variables make no sense.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
    port = _FIRST_PORT + _number(environ, "SLURM_JOB_ID") % _PORTS
    return {
        "MASTER_ADDR": environ.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def first_host(nodes: str) -> str:
    """The first name in Slurm's short form: `gpu[003-007,12],login` gives `gpu003`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if not found:
        raise UserError(f"SLURM_JOB_NODELIST: {nodes!r} is no list of nodes: set MASTER_ADDR")
    prefix, number, suffix = found.groups()
    return prefix + (number or "") + suffix


def _check_place(rank_name: str, rank: int, size_name: str, world_size: int) -> None:
    if not rank < world_size:
        raise UserError(
            f"{rank_name}: {rank} in the environment is no rank of {size_name}: {world_size}"
            " processes, which count from 0: unset both, or correct them"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise UserError(
            f"{name}: {text!r} in the environment is no number: unset it, or correct it"
        )
    return int(text)
