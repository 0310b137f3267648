"""What a step would take with other settings: measured times put together anew, and planned again.

A visit is its layers and, on the first virtual stage, the embedding or the fusion. A layer takes on
each stage what it took there; where the stages differ by less than the measurement can tell, what
it took on average. The plan for the new sizes is made and run on paper. What the real pipeline took
over its own simulation (the work between actions) is taken to stay in proportion, and the time
outside the pipeline to stay as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan, make_plan
from megalatent.passes.plan_options import apportion
from megalatent.passes.simulate import simulate
from megalatent.profiling.measure import Visit, typical, windows
from megalatent.profiling.measured_costs import Measured, MeasuredCosts, measure
from megalatent.profiling.records import Case, Recording

__all__ = ["CasePredictor", "Prediction", "Setting", "current_setting", "weights"]

# Layers of different stages that differ by less are taken to be equally fast.
_ALIKE = 0.05
_PARTS = {
    "F": ("data", "embedding", "fusion"),
    "B": ("embedding_backward", "fusion_backward"),
}


@dataclass(frozen=True)
class Setting:
    """What can be changed without changing the number of stages.

    Attributes:
        micro_batches: of a step, m.
        chunks: virtual chunks of each stage.
        layers: of each virtual stage, index `chunk * stages + stage`.
        recompute: "never", "extra" or "all".
    """

    micro_batches: int
    chunks: int
    layers: tuple[int, ...]
    recompute: str = "never"

    def recomputes(self, k: int) -> bool:
        """Whether pass `k` recomputes its activations."""
        return self.recompute == "all" or (self.recompute == "extra" and k > 1)


@dataclass(frozen=True)
class Prediction:
    """A step on paper.

    Attributes:
        step_seconds: predicted.
        peak_in_flight: most activations of any stage.
        activation_bytes: most that each stage holds at once; empty if bytes were not counted.
    """

    step_seconds: float
    peak_in_flight: int
    activation_bytes: tuple[int, ...]


class CasePredictor:
    """Predicts the steps of one case under other settings.

    Args:
        recording: gives the facts.
        case: with at least one step.
        current: the setting under which it was recorded.
    """

    def __init__(self, recording: Recording, case: Case, current: Setting) -> None:
        self.recording, self.case, self.current = recording, case, current
        self.stages = case.plan.stages
        self.measured: Measured = measure(recording, [case])
        found = windows(recording, case)
        self.pipeline_seconds = typical([w.pipeline for w in found])
        self.step_seconds = typical([w.step for w in found])
        self.outside_seconds = typical([w.step - w.pipeline for w in found])

    @cached_property
    def calibration(self) -> float:
        """The real pipeline over its simulation."""
        simulated = simulate(self.case.plan, self.measured.exact()).makespan
        return self.pipeline_seconds / simulated

    def predict(self, setting: Setting, planned: Costs) -> Prediction:
        """The step under `setting`.

        Args:
            planned: what the planner is to assume; what it assumed when the case was recorded
                gives the plan that was recorded.
        """
        costs = self.costs(setting)
        passes = self._passes(setting.micro_batches)
        plan = self.case.plan
        if setting != self.current or planned != self.case.costs:
            cap = self.recording.facts.get("max_in_flight")
            if cap is not None:
                cap = max(cap, setting.chunks * max(passes))
            plan = make_plan(self.stages, setting.chunks, passes, costs=planned, max_in_flight=cap)
        simulation = simulate(plan, costs)
        return Prediction(
            simulation.makespan * self.calibration + self.outside_seconds,
            max(simulation.peak_in_flight),
            self._held(plan, setting),
        )

    def costs(self, setting: Setting) -> MeasuredCosts:
        """Costs of all visits under `setting`."""
        visits: dict[Visit, float] = {}
        for k in self.measured.passes:
            for kind in "FB":
                for index, layers in enumerate(setting.layers):
                    stage, chunk = index % self.stages, index // self.stages
                    seconds = layers * self._layer(kind, k)[stage]
                    if kind == "B" and setting.recomputes(k) and not self.current.recomputes(k):
                        seconds += layers * self._layer("F", k)[stage]
                    if kind == "B" and self.current.recomputes(k) and not setting.recomputes(k):
                        seconds -= layers * self._layer("F", k)[stage]
                    if index == 0:
                        seconds += self._parts(kind, k)
                    visits[stage, chunk, kind, k] = max(0.0, seconds)
        exact = self.measured.exact()
        return replace(exact, visits=visits)

    def costs_for_file(self, setting: Setting) -> Costs:
        """The same in the form of the planner's file."""
        parts = {v: s for v, s in self.measured.visits.items() if v[2] not in "FB"}
        visits = {**parts, **self.costs(setting).visits}
        return replace(self.measured, chunks=setting.chunks, visits=visits).costs()

    def _passes(self, micro_batches: int) -> tuple[int, ...]:
        own = self.case.plan.passes
        if len(own) == micro_batches:
            return own
        shares = {k: own.count(k) / len(own) for k in set(own)}
        return apportion(shares, micro_batches)

    def _parts(self, kind: str, k: int) -> float:
        """What the first virtual stage does besides its layers."""
        visits = self.measured.visits
        return sum(visits.get((0, 0, part, k), 0.0) for part in _PARTS[kind])

    def _layer(self, kind: str, k: int) -> list[float]:
        """Seconds of a layer on each stage."""
        if (kind, k) not in self._layers:
            self._layers[kind, k] = self._layer_seconds(kind, k)
        return self._layers[kind, k]

    @cached_property
    def _layers(self) -> dict[tuple[str, int], list[float]]:
        return {}

    def _layer_seconds(self, kind: str, k: int) -> list[float]:
        seconds = [0.0] * self.stages
        counts = [0] * self.stages
        for index, layers in enumerate(self.current.layers):
            stage, chunk = index % self.stages, index // self.stages
            if layers:
                time = self.measured.visits[stage, chunk, kind, k]
                seconds[stage] += time - self._parts(kind, k) if index == 0 else time
                counts[stage] += layers
        each = [s / n for s, n in zip(seconds, counts, strict=True) if n]
        mean = sum(seconds) / sum(counts)
        if max(each) - min(each) <= _ALIKE * mean:
            return [mean] * self.stages
        return [s / n if n else fmean(each) for s, n in zip(seconds, counts, strict=True)]

    # -- memory -----------------------------------------------------------------------------

    def _held(self, plan: Plan, setting: Setting) -> tuple[int, ...]:
        """Most bytes of activations on each stage at once."""
        kept = self._kept_by_layer
        if not kept:
            return ()
        peaks = []
        for stage, actions in enumerate(plan.actions):
            held = peak = 0.0
            for action in actions:
                layers = setting.layers[action.chunk * self.stages + stage]
                if setting.recomputes(action.k):
                    size = layers * self.recording.facts.get("layer_input_bytes", 0)
                else:
                    size = layers * kept.get(action.k, kept[max(kept)])
                held += {"F": size, "B": -size}.get(action.kind, 0)
                peak = max(peak, held)
            peaks.append(round(peak))
        return tuple(peaks)

    @cached_property
    def _kept_by_layer(self) -> Mapping[int, float]:
        """Bytes that a layer keeps in each pass, where it is not recomputed.

        What embedding and fusion keep counts to the layers of the first stage.
        """
        sizes: dict[int, int] = {}
        layers: dict[int, int] = {}
        for stage, chunk, k, size in self.recording.activations:
            if not self.current.recomputes(k):
                sizes[k] = sizes.get(k, 0) + size
                count = self.current.layers[chunk * self.stages + stage]
                layers[k] = layers.get(k, 0) + count
        return {k: size / layers[k] for k, size in sizes.items() if layers[k]}


def current_setting(recording: Recording, case: Case) -> Setting:
    """The setting under which a case was recorded."""
    facts = recording.facts
    recompute = facts.get("recompute", "never")
    return Setting(
        len(case.plan.passes),
        case.plan.chunks,
        tuple(facts["layers"]),
        recompute if recompute in ("never", "extra", "all") else "never",
    )


def weights(cases: Sequence[Case], mixture: Mapping[str, float]) -> list[float]:
    """What each case counts for in the whole run: its K's share, or all the same.

    Cases with several K stand for the whole mixture, each for as much as it has steps: then only
    such cases count.
    """
    mixed = [len(case.steps) if len(set(case.plan.passes)) > 1 else 0 for case in cases]
    if any(mixed):
        return [steps / sum(mixed) for steps in mixed]
    shares = [mixture.get(str(case.plan.passes[0]), 0.0) for case in cases]
    total = sum(shares)
    return [share / total for share in shares] if total else [1 / len(cases)] * len(cases)
