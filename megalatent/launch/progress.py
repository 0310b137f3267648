"""Follows a run from its metrics file: how far it is, whether it moves, whether its loss is sane.

The metrics file has one JSON object a line. Those of `kind` "train" stand for a logged iteration,
with at least `iteration`, `consumed_samples` and `loss_per_pass` (pass -> loss). Between two of
them, which may be a hundred steps apart, a heartbeat tells that steps go on.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BadLoss", "Heartbeat", "Progress", "end_last_line", "pass_losses", "read_metrics"]

HEARTBEAT = "heartbeat"
_SECONDS_BETWEEN_BEATS = 10.0


@dataclass(frozen=True)
class BadLoss:
    """The first loss that is not a finite number: at which iteration, in which pass (1-based).

    Attributes:
        since: the iteration from which on weights may be bad, earlier than `iteration` where not
            every iteration is logged.
    """

    iteration: int
    pass_number: int
    value: float
    since: int

    def __str__(self) -> str:
        what = "infinite" if math.isinf(self.value) else "not a number"
        return f"the loss of pass {self.pass_number} is {what} at iteration {self.iteration}"


def pass_losses(record: dict[str, Any]) -> dict[int, float]:
    """Pass (1-based) -> loss."""
    losses = record.get("loss_per_pass") or {}
    return {int(number): float(loss) for number, loss in losses.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first, each iteration once.

    A run that starts again from a checkpoint logs the iterations after it a second time: the
    later record stands.
    """
    records: list[dict[str, Any]] = []
    for record in _Tail(path).records():
        if record.get("kind", "train") != "train":
            continue
        # what an earlier attempt logged beyond its last checkpoint was lost with it
        while records and records[-1]["iteration"] >= record["iteration"]:
            records.pop()
        records.append(record)
    return records


def end_last_line(path: Path) -> None:
    """Close a line that a crash cut off, so that the next record starts a line of its own."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as stream:
        stream.seek(-1, 2)
        if stream.read(1) != b"\n":
            stream.write(b"\n")


class Heartbeat:
    """A rank's sign of life: a file in the attempt's logs whose time is the last step's."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        logs = environment.get("MEGALATENT_LOGS")  # which a supervisor sets
        self._file = Path(logs, HEARTBEAT) if logs else None
        self._next = 0.0

    def beat(self) -> None:
        """Call after every step; it touches the file now and then."""
        if self._file is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS_BETWEEN_BEATS
            with contextlib.suppress(OSError):  # no reason to end a run
                self._file.touch()


class Progress:
    """Watches the metrics file from now on.

    Args:
        heartbeat: the file that a `Heartbeat` touches, if any.
        start: the iteration of the checkpoint that the ranks start from.

    Attributes:
        iteration: the last iteration logged since then, None before the first.
        samples: the samples consumed until then.
        bad_loss: the first loss that is not finite, if any.
    """

    def __init__(self, metrics: Path, heartbeat: Path | None = None, start: int = 0) -> None:
        self._tail = _Tail(metrics, from_end=True)
        self._moved = time.monotonic()
        self._heartbeat = heartbeat
        self._last_beat: int | None = None
        self._good = start
        self.iteration: int | None = None
        self.samples: int | None = None
        self.bad_loss: BadLoss | None = None

    def poll(self) -> None:
        """Read what was logged since the last call."""
        if self._heartbeat is not None:
            with contextlib.suppress(OSError):
                beat = self._heartbeat.stat().st_mtime_ns
                if beat != self._last_beat:
                    self._last_beat = beat
                    self.touch()
        for record in self._tail.records():
            self._moved = time.monotonic()
            if record.get("kind", "train") != "train":
                continue
            self.iteration = record["iteration"]
            self.samples = record.get("consumed_samples", self.samples)
            if self.bad_loss is None:
                self.bad_loss = _bad_loss(record, since=self._good + 1)
                self._good = record["iteration"]

    def touch(self) -> None:
        """Count something outside the metrics file, such as a save, as progress."""
        self._moved = time.monotonic()

    def seconds_still(self) -> float:
        """Seconds since the last sign of progress."""
        return time.monotonic() - self._moved


class _Tail:
    """Reads whole lines that are appended to a file, which may not exist yet."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def records(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                new = stream.read()
        except OSError:  # not there yet, or a shared file system that does not answer just now
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            # a line that a crash cut off
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                yield record


def _bad_loss(record: dict[str, Any], since: int) -> BadLoss | None:
    for number, loss in sorted(pass_losses(record).items()):
        if not math.isfinite(loss):
            return BadLoss(record["iteration"], number, loss, since)
    return None
