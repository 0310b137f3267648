"""What the actions of a plan cost: the planner's and the simulator's only knowledge of time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from os import PathLike
from typing import Any

from megalatent.errors import UserError

__all__ = ["Costs"]

PerStage = float | tuple[float, ...]
#: Sums over all actions, and differences between them, then remain numbers.
_LEAST, _MOST = 1e-100, 1e100


@dataclass(frozen=True)
class Costs:
    """Durations of actions, all in one unit (seconds, or the forward of one stage).

    A value per virtual stage is a number (the same on every stage), one number per rank (every
    chunk of a rank costs the same), or one number per virtual stage in the order in which a
    micro-batch visits them: index `chunk * stages + rank`.

    `head` is logits, loss and their backward of one micro-batch and pass, on the last rank.
    `hand_over` is the time from the end of an action to the arrival of its output on the next
    rank: a number, or one per edge `rank -> rank + 1` (the last is the ring edge), the same in both
    directions; on one rank it is zero. `embedding` adds to the first stage's forward in pass 1 and
    `embedding_backward` to its backward there (a micro-batch is embedded once); `fusion` and
    `fusion_backward` add to the first stage in passes k >= 2. `extra_forward` and `extra_backward`
    add to each stage in passes k >= 2 (say, the recomputation of the extra passes).
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    head: float = 0.0
    hand_over: PerStage = 0.0
    embedding: float = 0.0
    embedding_backward: float = 0.0
    fusion: float = 0.0
    fusion_backward: float = 0.0
    extra_forward: PerStage = 0.0
    extra_backward: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            many = isinstance(value, Sequence) and not isinstance(value, str)
            if many and field.name not in _PER_STAGE:
                raise UserError(f"cost {field.name} is {list(value)}; give one number")
            try:
                numbers = tuple(float(x) for x in (value if many else [value]))
            except (TypeError, ValueError, OverflowError):
                raise UserError(f"cost {field.name} is {value!r}; give numbers") from None
            signed = field.name.startswith("extra_")
            if not numbers or not all(math.isfinite(x) and (signed or x >= 0) for x in numbers):
                raise UserError(
                    f"cost {field.name} is {value!r}; give finite numbers that are not negative"
                )
            if any(x and not _LEAST <= abs(x) <= _MOST for x in numbers):
                raise UserError(
                    f"cost {field.name} is {value!r}; give 0 or numbers from {_LEAST:g} to "
                    f"{_MOST:g}, if need be in another unit of time"
                )
            object.__setattr__(self, field.name, numbers if many else numbers[0])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """Costs from a mapping of field names. Raises UserError for a name it does not know."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise UserError(f"costs have no entry named {name}; {hint}")
        return cls(**values)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Costs:
        """Costs from a JSON file. Raises UserError if it holds no costs, OSError if absent."""
        with open(path, encoding="utf-8-sig") as file:
            try:
                values = json.load(file)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path} is no JSON file: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold one JSON object with costs by name")
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The costs as plain values that `from_dict` reads back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def summary(self) -> str:
        """What is not zero, in one line; of several values the least and the most."""
        found = []
        for name, value in self.to_dict().items():
            values = value if isinstance(value, list) else [value]
            least, most = min(values), max(values)
            if least or most:
                several = f" to {most:.4g}" if most > least else ""
                found.append(f"{name} {least:.4g}{several}")
        return ", ".join(found)

    def forward_time(self, stages: int, chunks: int, rank: int, chunk: int, k: int) -> float:
        """Duration of the forward of pass k (1-based) on one virtual stage."""
        first = rank == 0 and chunk == 0
        time = _stage_value(self, "forward", stages, chunks, rank, chunk)
        if k == 1:
            return time + self.embedding if first else time
        time += _stage_value(self, "extra_forward", stages, chunks, rank, chunk)
        return _not_negative("extra_forward", time + self.fusion if first else time)

    def backward_time(self, stages: int, chunks: int, rank: int, chunk: int, k: int) -> float:
        """Duration of the backward of pass k (1-based) on one virtual stage."""
        first = rank == 0 and chunk == 0
        time = _stage_value(self, "backward", stages, chunks, rank, chunk)
        if k == 1:
            return time + self.embedding_backward if first else time
        time += _stage_value(self, "extra_backward", stages, chunks, rank, chunk)
        return _not_negative("extra_backward", time + self.fusion_backward if first else time)

    def hand_over_time(self, stages: int, rank: int) -> float:
        """Duration of a hand-over on the edge between `rank` and the next one of the ring."""
        if stages == 1:
            return 0.0
        if isinstance(self.hand_over, float):
            return self.hand_over
        if len(self.hand_over) != stages:
            raise UserError(
                f"cost hand_over has {len(self.hand_over)} entries for {stages} stages; give one "
                f"number, or one per edge ({stages})"
            )
        return self.hand_over[rank]


_PER_STAGE = ("forward", "backward", "hand_over", "extra_forward", "extra_backward")


def _stage_value(costs: Costs, name: str, stages: int, chunks: int, rank: int, chunk: int) -> float:
    value: PerStage = getattr(costs, name)
    if isinstance(value, float):
        return value
    if len(value) == stages * chunks:
        return value[chunk * stages + rank]
    if len(value) == stages:
        return value[rank]
    per_virtual = f", or one per virtual stage ({stages * chunks})" if chunks > 1 else ""
    raise UserError(
        f"cost {name} has {len(value)} entries for {stages} stages of {chunks} chunk(s); give one "
        f"number, one per rank ({stages}){per_virtual}"
    )


def _not_negative(name: str, time: float) -> float:
    if time < 0:
        raise UserError(f"cost {name} makes a later pass cost {time:g}; it must not be negative")
    return time
