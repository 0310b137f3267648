"""Plans as text: a timeline for the terminal and a grid of actions with a marked cell."""

from __future__ import annotations

from bisect import bisect_right

from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan
from megalatent.passes.simulate import Simulation, simulate

__all__ = ["MOST_COLUMNS", "axis_ticks", "label", "render_grid", "render_timeline"]

#: 256-colour backgrounds of forward and backward, one shade per pass, and of the head.
_FORWARD_SHADES = (153, 111, 69, 26)
_BACKWARD_SHADES = (157, 114, 71, 28)
_HEAD_SHADE = 209
_IDLE = "."
#: No reader has more use for; a timeline of all stages is then written in seconds.
MOST_COLUMNS = 100_000


def render_timeline(
    plan: Plan, simulation: Simulation, *, width: int | None = 100, color: bool = False
) -> str:
    """Stages as rows, time to the right.

    A forward is the digit of its pass, a backward the letter of its pass (a for pass 1), a head is
    H, waiting is a dot. A column shows what runs at the middle of its time.

    Args:
        width: columns of the timeline; None for as many as show every action.
        color: shade the passes with terminal colours.

    Raises:
        UserError: more than `MOST_COLUMNS` columns.
    """
    total = simulation.makespan or 1.0
    columns = width if width is not None else _full_width(simulation)
    if columns > MOST_COLUMNS:
        raise UserError(
            f"showing every action takes {columns:.6g} columns, more than {MOST_COLUMNS}; give "
            "--width N instead of --width full"
        )
    step = total / columns
    rows = []
    digits = len(str(plan.stages - 1))
    for rank, actions in enumerate(plan.actions):
        spans = simulation.spans[rank]
        starts = [start for start, _ in spans]
        cells: list[Action | None] = []
        for column in range(columns):
            time = (column + 0.5) * step
            at = bisect_right(starts, time) - 1
            cells.append(actions[at] if at >= 0 and time < spans[at][1] else None)
        share = simulation.busy[rank] / total
        text = _paint(cells) if color else "".join(map(_symbol, cells))
        rows.append(f"stage {rank:>{digits}} |{text}| {share:4.0%} busy")
    indent = " " * (len("stage ") + digits + 1)
    return "\n".join(
        [*rows, *(indent + line for line in _axis(total, columns)), _legend(plan, step)]
    )


def _full_width(simulation: Simulation) -> int:
    """Columns that show even the shortest action."""
    spans = [end - start for rank in simulation.spans for start, end in rank]
    shortest = min((span for span in spans if span > 0), default=simulation.makespan or 1.0)
    return max(1, round(simulation.makespan / shortest))


def _symbol(action: Action | None) -> str:
    if action is None:
        return _IDLE
    if action.kind == "F":
        return str(action.k) if action.k < 10 else "+"
    if action.kind == "B":
        return chr(ord("a") + action.k - 1) if action.k <= 26 else "*"
    return action.kind


def _paint(cells: list[Action | None]) -> str:
    painted, before = [], -1
    for action in cells:
        shade = _shade(action)
        if shade != before:
            painted.append("\x1b[0m" if shade < 0 else f"\x1b[0;30;48;5;{shade}m")
            before = shade
        painted.append(_symbol(action))
    return "".join(painted) + "\x1b[0m"


def _shade(action: Action | None) -> int:
    if action is None:
        return -1
    if action.kind == "H":
        return _HEAD_SHADE
    shades = _FORWARD_SHADES if action.kind == "F" else _BACKWARD_SHADES
    return shades[min(action.k, len(shades)) - 1]


def axis_ticks(total: float, most: int) -> list[float]:
    """Round times from 0 to at most `total`, about `most` of them."""
    if total <= 0:
        return [0.0]
    rough = total / max(1, most)
    scale = 1.0
    while scale > rough:
        scale /= 10
    while scale * 10 <= rough:
        scale *= 10
    step = next(scale * m for m in (1, 2, 5, 10) if scale * m >= rough * (1 - 1e-9))
    return [i * step for i in range(int(total / step * (1 + 1e-9)) + 1)]


def _axis(total: float, columns: int) -> list[str]:
    marks, names = [" "] * (columns + 1), [" "] * (columns + 12)
    free = 0
    for time in axis_ticks(total, columns // 10):
        at = round(time / total * columns)
        marks[at] = "'"
        name = f"{time:g}"
        if at >= free:
            names[at : at + len(name)] = name
            free = at + len(name) + 1
    return ["".join(marks).rstrip(), "".join(names).rstrip()]


def _legend(plan: Plan, step: float) -> str:
    deepest = max(plan.passes)
    passes = ", ".join(
        f"{_symbol(Action('F', 0, k, 0))}/{_symbol(Action('B', 0, k, 0))} pass {k}"
        for k in range(1, min(deepest, 4) + 1)
    )
    more = ", …" if deepest > 4 else ""
    return f"forward/backward: {passes}{more}; H head; {_IDLE} waiting; one column is {step:.4g}"


def label(action: Action, chunks: int) -> str:
    """A short name: kind, micro-batch and pass, with the chunk where there are several."""
    chunk = f"c{action.chunk}" if chunks > 1 else ""
    return f"{action.kind}{action.micro_batch}.{action.k}{chunk}"


def render_grid(plan: Plan, mark: tuple[int, int] | None = None, *, around: int | None = 8) -> str:
    """Ranks as rows, one action per cell, in the order in which they can run.

    A cell is kind, micro-batch and pass: `B3.2` is the backward of micro-batch 3 in pass 2, and
    `B3.2c1` that of chunk 1. Cells of one column can run at the same time.

    Args:
        mark: rank and position in its list of the cell to be marked with `>` and `<`.
        around: columns to show on each side of the marked cell; None for all.
    """
    spans = simulate(plan, Costs(forward=1.0, backward=1.0, head=1.0)).spans
    columns = [[round(start) for start, _ in rank] for rank in spans]
    first, last = 0, max(rank[-1] for rank in columns if rank)
    if mark is not None and around is not None:
        middle = columns[mark[0]][mark[1]]
        first, last = max(first, middle - around), min(last, middle + around)
    cells = [[""] * (last - first + 1) for _ in plan.actions]
    for rank, actions in enumerate(plan.actions):
        for index, action in enumerate(actions):
            column = columns[rank][index]
            if first <= column <= last:
                name = label(action, plan.chunks)
                cells[rank][column - first] = f">{name}<" if (rank, index) == mark else name
    size = max(len(cell) for row in cells for cell in row) + 1
    digits = len(str(plan.stages - 1))
    lines = [
        f"stage {rank:>{digits}} | " + "".join(f"{cell or '.':<{size}}" for cell in row).rstrip()
        for rank, row in enumerate(cells)
    ]
    if mark is not None:
        action = plan.actions[mark[0]][mark[1]]
        lines.append(f"marked: stage {mark[0]}, action {mark[1]}, {action}")
    return "\n".join(lines)
