"""The settings of a submission: one table, three places to set them.

A setting `gpus_per_node` is the flag `--gpus-per-node`, the variable
`MEGALATENT_GPUS_PER_NODE` of the cluster file, and `launch.gpus_per_node` of the config. Flags come
first, then the cluster file, then the config.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalatent.config_values import nearest
from megalatent.errors import UserError
from megalatent.launch.failure import is_secret

__all__ = [
    "SETTINGS",
    "ClusterFile",
    "Setting",
    "Settings",
    "add_flags",
    "minutes_of",
    "read_cluster_file",
]

PREFIX = "MEGALATENT_"


def _count(text: str) -> int:
    return _number(text, 1)


def _count_or_none(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise ValueError(f"is not a whole number of {least} or more")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not 0 <= value < float("inf"):
        raise ValueError("is not a number of 0 or more")
    return value


def _duration(text: str) -> str:
    minutes_of(text)
    return text


def minutes_of(text: str) -> float:
    """Minutes of a time as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise ValueError("is no time: write minutes, hours:minutes:seconds or days-hours")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    total = int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60
    if total <= 0:
        raise ValueError("is no time above zero")
    return total


def _array(text: str) -> str:
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", text):
        raise ValueError("is no list of array tasks: write 0-3, 1,2,5 or 0-15%4")
    return text


def _dependency(text: str) -> str:
    kind = r"(after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)(:\d+(_\d+)?(\+\d+)?)+"
    if not re.fullmatch(rf"({kind}|singleton)([,?]({kind}|singleton))*", text):
        raise ValueError("is no dependency: write afterany:JOB or afterok:JOB")
    return text


def _word(text: str) -> str:
    if not text or re.search(r"\s", text):
        raise ValueError("is not one word")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text):
        raise ValueError("is no name: use letters, digits, dot, dash and underscore")
    return text


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"is none of {', '.join(names)}")
        return text

    return parse


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: with underscores.
        parse: text to value; a `ValueError` says what is wrong with the text.
        help: one line.
        sbatch: the option of sbatch that it becomes.
        exported: handed to the job script as a variable.
        default: where nobody sets it.
    """

    name: str
    parse: Callable[[str], Any]
    help: str
    sbatch: str | None = None
    exported: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


SETTINGS = (
    Setting("nodes", _count, "nodes of the job", "--nodes", default=1),
    Setting("gpus_per_node", _count_or_none, "GPUs of each node; 0: train on CPUs", default=8),
    Setting("ranks_per_node", _count, "processes on each node (default: one per GPU)"),
    Setting("cpus_per_task", _count, "CPU cores of each process", "--cpus-per-task"),
    Setting("mem", _word, "memory of each node, such as 500G", "--mem"),
    Setting("time", _duration, "time limit of one job, such as 24:00:00", "--time"),
    Setting("account", _word, "account that is charged", "--account"),
    Setting("partition", _word, "partition to run in", "--partition"),
    Setting("qos", _word, "quality of service", "--qos"),
    Setting("reservation", _word, "reservation to run in", "--reservation"),
    Setting("constraint", _word, "features that nodes must have", "--constraint"),
    Setting("exclude", _word, "nodes to leave out", "--exclude"),
    Setting(
        "array", _array, "one run per array task; {task} in --set becomes its number", "--array"
    ),
    Setting(
        "dependency", _dependency, "start after other jobs, such as afterok:123", "--dependency"
    ),
    Setting("mail", _word, "address that is told of start, end and failure", "--mail-user"),
    Setting("sbatch_options", str, "further options for sbatch, such as --exclusive"),
    Setting("container", _word, "container image (pyxis and enroot)", exported=True),
    Setting("mounts", _word, "container mounts, FROM:TO,…", exported=True),
    Setting("container_python", _word, "Python inside the container", exported=True),
    Setting("modules", str, "modules to load, separated by spaces", exported=True),
    Setting("venv", _word, "virtual environment to activate", exported=True),
    Setting(
        "python", _word, "Python of the job (default: the one that runs submit)", exported=True
    ),
    Setting("secrets", _word, "file of NAME=VALUE lines that the job reads", exported=True),
    Setting("launcher", _choice("srun", "torchrun", "ft"), "what starts the ranks", exported=True),
    Setting(
        "max_restarts", _count_or_none, "restarts inside the job (torchrun, ft)", exported=True
    ),
    Setting("ft_config", _word, "configuration file of nvidia-resiliency-ext", exported=True),
    Setting("entry", _word, "script of yours in place of `megalatent train`", exported=True),
    Setting("name", _name, "name of the run (default: the config's)", "--job-name"),
    Setting(
        "chain", _count, "jobs that follow one another, each for one time limit", exported=True
    ),
    Setting(
        "max_requeues",
        _count_or_none,
        "give up after so many failures in a row without a new checkpoint (default 10)",
        exported=True,
    ),
    Setting("signal_lead", _count, "seconds before the time limit to save", default=300),
    Setting("back_off_seconds", _amount, "wait after a failure, doubled each time", exported=True),
    Setting("hang_minutes", _amount, "without progress for so long: a hang", exported=True),
    Setting("startup_minutes", _amount, "the same until the first step", exported=True),
    Setting(
        "node_check",
        _choice("off", "basic", "full"),
        "before the first step: full adds an all-reduce",
        exported=True,
    ),
    Setting("node_check_seconds", _amount, "a node silent for longer is bad", exported=True),
    Setting("min_bandwidth", _amount, "GB/s that the all-reduce must reach", exported=True),
    Setting("runs", _word, "folder for runs whose config has no megatron.save", default="runs"),
    Setting("shared_paths", _word, "folders that all nodes see, A:B:…", default=""),
    Setting(
        "node_local_paths",
        _word,
        "folders that each node has its own of, A:B:…",
        default="/tmp:/var/tmp:/dev/shm:/scratch/local:/local",
    ),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True)
class ClusterFile:
    """What a site sets: our settings as text, and the environment of the job."""

    path: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Settings:
    """The value of each setting and where it comes from: `settings.nodes`, `settings["nodes"]`."""

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self._values = values
        self._sources = sources

    @classmethod
    def resolve(
        cls, flags: Mapping[str, str], cluster: ClusterFile, config: Mapping[str, Any]
    ) -> Settings:
        """Flags before cluster file before config before defaults.

        Raises:
            UserError: an unknown name, or a value that makes no sense; says where it stands.
        """
        for key in config:
            _known(key, f"launch.{key}", list(_BY_NAME))
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for setting in SETTINGS:
            name = setting.name
            places = (
                (setting.flag, flags.get(name)),
                (f"{cluster.path}: {setting.variable}", cluster.settings.get(name)),
                (f"launch.{name}", config.get(name)),
            )
            values[name], sources[name] = setting.default, f"default of {setting.flag}"
            for source, given in places:
                if given is not None and given != "":
                    values[name], sources[name] = _parsed(setting, given, source), source
                    break
        return cls(values, sources)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def source(self, name: str) -> str:
        """Where the value comes from, as a user would find it."""
        return self._sources[name]

    def is_set(self, name: str) -> bool:
        return not self._sources[name].startswith("default")


def add_flags(parser: argparse._ActionsContainer) -> None:
    """Add one flag per setting; the values stay text until `Settings.resolve`."""
    for setting in SETTINGS:
        default = f" (default {setting.default})" if setting.default not in (None, "") else ""
        parser.add_argument(setting.flag, metavar="…", help=setting.help + default)


def read_cluster_file(path: Path | None) -> ClusterFile:
    """Read a cluster file, which is shell: what it sets, seen by bash.

    Raises:
        UserError: missing, not shell, an unknown `MEGALATENT_` variable, or a secret in it.
    """
    if path is None:
        return ClusterFile()
    if not path.is_file():
        raise UserError(f"{path}: no such cluster file: copy slurm/cluster.env.example")
    command = 'set -eu; set -a; . "$1"; env -0'
    bare = {name: os.environ[name] for name in ("PATH", "HOME", "USER") if name in os.environ}
    done = subprocess.run(
        ["bash", "--norc", "-c", command, "bash", str(path.absolute())],
        capture_output=True,
        env=bare,
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{path}: bash cannot read it: {said[-1] if said else 'no reason given'}")
    seen = dict(
        pair.split("=", 1) for pair in done.stdout.decode(errors="replace").split("\0") if pair
    )
    ignored = {*bare, "PWD", "OLDPWD", "SHLVL", "_"}
    settings: dict[str, str] = {}
    environment: dict[str, str] = {}
    for name, value in seen.items():
        if name in ignored:
            continue
        if is_secret(name):
            raise UserError(
                f"{path}: {name} would be written into job scripts: move it into a file that only"
                f" you can read, and name that file in {PREFIX}SECRETS"
            )
        if not name.startswith(PREFIX):
            environment[name] = value
            continue
        key = name.removeprefix(PREFIX).lower()
        _known(key, f"{path}: {name}", list(_BY_NAME), PREFIX)
        settings[key] = value
    return ClusterFile(path, settings, environment)


def _known(key: str, where: str, names: list[str], prefix: str = "") -> None:
    if key in names:
        return
    close = nearest(key, names)
    shown = (prefix + close.upper() if prefix else close) if close else ""
    hint = f"did you mean {shown}?" if close else "`megalatent submit --help` lists them"
    raise UserError(f"{where}: no such setting: {hint}")


def _parsed(setting: Setting, given: Any, source: str) -> Any:
    if isinstance(given, (bool, list, dict)):
        raise UserError(f"{source}: {given!r} is not a single value")
    try:
        return setting.parse(str(given))
    except ValueError as error:
        raise UserError(f"{source}: {given!r} {error}") from None
