"""Trace files are valid, and hold what was recorded: sums, order on each row, matched arrows."""

from __future__ import annotations

import builtins
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.profiling.records import PARTS, Recording
from megalatent.profiling.trace import chrome_events, write_chrome_trace, write_perfetto_trace
from tests.profiling.measured import measured
from tests.profiling.synthetic import recording

# The fields of the trace event format: name -> (type, needed).
NUMBER = (int, float)
FIELDS: dict[str, dict[str, tuple[type | tuple[type, ...], bool]]] = {
    "X": {"ts": (NUMBER, True), "dur": (NUMBER, True), "name": (str, True), "cat": (str, True)},
    "s": {"ts": (NUMBER, True), "id": (int, True), "name": (str, True), "cat": (str, True)},
    "f": {
        "ts": (NUMBER, True),
        "id": (int, True),
        "name": (str, True),
        "cat": (str, True),
        "bp": (str, True),
    },
    "C": {"ts": (NUMBER, True), "name": (str, True), "args": (dict, True)},
    "M": {"name": (str, True), "args": (dict, True)},
}
COMMON = {"ph": str, "pid": int, "tid": int, "cname": str, "args": dict}
METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str}
METADATA["thread_sort_index"] = int
# What Chrome's viewer knows of fixed colours (its base/color_scheme).
COLOURS = set(
    "thread_state_uninterruptible thread_state_iowait thread_state_running thread_state_runnable "
    "thread_state_sleeping thread_state_unknown background_memory_dump light_memory_dump "
    "detailed_memory_dump vsync_highlight_color generic_work good bad terrible black grey white "
    "yellow olive rail_response rail_animation rail_idle rail_load startup".split()
)


def check_schema(event: dict) -> None:
    allowed = FIELDS[event["ph"]]
    for name, (kind, needed) in allowed.items():
        assert not needed or isinstance(event[name], kind), event
    for name, value in event.items():
        assert name in allowed or isinstance(value, COMMON[name]), (name, event)
    assert isinstance(event["pid"], int)
    if event["ph"] == "M":
        value = event["args"]["name" if event["name"].endswith("name") else "sort_index"]
        assert isinstance(value, METADATA[event["name"]])
    else:
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
    if event["ph"] == "X":
        assert event["dur"] >= 0
        assert event["cname"] in COLOURS
    if event["ph"] == "C":
        assert all(isinstance(value, (int, float)) for value in event["args"].values())


PLAIN = Costs(head=0.5, hand_over=0.1, fusion=0.2, fusion_backward=0.1)
RECORDINGS: dict[str, Callable[[], Recording]] = {
    "two cases": recording,
    "mixed passes, two chunks": lambda: recording(
        ((3, 1, 2, 1, 1, 2),), stages=2, chunks=2, costs=PLAIN
    ),
    "two replicas": lambda: recording(((2,) * 5,), replicas=2, steps=2),
    "one stage": lambda: recording(((2, 2),), stages=1, costs=PLAIN),
    "really measured": measured,
    "clocks that differ": lambda: recording(late=(0, -40_000, 30_000, 55_000)),
}


@pytest.fixture(params=RECORDINGS)
def recorded(request: pytest.FixtureRequest) -> Recording:
    return RECORDINGS[request.param]()


def sums(recorded: Recording) -> dict[tuple[int, str, int], int]:
    """Nanoseconds by rank, kind and pass, straight from the spans."""
    found: Counter[tuple[int, str, int]] = Counter()
    for case in recorded.cases:
        for step in case.steps:
            for info, rank in zip(recorded.ranks, step.ranks, strict=True):
                for span in rank.spans:
                    found[info.rank, span.kind, span.k] += span.end - span.start
    return {key: time for key, time in found.items() if time}


def expected_arrows(recorded: Recording) -> int:
    """A chain of n visits crosses n - 1 edges forwards and as many backwards, if ranks differ."""
    total = 0
    for case in recorded.cases:
        plan = case.plan
        if plan.stages == 1:
            continue
        edges = sum(k * plan.chunks * plan.stages - 1 for k in plan.passes)
        replicas = len(recorded.ranks) // plan.stages
        total += 2 * edges * replicas * len(case.steps)
    return total


def row_rank(name: str, recorded: Recording) -> int:
    """The rank of the row of a trace."""
    if len(recorded.ranks) == 1:
        return 0
    found = re.match(r"stage (\d+)(?:, replica (\d+))?( \(rank (\d+)\))?", name)
    assert found is not None, name
    return int(found[4] or found[1])


def word(kind: str, k: int) -> str:
    return f"{kind}, pass {['', 'one', 'two', 'three'][k]}"


def test_chrome_trace(recorded: Recording, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(recorded, path)
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"]["model"] == "synthetic"
    events = trace["traceEvents"]
    for event in events:
        check_schema(event)

    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    rows = defaultdict(list)
    for event in events:
        if event["ph"] in "Xsf":
            rows[event["pid"], event["tid"]].append(event)
    assert set(rows) == set(names)
    for row in rows.values():
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(row))

    found: Counter[tuple[int, str, int]] = Counter()
    for place, row in rows.items():
        slices = [e for e in row if e["ph"] == "X"]
        if names[place] == "steps":
            assert len(slices) == sum(len(case.steps) for case in recorded.cases)
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(slices))
            continue
        for event in slices:
            k = event["args"].get("pass", 0)
            if event["cat"] in "FBH":
                assert event["name"] == word(
                    {"F": "forward", "B": "backward", "H": "head"}[event["cat"]], k
                )
            key = row_rank(names[place], recorded), event["cat"], k
            found[key] += round(1000 * event["dur"])
        assert_nested([(round(1000 * e["ts"]), round(1000 * e["dur"]), e["cat"]) for e in slices])
    assert {key: time for key, time in found.items() if time} == sums(recorded)


def assert_nested(slices: list[tuple[int, int, str]]) -> None:
    """Slices of a row overlap only where a part lies inside its action."""
    end, action_end = 0, 0
    for start, length, kind in slices:
        if kind in PARTS:
            assert start + length <= action_end
        else:
            assert start >= end
            action_end = start + length
        end = max(end, start + length)


def test_arrows_match_and_bind_to_the_right_actions(recorded: Recording) -> None:
    events = [event for event in chrome_events(recorded) if event["ph"] in "Xsf"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == expected_arrows(recorded)
    assert sum(e["ph"] != "X" for e in events) == 2 * len(starts)
    assert starts.keys() == ends.keys()

    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["cat"] in "FB":
            slices[event["pid"], event["tid"]].append(event)
    rows = sorted(slices, key=lambda place: place[::-1])
    stages = {place: recorded.ranks[i].stage for i, place in enumerate(rows)}

    def action_at(event: dict) -> tuple[int, str, int, int, int]:
        """As a viewer binds it: the last slice of the row that is open then."""
        place, time = (event["pid"], event["tid"]), event["ts"]
        held = [s for s in slices[place] if s["ts"] <= time <= s["ts"] + s["dur"]][-1]
        args = held["args"]
        return stages[place], held["cat"], args["micro_batch"], args["pass"], args["chunk"]

    stages_in_ring = len(set(stages.values()))
    chunks = recorded.cases[0].plan.chunks
    for number in list(starts)[:400]:
        start, end = starts[number], ends[number]
        assert start["ts"] < end["ts"]
        assert start["pid"] == end["pid"]
        (stage, kind, micro_batch, k, chunk), target = action_at(start), action_at(end)
        # Places on the chain of the micro-batch, written out as one number.
        place = (k * chunks + chunk) * stages_in_ring + stage
        other = (target[3] * chunks + target[4]) * stages_in_ring + target[0]
        assert (target[1], target[2]) == (kind, micro_batch)
        assert other - place == (1 if kind == "F" else -1)


def test_perfetto_trace_read_back_gives_the_same_sums(recorded: Recording, tmp_path: Path) -> None:
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    path = tmp_path / "trace.pftrace"
    write_perfetto_trace(recorded, path)
    trace = proto.Trace.FromString(path.read_bytes())
    event_type = proto.TrackEvent.Type
    tracks: dict[int, str] = {}
    parents: dict[int, int] = {}
    times: dict[int, list[int]] = defaultdict(list)
    open_slices: dict[int, list] = defaultdict(list)
    found: Counter[tuple[int, str, int]] = Counter()
    left: Counter[int] = Counter()
    arrived: Counter[int] = Counter()
    counters: Counter[str] = Counter()
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert descriptor.uuid not in tracks
            tracks[descriptor.uuid] = descriptor.name
            if descriptor.HasField("parent_uuid"):
                parents[descriptor.uuid] = descriptor.parent_uuid
            continue
        event = packet.track_event
        name = tracks[event.track_uuid]
        times[event.track_uuid].append(packet.timestamp)
        if event.type == event_type.TYPE_COUNTER:
            counters[name] += 1
            continue
        stack = open_slices[event.track_uuid]
        if event.type == event_type.TYPE_SLICE_BEGIN:
            left.update(event.flow_ids)
            arrived.update(event.terminating_flow_ids)
            stack.append(packet)
            continue
        assert event.type == event_type.TYPE_SLICE_END
        begin = stack.pop()
        if name == "steps":
            continue
        notes = {note.name: note for note in begin.track_event.debug_annotations}
        k = notes["pass"].int_value if "pass" in notes else 0
        key = row_rank(name, recorded), begin.track_event.categories[0], k
        found[key] += packet.timestamp - begin.timestamp
    assert not any(open_slices.values())
    assert all(a <= b for row in times.values() for a, b in pairwise(row))
    assert {key: time for key, time in found.items() if time} == sums(recorded)
    assert left == arrived
    assert set(left.values()) <= {1}
    assert len(left) == expected_arrows(recorded)
    assert {tracks[parent] for parent in parents.values()} == {
        f"replica {info.replica}" for info in recorded.ranks
    }
    samples = sum(len(step.ranks[0].memory) for case in recorded.cases for step in case.steps)
    first = "stage 0, replica 0" if len({i.replica for i in recorded.ranks}) > 1 else "stage 0"
    assert counters[f"{first}: in flight"] == counters[f"{first}: resident"] == samples


def test_passes_have_colours_of_their_own() -> None:
    events = list(chrome_events(recording(((3, 2, 1),), steps=1)))
    colours = defaultdict(set)
    for event in events:
        if event["ph"] == "X" and event["cat"] in "FB":
            colours[event["cat"], event["args"]["pass"]].add(event["cname"])
    assert all(len(names) == 1 for names in colours.values())
    assert len({next(iter(names)) for names in colours.values()}) == len(colours) == 6
    # Perfetto's viewer takes the colour from the name without its digits.
    names = {re.sub(r" ?\d+", "", e["name"]) for e in events if e.get("cat") in ("F", "B")}
    assert len(names) == 6


def test_counters_follow_the_samples() -> None:
    recorded = recording(((2,) * 8,), steps=1)
    samples = recorded.cases[0].steps[0].ranks[2].memory
    events = [e for e in chrome_events(recorded) if e["name"] == "stage 2: in flight"]
    assert [e["args"]["activations"] for e in events] == [sample.in_flight for sample in samples]
    assert max(e["args"]["activations"] for e in events) > 1
    assert events[-1]["args"]["activations"] == 0


def test_a_rank_that_was_not_recorded_leaves_arrows_out() -> None:
    whole = recording(((2,) * 4,), steps=1)
    case, step = whole.cases[0], whole.cases[0].steps[0]
    part = replace(
        whole,
        ranks=whole.ranks[:2],
        cases=(replace(case, steps=(replace(step, ranks=step.ranks[:2]),)),),
    )
    events = list(chrome_events(part))
    starts = [e["id"] for e in events if e["ph"] == "s"]
    assert sorted(starts) == sorted(e["id"] for e in events if e["ph"] == "f")
    # Between stages 0 and 1: one hand-over each way for each of the two passes.
    assert len(starts) == 4 * 2 * 2


def test_without_the_package_a_perfetto_trace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args, **kwargs):
        if name.startswith("perfetto"):
            raise ImportError(f"No module named {name}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"install megalatent\[profile\]"):
        write_perfetto_trace(recording(steps=1), tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
