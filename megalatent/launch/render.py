"""Fills in the job template: the marked blocks of `slurm/pretrain.sbatch`, and nothing else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalatent.launch.setting_values import option_lines
from megalatent.launch.settings import SETTINGS, Settings

__all__ = ["Job", "names_of_the_script", "render", "template"]

_TEMPLATES = Path(__file__).with_name("templates")
_TASK = "$SLURM_ARRAY_TASK_ID"


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a script needs.

    Attributes:
        run: run folder; of an array, the folder that holds one run folder per task.
        folder: where relative paths of the config start, the folder of the submission.
        cpus_per_task: cores of each process; None: what Slurm gives.
        task_overrides: `section.key=value` with `{task}` for the number of the array task.
        environment: variables for the job, from the cluster file and `--env`.
        targets: `target_iterations` or `target_samples`.
        python: interpreter of the job where no other is set.
        source: the folder that holds the package where it is not installed.
    """

    settings: Settings
    name: str
    run: Path
    folder: Path
    ranks_per_node: int
    cpus_per_task: int | None = None
    task_overrides: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)
    python: str = "python"
    source: Path | None = None


def template(name: str) -> str:
    """The text of a template in `slurm/`."""
    return (_TEMPLATES / f"{name}.sbatch").read_text(encoding="utf-8")


def names_of_the_script() -> frozenset[str]:
    """Variables that the job script sets for itself, which no environment may."""
    return frozenset(re.findall(r"^ *([A-Z_]+)\+?=", template("pretrain"), re.MULTILINE))


def render(job: Job) -> str:
    """The job script: self-contained, readable, and the same for the same job."""
    text = template("pretrain")
    head = [
        f"# The run {job.name}, on {_nodes(job)}. Written by `megalatent submit`.",
        f"#   sbatch {shlex.quote(str(job.run / 'job.sbatch'))}    starts it again by hand",
        "",
    ]
    text = re.sub(r"(?s)(?<=#!/bin/bash\n).*?(?=# >>> options)", _lines(head), text, count=1)
    text = _fill(text, "options for sbatch", _options(job))
    return _fill(text, "settings", _settings(job))


def _nodes(job: Job) -> str:
    nodes, gpus = job.settings.nodes, job.settings.gpus_per_node
    plural = "s" if nodes > 1 else ""
    what = f"{gpus} GPUs" if gpus else f"{job.ranks_per_node} processes on CPUs"
    return f"{nodes} node{plural} with {what}{' each' if nodes > 1 else ''}"


def _options(job: Job) -> Iterable[str]:
    settings = job.settings
    log = "slurm-%A_%a.log" if settings.array else "slurm-%j.log"
    yield f"#SBATCH --job-name={shlex.quote(job.name)}"
    yield f"#SBATCH --nodes={settings.nodes}"
    yield f"#SBATCH --ntasks-per-node={job.ranks_per_node}"
    if settings.gpus_per_node:
        yield f"#SBATCH --gpus-per-node={settings.gpus_per_node}"
    if job.cpus_per_task:
        yield f"#SBATCH --cpus-per-task={job.cpus_per_task}"
    for setting in SETTINGS:
        if setting.sbatch and setting.name not in ("name", "nodes") and settings[setting.name]:
            yield f"#SBATCH {setting.sbatch}={shlex.quote(str(settings[setting.name]))}"
    if settings.mail:
        yield "#SBATCH --mail-type=BEGIN,END,FAIL,REQUEUE,TIME_LIMIT"
    yield f"#SBATCH --chdir={shlex.quote(str(job.folder))}"
    logs = str(job.run / "logs").replace("%", "%%")  # Slurm's mark for what it fills in
    yield f"#SBATCH --output={shlex.quote(f'{logs}/{log}')}"
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --requeue"
    yield f"#SBATCH --signal=B:USR1@{settings.signal_lead}"
    for line in option_lines(settings.sbatch_options or ""):
        yield f"#SBATCH {line}"


def _settings(job: Job) -> Iterable[str]:
    settings = job.settings
    run = shlex.quote(str(job.run))
    yield f"CONFIG={shlex.quote(str(job.run / 'config.yaml'))}"
    yield f"RUN={run}/task-{_TASK}" if settings.array else f"RUN={run}"
    overrides = [f"--set {_for_task(override)}" for override in job.task_overrides]
    yield f"OVERRIDES=({' '.join(overrides)})"
    yield "unset ${!MEGALATENT_@} # of the shell that submitted this: what counts stands here"
    if job.source is not None:
        source = shlex.quote(str(job.source))
        yield f"export PYTHONPATH={source}${{PYTHONPATH:+:$PYTHONPATH}}"
    if not settings.python and not settings.venv:
        yield _export("MEGALATENT_PYTHON", job.python)
    if settings.gpus_per_node:
        yield _export("MEGALATENT_GPUS_TO_CHECK", settings.gpus_per_node)
    for name, target in job.targets.items():
        yield _export(f"MEGALATENT_{name.upper()}", target)
    for setting in SETTINGS:
        if setting.exported and settings[setting.name] is not None:
            yield _export(setting.variable, settings[setting.name])
    for name, value in job.environment.items():
        yield _export(name, value)


def _for_task(override: str) -> str:
    """`a={task}b` -> `a="$SLURM_ARRAY_TASK_ID"b`, the rest quoted."""
    parts = (shlex.quote(part) if part else "" for part in override.split("{task}"))
    return f'"{_TASK}"'.join(parts)


def _export(name: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"export {name}={shlex.quote(text)}"


def _fill(text: str, block: str, lines: Iterable[str]) -> str:
    begin, end = f"# >>> {block}\n", f"# <<< {block}\n"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return before + begin + _lines(lines) + end + after


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
