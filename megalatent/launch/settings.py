"""The settings of a submission: one table, three places to set them.

A setting `gpus_per_node` is the flag `--gpus-per-node`, the variable
`MEGALATENT_GPUS_PER_NODE` of the cluster file, and `launch.gpus_per_node` of the config. Flags come
first, then the cluster file, then the config.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalatent.config_values import nearest
from megalatent.errors import UserError
from megalatent.launch import setting_values as kinds

__all__ = ["PREFIX", "SETTINGS", "Setting", "Settings", "add_flags"]

PREFIX = "MEGALATENT_"


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
    Setting("nodes", kinds.count, "nodes of the job", "--nodes", default=1),
    Setting("gpus_per_node", kinds.count_or_none, "GPUs of each node; 0: train on CPUs", default=8),
    Setting("ranks_per_node", kinds.count, "processes on each node (default: one per GPU)"),
    Setting("cpus_per_task", kinds.count, "CPU cores of each process (default with GPUs: enough)"),
    Setting("mem", kinds.word, "memory of each node, such as 500G", "--mem"),
    Setting("time", kinds.duration, "time limit of one job, such as 24:00:00", "--time"),
    Setting("account", kinds.word, "account that is charged", "--account"),
    Setting("partition", kinds.word, "partition to run in", "--partition"),
    Setting("qos", kinds.word, "quality of service", "--qos"),
    Setting("reservation", kinds.word, "reservation to run in", "--reservation"),
    Setting("constraint", kinds.word, "features that nodes must have", "--constraint"),
    Setting("exclude", kinds.word, "nodes to leave out", "--exclude"),
    Setting(
        "array",
        kinds.array,
        "one run per array task; {task} in --set becomes its number",
        "--array",
    ),
    Setting(
        "dependency",
        kinds.dependency,
        "start after other jobs, such as afterok:123",
        "--dependency",
    ),
    Setting("mail", kinds.word, "address that is told of start, end and failure", "--mail-user"),
    Setting("sbatch_options", kinds.options, "further options for sbatch, such as --exclusive"),
    Setting("container", kinds.path, "container image (pyxis and enroot)", exported=True),
    Setting("mounts", kinds.word, "container mounts, FROM:TO,…", exported=True),
    Setting("container_python", kinds.word, "Python inside the container", exported=True),
    Setting("modules", kinds.words, "modules to load, separated by spaces", exported=True),
    Setting("venv", kinds.path, "virtual environment to activate", exported=True),
    Setting(
        "python", kinds.path, "Python of the job (default: the one that runs submit)", exported=True
    ),
    Setting("secrets", kinds.path, "file of NAME=VALUE lines that the job reads", exported=True),
    Setting(
        "launcher", kinds.choice("srun", "torchrun", "ft"), "what starts the ranks", exported=True
    ),
    Setting(
        "max_restarts", kinds.count_or_none, "restarts inside the job (torchrun, ft)", exported=True
    ),
    Setting("ft_config", kinds.path, "configuration file of nvidia-resiliency-ext", exported=True),
    Setting("entry", kinds.path, "script of yours in place of `megalatent train`", exported=True),
    Setting("name", kinds.name, "name of the run (default: the config's)", "--job-name"),
    Setting(
        "chain", kinds.count, "jobs that follow one another, each for one time limit", exported=True
    ),
    Setting(
        "max_requeues",
        kinds.count_or_none,
        "give up after so many failures in a row without a new checkpoint (default 10)",
        exported=True,
    ),
    Setting("signal_lead", kinds.count, "seconds before the time limit to save", default=300),
    Setting(
        "back_off_seconds", kinds.amount, "wait after a failure, doubled each time", exported=True
    ),
    Setting(
        "hang_minutes",
        kinds.amount,
        "without progress for so long: a hang; 0: never",
        exported=True,
    ),
    Setting("startup_minutes", kinds.amount, "the same until the first step", exported=True),
    Setting(
        "node_check",
        kinds.choice("off", "basic", "full"),
        "before the first step: full adds an all-reduce",
        exported=True,
    ),
    Setting("node_check_seconds", kinds.positive, "a node silent for longer is bad", exported=True),
    Setting("min_bandwidth", kinds.amount, "GB/s that the all-reduce must reach", exported=True),
    Setting(
        "runs", kinds.path, "folder for runs whose config has no megatron.save", default="runs"
    ),
    Setting("shared_paths", kinds.word, "folders that all nodes see, A:B:…", default=""),
    Setting(
        "node_local_paths",
        kinds.word,
        "folders that each node has its own of, A:B:…",
        default="/tmp:/var/tmp:/dev/shm:/scratch/local:/local",
    ),
)


class Settings:
    """The value of each setting and where it comes from: `settings.nodes`, `settings["nodes"]`."""

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self._values = values
        self._sources = sources

    @classmethod
    def resolve(
        cls,
        flags: Mapping[str, str],
        cluster: Mapping[str, str],
        config: Mapping[str, Any],
        cluster_file: object = "cluster file",
    ) -> Settings:
        """Flags before cluster file before config before defaults.

        Args:
            flags, config: values by the name of the setting.
            cluster: by the name of the variable.
            cluster_file: its name, for messages.

        Raises:
            UserError: an unknown name, or a value that makes no sense; says where it stands.
        """
        names = [setting.name for setting in SETTINGS]
        for key in config:
            _refuse_unknown(key, f"launch.{key}", names)
        variables = [setting.variable for setting in SETTINGS]
        for variable in cluster:
            _refuse_unknown(variable, f"{cluster_file}: {variable}", variables)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for setting in SETTINGS:
            name = setting.name
            places = (
                (setting.flag, flags.get(name)),
                (f"{cluster_file}: {setting.variable}", cluster.get(setting.variable)),
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


def _refuse_unknown(name: str, where: str, names: Sequence[str]) -> None:
    if name not in names:
        close = nearest(name, names)
        hint = f"did you mean {close}?" if close else "`megalatent submit --help` lists them"
        raise UserError(f"{where}: no such setting: {hint}")


def _parsed(setting: Setting, given: Any, source: str) -> Any:
    if isinstance(given, (bool, list, dict)):
        raise UserError(f"{source}: {given!r} is not a single value")
    try:
        return setting.parse(str(given))
    except ValueError as error:
        raise UserError(f"{source}: {given!r} {error}") from None
