"""Trace files of a recording: the trace-event JSON of Chrome, and Perfetto's own form.

Both show the same rows (:mod:`megalatent.profiling.rows`), and both open in the viewers of Chrome
and of Perfetto. Hand-overs are arrows from the action that made a tensor to the one that took it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from typing import Any

from megalatent.errors import UserError
from megalatent.profiling.records import Recording
from megalatent.profiling.rows import Counter, Row, Slice, counters, rows

__all__ = ["chrome_events", "write_chrome_trace", "write_perfetto_trace"]

#: Names of Chrome's fixed colours, by kind; of several the one of the pass, the last beyond.
_COLORS = {
    "F": ("thread_state_runnable", "rail_response", "vsync_highlight_color", "light_memory_dump"),
    "B": ("thread_state_running", "rail_load", "good", "olive"),
    "H": ("thread_state_iowait",),
    "wait": ("grey",),
    "send": ("generic_work",),
    "reduce": ("detailed_memory_dump",),
    "optimizer": ("thread_state_uninterruptible",),
    "step": ("white",),
}
_PART_COLOR = "thread_state_unknown"
_FLOW = {"cat": "hand-over", "name": "hand-over"}


def chrome_events(recording: Recording) -> Iterator[dict[str, Any]]:
    """The events of the JSON form, in the order of time on each row; times are microseconds.

    Every replica is a process and every row a thread of it; the steps are process 1.
    """
    processes: set[int] = set()
    threads: set[int] = set()
    for row in rows(recording):
        process, thread = _process(row.group), row.order + 1
        if process not in processes:
            processes.add(process)
            name = "steps" if row.group is None else f"replica {row.group}"
            yield _metadata("process_name", process, {"name": name})
            yield _metadata("process_sort_index", process, {"sort_index": process})
        if thread not in threads:
            threads.add(thread)
            yield _metadata("thread_name", process, {"name": row.name}, thread)
            yield _metadata("thread_sort_index", process, {"sort_index": thread}, thread)
        yield from _row_events(row, {"pid": process, "tid": thread})
    for counter in counters(recording):
        place = {"ph": "C", "pid": _process(counter.group), "tid": 0, "name": counter.name}
        for time, value in counter.samples:
            yield {**place, "ts": time / 1000, "args": {counter.unit: value}}


def write_chrome_trace(recording: Recording, path: str | PathLike[str]) -> None:
    """Write the JSON form, one event a line.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        about = {"created": recording.created, **recording.facts}
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps({key: str(value) for key, value in about.items()}))
        file.write(', "traceEvents": [')
        separator = "\n"
        for event in chrome_events(recording):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _process(group: int | None) -> int:
    return 1 if group is None else 2 + group


def _metadata(
    name: str, process: int, args: dict[str, Any], thread: int | None = None
) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "name": name, "pid": process, "args": args}
    return event if thread is None else {**event, "tid": thread}


def _row_events(row: Row, place: dict[str, int]) -> list[dict[str, Any]]:
    timed: list[tuple[int, dict[str, Any]]] = []
    for piece in row.slices:
        timed.append((piece.start, _slice_event(piece, place)))
        if piece.out is not None:
            number, time = piece.out
            timed.append((time, {"ph": "s", "id": number, **_FLOW, **place, "ts": time / 1000}))
        if piece.into is not None:
            event = {"ph": "f", "bp": "e", "id": piece.into, **_FLOW, **place}
            timed.append((piece.start, {**event, "ts": piece.start / 1000}))
    # Sorting is stable: a slice stays before the arrows that belong to it.
    return [event for _, event in sorted(timed, key=lambda pair: pair[0])]


def _slice_event(piece: Slice, place: dict[str, int]) -> dict[str, Any]:
    colors = _COLORS.get(piece.kind, (_PART_COLOR,))
    return {
        "ph": "X",
        "name": piece.name,
        "cat": piece.kind,
        "cname": colors[min(max(piece.k, 1), len(colors)) - 1],
        **place,
        "ts": piece.start / 1000,
        "dur": (piece.end - piece.start) / 1000,
        "args": piece.facts,
    }


def write_perfetto_trace(recording: Recording, path: str | PathLike[str]) -> None:
    """Write Perfetto's own form; times are nanoseconds.

    Raises:
        UserError: the package `perfetto` is not installed.
        OSError: the file cannot be written.
    """
    try:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise UserError(
            f"a Perfetto trace needs the package perfetto, which cannot be imported ({error}): "
            "install megalatent[profile], or write the JSON trace, which Perfetto opens too"
        ) from None
    with open(path, "wb") as file:
        _Perfetto(StreamingTraceProtoBuilder(file)).write(recording)


class _Perfetto:
    """Writes packets: a track per row below a track per replica."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.groups: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.tracks = 0

    def write(self, recording: Recording) -> None:
        for row in rows(recording):
            if row.order not in self.rows:
                parent = self._group(row.group)
                self.rows[row.order] = self._describe(row.name, parent, row.order)
            for time, piece, begins in _edges(row.slices):
                self._edge(self.rows[row.order], time, piece, begins)
        for order, counter in enumerate(counters(recording), 1 + max(self.rows, default=0)):
            self._counter(counter, order)

    def _group(self, group: int | None) -> int | None:
        if group is None:
            return None
        if group not in self.groups:
            self.groups[group] = self._describe(f"replica {group}", None, group)
        return self.groups[group]

    def _describe(self, name: str, parent: int | None, order: int, unit: str | None = None) -> int:
        self.tracks += 1
        packet = self.builder.create_packet()
        packet.trusted_packet_sequence_id = 1
        descriptor = packet.track_descriptor
        descriptor.uuid = self.tracks
        descriptor.name = name
        descriptor.sibling_order_rank = order
        descriptor.child_ordering = descriptor.EXPLICIT
        if parent is not None:
            descriptor.parent_uuid = parent
        if unit is not None:
            descriptor.counter.unit_name = unit
        self.builder.write_packet(packet)
        return self.tracks

    def _edge(self, track: int, time: int, piece: Slice, begins: bool) -> None:
        packet = self.builder.create_packet()
        packet.trusted_packet_sequence_id = 1
        packet.timestamp = time
        event = packet.track_event
        event.track_uuid = track
        event.type = event.TYPE_SLICE_BEGIN if begins else event.TYPE_SLICE_END
        if begins:
            event.name = piece.name
            event.categories.append(piece.kind)
            if piece.out is not None:
                event.flow_ids.append(piece.out[0])
            if piece.into is not None:
                event.terminating_flow_ids.append(piece.into)
            for name, value in piece.facts.items():
                note = event.debug_annotations.add()
                note.name = name
                if isinstance(value, int):
                    note.int_value = value
                else:
                    note.string_value = str(value)
        self.builder.write_packet(packet)

    def _counter(self, counter: Counter, order: int) -> None:
        track = self._describe(counter.name, self._group(counter.group), order, counter.unit)
        for time, value in counter.samples:
            packet = self.builder.create_packet()
            packet.trusted_packet_sequence_id = 1
            packet.timestamp = time
            packet.track_event.type = packet.track_event.TYPE_COUNTER
            packet.track_event.track_uuid = track
            packet.track_event.counter_value = value
            self.builder.write_packet(packet)


def _edges(slices: list[Slice]) -> Iterator[tuple[int, Slice, bool]]:
    """Begins and ends in the order of time, a part's end before that of what contains it."""
    open_slices: list[Slice] = []
    for piece in slices:
        while open_slices and open_slices[-1].end <= piece.start:
            ended = open_slices.pop()
            yield ended.end, ended, False
        yield piece.start, piece, True
        open_slices.append(piece)
    while open_slices:
        ended = open_slices.pop()
        yield ended.end, ended, False
