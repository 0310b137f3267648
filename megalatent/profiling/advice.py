"""What to change: other settings, best first, each as overrides that can be pasted.

The plan of a run depends on what its planner assumes. Without a place for files of measured costs,
predictions are for plans as the run makes them; with one, every option comes with its file.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from megalatent.passes.bounds import lower_bound
from megalatent.passes.costs import Costs
from megalatent.passes.split import equal_split, layout, split_candidates
from megalatent.profiling.predict import (
    CasePredictor,
    Prediction,
    Setting,
    current_setting,
    weights,
)
from megalatent.profiling.records import Recording

__all__ = ["Advice", "Option", "advise"]

AS_IT_IS, MEASURED = "as it is", "measured costs"
# Splits that are planned in full; the others are sorted out by their lower bound.
_PLANNED = 4
_LAYOUT = "pipeline_model_parallel_layout"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One setting and what is predicted for it.

    Attributes:
        name: what changes, in words.
        overrides: `section.key=value` for `--set`; empty for the current setting.
        predicted_step_seconds: mean of the cases by their weights.
        predicted_step_seconds_by_case: by name of the case.
        tokens_per_second: predicted.
        gain: tokens per second over those predicted for the current setting, less 1.
        peak_in_flight: most activations (chunk visits) on any stage in any case.
        activation_bytes: most bytes of activations on any stage in any case; None: not counted.
        predicted_peak_bytes: most memory of any rank; None where it was not measured.
        changes_batch: other micro-batch counts change the global batch, hence the training.
        costs_file, costs: a file that one of the overrides names, and what it must hold.
    """

    name: str
    overrides: tuple[str, ...]
    predicted_step_seconds: float
    predicted_step_seconds_by_case: dict[str, float]
    tokens_per_second: float
    gain: float
    peak_in_flight: int
    activation_bytes: int | None
    predicted_peak_bytes: int | None
    changes_batch: bool
    costs_file: str | None = None
    costs: dict[str, Any] | None = None

    @property
    def arguments(self) -> str:
        """To paste behind `megalatent train CONFIG`."""
        return " ".join(f"--set {shlex.quote(override)}" for override in self.overrides)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All options, best first; one of them is the current setting."""

    options: tuple[Option, ...]
    weights: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "options": [{**asdict(o), "arguments": o.arguments} for o in self.options],
        }


def advise(recording: Recording, costs_file: str | PathLike[str] | None = None) -> Advice:
    """Predict a step for the settings at hand and around it.

    Args:
        costs_file: where the measured costs of the current setting go; those of other settings go
            beside it. None: no files.

    Raises:
        ValueError: nothing was recorded.
    """
    cases = [case for case in recording.cases if case.steps]
    if not cases:
        raise ValueError("nothing was recorded: no case has a step")
    shares = weights(cases, recording.facts.get("mixture", {}))
    counted = [(case, share) for case, share in zip(cases, shares, strict=True) if share > 0]
    current = current_setting(recording, counted[0][0])
    predictors = [CasePredictor(recording, case, current) for case, _ in counted]
    adviser = _Adviser(
        recording,
        predictors,
        [share for _, share in counted],
        current,
        None if costs_file is None else Path(costs_file),
    )
    options = [adviser.option(*found) for found in adviser.settings()]
    now = options[0].tokens_per_second
    options = [replace(option, gain=option.tokens_per_second / now - 1) for option in options]
    options.sort(key=lambda option: -option.tokens_per_second)
    return Advice(options=tuple(options), weights={case.name: share for case, share in counted})


def _value(text: str) -> str:
    """A text as the value of an override, quoted where it would be read as something else."""
    from yaml import YAMLError

    from megalatent.config_yaml import parse_scalar

    try:
        plain = parse_scalar(text) == text
    except YAMLError:
        plain = False
    return text if plain else json.dumps(text)


class _Adviser:
    def __init__(
        self,
        recording: Recording,
        predictors: list[CasePredictor],
        shares: list[float],
        current: Setting,
        costs_file: Path | None,
    ) -> None:
        self.recording, self.predictors, self.shares = recording, predictors, shares
        self.current, self.costs_file = current, costs_file
        self.stages = predictors[0].stages
        self.facts = recording.facts
        self._now = [predictor.predict(current, predictor.case.costs) for predictor in predictors]

    def option(self, name: str, setting: Setting, overrides: tuple[str, ...]) -> Option:
        """What is predicted for a setting; the first one asked for is the current one."""
        file, costs = None, self.predictors[0].case.costs
        if self.costs_file is not None and name != AS_IT_IS:
            file, costs = self._file(name), self._deepest.costs_for_file(setting)
            overrides = (*overrides, f"latent.passes.costs={_value(file)}")
        elif setting.layers != self.current.layers and self.facts.get("costs_file"):
            # Measured for other stages than these.
            costs = Costs()
            overrides = (*overrides, "latent.passes.costs=null")
        found = [predictor.predict(setting, costs) for predictor in self.predictors]
        step = sum(share * own.step_seconds for share, own in zip(self.shares, found, strict=True))
        tokens = self.facts["tokens_per_micro_batch"] * setting.micro_batches
        held = [max(own.activation_bytes) for own in found if own.activation_bytes]
        return Option(
            name=name,
            overrides=overrides,
            predicted_step_seconds=step,
            predicted_step_seconds_by_case={
                predictor.case.name: own.step_seconds
                for predictor, own in zip(self.predictors, found, strict=True)
            },
            tokens_per_second=tokens * self.facts["replicas"] / step,
            gain=0.0,
            peak_in_flight=max(own.peak_in_flight for own in found),
            activation_bytes=max(held) if held else None,
            predicted_peak_bytes=self._peak(found),
            changes_batch=setting.micro_batches != self.current.micro_batches,
            costs_file=file,
            costs=None if file is None else costs.to_dict(),
        )

    @property
    def _deepest(self) -> CasePredictor:
        """The case that knows most passes."""
        return max(self.predictors, key=lambda predictor: predictor.measured.passes[-1])

    def _file(self, name: str) -> str:
        assert self.costs_file is not None
        if name == MEASURED:
            return str(self.costs_file)
        words = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
        return str(self.costs_file.with_name(f"{self.costs_file.stem}-{words}.json"))

    def _peak(self, found: list[Prediction]) -> int | None:
        """Measured peaks with the predicted change in activations."""
        if self.recording.memory_kind != "allocated":
            return None
        peaks = []
        for predictor, now, then in zip(self.predictors, self._now, found, strict=True):
            if not now.activation_bytes:
                return None
            for step in predictor.case.steps:
                for info, rank in zip(self.recording.ranks, step.ranks, strict=True):
                    measured = max((sample.peak for sample in rank.memory), default=0)
                    change = then.activation_bytes[info.stage] - now.activation_bytes[info.stage]
                    peaks.append(measured + change)
        return max(peaks)

    # -- settings ---------------------------------------------------------------------------

    def settings(self) -> Iterator[tuple[str, Setting, tuple[str, ...]]]:
        """Name, setting and overrides of all options, the current one first."""
        yield AS_IT_IS, self.current, ()
        if self.costs_file is not None:
            yield MEASURED, self.current, ()
        yield from self._micro_batches()
        yield from self._chunks()
        yield from self._splits()
        yield from self._recomputations()

    def _micro_batches(self) -> Iterator[tuple[str, Setting, tuple[str, ...]]]:
        m = self.current.micro_batches
        size, batch = self.facts.get("micro_batch_size"), self.facts.get("global_batch_size")
        if not size or batch != m * size * self.facts["replicas"]:
            return  # something else than the batch's size decides
        for count in (m // 2, 2 * m, 4 * m):
            if count >= 1:
                total = count * size * self.facts["replicas"]
                setting = replace(self.current, micro_batches=count)
                overrides = (f"megatron.global_batch_size={total}",)
                yield f"{count} micro-batches", setting, overrides

    def _chunks(self) -> Iterator[tuple[str, Setting, tuple[str, ...]]]:
        layers = self.facts["num_layers"]
        if not self._layers_can_move:
            return
        cap, deepest = self.facts.get("max_in_flight"), self.facts.get("max_passes", 1)
        most = self.facts.get("most_chunks") or layers // self.stages
        for chunks in (1, 2, 4):
            fits = chunks <= min(most, layers // self.stages)
            if chunks != self.current.chunks and fits and (cap is None or chunks * deepest <= cap):
                split = equal_split(self.stages, chunks, layers)
                setting = replace(self.current, chunks=chunks, layers=split)
                name = f"{chunks} chunk{'s' if chunks > 1 else ''} a stage"
                yield name, setting, self._layout(split)

    def _splits(self) -> Iterator[tuple[str, Setting, tuple[str, ...]]]:
        chunks, layers = self.current.chunks, self.facts["num_layers"]
        heavy = max(zip(self.shares, self.predictors, strict=True), key=lambda pair: pair[0])[1]
        if not self._layers_can_move:
            return

        def bound(split: tuple[int, ...]) -> float:
            costs = heavy.costs(replace(self.current, layers=split))
            return lower_bound(self.stages, chunks, heavy.case.plan.passes, costs)

        splits = {*split_candidates(self.stages, chunks, layers), *self._moved(layers)}
        splits.discard(self.current.layers)
        ordered = sorted(splits, key=lambda s: (round(bound(s), 9), sum(n * n for n in s), s))
        for split in ordered[:_PLANNED]:
            setting = replace(self.current, layers=split)
            yield f"layers {' '.join(map(str, split))}", setting, self._layout(split)

    @property
    def _layers_can_move(self) -> bool:
        return self.stages > 1 and self.facts.get("layers_can_move", True)

    def _moved(self, layers: int) -> Iterator[tuple[int, ...]]:
        """The equal split, and the current one with one layer moved from a stage to another."""
        now = self.current.layers
        yield equal_split(self.stages, self.current.chunks, layers)
        for source in range(len(now)):
            for target in range(len(now)):
                if source != target and now[source] > 0:
                    moved = list(now)
                    moved[source] -= 1
                    moved[target] += 1
                    yield tuple(moved)

    def _layout(self, split: tuple[int, ...]) -> tuple[str, ...]:
        others = [name for name in self.facts.get("pipeline_options", ()) if name != _LAYOUT]
        away = [f"megatron.{name}=null" for name in others]
        return (*away, f"megatron.{_LAYOUT}={layout(split)}")

    def _recomputations(self) -> Iterator[tuple[str, Setting, tuple[str, ...]]]:
        if self.facts.get("recompute", "never") not in ("never", "extra", "all"):
            return  # a choice for each K: the user has thought about it
        if self.facts.get("recomputed_by_megatron"):
            return  # one or the other
        for mode in ("never", "extra", "all"):
            if mode != self.current.recompute:
                overrides = (f"latent.passes.recompute={mode}",)
                yield f"recompute {mode}", replace(self.current, recompute=mode), overrides
