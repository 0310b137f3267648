"""Profiling chosen steps of a training run (`latent.profile`, `train --profile-steps`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalatent.errors import UserError
from megalatent.profiling.output import Targets, publish

if TYPE_CHECKING:
    from megalatent.config import Config
    from megalatent.profiling.records import Recording

__all__ = ["step_profiler"]


def step_profiler(config: Config) -> Any:
    """The `RunProfiler` of a training run, or None if none of its steps is to be profiled."""
    profile = config.latent.profile
    steps = profile.iterations
    if not steps:
        return None
    from megalatent.profiling.run import RunProfiler

    start = Path(profile.output or Path(config.megatron.get("save") or ".") / "profile")

    def done(recording: Recording) -> None:
        """Nothing that goes wrong here may end the training."""
        seen = [step.iteration + 1 for case in recording.cases for step in case.steps]
        # A run that ended early or resumed late has not had them all.
        of = f"{min(seen)}-{max(seen)}" if seen else "none"
        print(f" profile of steps {of}", flush=True)
        targets = Targets(
            json=f"{start}.json", trace=f"{start}.trace.json", html=f"{start}.html", costs=None
        )
        try:
            start.parent.mkdir(parents=True, exist_ok=True)
            publish(recording, targets)
        except UserError as error:
            complain(str(error))
        except Exception as error:
            complain(f"{type(error).__name__}: {error}")

    def complain(why: str) -> None:
        line = f"megalatent: profile of steps {profile.steps}: {why}"
        print(line, file=sys.stderr, flush=True)

    # The step before the first one counts what visits keep.
    before = {steps.start - 1} if steps.start else set()
    return RunProfiler(
        steps=steps,
        count=before,
        replicas=profile.replicas,
        done=done,
        missed=lambda: complain("none, the run ended before them"),
    )
