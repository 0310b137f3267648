"""Notices a step that stands still, says what it waited for, and ends the process.

A rank whose neighbour died or hangs would wait for ever (or for the communication library's own,
much longer, timeout) and could only say that a receive failed. The watch knows the plan: it says
which action of which stage was missing and writes the plan's grid with the stuck cell marked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megalatent.passes.plan import Action, Plan

__all__ = ["Watch"]


class Watch:
    """Watches the steps of one rank from a thread of its own.

    Args:
        timeout: seconds without progress after which the process ends with exit code 1.
        folder: where the grid of a stalled step is written; None prints only.
        name: how messages name this rank, for example ``"global rank 3"``.
    """

    def __init__(self, timeout: float, folder: Path | None = None, name: str = "") -> None:
        self.timeout = timeout
        self.folder = folder
        self.name = name
        self._plan: Plan | None = None
        self._rank = 0
        self._index = 0
        self._source: int | None = None
        self._moved = time.monotonic()
        self._events: list[tuple[int, torch.cuda.Event]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def step(self, plan: Plan, rank: int) -> Iterator[None]:
        """Watch one step; also turns its errors into ones that name the action."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True, name="latent-watch")
            self._thread.start()
        with self._lock:
            self._plan, self._rank, self._events = plan, rank, []
            self._index, self._source, self._moved = 0, None, time.monotonic()
        try:
            yield
        except RuntimeError:
            self.write_grid()
            raise
        finally:
            with self._lock:
                self._plan = None

    def waiting(self, index: int, action: Action, source: int) -> None:
        """The rank waits for ``source`` to hand over the input of its action ``index``."""
        self._index, self._source, self._moved = index, source, time.monotonic()

    def running(self, index: int, action: Action) -> None:
        """The rank has begun its action ``index``."""
        self._index, self._source, self._moved = index, None, time.monotonic()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # The host runs ahead of the device: an event tells how far the device has come.
            event = torch.cuda.Event()
            event.record()
            with self._lock:
                self._events.append((index, event))

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout / 10))
            with self._lock:
                if self._plan is None:
                    continue
                while self._events and self._events[0][1].query():
                    self._events.pop(0)
                    self._moved = time.monotonic()
                stalled = time.monotonic() - self._moved
            if stalled > self.timeout:
                self._stop(stalled)

    def describe(self) -> str:
        """One line: which action of which stage this rank is at or waits for."""
        if self._plan is None:
            return "between steps"
        index = self._events[0][0] if self._events else self._index
        action = self._plan.actions[self._rank][index]
        place = f"stage {self._rank}, action {index} of {len(self._plan.actions[self._rank])}"
        if self._source is not None:
            return f"{place}: waiting for stage {self._source} to hand over the input of {action}"
        return f"{place}: inside {action}"

    def write_grid(self) -> Path | None:
        """Write the plan's grid with this rank's cell marked; the file's path, or None."""
        if self.folder is None or self._plan is None:
            return None
        from megalatent.passes.render import render_grid

        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"stalled-{os.getpid()}.txt"
        grid = render_grid(self._plan, mark=(self._rank, self._index))
        path.write_text(f"{self.name}: {self.describe()}\n\n{grid}\n")
        return path

    def _stop(self, stalled: float) -> None:
        path = self.write_grid()
        where = f"; the plan with the stuck action marked is in {path}" if path else ""
        print(
            f"megalatent: error: {self.name}: no progress for {stalled:.0f} s "
            f"(latent.passes.timeout_seconds {self.timeout:g}): {self.describe()}{where}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
