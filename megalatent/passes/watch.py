"""Notices a step that cannot go on, says why, and ends the process.

A rank whose neighbour died or hangs would wait for ever (or for the communication library's own,
much longer, timeout) and could only say that a receive failed. The watch knows the plan and,
through `peers`, what became of the other ranks: it says which action of which stage was missing and
which rank is the cause, and writes the plan's grid with the stuck cell marked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

import torch

from megalatent.passes.peers import Note, Peers
from megalatent.passes.plan import Plan

__all__ = ["Watch"]

# Seconds that other ranks' notes may take to get here, or ours to get there.
_SPREAD = 1.0
# A stalled rank asks the others where they are at this share of the timeout.
_ASK = 0.8
_MOST_NAMES = 4


class _Place(NamedTuple):
    """Where a rank is.

    Attributes:
        kind: waiting (for a hand-over), sending, inside (an action), before or after (the actions
            of a step), between (steps).
        at: index of the action in the stage's list, where there is one.
        receiver: stage and index of the action whose input is being sent.
    """

    kind: str
    plan: Plan | None = None
    stage: int = 0
    at: int = 0
    receiver: tuple[int, int] | None = None

    def describe(self) -> str:
        """What follows "rank 3 (stage 1) was": one line."""
        if self.plan is None:
            return "between steps"
        if self.kind in ("before", "after"):
            which = "first" if self.kind == "before" else "last"
            return f"{self.kind} its {which} action of the step"
        here = f"action {self.at}, {self.plan.actions[self.stage][self.at]}"
        if self.kind == "inside":
            return f"inside its {here}"
        stage, index = self.awaited()
        awaited = self.plan.actions[stage][index]
        if self.kind == "sending":
            return f"at its {here}, waiting for stage {stage} to receive the input of {awaited}"
        return f"at its {here}, waiting for {awaited} of stage {stage}"

    def awaited(self) -> tuple[int, int]:
        """Stage and index of the action that this rank waits for, or is in."""
        assert self.plan is not None
        if self.receiver is not None:
            return self.receiver
        if self.kind != "waiting":
            return self.stage, self.at
        action = self.plan.actions[self.stage][self.at]
        found = self.plan.maker(action, self.stage)
        assert found is not None
        return found[0], self.plan.actions[found[0]].index(found[1])


class Watch:
    """Watches one rank from a thread of its own.

    Within a step (`step`), a rank that does not move for the timeout ends the run. Once connected
    (`connect`), this rank also ends, at any time, when another one has failed or died.

    Args:
        timeout: seconds without progress after which the process ends with exit code 1.
        folder: where the grid of a stalled step is written; None prints only.
        name: how messages name this rank, for example ``"rank 3"``.
        report: called with why the process ends and whether that follows from another rank's end;
            says whether somebody else will show it.
    """

    def __init__(
        self,
        timeout: float,
        folder: Path | None = None,
        name: str = "this rank",
        report: Callable[[str, bool], bool] | None = None,
    ) -> None:
        self._report = report
        self.timeout = timeout
        self.folder = folder
        self.name = self._who = name
        self._in_step = False
        self._plan: Plan | None = None
        self._stage = 0
        self._place = _Place("between")
        # The host runs ahead of a GPU: events tell how far the GPU has come.
        self._events: deque[tuple[_Place, torch.cuda.Event]] | None = None
        self._peers: Peers | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._closed = False
        self._failed = False
        self._still = 0.0
        self._answers: dict[int, Note] = {}
        self._left: set[int] = set()

    # -- what this rank does ----------------------------------------------------------------

    def connect(self, stage: int) -> None:
        """Get to know the other ranks of the run. All ranks together, once.

        Args:
            stage: of this rank, for messages.
        """
        if self._peers is None:
            self._who = f"{self.name} (stage {stage})"
            self._peers = Peers.connect(self._who)
            # Where a process ends in order, nobody must take it for dead.
            Finalize(None, self._exits, exitpriority=100)
            self._start()

    @contextmanager
    def step(self, plan: Plan, stage: int) -> Iterator[None]:
        """Watch one step. May be entered again inside for the part that runs the actions.

        An exception leaves through here only if it is this rank's own: if another rank is the
        cause, the process ends with a message that says so.
        """
        if self._in_step:
            yield
            self._set(_Place("after", plan, stage))
            return
        self._start()
        if self._events is None and torch.cuda.is_available():
            self._events = deque()
        self._in_step, self._plan, self._stage = True, plan, stage
        self._set(_Place("before", plan, stage))
        try:
            yield
        except BaseException as error:
            self._fails(error)
            raise
        self._set(_Place("between"))
        self._in_step, self._plan = False, None

    def waiting(self, index: int) -> None:
        """The rank waits for the input of its action ``index``."""
        self._set(_Place("waiting", self._plan, self._stage, index))

    def running(self, index: int) -> None:
        """The rank has begun its action ``index``."""
        self._set(_Place("inside", self._plan, self._stage, index))

    def sending(self, index: int, stage: int, consumer_index: int) -> None:
        """At its action ``index``, the rank waits until ``stage`` has received what it made.

        ``consumer_index`` is that of the action of ``stage`` whose input it is.
        """
        receiver = (stage, consumer_index)
        self._set(_Place("sending", self._plan, self._stage, index, receiver))

    def close(self, error: BaseException | None = None) -> None:
        """The run is over for this rank: well, or because of ``error``."""
        if self._closed:
            return
        if error is not None and not self._failed:
            self._fails(error)
        self._closed = True
        if self._peers is not None:
            self._peers.close()

    def _exits(self) -> None:
        self.close(getattr(sys, "last_exc", None))

    def describe(self) -> str:
        """One line: which action of which stage this rank is at or waits for."""
        return self._place.describe()

    def _set(self, place: _Place) -> None:
        if self._events is None:
            self._place = place
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append((place, event))

    # -- failures of this rank --------------------------------------------------------------

    def _fails(self, error: BaseException) -> None:
        """Find out whether another rank is the cause; if not, tell the others."""
        if isinstance(error, RuntimeError) and self._peers is not None:
            # A broken connection is a RuntimeError, and the cause may still be on its way.
            self._stopping.wait(_SPREAD)
        with self._lock:
            self._failed = not self._stopping.is_set()
        if not self._failed:
            time.sleep(10 * _SPREAD)  # the watch's thread ends this process
            return
        place = self._place
        what = "".join(traceback.format_exception_only(error)[:1]).strip()
        if self._peers is not None and not self._closed:
            self._peers.tell("failed", f"{place.describe()}: {what}")
        path = self._write_grid(place, f"{self._who} failed {place.describe()}: {what}")
        if path is not None:
            error.add_note(f"the plan with the action marked is in {path}")

    # -- the thread -------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True, name="latent-watch")
            self._thread.start()

    def _look(self) -> None:
        period = min(1.0, self.timeout / 10)
        seen, asked = self._place, False
        before = time.monotonic()
        while not self._closed:
            notes = self._await_notes(period)
            now = time.monotonic()
            # Time in which this process itself was stopped, or got no core, does not count.
            tick, before = min(now - before, 2 * period), now
            if self._failed:
                self._still += tick
                if self._still > self.timeout:  # something keeps the process from ending
                    os._exit(1)
                continue
            for note in notes:
                self._heard(note)
            self._follow_device()
            if self._place is not seen:
                seen, asked, self._still = self._place, False, 0.0
                continue
            self._still += tick
            if seen.kind == "between":
                continue
            if self._still > self.timeout:
                self._give_up()
            elif self._still > _ASK * self.timeout and not asked and self._peers is not None:
                asked, self._answers = True, {}
                self._peers.tell("where")

    def _follow_device(self) -> None:
        try:
            while self._events and self._events[0][1].query():
                self._place = self._events.popleft()[0]
        except RuntimeError:  # the device has failed: the main thread will say how
            return

    def _await_notes(self, seconds: float) -> list[Note]:
        if self._peers is None:
            time.sleep(seconds)
            return []
        return self._peers.poll(seconds)

    def _heard(self, note: Note) -> None:
        assert self._peers is not None
        if note.kind == "where":
            place = self._place
            self._peers.tell("here", place.describe(), at=place.kind, still=self._still)
        elif note.kind == "here":
            self._answers[note.rank] = note
        elif note.kind == "left":
            self._left.add(note.rank)
        else:
            who = self._peers.names[note.rank]
            if note.kind == "gone":
                self._stop(f"{who} is gone: its process has ended without a word", follows=True)
            elif note.kind == "failed":
                # It should be the first to end: launchers report what ends first.
                delay = min(2.0, self.timeout / 4)
                self._stop(f"{who} failed {note.text}", delay=delay, follows=True)
            elif note.kind == "stalled":
                seconds = f"{note.facts['seconds']:.0f} s"
                self._stop(f"{who} saw no progress for {seconds}: {note.text}", follows=True)

    def _give_up(self) -> None:
        text = (
            f"no progress for {self._still:.0f} s (latent.passes.timeout_seconds {self.timeout:g})"
        )
        if self._peers is not None:
            cause = self._cause(self._peers)
            self._peers.tell("stalled", cause, seconds=self._still)
            text += f": {cause}"
        self._stop(text)

    def _cause(self, peers: Peers) -> str:
        """What the ranks' answers say about why nothing moves."""
        places: dict[int, tuple[str, str, float]] = {
            peers.rank: (self._place.kind, self.describe(), self._still)
        }
        for rank, note in self._answers.items():
            places[rank] = (note.facts["at"], note.text, note.facts["still"])
        world = range(len(peers.names))
        left = [r for r in world if r in self._left]
        silent = [r for r in world if r not in self._left and r not in places]
        if left:
            return f"out of the run: {_listed(peers, left)}"
        if silent:
            who = _listed(peers, silent)
            return f"no answer from {who}: the process is stopped, or the machine is cut off"
        # Who waits for a hand-over is not the cause; who has just moved is not, either.
        for kind in ("inside", "between", "before", "after", "sending"):
            stuck = [r for r, at in places.items() if at[0] == kind and at[2] > self.timeout / 2]
            if stuck:
                return f"standing still: {_listed(peers, stuck)}, {places[min(stuck)][1]}"
        return "no rank stands still for long except by waiting for another one"

    def _stop(self, cause: str, delay: float = 0.0, *, follows: bool = False) -> None:
        """End this process because of something that is not an exception of its own."""
        with self._lock:
            if self._failed or self._closed:
                return
            self._stopping.set()
        time.sleep(delay)
        place = self._place
        message = f"{cause}; {self._who} was {place.describe()}"
        path = self._write_grid(place, f"{self.name}: {message}")
        where = f"; the plan with the stuck action marked is in {path}" if path else ""
        if self._report is None or not self._report(message + where, follows):
            print(f"megalatent: error: {self.name}: {message}{where}", file=sys.stderr, flush=True)
        time.sleep(min(_SPREAD, self.timeout) / 5)  # for the notes to leave
        os._exit(1)

    def _write_grid(self, place: _Place, message: str) -> Path | None:
        """Write the plan's grid with the awaited action marked; the file's path, or None."""
        if self.folder is None or place.plan is None:
            return None
        from megalatent.passes.render import render_grid

        mark = None if place.kind in ("before", "after") else place.awaited()
        path = self.folder / f"{self.name.replace(' ', '-')}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{message}\n\n{render_grid(place.plan, mark=mark)}\n")
        except OSError as error:
            print(f"megalatent: cannot write {path}: {error}", file=sys.stderr, flush=True)
            return None
        return path


def _listed(peers: Peers, ranks: list[int]) -> str:
    names = [peers.names[rank] for rank in sorted(ranks)]
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
