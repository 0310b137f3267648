"""A plan's timeline as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megalatent.passes.plan import Action, Plan
from megalatent.passes.render import axis_ticks
from megalatent.passes.simulate import Simulation

__all__ = ["render_svg"]

_FORWARD = ("#cfe3f7", "#8fbfe8", "#4a90cf", "#1f5f9e")
_BACKWARD = ("#d5efcf", "#9bd492", "#56ab58", "#2a7a3b")
_HEAD = "#f2a65a"
_DARK_FROM = 3  # passes from here on carry white text
_LEFT, _RIGHT, _TOP, _ROW, _GAP = 76, 76, 78, 30, 6
#: With more actions than this, equal ones of a stage become one shape without details on hover.
_DETAILED = 20_000


def render_svg(
    plan: Plan,
    simulation: Simulation,
    *,
    title: str = "",
    lower_bound: float | None = None,
    width: int | None = None,
) -> str:
    """The timeline with legend, axis and the details of each action on hover.

    Args:
        lower_bound: a time to be marked with a dashed line.
        width: pixels of the drawing; by default as many as the shortest action needs to be seen,
            between 1,100 and 6,000.
    """
    total = max(simulation.makespan, lower_bound or 0.0) or 1.0
    spans = [end - start for rank in simulation.spans for start, end in rank if end > start]
    if width is None:
        wanted = _LEFT + _RIGHT + round(14 * total / min(spans, default=total))
        width = min(6000, max(1100, wanted))
    scale = (width - _LEFT - _RIGHT) / total
    bottom = _TOP + plan.stages * (_ROW + _GAP)
    numbers = "micro-batch.chunk" if plan.chunks > 1 else "micro-batch"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 44}" '
        f'viewBox="0 0 {width} {bottom + 44}" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title or 'pipeline plan')}</title>",
        f'<rect width="{width}" height="{bottom + 44}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}'
        f'<tspan dx="14" font-size="12" font-weight="400" fill="#666">numbers: {numbers}</tspan>'
        "</text>",
        *_legend(plan, lower_bound is not None),
        *_axis(total, scale, bottom),
    ]
    detailed = sum(map(len, plan.actions)) <= _DETAILED
    for rank in range(plan.stages):
        y = _TOP + rank * (_ROW + _GAP)
        parts += _stage(plan, simulation, rank, y, scale, detailed)
        share = simulation.busy[rank] / (simulation.makespan or 1.0)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 19}" text-anchor="end">stage {rank}</text>'
            f'<text x="{_LEFT + total * scale + 8:.1f}" y="{y + 19}" fill="#666">{share:.0%} busy'
            "</text>"
        )
    if lower_bound is not None:
        x = _LEFT + lower_bound * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{_TOP - 6}" y2="{bottom}" stroke="#c0392b" '
            f'stroke-width="1.5" stroke-dasharray="5 3"><title>lower bound {lower_bound:g}</title>'
            "</line>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _stage(
    plan: Plan, simulation: Simulation, rank: int, y: int, scale: float, detailed: bool
) -> Iterator[str]:
    yield (
        f'<rect x="{_LEFT}" y="{y}" width="{simulation.makespan * scale:.2f}" height="{_ROW}" '
        'fill="#f2f2f2"/>'
    )
    paths: dict[str, list[str]] = {}
    for action, (start, end) in zip(plan.actions[rank], simulation.spans[rank], strict=True):
        x, size = _LEFT + start * scale, (end - start) * scale
        if not size:
            continue
        fill = _fill(action)
        if not detailed:
            paths.setdefault(fill, []).append(f"M{x:.2f} {y}h{size:.2f}v{_ROW}h-{size:.2f}z")
            continue
        yield (
            f"<g><title>{escape(_details(plan, action, rank, start, end))}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{size:.2f}" height="{_ROW}" fill="{fill}" '
            'stroke="white" stroke-width="0.6"/>'
        )
        name = _name(plan, action)
        if size > 7 * len(name) + 2:
            color = "white" if action.k >= _DARK_FROM and action.kind != "H" else "#222"
            yield (
                f'<text x="{x + size / 2:.2f}" y="{y + 19}" text-anchor="middle" font-size="11" '
                f'fill="{color}" pointer-events="none">{name}</text>'
            )
        yield "</g>"
    for fill, path in paths.items():
        yield f'<path d="{"".join(path)}" fill="{fill}"/>'


def _fill(action: Action) -> str:
    if action.kind == "H":
        return _HEAD
    shades = _FORWARD if action.kind == "F" else _BACKWARD
    return shades[min(action.k, len(shades)) - 1]


def _name(plan: Plan, action: Action) -> str:
    return f"{action.micro_batch}.{action.chunk}" if plan.chunks > 1 else str(action.micro_batch)


def _details(plan: Plan, action: Action, rank: int, start: float, end: float) -> str:
    kind = {"F": "forward", "B": "backward", "H": "head"}[action.kind]
    passes = f"pass {action.k} of {plan.passes[action.micro_batch]}"
    chunk = f", chunk {action.chunk}" if plan.chunks > 1 else ""
    return (
        f"{kind}, micro-batch {action.micro_batch}, {passes}{chunk}\n"
        f"stage {rank}, {start:g} to {end:g} ({end - start:g})"
    )


def _legend(plan: Plan, bound: bool) -> Iterator[str]:
    x = _LEFT

    def entry(fill: str, name: str) -> str:
        nonlocal x
        text = (
            f'<rect x="{x}" y="38" width="16" height="14" rx="2" fill="{fill}"/>'
            f'<text x="{x + 21}" y="50">{name}</text>'
        )
        x += 32 + round(6.6 * len(name))
        return text

    deepest = max(plan.passes)
    for k in range(1, min(deepest, len(_FORWARD)) + 1):
        more = "+" if k == len(_FORWARD) and deepest > k else ""
        yield entry(_FORWARD[k - 1], f"forward {k}{more}")
    if not plan.forward_only:
        for k in range(1, min(deepest, len(_BACKWARD)) + 1):
            more = "+" if k == len(_BACKWARD) and deepest > k else ""
            yield entry(_BACKWARD[k - 1], f"backward {k}{more}")
    yield entry(_HEAD, "head")
    yield entry("#f2f2f2", "waiting")
    if bound:
        yield (
            f'<line x1="{x}" x2="{x + 16}" y1="45" y2="45" stroke="#c0392b" stroke-width="1.5" '
            f'stroke-dasharray="5 3"/><text x="{x + 21}" y="50">lower bound</text>'
        )


def _axis(total: float, scale: float, bottom: int) -> Iterator[str]:
    for time in axis_ticks(total, max(2, round(total * scale / 90))):
        x = _LEFT + time * scale
        yield (
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{_TOP - 6}" y2="{bottom + 4}" stroke="#ddd"/>'
            f'<text x="{x:.2f}" y="{bottom + 18}" text-anchor="middle" fill="#444">{time:g}</text>'
        )
    yield (
        f'<text x="{_LEFT + total * scale / 2:.1f}" y="{bottom + 36}" text-anchor="middle" '
        'fill="#666">time</text>'
    )
