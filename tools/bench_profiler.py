"""What profiling costs, and how well predictions hold on real models.

    python tools/bench_profiler.py             # cost of a recorder: off, on, and in a real step
    python tools/bench_profiler.py --predict   # small real models: predicted steps, then measured

Times on a shared machine are noise: steps with and without a recorder are compared in turn within
one run, and a setting is predicted from a run before and from one after the run that measures it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of OpenMP do not survive a fork

import torch

from megalatent.passes.channels import Ring
from megalatent.passes.execute import Executor
from megalatent.passes.plan import Action, make_plan
from megalatent.profiling.clock import CpuClock
from megalatent.profiling.measure import spread, standard_error
from megalatent.profiling.memory import make_meter
from megalatent.profiling.recorder import StepRecorder
from tests.passes.standin import HAND_OVER, StandIn

# Beginnings of the names of settings to predict.
_SETTINGS = ("4 micro", "2 chunk", "layers", "recompute extra", "recompute all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--predict", action="store_true", help="predictions on real models")
    parser.add_argument(
        "--settings", nargs="+", default=_SETTINGS, metavar="NAME", help="what is predicted"
    )
    given = parser.parse_args()
    if given.predict:
        return predict(given.steps, given.settings)
    per_call()
    off_and_on()
    return real(given.steps)


# -- what a recorder costs -----------------------------------------------------------------------


def per_call() -> None:
    """Time of a begin and its end, with and without memory."""
    action, count = Action("F", 0, 1, 0), 20_000
    for name, meter in (("times", None), ("times and memory", make_meter(torch.device("cpu")))):
        recorder = StepRecorder(CpuClock(), meter)
        recorder.step_begins(0)
        begin = time.perf_counter()
        for _ in range(count):
            recorder.begin("F", action)
            recorder.end("F", action)
        each = (time.perf_counter() - begin) / count
        print(f"{name}: {each * 1e6:.2f} us an action")


def off_and_on() -> None:
    """An executor with nothing to do: what it takes per action without and with a recorder."""
    plan = make_plan(1, 1, (2,) * 200)
    actions = len(plan.actions[0])
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(9):
        for on in (False, True):
            recorder = StepRecorder(CpuClock(), make_meter(torch.device("cpu"))) if on else None
            if recorder is not None:
                recorder.step_begins(0)
            executor, program = Executor(Ring(0, 1, 0, 0), recorder=recorder), StandIn(plan, 0)
            begin = time.perf_counter()
            executor.run(plan, program, HAND_OVER)
            found[on].append((time.perf_counter() - begin) / actions)
    without, with_one = (min(found[key]) * 1e6 for key in (False, True))
    print(f"executor alone: {without:.2f} us an action without, {with_one:.2f} us with a recorder")


def real(steps: int) -> int:
    """Steps of a small model with a recorder and without, in turn."""
    import tests.distributed.conftest  # noqa: F401  (Megatron's imports, before anything forks)
    from tests.distributed.harness import Layout, run_ranks
    from tests.distributed.latent import Setup

    setup = Setup(passes=(2,) * 8, batch=16, seq_length=64, hidden=128, packed=False)
    found = run_ranks(2, _steps, setup, Layout(pp=2), steps, timeout=600)[0]
    print("a real step on 2 stages, in ms, without and with a recorder:")
    for name, (off, on) in zip(("on the clock", "of a processor"), found, strict=True):
        ratios = [b / a for a, b in zip(off, on, strict=True)]
        error = standard_error(spread(ratios), len(ratios))
        print(
            f"  {name}: {statistics.median(off) * 1e3:.1f}, {statistics.median(on) * 1e3:.1f};"
            f" median ratio {statistics.median(ratios):.4f} ± {error:.4f}"
        )
    return 0


def _steps(rank: int, setup: Any, layout: Any, steps: int) -> list[tuple[list[float], list[float]]]:
    """Seconds of steps without and with a recorder, in turn: on the clock, and of the processor.

    What other programs do to a step's time, they hardly do to the time that it has a processor for.
    """
    import torch.distributed as dist

    from tests.distributed.harness import init
    from tests.distributed.latent import Rig

    del rank
    init(layout)
    rig = Rig(setup, layout)
    recorder = StepRecorder(CpuClock(), make_meter(torch.device("cpu")))
    clocks = (time.perf_counter, time.process_time)
    times: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
    for step in range(steps + 1):
        for on in ((False, True), (True, False))[step % 2]:
            rig.schedule.recorder = recorder if on else None
            dist.barrier()
            begin = [clock() for clock in clocks]
            if on:
                recorder.step_begins(step)
            rig.run()
            dist.barrier()
            if step:
                for clock, start, own in zip(clocks, begin, times, strict=True):
                    own[on].append(clock() - start)
    return times


# -- how well predictions hold -------------------------------------------------------------------


def predict(steps: int, settings: Sequence[str]) -> int:
    from megalatent.profiling.advice import advise
    from megalatent.profiling.report import report

    print(f"{'setting':<24}{'case':<8}{'predicted':>11}{'again':>11}{'measured':>11}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as name:
        run = _profiler(Path(name), steps)
        for start in settings:
            # Before and after: what else the machine does changes from minute to minute.
            before = _option(advise(run({})).options, start)
            changes = dict(override.split("=", 1) for override in before.overrides)
            then = {case.name: case.step_seconds for case in report(run(changes)).cases}
            after = _option(advise(run({})).options, start, before.name)
            for case, measured in then.items():
                both = [own.predicted_step_seconds_by_case[case] for own in (before, after)]
                print(
                    f"{before.name:<24}{case:<8}{both[0]:>11.3f}{both[1]:>11.3f}{measured:>11.3f}"
                    f"{statistics.mean(both) / measured:>8.3f}",
                    flush=True,
                )
    return 0


def _option(options: Sequence[Any], start: str, name: str | None = None) -> Any:
    """The best option whose name begins like this, or the one with a given name."""
    return next(own for own in options if own.name.startswith(name or start))


def _profiler(folder: Path, steps: int) -> Callable[[dict[str, str]], Any]:
    from megalatent.config_yaml import apply_overrides
    from megalatent.profiling.cases import CasePlan
    from tests.profiling.test_run import profiled
    from tests.training.runs import configuration

    plan = CasePlan(({1: 1.0}, {2: 1.0}), warmup=2, steps=steps)
    given = configuration(
        folder,
        {"passes": {"schedule": {1: 0.5, 2: 0.5}}},
        pipeline_model_parallel_size=2,
        num_layers=8,
        hidden_size=96,
        ffn_hidden_size=192,
        micro_batch_size=2,
        global_batch_size=16,
        seq_length=32,
        train_iters=plan.iterations,
    )

    def run(changes: dict[str, str]) -> Any:
        overrides = [f"{key}={value}" for key, value in changes.items()]
        return profiled(apply_overrides(given, overrides), 2, plan)

    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
