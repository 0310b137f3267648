"""Names what is slow: a stage, a link or a pass that costs more than its likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megalatent.profiling.measure import standard_error, typical
from megalatent.profiling.report import CaseReport, Report, StageReport

__all__ = ["Finding", "diagnose"]

# A stage or pass is slow from here on, over the others, and beyond this many standard errors.
_SLOW = 0.10
_ERRORS = 3.0
# A link is slow that takes this share of a forward, and this many times what the others take.
_LINK_SHARE, _LINK_TIMES = 0.10, 2.0
# One stage has most of a pass's overhead from here on.
_MOST = 0.6


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something slow.

    Attributes:
        kind: "stage", "link" or "pass".
        stage: the stage; of a link, the one that activations leave.
        k: the pass.
        factor: time over that of the others.
        text: one line that says so.
    """

    kind: str
    stage: int | None = None
    k: int | None = None
    factor: float
    text: str


def diagnose(report: Report) -> list[Finding]:
    """All findings, the costliest kind of each first."""
    deepest = max(report.cases, key=lambda case: (max(case.passes), sum(case.passes)))
    recomputed = report.facts.get("recompute") == "extra"
    return [*_stages(deepest), *_links(deepest), *_passes(deepest, recomputed)]


def _visits(stage: StageReport, case: CaseReport) -> tuple[float, float]:
    """Seconds of a stage's visits in a step, and of its heads."""
    counts = {own.k: sum(k >= own.k for k in case.passes) for own in stage.passes}
    visits = sum(counts[o.k] * (o.forward_seconds + o.backward_seconds) for o in stage.passes)
    return visits, sum(counts[o.k] * o.head_seconds for o in stage.passes)


def _limit(stages: Sequence[StageReport], k: int | None = None) -> float:
    """From which excess on something is slow, in view of how much the visits vary."""
    passes = [own for stage in stages for own in stage.passes if k is None or own.k == k]
    error = fmean(standard_error(own.noise, own.measured) for own in passes)
    return 1 + max(_SLOW, _ERRORS * error)


def _stages(case: CaseReport) -> list[Finding]:
    if len(case.stages) == 1:
        return []
    limit = _limit(case.stages)
    work = [sum(_visits(stage, case)) for stage in case.stages]
    found = []
    for stage in case.stages:
        rest = [work[other.stage] for other in case.stages if other is not stage]
        factor = work[stage.stage] / fmean(rest)
        if factor < limit or work[stage.stage] < max(work) / (1 + _SLOW / 2):
            continue
        text = (
            f"stage {stage.stage} is slow: {factor - 1:.0%} more work than the others"
            f" ({_why(case, stage)})"
        )
        found.append(Finding(kind="stage", stage=stage.stage, factor=factor, text=text))
    return found


def _why(case: CaseReport, stage: StageReport) -> str:
    """What makes a stage's work more than that of the others."""
    visits, head = _visits(stage, case)
    others = [other for other in case.stages if other is not stage]
    if head and visits < (1 + _SLOW) * fmean(_visits(other, case)[0] for other in others):
        return f"the head takes {head / (visits + head):.0%} of its time"
    layers = fmean(other.layers for other in others)
    if stage.layers > layers:
        return f"it has {stage.layers} layers, the others {layers:.3g} on average"
    fused = [own for own in stage.passes if own.k > 1]
    fusion = sum(own.fusion_seconds + own.fusion_backward_seconds for own in fused)
    embedding = stage.embedding_seconds + stage.embedding_backward_seconds
    whole = sum(own.forward_seconds + own.backward_seconds for own in stage.passes)
    if (fusion + embedding) / whole > _SLOW:
        return f"embedding and fusion take {(fusion + embedding) / whole:.0%} of its visits"
    return "with no more layers than they have: look at its device"


def _links(case: CaseReport) -> list[Finding]:
    seconds = {
        link.source: fmean(seen)
        for link in case.links
        for seen in [[s for s in (link.forward_seconds, link.backward_seconds) if s is not None]]
        if seen
    }
    forward = typical([own.forward_seconds for stage in case.stages for own in stage.passes])
    found = []
    for edge, own in sorted(seconds.items(), key=lambda item: -item[1]):
        rest = [value for other, value in seconds.items() if other != edge]
        usual = typical(rest)
        if own < _LINK_SHARE * forward or (rest and own < _LINK_TIMES * usual):
            continue
        target = case.links[edge].target
        text = (
            f"the link from stage {edge} to stage {target} is slow: a hand-over takes"
            f" {own * 1e3:.3g} ms, {own / forward:.0%} of a forward"
        )
        factor = own / usual if usual else float(own > 0)
        text += f", {factor:.3g} times what the others take" if usual else ""
        found.append(Finding(kind="link", stage=edge, factor=factor, text=text))
    if not found and seconds and typical(list(seconds.values())) > _LINK_SHARE * forward:
        own = typical(list(seconds.values()))
        text = (
            f"all links are slow: a hand-over takes {own * 1e3:.3g} ms, {own / forward:.0%} of a"
            " forward"
        )
        found.append(Finding(kind="link", factor=1.0, text=text))
    return found


def _passes(case: CaseReport, recomputed: bool) -> list[Finding]:
    found = []
    for index, first in enumerate(case.stages[0].passes):
        if first.k == 1:
            continue
        own = [stage.passes[index] for stage in case.stages]
        now = [p.forward_seconds + p.backward_seconds for p in own]
        base = [n / (1 + p.overhead_over_pass_1) for n, p in zip(now, own, strict=True)]
        factor = sum(now) / sum(base)
        if factor < _limit(case.stages, first.k):
            continue
        extra = [a - b for a, b in zip(now, base, strict=True)]
        text = f"pass {first.k} is slow: it takes {factor - 1:.0%} longer than pass 1"
        stage = extra.index(max(extra))
        if max(extra) > _MOST * sum(extra):
            text += f", almost all of it on stage {stage}"
            fusion = own[stage].fusion_seconds + own[stage].fusion_backward_seconds
            if fusion > _MOST * max(extra):
                text += ", where the fusion is"
        elif recomputed:
            text += "; it recomputes its activations, which pass 1 does not"
        found.append(Finding(kind="pass", k=first.k, factor=factor, text=text))
    return found
