"""Runs a function on N gloo ranks, forked from this process, which has imported torch and Megatron.

A fork costs milliseconds where a fresh start costs seconds of imports. It is safe because this
process uses one thread (see `tests/conftest.py`): forking after OpenMP threads ran hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.waiting import HANG

__all__ = ["Layout", "RankError", "init", "run_ranks"]

# How long the other ranks may still report after the first one failed: they often fail for a
# better reason, or they hang waiting for the dead one.
_GRACE = 3.0
# How long hung ranks may take to write their stacks.
_STACKS = 30.0


class RankError(AssertionError):
    """A rank failed or hung; the message carries every rank's traceback or stack."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = HANG) -> list[Any]:
    """Call `fn(rank, *args)` in `n` forked processes joined by gloo; their results, by rank.

    `fn` may be a closure. What it returns is pickled: keep it small, and detached from graphs.

    Raises:
        RankError: a rank raised (its traceback is in the message), died, or did not finish within
            `timeout` seconds (the stacks of all ranks are in the message).
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_Rank(rank, Path(folder)) for rank in range(n)]
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in ranks:
            rank.start(n, fn, args, timeout)
        try:
            _wait(ranks, timeout)
        finally:
            for rank in ranks:
                rank.kill()
        failed = sorted((r for r in ranks if r.error() is not None), key=_Rank.failed_at)
        if failed:
            raise RankError("\n".join(rank.report() for rank in failed))
        return [rank.result() for rank in ranks]


class _Rank:
    """One forked process; it leaves its result, or its error, in a file."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.process: Any = None
        self.hung = False

    def _path(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.rank}"

    def start(self, n: int, fn: Callable[..., Any], args: Any, timeout: float) -> None:
        # Unlike a bare fork, it also ends the helper processes that saving a checkpoint starts.
        process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(n, fn, args, timeout)
        )
        process.start()
        self.process = process

    def _run(self, n: int, fn: Callable[..., Any], args: Any, timeout: float) -> None:
        # A group of its own: what the rank has started can be ended with it.
        os.setsid()
        with self._path("stack").open("w") as stack:
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
            os.environ.update(
                RANK=str(self.rank),
                LOCAL_RANK=str(self.rank),
                WORLD_SIZE=str(n),
                LOCAL_WORLD_SIZE=str(n),
                GLOO_SOCKET_IFNAME="lo",
            )
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{self.folder}/rendezvous",
                    rank=self.rank,
                    world_size=n,
                    timeout=timedelta(seconds=timeout + 60),
                )
                data = io.BytesIO()
                torch.save(fn(self.rank, *args), data)
                # A rank that leaves early breaks the connections the others still use.
                dist.barrier()
                self._path("result").write_bytes(data.getvalue())
            except BaseException:
                self._path("error").write_text(traceback.format_exc())

    def ended(self) -> bool:
        return self.process.exitcode is not None

    def failed(self) -> bool:
        return self._path("error").exists() or (self.ended() and self.process.exitcode != 0)

    def kill(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def error(self) -> str | None:
        if self._path("error").exists():
            return self._path("error").read_text()
        if self.hung:
            return f"did not finish; its stack:\n{self._path('stack').read_text()}"
        if not self._path("result").exists():
            return f"ended with exit code {self.process.exitcode} and no traceback"
        return None

    def failed_at(self) -> float:
        """When it failed: the first failure explains the others. Hung ranks come last."""
        path = self._path("error")
        return path.stat().st_mtime if path.exists() else float("inf")

    def report(self) -> str:
        return f"--- rank {self.rank}: {self.error()}"

    def dump_stack(self) -> None:
        self.hung = True
        # One that ends just now needs no stack.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack_size(self) -> int:
        path = self._path("stack")
        return path.stat().st_size if path.exists() else 0

    def result(self) -> Any:
        return torch.load(io.BytesIO(self._path("result").read_bytes()), weights_only=False)


def _wait(ranks: list[_Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    failed = False
    while not all(rank.ended() for rank in ranks):
        if not failed and any(rank.failed() for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE)
        if time.monotonic() > deadline:
            _dump_stacks([rank for rank in ranks if not rank.ended()])
            return
        time.sleep(0.005)


def _dump_stacks(hung: list[_Rank]) -> None:
    """Let ranks write their stacks, and wait until all have and none writes any more."""
    for rank in hung:
        rank.dump_stack()
    deadline = time.monotonic() + _STACKS
    before: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(0.5)
        sizes = [rank.stack_size() for rank in hung if not rank.ended()]
        if all(sizes) and sizes == before:
            return
        before = sizes


@dataclass(frozen=True)
class Layout:
    """How many ranks there are on each axis; `vp` is the number of chunks per pipeline rank."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    pp: int = 1
    vp: int | None = None
    ep: int = 1
    dp: int = 1
    etp: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "cp", "pp", "vp", "ep", "etp", "dp")
            if getattr(self, name) not in (None, 1)
        ]
        return "x".join([*parts, *(["sp"] if self.sp else [])]) or "single"

    def config_kwargs(self) -> dict[str, Any]:
        """The arguments of `TransformerConfig` that say the same."""
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sp,
            "context_parallel_size": self.cp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "pipeline_dtype": torch.float32,
            # With two stages and chunks, batched sends between the same two ranks get mixed up.
            "overlap_p2p_comm": self.vp is not None,
            "batch_p2p_comm": self.vp is None,
        }


def init(layout: Layout, *, seed: int = 1234) -> None:
    """Set up Megatron's process groups and random states in a rank of `run_ranks`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    assert dist.get_world_size() == layout.world_size, f"{layout} needs {layout.world_size} ranks"
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(seed)
