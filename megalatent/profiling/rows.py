"""A recording as rows of slices, which is what trace files consist of.

Every recorded rank has a row for its actions with their parts, one for waiting, and one for what
closes the step. Slices of a row are in the order of time and overlap only if one is inside the
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megalatent.profiling.hand_overs import hand_overs
from megalatent.profiling.records import (
    ACTIONS,
    PARTS,
    WHOLE_STEP,
    Case,
    RankInfo,
    RankStep,
    Recording,
    Span,
    Step,
)

__all__ = ["KIND_NAMES", "Counter", "Row", "Slice", "counters", "rank_name", "rows", "span_name"]

#: What the kinds of spans are called.
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "H": "head",
    "wait": "wait",
    "send": "send",
    "reduce": "reduce",
    "optimizer": "optimizer",
    "data": "data",
    "embedding": "embedding",
    "embedding_backward": "embedding, backward",
    "fusion": "fusion",
    "fusion_backward": "fusion, backward",
}
# The viewer of Perfetto colours a slice by its name without digits: passes are named by words.
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()

_ROWS = (
    ("", (*ACTIONS, *PARTS)),
    ("waiting, sending", ("wait", "send")),
    ("reduce, update", WHOLE_STEP),
)


@dataclass(frozen=True)
class Slice:
    """A stretch of time on a row.

    Attributes:
        name: for people; equal names have equal colours.
        kind: as of the span.
        k: pass, 0 where there is none.
        start, end: ns since the first event of the recording.
        facts: what a viewer shows when the slice is selected.
        out: number of the hand-over that leaves here and when its arrow leaves, or None.
        into: number of the hand-over that arrives here, or None.
    """

    name: str
    kind: str
    k: int
    start: int
    end: int
    facts: dict[str, Any] = field(default_factory=dict)
    out: tuple[int, int] | None = None
    into: int | None = None


@dataclass(frozen=True)
class Row:
    """What one step adds to one line of a trace.

    Attributes:
        name: of the line.
        group: the replica, or None for the line of the steps.
        order: place of the line among all.
    """

    name: str
    group: int | None
    order: int
    slices: list[Slice]


@dataclass(frozen=True)
class Counter:
    """A value over time: (ns, value) in the order of time."""

    name: str
    group: int
    unit: str
    samples: list[tuple[int, int]]


def span_name(kind: str, k: int) -> str:
    """A name that is the same for all spans of a kind and pass."""
    if kind not in ACTIONS:
        return KIND_NAMES[kind]
    word = _WORDS[k] if k < len(_WORDS) else str(k)
    return f"{KIND_NAMES[kind]}, pass {word}"


def rank_name(info: RankInfo, recording: Recording) -> str:
    """The name of a rank's row: its stage, its replica if there are several, its rank."""
    replicas = len({other.replica for other in recording.ranks}) > 1
    replica = f", replica {info.replica}" if replicas else ""
    rank = f" (rank {info.rank})" if info.rank != info.stage else ""
    return f"stage {info.stage}{replica}{rank}"


def rows(recording: Recording) -> Iterator[Row]:
    """All rows, step by step in the order of time; of each step its own first, then the ranks'.

    Only one step's slices exist at a time: a long recording of many ranks has millions.
    """
    origin = _origin(recording)
    steps = _steps_in_time(recording)
    starts = [min(rank.start for rank in step.ranks) for _, step in steps]
    first = 1
    for (case, step), following in zip(steps, [*starts[1:], None], strict=True):
        yield Row("steps", None, 0, [_step_slice(case, step, origin, following)])
        arrows, first = _arrows(recording, case, step, first)
        for position, info in enumerate(recording.ranks):
            rank, ends = step.ranks[position], arrows[position]
            name = rank_name(info, recording)
            for number, (title, kinds) in enumerate(_ROWS):
                found = list(_slices(rank, kinds, origin, case.name, ends))
                if found:
                    full = f"{name}: {title}" if title else name
                    yield Row(full, info.replica, 1 + len(_ROWS) * position + number, found)


def counters(recording: Recording) -> Iterator[Counter]:
    """Memory and activations in flight of each rank, where they were recorded."""
    origin = _origin(recording)
    steps = _steps_in_time(recording)
    for position, info in enumerate(recording.ranks):
        samples = [sample for _, step in steps for sample in step.ranks[position].memory]
        if not samples:
            continue
        name = rank_name(info, recording)
        flight = [(sample.time - origin, sample.in_flight) for sample in samples]
        yield Counter(f"{name}: in flight", info.replica, "activations", flight)
        if recording.memory_kind:
            memory = [(sample.time - origin, sample.allocated) for sample in samples]
            yield Counter(f"{name}: {recording.memory_kind}", info.replica, "bytes", memory)


def _origin(recording: Recording) -> int:
    return min(
        (rank.start for case in recording.cases for step in case.steps for rank in step.ranks),
        default=0,
    )


def _steps_in_time(recording: Recording) -> list[tuple[Case, Step]]:
    steps = [(case, step) for case in recording.cases for step in case.steps]
    return sorted(steps, key=lambda pair: min(rank.start for rank in pair[1].ranks))


def _step_slice(case: Case, step: Step, origin: int, following: int | None) -> Slice:
    start = min(rank.start for rank in step.ranks)
    end = max(rank.end for rank in step.ranks)
    # The first rank may begin a step before the last one has ended the one before.
    end = end if following is None else min(end, following)
    number = step.iteration + 1  # as Megatron logs it
    facts = {"iteration": number, "case": case.name, "strategy": case.plan.strategy}
    name = f"step {number}, {case.name}"
    return Slice(name, "step", 0, start - origin, end - origin, facts)


@dataclass
class _Ends:
    """Arrows of one span: (number, ns) of the one that leaves, number of the one that arrives."""

    out: tuple[int, int] | None = None
    into: int | None = None


_NO_ENDS = _Ends()


def _arrows(
    recording: Recording, case: Case, step: Step, first: int
) -> tuple[list[defaultdict[int, _Ends]], int]:
    """For each rank: span -> its arrows, numbered from `first` on; and the next free number."""
    ends: list[defaultdict[int, _Ends]] = [defaultdict(_Ends) for _ in recording.ranks]
    found = hand_overs(recording.ranks, case.plan, step)
    for number, item in enumerate(found, first):
        sent = step.ranks[item.sender].spans[item.sent]
        used = step.ranks[item.receiver].spans[item.used]
        # An arrow belongs to the slice that is open when it leaves, so just before its end;
        # and before it arrives, which clocks that differ a little may deny.
        leaves = max(sent.start, min(sent.end, used.start) - 1)
        ends[item.sender][item.sent].out = number, leaves
        ends[item.receiver][item.used].into = number
    return ends, first + len(found)


def _slices(
    rank: RankStep,
    kinds: tuple[str, ...],
    origin: int,
    case: str,
    arrows: defaultdict[int, _Ends],
) -> Iterator[Slice]:
    chosen = [(i, span) for i, span in enumerate(rank.spans) if span.kind in kinds]
    # What contains others comes before them.
    chosen.sort(key=lambda pair: (pair[1].start, -pair[1].end, pair[1].kind in PARTS))
    action_end = 0
    for i, span in chosen:
        start, end = span.start, span.end
        if span.kind in PARTS:
            # Events of a device are rounded one by one: a part may seem to end a tick late.
            end = min(end, max(start, action_end))
        else:
            action_end = end
        ends = arrows.get(i, _NO_ENDS)
        out = (ends.out[0], ends.out[1] - origin) if ends.out else None
        yield Slice(
            span_name(span.kind, span.k),
            span.kind,
            span.k,
            start - origin,
            end - origin,
            _facts(span, case),
            out,
            ends.into,
        )


def _facts(span: Span, case: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"case": case}
    if span.action is not None:
        facts |= {"micro_batch": span.micro_batch, "pass": span.k, "chunk": span.chunk}
    if span.of:
        facts["of"] = KIND_NAMES[span.of]
    return facts
