"""`submit`: check a run, write its job script, and hand it to Slurm."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalatent.errors import UserError
from megalatent.launch import checks
from megalatent.launch.cluster_file import ClusterFile, is_variable, read_cluster_file
from megalatent.launch.failure import holds_secret
from megalatent.launch.mfu import flops_per_token
from megalatent.launch.render import Job, names_of_the_script, render
from megalatent.launch.runfolder import RunFolder, Submission, now, write_atomically
from megalatent.launch.setting_values import array_tasks
from megalatent.launch.settings import PREFIX, Settings, add_flags
from megalatent.launch.slurm import ACTIVE_STATES, Slurm
from megalatent.launch.versions import versions

__all__ = ["add_submit_parser", "run_submit_command"]

_DESCRIPTION = """\
Checks that a run fits the cluster, writes one self-contained job script into the run folder
(megatron.save, or runs/NAME), submits it, and says how to follow and how to stop it. The job is
resumed by itself after time limits, preemption, crashes and hangs, until the run is finished.

Every setting below can stand in three places, the first one found wins: the flag, the cluster file
(MEGALATENT_NODES=2, see slurm/cluster.env.example), and the config (launch: {nodes: 2}).
"""
_CLUSTER_FILES = ("slurm/cluster.env", "cluster.env")


def add_submit_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `submit` to the command line."""
    parser = subparsers.add_parser(
        "submit",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the config, for example --set megatron.lr=1e-3; may be repeated",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="variable for the job; without a value it comes from your shell; may be repeated",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help=f"cluster file (default: ${PREFIX}CLUSTER_ENV, or {' or '.join(_CLUSTER_FILES)})",
    )
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--dry-run", action="store_true", help="print the script and stop")
    doing.add_argument(
        "--test-only", action="store_true", help="ask Slurm whether it would take the job, and stop"
    )
    doing.add_argument("--watch", action="store_true", help="follow the run until it ends")
    add_flags(parser.add_argument_group("settings"))


def run_submit_command(args: argparse.Namespace) -> int:
    """Run `submit`; 0 where the job was handed in.

    Raises:
        UserError: something does not fit; nothing was written or submitted.
    """
    plan = _plan(args)
    for note in plan.notes:
        print(f"megalatent: note: {note}", file=sys.stderr)
    if args.dry_run:
        print(plan.script, end="")
        return 0
    slurm = Slurm()
    _refuse_if_busy(plan, slurm)
    answer = slurm.test_only(plan.script)
    if args.test_only:
        print(f"Slurm would take it: {answer}")
        return 0
    jobs = _submit(plan, slurm)
    _tell(plan, jobs)
    if args.watch:
        from megalatent.launch.status import watch

        return watch(plan.folder.path, slurm)
    return 0


@dataclass(frozen=True)
class _Plan:
    """A submission that has passed every check that needs no Slurm."""

    script: str
    folder: RunFolder
    config_text: str
    submission: Submission
    chain: int
    tasks: Sequence[int]
    notes: Sequence[str]

    def task_folder(self, task: int) -> RunFolder:
        return RunFolder(self.folder.path / f"task-{task}")

    def run_folders(self) -> list[RunFolder]:
        """The folder of the submission, and of an array those of its tasks."""
        return [self.folder, *map(self.task_folder, self.tasks)]


def _plan(args: argparse.Namespace) -> _Plan:
    from megalatent.config_megatron import parse
    from megalatent.config_yaml import apply_overrides, read_yaml

    fixed = [override for override in args.overrides if "{task}" not in override]
    for_task = [override for override in args.overrides if "{task}" in override]
    given = apply_overrides(read_yaml(args.config), fixed)
    cluster = read_cluster_file(_cluster_file(args.cluster))
    section = _section(given, "launch")
    settings = Settings.resolve(vars(args), cluster.settings, section, cluster.path)
    tasks = array_tasks(settings.array) if settings.array else []
    if for_task and not tasks:
        raise UserError(f"--set {for_task[0]}: {{task}} stands for an array task: add --array")
    ranks_per_node = settings.ranks_per_node or settings.gpus_per_node
    if not ranks_per_node:
        raise UserError(
            f"{settings.source('gpus_per_node')}: 0 GPUs give no number of processes: add"
            " --ranks-per-node"
        )
    environment = _environment(args.env, cluster)
    checks.check_settings(settings, ranks_per_node)

    name = settings.name or _name_for(args.config)
    run = _run_folder(given, settings, name)
    given = {**given, "megatron": {**_section(given, "megatron"), "save": str(run)}}
    samples = [override.replace("{task}", str(task)) for task in tasks for override in for_task]
    config = _load(args.config, given, samples[: len(for_task)])
    parsed = parse(config.megatron_argv())
    notes = checks.check_layout(parsed, settings, ranks_per_node)
    cores, about_cores = checks.cores_per_rank(parsed, settings)
    notes += about_cores
    # Every attempt repairs the run's checkpoints before its ranks start.
    config.check(settings.nodes * ranks_per_node, checkpoints_repaired=True)
    checks.check_paths(parsed, settings, run)
    notes += checks.check_disk(parsed, run)
    if tasks and not for_task:
        notes.append("no --set has {task} in it: the array trains the same run several times")

    targets = _targets(parsed)
    folder = RunFolder(run)
    mark = folder.finished()
    if mark is not None and not _goes_further(mark, targets, parsed):
        raise UserError(
            f"{run}: the run is finished at iteration {mark.get('iteration')}, and"
            f" {_describe(targets)} is not more: train longer, or give another --name"
        )
    job = Job(
        settings=settings,
        name=name,
        run=run,
        folder=Path.cwd(),
        ranks_per_node=ranks_per_node,
        cpus_per_task=cores,
        task_overrides=for_task,
        environment=environment,
        targets=targets,
        python=sys.executable,
        source=_source_folder(),
    )
    return _Plan(
        script=render(job),
        folder=folder,
        config_text=_config_text(given, args.config),
        submission=Submission(
            name=name,
            at=now(),
            target_iterations=targets.get("target_iterations"),
            target_samples=targets.get("target_samples"),
            tokens_per_sample=parsed.seq_length,
            flops_per_token=flops_per_token(parsed, config.latent),
            ranks=settings.nodes * settings.gpus_per_node,
        ),
        chain=settings.chain or 1,
        tasks=tasks,
        notes=notes,
    )


def _cluster_file(given: Path | None) -> Path | None:
    if given is not None:
        return Path(os.path.expanduser(given))
    named = os.environ.get(f"{PREFIX}CLUSTER_ENV")
    if named:
        return Path(named)
    return next((Path(path) for path in _CLUSTER_FILES if Path(path).is_file()), None)


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = given.get(name) or {}
    if not isinstance(section, dict):
        raise UserError(
            f"{name}: {repr(section)[:60]} is no section: write {name}: {{option: value}}"
        )
    return section


def _name_for(config: str) -> str:
    """The name of the file, without what job names and folders should not have in them."""
    return re.sub(r"[^\w.-]+", "-", Path(config).stem).strip(".-")[:100] or "run"


def _run_folder(given: Mapping[str, Any], settings: Settings, name: str) -> Path:
    save = _section(given, "megatron").get("save") or Path(settings.runs, name)
    if not isinstance(save, (str, Path)):
        raise UserError(f"megatron.save: {save!r} is no path: give a folder")
    return Path(os.path.expanduser(save)).absolute()


def _environment(given: Sequence[str], cluster: ClusterFile) -> dict[str, str]:
    """The job's variables of the cluster file and of `--env`, without secrets."""
    taken = names_of_the_script()
    for name in cluster.environment:
        if name in taken:
            raise UserError(f"{cluster.path}: {name}: job scripts use this name: choose another")
    environment = dict(cluster.environment)
    for item in given:
        name, equals, value = item.partition("=")
        if not is_variable(name):
            raise UserError(f"--env: {name!r} is no variable: write NAME or NAME=VALUE")
        if name in taken:
            raise UserError(f"--env {name}: job scripts use this name: choose another")
        if not equals and name not in os.environ:
            raise UserError(
                f"--env {name}: not set in your shell: export it, give --env {name}=VALUE where it"
                " is no secret, or leave it out"
            )
        value = value if equals else os.environ[name]
        if not holds_secret(name, value):
            environment[name] = value
        elif equals:
            raise UserError(
                f"--env {name}=…: a secret would stand in the job script: export it in your"
                f" shell and give --env {name}, or put it into a file for --secrets"
            )
        elif "ALL" not in os.environ.get("SBATCH_EXPORT", "ALL"):
            raise UserError(
                f"--env {name}: SBATCH_EXPORT={os.environ['SBATCH_EXPORT']} keeps your shell's"
                " variables from the job: put it into a file for --secrets"
            )
        # else the secret comes along, because Slurm hands the shell's variables to the job
    for name, value in environment.items():
        if re.search("[\ud800-\udfff]", value):  # bytes that Python could not read
            raise UserError(f"{name}: its value is not UTF-8 text, which a job script has to be")
    return environment


def _load(path: str, given: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    from megalatent.config import Config
    from megalatent.config_yaml import apply_overrides

    try:
        return Config.from_mapping(apply_overrides(dict(given), overrides))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _targets(parsed: argparse.Namespace) -> dict[str, int]:
    if parsed.train_iters is not None:
        return {"target_iterations": parsed.train_iters}
    return {"target_samples": parsed.train_samples}


def _describe(targets: Mapping[str, int]) -> str:
    ((name, value),) = targets.items()
    return f"{value} {name.removeprefix('target_')}"


def _goes_further(
    mark: Mapping[str, Any], targets: Mapping[str, int], parsed: argparse.Namespace
) -> bool:
    """Whether the config asks for more than a finished run has trained."""
    done = mark.get("iteration") or 0
    if "target_iterations" in targets:
        return targets["target_iterations"] > done
    return targets["target_samples"] > done * (parsed.global_batch_size or 1)


def _source_folder() -> Path | None:
    """The folder to import the package from where it is not installed."""
    try:
        importlib.metadata.distribution("megalatent")
    except importlib.metadata.PackageNotFoundError:
        return Path(__file__).absolute().parents[2]
    return None


def _config_text(given: Mapping[str, Any], origin: str) -> str:
    import yaml

    text: str = yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True)
    source = " ".join(str(Path(origin).absolute()).split())
    return f"# {source} with the overrides of this submission\n{text}"


def _refuse_if_busy(plan: _Plan, slurm: Slurm) -> None:
    jobs: set[str] = set()
    for folder in plan.run_folders():
        known = (*folder.read_submission().jobs, *folder.read_state().jobs)
        jobs |= {job.partition("_")[0] for job in known}  # a task's array stands for it
    for job in sorted(jobs):
        state = slurm.job_state(job)
        if state == "PENDING" or state in ACTIVE_STATES:
            raise UserError(
                f"{plan.folder.path} is in use by job {job} ({state.lower()}): wait for it, stop it"
                f" with 'scancel {job}', or give this run another --name"
            )


def _submit(plan: _Plan, slurm: Slurm) -> list[str]:
    folder = plan.folder
    folder.logs.mkdir(parents=True, exist_ok=True)
    write_atomically(folder.config, plan.config_text)
    write_atomically(folder.environment, versions())
    write_atomically(folder.script, plan.script)
    for run in plan.run_folders():
        _clear_verdict(run)
    jobs: list[str] = []
    try:
        for _ in range(plan.chain):
            after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
            jobs.append(slurm.submit(str(folder.script), after))
        _write_down(plan, jobs)
    except BaseException:  # half a chain, or jobs that nobody knows of, are of no use; also Ctrl-C
        if jobs:
            slurm.cancel(jobs)
        raise
    return jobs


def _write_down(plan: _Plan, jobs: list[str]) -> None:
    submission = replace(plan.submission, jobs=jobs)
    plan.folder.write_submission(submission)
    for task in plan.tasks:
        run = plan.task_folder(task)
        run.path.mkdir(exist_ok=True)
        name = f"{submission.name}/{run.path.name}"
        run.write_submission(replace(submission, name=name, jobs=[f"{jobs[0]}_{task}"]))


def _clear_verdict(folder: RunFolder) -> None:
    """A person starts the run again: earlier failures no longer count."""
    folder.finished_mark.unlink(missing_ok=True)
    if folder.state_file.exists():
        state = folder.read_state()
        state.status, state.reason, state.failures, state.excluded = "submitted", "", 0, {}
        folder.write_state(state)


def _tell(plan: _Plan, jobs: Sequence[str]) -> None:
    what = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {', '.join(jobs)}, one after another"
    print(f"submitted {what}")
    print(f"  run folder  {plan.folder.path}")
    print(f"  log         {plan.folder.rank0_log if not plan.tasks else plan.folder.logs}")
    print(f"  follow      megalatent status {plan.folder.path}")
    print(f"  cancel      scancel {' '.join(jobs)}")
