"""A recording: what every rank did in the recorded steps, on one clock, beside the plan it ran.

This is the raw data that reports, traces, timelines and advice are made from, and the `recording`
section of the files that `megalatent profile --json` writes. All times are integers: nanoseconds
since the recording's own zero, on the clock of the first recorded rank. Nothing here imports torch.

    recording = Recording.load("profile.json")
    for case in recording.cases:            # a case: steps with the same passes, the same plan
        for step in case.steps:
            for info, rank in zip(recording.ranks, step.ranks, strict=True):
                for span in rank.spans: ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple

from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan

__all__ = [
    "ACTIONS",
    "PARTS",
    "SCHEMA",
    "VERSION",
    "WHOLE_STEP",
    "Activation",
    "Case",
    "MemorySample",
    "RankInfo",
    "RankStep",
    "Recording",
    "Span",
    "Step",
    "read_profile",
]

SCHEMA = "megalatent.profile"
#: Raised when a reader of older files would misread new ones.
VERSION = 1

#: Kinds of spans that are actions of the plan: forward, backward, head.
ACTIONS = ("F", "B", "H")
#: Kinds of spans that belong to no action. `reduce` is gradient reduction and what else closes the
#: gradients; `optimizer` is the update.
WHOLE_STEP = ("reduce", "optimizer")
#: Kinds of spans inside an action (`Span.of`). Spans of other kinds never overlap on a rank.
PARTS = ("data", "embedding", "embedding_backward", "fusion", "fusion_backward")
#: `wait`: for the hand-over that `Span.of` consumes. `send`: handing over what `Span.of` made.
_KINDS = frozenset((*ACTIONS, *WHOLE_STEP, *PARTS, "wait", "send"))


class Span(NamedTuple):
    """Something a rank did from `start` to `end`.

    Attributes:
        kind: one of `ACTIONS`, `WHOLE_STEP`, `PARTS`, `wait` or `send`.
        start, end: ns.
        micro_batch, k, chunk: of the action, as in `Action`; -1, 0, -1 where there is none.
        of: for a wait or a part: the kind of the action that waits, or that it is inside of.
    """

    kind: str
    start: int
    end: int
    micro_batch: int = -1
    k: int = 0
    chunk: int = -1
    of: str = ""

    @property
    def action(self) -> Action | None:
        """The action it is, or belongs to; None for what belongs to the whole step."""
        kind = self.of or self.kind
        return Action(kind, self.micro_batch, self.k, self.chunk) if kind in ACTIONS else None

    @property
    def nanoseconds(self) -> int:
        return self.end - self.start


class MemorySample(NamedTuple):
    """Memory of a rank at the end of an action.

    Attributes:
        time: ns.
        allocated: bytes at this moment; see `Recording.memory_kind`.
        peak: most bytes since the sample before.
        in_flight: activations held: chunk visits between their forward and their backward.
    """

    time: int
    allocated: int
    peak: int
    in_flight: int


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A recorded rank.

    Attributes:
        rank: in the world.
        stage: pipeline rank, which is the index into a plan's lists.
        replica: data-parallel rank.
        host: name of its machine.
        device: "cpu", or the name of its GPU.
        clock_error: ns by which its times may be off against those of the first recorded rank.
    """

    rank: int
    stage: int
    replica: int = 0
    host: str = ""
    device: str = "cpu"
    clock_error: int = 0


@dataclass(frozen=True)
class RankStep:
    """One step on one rank.

    Attributes:
        start, end: ns, of the whole training step including the update.
        spans: in the order of their ends; those that are no `PARTS` do not overlap.
        memory: samples in the order of time; empty where memory was not recorded.
    """

    start: int
    end: int
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()

    def of_kind(self, *kinds: str) -> Iterator[Span]:
        return (span for span in self.spans if span.kind in kinds)

    def moved(self, by: int) -> RankStep:
        """The same on a clock that shows `by` ns more."""
        return RankStep(
            self.start + by,
            self.end + by,
            tuple(span._replace(start=span.start + by, end=span.end + by) for span in self.spans),
            tuple(sample._replace(time=sample.time + by) for sample in self.memory),
        )


@dataclass(frozen=True)
class Step:
    """One step on all recorded ranks, in the order of `Recording.ranks`.

    Attributes:
        iteration: counted from 0; Megatron's log counts from 1.
    """

    iteration: int
    ranks: tuple[RankStep, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps that ran the same plan.

    Attributes:
        name: for tables and titles, such as "K = 2".
        plan: what every replica ran; `plan.passes` are the K of its micro-batches.
        costs: what the planner assumed when it made the plan.
        steps: in the order in which they ran (steps of other cases may lie between them).
    """

    name: str
    plan: Plan
    costs: Costs
    steps: tuple[Step, ...]


class Activation(NamedTuple):
    """What one forward visit keeps for its backward, counted once outside the timed steps.

    Attributes:
        stage, chunk: where.
        k: pass.
        bytes: of all tensors kept, weights left out.
    """

    stage: int
    chunk: int
    k: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Everything that was measured.

    Attributes:
        ranks: the recorded ranks, by replica and stage.
        cases: what was compared.
        memory_kind: what `MemorySample` counts: "allocated" (by torch, on a GPU), "resident" (of
            the process, on a CPU) or "" (nothing).
        activations: bytes of each visit, where they were counted.
        facts: about the model and the run, for reports: names and plain values. Among them
            `tokens_per_micro_batch`, `layers` (per virtual stage, index `chunk * stages + stage`).
        created: when, in ISO 8601.
    """

    ranks: tuple[RankInfo, ...]
    cases: tuple[Case, ...]
    memory_kind: str = ""
    activations: tuple[Activation, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    created: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads back; what is many is written as rows."""
        return {
            "created": self.created,
            "facts": self.facts,
            "memory_kind": self.memory_kind,
            "ranks": [vars(rank).copy() for rank in self.ranks],
            "activations": [list(item) for item in self.activations],
            "cases": [_case_to_dict(case) for case in self.cases],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recording:
        """The recording that `to_dict` wrote.

        Raises:
            AttributeError, LookupError, TypeError, ValueError: the values are no recording.
        """
        ranks = tuple(RankInfo(**rank) for rank in values["ranks"])
        return cls(
            ranks=ranks,
            cases=tuple(_case_from_dict(case, ranks) for case in values["cases"]),
            memory_kind=values["memory_kind"],
            activations=tuple(Activation(*map(int, row)) for row in values["activations"]),
            facts=dict(values["facts"]),
            created=values["created"],
        )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Recording:
        """The recording in a file of `megalatent profile --json`.

        Raises:
            UserError: the file is no such file, or of another version.
            OSError: it cannot be read.
        """
        values = read_profile(path)
        try:
            return cls.from_dict(values["recording"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: its recording is damaged ({type(error).__name__}: {error}): profile again"
            ) from None


def read_profile(path: str | PathLike[str]) -> dict[str, Any]:
    """The whole JSON of a profile: `schema`, `version`, `report`, `recording`.

    Raises:
        UserError: the file is no profile, or of another version.
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: no JSON file ({error}): give a profile") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise UserError(
            f"{path}: no profile: give a file that `megalatent profile --json` has written"
        )
    if values.get("version") != VERSION:
        raise UserError(
            f"{path}: a profile of version {values.get('version')}, but this megalatent reads"
            f" version {VERSION}: profile again, or read it with the megalatent that wrote it"
        )
    return values


def _case_to_dict(case: Case) -> dict[str, Any]:
    plan = case.plan
    return {
        "name": case.name,
        "plan": {
            "stages": plan.stages,
            "chunks": plan.chunks,
            "passes": list(plan.passes),
            "strategy": plan.strategy,
            "forward_only": plan.forward_only,
            "actions": [[list(action) for action in rank] for rank in plan.actions],
        },
        "costs": case.costs.to_dict(),
        "steps": [
            {
                "iteration": step.iteration,
                "ranks": [
                    {
                        "start": rank.start,
                        "end": rank.end,
                        "spans": [list(span) for span in rank.spans],
                        "memory": [list(sample) for sample in rank.memory],
                    }
                    for rank in step.ranks
                ],
            }
            for step in case.steps
        ],
    }


def _case_from_dict(values: Mapping[str, Any], ranks: Sequence[RankInfo]) -> Case:
    given = values["plan"]
    plan = Plan(
        stages=given["stages"],
        chunks=given["chunks"],
        passes=tuple(given["passes"]),
        strategy=given["strategy"],
        actions=tuple(tuple(Action(*row) for row in rank) for rank in given["actions"]),
        forward_only=given["forward_only"],
    )
    return Case(
        name=str(values["name"]),
        plan=plan,
        costs=Costs.from_dict(values["costs"]),
        steps=tuple(_step_from_dict(step, plan, ranks) for step in values["steps"]),
    )


def _step_from_dict(values: Mapping[str, Any], plan: Plan, ranks: Sequence[RankInfo]) -> Step:
    found = tuple(
        RankStep(
            int(rank["start"]),
            int(rank["end"]),
            tuple(_span(row) for row in rank["spans"]),
            tuple(MemorySample(*map(int, row)) for row in rank["memory"]),
        )
        for rank in values["ranks"]
    )
    if len(found) != len(ranks):
        raise ValueError(f"a step of {len(found)} ranks in a recording of {len(ranks)}")
    for info, rank in zip(ranks, found, strict=True):
        done = [span.action for span in rank.of_kind(*ACTIONS)]
        if not done or done != list(plan.actions[info.stage]):
            raise ValueError(f"a step of rank {info.rank} that is not what its plan says")
    return Step(int(values["iteration"]), found)


def _span(row: Any) -> Span:
    kind, start, end, micro_batch, k, chunk, of = row
    span = Span(kind, int(start), int(end), int(micro_batch), int(k), int(chunk), of)
    if span.kind not in _KINDS:
        raise ValueError(f"a span of unknown kind {span.kind!r}")
    return span
