"""Recording chosen steps of a training run: when, on which ranks, and how it comes together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan
from megalatent.profiling.clock import Alignment, align, make_clock
from megalatent.profiling.memory import KeptTensors, make_meter
from megalatent.profiling.recorder import KeptCounter, RecordedStep, StepRecorder
from megalatent.profiling.records import (
    ACTIONS,
    Activation,
    Case,
    RankInfo,
    RankStep,
    Recording,
    Step,
)
from megalatent.profiling.run_facts import model_facts

__all__ = ["RunProfiler", "case_name", "join_cases"]


class RunProfiler:
    """Records steps of one training run on this rank.

    Without one, a run does nothing of all this. All ranks of the run have one: those that are not
    recorded take part in making the group of those that are.

    Args:
        steps: iterations to record, 0-based. A run that ends before the last one, in order, leaves
            a recording of what it did of them.
        count: iterations in which the bytes that visits keep are counted; they are not timed.
        replicas: data-parallel replicas to record, from the first; of each, the first TP and CP
            rank of every stage.
        passes: K of the micro-batches of an iteration, in place of those that the run would draw;
            None: as the run draws them.
        done: called on the first recorded rank with the recording.
        missed: called on rank 0 in place of it, if the run ended before the first of the steps.
    """

    def __init__(
        self,
        *,
        steps: range,
        count: Collection[int] = (),
        replicas: int = 1,
        passes: Callable[[int, int], Sequence[int]] | None = None,
        done: Callable[[Recording], None],
        missed: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps = steps
        self.count = count
        self.replicas = replicas
        self.passes = passes
        self.done = done
        self.missed = missed
        self._session: Any = None
        self._group: Any = None
        self._recorder: StepRecorder | None = None
        self._counter: KeptCounter | None = None
        self._before: Alignment | None = None
        self._finished = False

    # -- hooks of the run -------------------------------------------------------------------

    def attach(self, session: Any, optimizer: Any) -> None:
        """The model and its optimiser are made, and have not taken a step."""
        self._session = session
        schedule = session.schedule()
        if self.passes is not None:
            schedule.sampler = _Given(self.passes)
        update = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            recorder = schedule.recorder
            if recorder is None:
                return update(*args, **kwargs)
            recorder.begin("optimizer")
            result = update(*args, **kwargs)
            recorder.end("optimizer")
            return result

        optimizer.step = step

    def train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `train`, which may end before the last step that is to be recorded."""

        def train(*args: Any, **kwargs: Any) -> Any:
            # A run that resumes behind the steps has nothing to do with them.
            self._finished = self._session.args.iteration > self.steps[-1]
            try:
                result = original(*args, **kwargs)
            except SystemExit as end:
                if end.code == 0:  # in order, on all ranks alike
                    self._finish()
                raise
            self._finish()
            return result

        return train

    def train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `train_step`, recorded where it is to be."""

        def train_step(*args: Any, **kwargs: Any) -> Any:
            schedule = self._session.schedule()
            iteration = schedule.position().iteration
            if iteration in self.count:
                return self._counted(lambda: original(*args, **kwargs))
            if iteration not in self.steps:
                return original(*args, **kwargs)
            if self._before is None:
                self._begin()
            recorder = schedule.recorder = self._recorder
            if recorder is not None:
                recorder.step_begins(iteration)
            result = original(*args, **kwargs)
            if recorder is not None:
                recorder.step_ends(schedule.last_plan)
            schedule.recorder = None
            if iteration == self.steps[-1]:
                self._finish()
            return result

        return train_step

    # -- on this rank -----------------------------------------------------------------------

    def _counted(self, step: Callable[[], Any]) -> Any:
        schedule = self._session.schedule()
        if self._counter is None:
            weights = [w for model in self._session.models for w in model.parameters()]
            self._counter = KeptCounter(KeptTensors(weights))
        schedule.recorder = self._counter
        result = step()
        schedule.recorder = None
        return result

    def _begin(self) -> None:
        """Between two steps: who records, on which clock."""
        mine = self._is_recorded()
        recorded: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(recorded, dist.get_rank() if mine else None)
        members = [rank for rank in recorded if rank is not None]
        self._group = dist.new_group(members, backend="gloo", group_desc="latent_profile")
        if mine:
            self._before = align(self._group)
            device = torch.device(torch.cuda.current_device())
            self._recorder = StepRecorder(make_clock(device), make_meter(device))
        else:
            self._before = Alignment(0, 0, 0)

    def _is_recorded(self) -> bool:
        return (
            parallel_state.get_data_parallel_rank() < self.replicas
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def _finish(self) -> None:
        """Between two steps: bring all ranks' steps to the first one, once."""
        if self._finished:
            return
        self._finished = True
        if self._before is None and dist.get_rank() == 0:
            self.missed()
        if self._recorder is None or self._before is None:
            return
        after = align(self._group)
        steps = self._recorder.finish(Alignment.between(self._before, after))
        stage = _stage()
        info = RankInfo(
            rank=dist.get_rank(),
            stage=stage,
            replica=parallel_state.get_data_parallel_rank(),
            host=socket.gethostname(),
            device=_device_name(),
            clock_error=max(self._before.error, after.error),
        )
        counted = self._counter.bytes.items() if self._counter else ()
        kept = [Activation(stage, chunk, k, size) for (chunk, k), size in counted]
        mine = (info, steps, kept, model_facts(self._session))
        first = self._group.rank() == 0
        every: list[Any] | None = [None] * self._group.size() if first else None
        dist.gather_object(mine, every, dst=dist.get_global_rank(self._group, 0), group=self._group)
        if every is not None:
            self.done(self._recording(every))

    def _recording(self, every: list[Any]) -> Recording:
        every.sort(key=lambda given: (given[0].replica, given[0].stage))
        facts = every[0][3]
        layers = [0] * (facts["stages"] * facts["chunks"])
        for info, _, _, own in every:
            for chunk, count in enumerate(own["own_layers"]):
                layers[chunk * facts["stages"] + info.stage] = count
        del facts["own_layers"]
        meter = make_meter(torch.device(torch.cuda.current_device()))
        # Replicas keep the same, unless their rows are packed differently.
        most: dict[tuple[int, int, int], int] = {}
        for stage, chunk, k, size in (item for _, _, kept, _ in every for item in kept):
            most[stage, chunk, k] = max(size, most.get((stage, chunk, k), 0))
        return Recording(
            ranks=tuple(info for info, *_ in every),
            cases=join_cases(
                [info.stage for info, *_ in every],
                [steps for _, steps, _, _ in every],
                self._session.schedule().costs,
            ),
            memory_kind="" if meter is None else meter.kind,
            activations=tuple(Activation(*visit, size) for visit, size in sorted(most.items())),
            facts={**facts, "layers": layers},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class _Given:
    """A sampler of passes that draws nothing."""

    def __init__(self, passes: Callable[[int, int], Sequence[int]]) -> None:
        self._passes = passes

    def passes(self, iteration: int, micro_batches: int) -> tuple[int, ...]:
        return tuple(self._passes(iteration, micro_batches))


def join_cases(
    stages: Sequence[int], ranks: Sequence[Sequence[RecordedStep]], costs: Costs
) -> tuple[Case, ...]:
    """Steps of all ranks side by side, those with equally many micro-batches of each K in one case.

    Micro-batches with the same K are alike to a plan: in a case they are ordered by it, whichever
    order a step drew. Times are moved so that the first step begins at 0. A step in which a rank
    did not do exactly what the plan says (Megatron repeats a step to look into a bad loss) is left
    out.

    Args:
        stages: of each rank.
        ranks: the recorded steps of each rank, all of the same iterations.
        costs: what the planner assumed.
    """
    zero = min((steps[0].step.start for steps in ranks if steps), default=0)
    found: dict[tuple[int, ...], tuple[Plan, list[Step]]] = {}
    for steps in zip(*ranks, strict=True):
        iteration, plan, _ = steps[0]
        if all(
            [span.action for span in own.step.of_kind(*ACTIONS)] == list(plan.actions[stage])
            for stage, own in zip(stages, steps, strict=True)
        ):
            numbers = _by_passes(plan.passes)
            step = Step(iteration, tuple(_renamed(own.step.moved(-zero), numbers) for own in steps))
            passes = tuple(sorted(plan.passes))
            if passes not in found:
                found[passes] = _renamed_plan(plan, numbers), []
            found[passes][1].append(step)
    return tuple(
        Case(name=case_name(passes), plan=plan, costs=costs, steps=tuple(steps))
        for passes, (plan, steps) in sorted(found.items(), key=lambda item: (sum(item[0]), item[0]))
    )


def _by_passes(passes: Sequence[int]) -> list[int]:
    """For each micro-batch its number once they are ordered by K, those with the same as before."""
    numbers = [0] * len(passes)
    order = sorted(range(len(passes)), key=lambda micro_batch: passes[micro_batch])
    for number, micro_batch in enumerate(order):
        numbers[micro_batch] = number
    return numbers


def _renamed(rank: RankStep, numbers: Sequence[int]) -> RankStep:
    spans = (
        span if span.micro_batch < 0 else span._replace(micro_batch=numbers[span.micro_batch])
        for span in rank.spans
    )
    return replace(rank, spans=tuple(spans))


def _renamed_plan(plan: Plan, numbers: Sequence[int]) -> Plan:
    actions = (
        tuple(action._replace(micro_batch=numbers[action.micro_batch]) for action in rank)
        for rank in plan.actions
    )
    return replace(plan, passes=tuple(sorted(plan.passes)), actions=tuple(actions))


def case_name(passes: Sequence[int]) -> str:
    """How tables call steps with these K."""
    if len(set(passes)) == 1:
        return f"K = {passes[0]}"
    return "K = " + " + ".join(f"{passes.count(k)}x{k}" for k in sorted(set(passes)))


def _stage() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
