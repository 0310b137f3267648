"""The report of a profile: what each pass costs on each stage, and where the rest of a step goes.

Its plain form is the `report` section of the files of `megalatent profile --json`; the names there
are the names of the fields here. Seconds everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from megalatent.passes.bounds import lower_bound
from megalatent.passes.simulate import peak_in_flight, simulate
from megalatent.profiling.measure import (
    Window,
    action_seconds,
    link_seconds,
    rank_parts,
    replicas,
    spread,
    typical,
    windows,
)
from megalatent.profiling.measured_costs import Measured, measure
from megalatent.profiling.records import Case, Recording

__all__ = ["CaseReport", "LinkReport", "RankReport", "Report", "StagePass", "StageReport", "report"]


@dataclass(frozen=True, kw_only=True)
class StagePass:
    """One pass on one stage; with virtual chunks, of a micro-batch's visits to all of them.

    Attributes:
        k: the pass.
        forward_seconds, backward_seconds: of one micro-batch.
        head_seconds: logits, loss and their backward; on the last stage.
        fusion_seconds, fusion_backward_seconds: parts of the forward and backward, first stage.
        overhead_over_pass_1: forward and backward over those of pass 1, less 1.
        activation_bytes: that the forward keeps; None where it was not counted.
        activation_overhead_over_pass_1: the same over that of pass 1, less 1.
        measured: forwards that the typical one is taken from.
        noise: half the distance between the quartiles of the forward and backward, relative.
    """

    k: int
    forward_seconds: float
    backward_seconds: float
    head_seconds: float
    fusion_seconds: float
    fusion_backward_seconds: float
    overhead_over_pass_1: float
    activation_bytes: int | None
    activation_overhead_over_pass_1: float | None
    measured: int
    noise: float


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One stage, over all its passes.

    Attributes:
        layers: of all its chunks.
        embedding_seconds, embedding_backward_seconds, data_seconds: parts of pass 1.
        work_seconds: busy time in a step.
    """

    stage: int
    layers: int
    passes: tuple[StagePass, ...]
    embedding_seconds: float
    embedding_backward_seconds: float
    data_seconds: float
    work_seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """The hand-overs between two neighbours of the ring.

    Attributes:
        source, target: stages; activations go this way, gradients the other.
        forward_seconds, backward_seconds: from the end of an action until its output is there;
            None where the receiver was never waiting for it.
        seen: hand-overs that somebody waited for.
    """

    source: int
    target: int
    forward_seconds: float | None
    backward_seconds: float | None
    seen: int


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One recorded rank; the parts add up to the step.

    Attributes:
        step_seconds: this rank's own.
        wait_seconds: waiting for hand-overs, since the first action of any stage.
        bubble_fraction: share of the pipeline's time in which it does not act.
        parts: seconds by name: forward, backward, head, wait, send, reduce, optimizer, other.
        in_flight: most activations held.
        allocated_peak_bytes: most memory; None where it was not measured.
    """

    rank: int
    stage: int
    replica: int
    step_seconds: float
    wait_seconds: float
    bubble_fraction: float
    parts: dict[str, float]
    in_flight: int
    allocated_peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """Steps with the same passes.

    Attributes:
        passes: K of each micro-batch.
        steps: how many were measured.
        step_seconds, pipeline_seconds: typical; the pipeline is from the first action to the last.
        step_noise: half the distance between the quartiles of the step, relative.
        simulated_step_seconds, lower_bound_seconds: what the plan takes on paper, and what no plan
            could beat, with the measured costs and the measured time outside the pipeline.
        simulated_pipeline_seconds, lower_bound_pipeline_seconds: the same without that time.
        bubble_fraction, simulated_bubble_fraction, lower_bound_bubble_fraction: share of the
            stages' time in the pipeline in which they do not act.
        over_one_pass: step over that of the case with one pass, less 1; None without such a case.
        mfu: model operations over what the GPUs could do; None on CPUs.
        imbalance: busy time of the slowest stage over the mean, less 1.
    """

    name: str
    passes: tuple[int, ...]
    strategy: str
    steps: int
    step_seconds: float
    step_seconds_samples: tuple[float, ...]
    step_noise: float
    pipeline_seconds: float
    simulated_step_seconds: float
    lower_bound_seconds: float
    simulated_pipeline_seconds: float
    lower_bound_pipeline_seconds: float
    bubble_fraction: float
    simulated_bubble_fraction: float
    lower_bound_bubble_fraction: float
    over_one_pass: float | None
    tokens_per_second: float
    token_equivalent_tokens_per_second: float
    mfu: float | None
    slowest_stage: int
    imbalance: float
    reduce_seconds: float
    optimizer_seconds: float
    stages: tuple[StageReport, ...]
    links: tuple[LinkReport, ...]
    ranks: tuple[RankReport, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole profile.

    Attributes:
        costs: measured, as the planner's file has them.
    """

    facts: dict[str, Any]
    cases: tuple[CaseReport, ...]
    costs: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def report(recording: Recording) -> Report:
    """Work out all figures.

    Raises:
        ValueError: nothing was recorded.
    """
    measured = measure(recording)
    cases = [case for case in recording.cases if case.steps]
    singles = [case for case in cases if set(case.plan.passes) == {1}]
    single = typical([w.step for case in singles for w in windows(recording, case)]) or None
    return Report(
        facts=dict(recording.facts),
        cases=tuple(_case(recording, case, single) for case in cases),
        costs=measured.costs().to_dict(),
    )


def _case(recording: Recording, case: Case, single: float | None) -> CaseReport:
    plan, facts = case.plan, recording.facts
    measured = measure(recording, [case])
    costs, found = measured.exact(), windows(recording, case)
    step, pipeline = typical([w.step for w in found]), typical([w.pipeline for w in found])
    outside = typical([w.step - w.pipeline for w in found])
    simulation = simulate(plan, costs)
    bound = lower_bound(plan.stages, plan.chunks, plan.passes, costs)
    work = [typical([w.busy[stage] for w in found]) for stage in range(plan.stages)]
    tokens = facts["tokens_per_micro_batch"] * len(plan.passes) * facts["replicas"]
    equivalent = tokens * fmean(plan.passes)
    closing = _closing(recording, case)
    return CaseReport(
        name=case.name,
        passes=plan.passes,
        strategy=plan.strategy,
        steps=len(case.steps),
        step_seconds=step,
        step_seconds_samples=tuple(w.step for w in found),
        step_noise=spread([w.step for w in found]),
        pipeline_seconds=pipeline,
        simulated_step_seconds=simulation.makespan + outside,
        lower_bound_seconds=bound + outside,
        simulated_pipeline_seconds=simulation.makespan,
        lower_bound_pipeline_seconds=bound,
        bubble_fraction=typical([w.bubble for w in found]),
        simulated_bubble_fraction=simulation.bubble_fraction,
        lower_bound_bubble_fraction=1 - sum(simulation.busy) / (plan.stages * bound),
        over_one_pass=None if single is None else step / single - 1,
        tokens_per_second=tokens / step,
        token_equivalent_tokens_per_second=equivalent / step,
        mfu=_mfu(facts, plan.passes, tokens / step),
        slowest_stage=work.index(max(work)),
        imbalance=max(work) / fmean(work) - 1,
        reduce_seconds=closing["reduce"],
        optimizer_seconds=closing["optimizer"],
        stages=tuple(_stages(recording, case, measured, work)),
        links=tuple(_links(recording, case)),
        ranks=tuple(_ranks(recording, case, found)),
    )


def _mfu(facts: dict[str, Any], passes: Sequence[int], tokens_per_second: float) -> float | None:
    if not facts.get("peak_flops"):
        return None
    one, two, three = facts["flops_per_token"]
    # The first fused pass prepares what all of them use; from there on each costs the same.
    per_token = fmean(one if k == 1 else two + (k - 2) * (three - two) for k in passes)
    return tokens_per_second * per_token / (facts["world_size"] * facts["peak_flops"])


def _closing(recording: Recording, case: Case) -> dict[str, float]:
    """Seconds of reduction and update without the time that early ranks wait for late ones in them.

    A collective begins when its last rank has come: what a rank spends in it before that is bubble.
    """
    found: dict[str, list[float]] = {"reduce": [], "optimizer": []}
    for step in case.steps:
        for positions in replicas(recording):
            for kind, seconds in found.items():
                last = [list(step.ranks[position].of_kind(kind))[-1:] for position in positions]
                spans = [span for own in last for span in own]
                if spans:
                    starts = max(span.start for span in spans)
                    seconds.append(max(0, max(span.end for span in spans) - starts) * 1e-9)
    return {kind: typical(seconds) for kind, seconds in found.items()}


def _stages(
    recording: Recording, case: Case, measured: Measured, work: Sequence[float]
) -> list[StageReport]:
    plan, visits = case.plan, measured.visits
    samples = action_seconds(recording, case)
    kept: dict[tuple[int, int], int] = {}
    for item in recording.activations:
        kept[item.stage, item.k] = kept.get((item.stage, item.k), 0) + item.bytes
    layers = recording.facts["layers"]
    result = []
    for stage in range(plan.stages):

        def total(kind: str, k: int, stage: int = stage) -> float:
            return sum(visits.get((stage, c, kind, k), 0.0) for c in range(plan.chunks))

        first = total("F", 1) + total("B", 1)
        passes = []
        for k in measured.passes:
            size, size_1 = kept.get((stage, k)), kept.get((stage, 1))
            spreads = [
                spread(samples[visit])
                for visit in samples
                if visit[0] == stage and visit[2] in "FB" and visit[3] == k
            ]
            passes.append(
                StagePass(
                    k=k,
                    forward_seconds=total("F", k),
                    backward_seconds=total("B", k),
                    head_seconds=total("H", k),
                    fusion_seconds=total("fusion", k),
                    fusion_backward_seconds=total("fusion_backward", k),
                    overhead_over_pass_1=(total("F", k) + total("B", k)) / first - 1,
                    activation_bytes=size,
                    activation_overhead_over_pass_1=size / size_1 - 1 if size and size_1 else None,
                    measured=len(samples[stage, 0, "F", k]),
                    noise=fmean(spreads),
                )
            )
        result.append(
            StageReport(
                stage=stage,
                layers=sum(layers[chunk * plan.stages + stage] for chunk in range(plan.chunks)),
                passes=tuple(passes),
                embedding_seconds=total("embedding", 1),
                embedding_backward_seconds=total("embedding_backward", 1),
                data_seconds=total("data", 1),
                work_seconds=work[stage],
            )
        )
    return result


def _links(recording: Recording, case: Case) -> list[LinkReport]:
    stages = case.plan.stages
    seen = link_seconds(recording, case)
    edges = [] if stages == 1 else range(stages)
    return [
        LinkReport(
            source=edge,
            target=(edge + 1) % stages,
            forward_seconds=typical(seen[edge, "F"]) if (edge, "F") in seen else None,
            backward_seconds=typical(seen[edge, "B"]) if (edge, "B") in seen else None,
            seen=len(seen.get((edge, "F"), ())) + len(seen.get((edge, "B"), ())),
        )
        for edge in edges
    ]


def _ranks(recording: Recording, case: Case, found: Sequence[Window]) -> list[RankReport]:
    groups = replicas(recording)
    in_flight = peak_in_flight(case.plan)
    result = []
    for position, info in enumerate(recording.ranks):
        group = next(i for i, positions in enumerate(groups) if position in positions)
        own = found[group :: len(groups)]
        steps = [step.ranks[position] for step in case.steps]
        parts = [rank_parts(step) for step in steps]
        # The step of median length: parts of different steps would not add up.
        order = sorted(range(len(steps)), key=lambda i: steps[i].end - steps[i].start)
        middle = order[len(order) // 2]
        peaks = [sample.peak for step in steps for sample in step.memory]
        result.append(
            RankReport(
                rank=info.rank,
                stage=info.stage,
                replica=info.replica,
                step_seconds=(steps[middle].end - steps[middle].start) * 1e-9,
                wait_seconds=typical([window.wait[info.stage] for window in own]),
                bubble_fraction=typical([window.bubble_of(info.stage) for window in own]),
                parts=parts[middle],
                in_flight=in_flight[info.stage],
                allocated_peak_bytes=max(peaks) if peaks else None,
            )
        )
    return result
