"""Plans as CSV files: one action per row, rows of a rank in execution order."""

from __future__ import annotations

import csv
import io
from os import PathLike

from megalatent.errors import UserError
from megalatent.passes.plan import Action, Plan
from megalatent.passes.simulate import Simulation

__all__ = ["csv_text", "read_csv", "write_csv"]

_COLUMNS = ("rank", "kind", "micro_batch", "pass", "chunk")


def write_csv(path: str | PathLike[str], plan: Plan, simulation: Simulation) -> None:
    """Write the plan, as `csv_text` has it."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(csv_text(plan, simulation))


def csv_text(plan: Plan, simulation: Simulation) -> str:
    """The plan as CSV; `start` and `end` are the simulated times, for the reader only."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*_COLUMNS, "start", "end"])
    for rank, (actions, spans) in enumerate(zip(plan.actions, simulation.spans, strict=True)):
        for action, (start, end) in zip(actions, spans, strict=True):
            kind, micro_batch, k, chunk = action
            rows.writerow([rank, kind, micro_batch, k, chunk, f"{start:.10g}", f"{end:.10g}"])
    return text.getvalue()


def read_csv(path: str | PathLike[str]) -> Plan:
    """Read a plan; its sizes are those of the largest rank, micro-batch, pass and chunk in it.

    The plan is not validated.

    Raises:
        UserError: the file is no such table.
        OSError: the file cannot be read.
    """
    lists: dict[int, list[Action]] = {}
    passes: dict[int, int] = {}
    chunks = 1
    # Excel begins its files with a byte-order mark.
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            rows = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{path} has no column {missing[0]}; a plan has {', '.join(_COLUMNS)}"
                )
            for row in rows:
                rank, action = _action(path, rows.line_num, row)
                lists.setdefault(rank, []).append(action)
                passes[action.micro_batch] = max(passes.get(action.micro_batch, 1), action.k)
                chunks = max(chunks, action.chunk + 1)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path} is no CSV file: {error}") from None
    if not lists:
        raise UserError(f"{path} holds no actions")
    stages, count = max(lists) + 1, max(passes) + 1
    total = sum(map(len, lists.values()))
    if max(stages, count, chunks, *passes.values()) > total:
        raise UserError(f"{path} has {total} action(s), too few for the numbers in it")
    actions = tuple(tuple(lists.get(rank, ())) for rank in range(stages))
    forward_only = not any(action.kind == "B" for rank in actions for action in rank)
    every = tuple(passes.get(m, 1) for m in range(count))
    return Plan(stages, chunks, every, f"read from {path}", actions, forward_only)


def _action(path: str | PathLike[str], line: int, row: dict[str, str | None]) -> tuple[int, Action]:
    try:
        rank, micro_batch, k, chunk = (
            int(row[name] or "") for name in ("rank", "micro_batch", "pass", "chunk")
        )
    except ValueError:
        raise UserError(
            f"{path}, line {line}: rank, micro_batch, pass and chunk must be whole numbers"
        ) from None
    kind = row["kind"] or ""
    if kind not in ("F", "B", "H"):
        raise UserError(f"{path}, line {line}: kind is {kind!r}; it must be F, B or H")
    if rank < 0 or micro_batch < 0 or k < 1 or chunk < 0:
        raise UserError(f"{path}, line {line}: passes count from 1, all else from 0")
    return rank, Action(kind, micro_batch, k, chunk)
