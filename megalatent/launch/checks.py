"""What must fit before a job is worth submitting; every failure names the two things that disagree.

The config's own contradictions are `Config.check`'s. Here: the cluster's side of it.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalatent.errors import UserError
from megalatent.launch.cluster_file import check_secrets_file
from megalatent.launch.setting_values import minutes_of, option_lines
from megalatent.launch.settings import SETTINGS, Settings

__all__ = [
    "check_disk",
    "check_layout",
    "check_paths",
    "check_settings",
    "checkpoint_bytes",
    "cores_per_rank",
]

_GB = 1e9
# A GPU's rank beside its data loaders: main and backward thread, NCCL, and writing checkpoints.
_CORES_OF_A_RANK = 6
# Short options of sbatch, by the setting that stands for them.
_SHORT = {
    "-N": "nodes", "-c": "cpus_per_task", "-t": "time", "-A": "account", "-p": "partition",
    "-q": "qos", "-C": "constraint", "-x": "exclude", "-a": "array", "-d": "dependency",
    "-J": "name",
}  # fmt: skip
_FILE_SYSTEMS_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check_settings(settings: Settings, ranks_per_node: int) -> None:
    """Contradictions between settings.

    Raises:
        UserError: the first one.
    """
    limit = minutes_of(settings.time) * 60 if settings.time else None
    if limit is not None and settings.signal_lead >= limit:
        raise UserError(
            f"{settings.source('signal_lead')}: {settings.signal_lead} s before the end is before"
            f" the start of a job of {limit:.0f} s: give a shorter --signal-lead or a longer --time"
        )
    gpus = settings.gpus_per_node
    if gpus and ranks_per_node > gpus:
        raise UserError(
            f"{settings.source('ranks_per_node')}: {ranks_per_node} processes need a GPU each, and"
            f" a node has {gpus}: give at most {gpus}, or more --gpus-per-node"
        )
    if settings.chain and settings.chain > 1 and settings.array:
        raise UserError(
            f"{settings.source('chain')}: {settings.chain} jobs in a row and the array"
            f" {settings.array} exclude each other: each task of an array is requeued by itself"
        )
    if settings.mounts and not settings.container:
        raise UserError(
            f"{settings.source('mounts')}: {settings.mounts} without a container: add --container"
        )
    for mount in (settings.mounts or "").split(","):
        source = mount.split(":")[0]
        if source and not Path(source).exists():
            raise UserError(f"{settings.source('mounts')}: {source}: no such file or folder")
    if settings.secrets and Path(settings.secrets).is_file():
        try:
            check_secrets_file(Path(settings.secrets))
        except UserError as error:
            raise UserError(f"{settings.source('secrets')}: {error}") from None
    _refuse_options_of_ours(settings)
    if settings.launcher == "ft" and not settings.container:
        from importlib.util import find_spec

        if find_spec("nvidia_resiliency_ext") is None:
            raise UserError(
                f"{settings.source('launcher')}: ft needs the package nvidia-resiliency-ext, which"
                " is not installed here: install it, or use --launcher srun"
            )


def _refuse_options_of_ours(settings: Settings) -> None:
    """An option of sbatch that is a setting too would undo what has been checked."""
    names = {"--ntasks-per-node": "ranks_per_node", "--gpus-per-node": "gpus_per_node", **_SHORT}
    names |= {setting.sbatch: setting.name for setting in SETTINGS if setting.sbatch}
    for line in option_lines(settings.sbatch_options or ""):
        option = re.split("[ =]", line)[0]
        name = names.get(option if option.startswith("--") else option[:2])
        if name:
            raise UserError(
                f"{settings.source('sbatch_options')}: {line}: give it as"
                f" --{name.replace('_', '-')}, which is checked"
            )


def cores_per_rank(args: argparse.Namespace, settings: Settings) -> tuple[int | None, list[str]]:
    """CPU cores of each rank, and a note where nobody has said how many.

    Slurm itself gives one to each task, for which the rank's threads and data loaders would fight.

    Args:
        args: Megatron's options.
    """
    options = option_lines(settings.sbatch_options or "")
    said = any(line == "--exclusive" or line.startswith("--cpus-per-gpu") for line in options)
    if settings.cpus_per_task or not settings.gpus_per_node or said:
        return settings.cpus_per_task, []
    cores = _CORES_OF_A_RANK + args.num_workers
    return cores, [
        f"each rank gets {cores} CPU cores ({args.num_workers} data loaders and"
        f" {_CORES_OF_A_RANK} for the rank): --cpus-per-task, or MEGALATENT_CPUS_PER_TASK in the"
        " cluster file, says what a node has for each GPU"
    ]


def check_layout(args: argparse.Namespace, settings: Settings, ranks_per_node: int) -> list[str]:
    """Whether the ranks hold whole copies of the model, in the words of a submission.

    Args:
        args: Megatron's options.

    Returns:
        what is allowed but slow, a sentence each.
    """
    nodes = settings.nodes
    world = nodes * ranks_per_node
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    ranks = f"{nodes} nodes x {ranks_per_node} ranks = {world} ranks"
    size = tp * pp * cp
    if world % size:
        raise UserError(
            f"{settings.source('nodes')}: {ranks} cannot hold whole copies of a model on"
            f" {size} = tensor {tp} x pipeline {pp} x context {cp} ranks: {world} is not a"
            f" multiple of {size}, change --nodes or the layout"
        )
    experts = (args.expert_tensor_parallel_size or tp) * ep * pp
    if args.num_experts and world % experts:
        raise UserError(
            f"{settings.source('nodes')}: {ranks} cannot hold the experts, which are spread over"
            f" {experts} = tensor x expert {ep} x pipeline {pp} ranks: {world} is not a multiple"
            f" of {experts}, change --nodes or megatron.expert_model_parallel_size"
        )
    if tp > ranks_per_node and nodes > 1:
        return [
            f"tensor parallelism over {tp} ranks crosses nodes of {ranks_per_node}: every layer"
            " waits for the network"
        ]
    return []


@dataclass(frozen=True)
class _Named:
    """A path and where the user wrote it."""

    where: str
    path: Path
    must_exist: bool


def check_paths(args: argparse.Namespace, settings: Settings, run: Path) -> None:
    """What the ranks read and write is there, and on a file system that all nodes see.

    Raises:
        UserError: the first path that is missing or that each node has its own of.
    """
    for where, folder in (("megatron.save", run), ("the folder you are in", Path.cwd())):
        if not str(folder).isprintable() or "\\" in str(folder):
            raise UserError(
                f"{where}: {str(folder)!r} has a line break, a backslash or the like in it, which"
                " no job script can name: use another"
            )
    if settings.container and re.search("[:,]", str(run)):
        raise UserError(f"megatron.save: {run}: a container cannot mount a path with : or , in it")
    for named in _paths(args, settings, run):
        path = named.path.absolute()
        if named.must_exist and not path.exists():
            raise UserError(f"{named.where}: {path}: no such file or folder")
        if settings.nodes > 1:
            _check_shared(named.where, path, settings)


def _paths(args: argparse.Namespace, settings: Settings, run: Path) -> Iterator[_Named]:
    yield _Named("megatron.save", run, must_exist=False)
    for name in ("load", "pretrained_checkpoint", "tokenizer_model", "vocab_file", "merge_file"):
        value = getattr(args, name, None)
        if value is not None and (name != "tokenizer_model" or Path(value).exists()):
            # a folder that is also saved to may be made by the run
            must_exist = not (name == "load" and Path(value).absolute() == run)
            yield _Named(f"megatron.{name}", Path(value), must_exist)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for entry in getattr(args, name, None) or ():
            if not _is_number(entry):
                yield _Named(f"megatron.{name}", Path(f"{entry}.bin"), must_exist=True)
    if args.data_cache_path:
        yield _Named("megatron.data_cache_path", Path(args.data_cache_path), must_exist=False)
    for name, inside in (
        ("venv", "bin/activate"),
        ("entry", ""),
        ("secrets", ""),
        ("ft_config", ""),
    ):
        if settings[name]:
            yield _Named(settings.source(name), Path(settings[name], inside), must_exist=True)
    if settings.python and "/" in settings.python:  # else a command
        yield _Named(settings.source("python"), Path(settings.python), must_exist=True)
    if settings.container and settings.container.startswith(("/", "./", "../")):
        yield _Named(settings.source("container"), Path(settings.container), must_exist=True)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_shared(where: str, path: Path, settings: Settings) -> None:
    def under(folders: str) -> Path | None:
        tops = [Path(folder) for folder in folders.split(":") if folder]
        return next((top for top in tops if path.is_relative_to(top)), None)

    if under(settings.shared_paths):
        return
    top = under(settings.node_local_paths)
    if top is None and _file_system(path) in _FILE_SYSTEMS_IN_MEMORY:
        top = Path(_mount_point(path))
    if top:
        raise UserError(
            f"{where}: {path} is in {top}, of which each of the {settings.nodes} nodes has its own:"
            f" use a shared folder, or name it in --shared-paths if it is one"
        )


def _mounts() -> list[tuple[str, str]]:
    """Mount points with their kind of file system, the deepest first."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return []
    found = [(parts[1], parts[2]) for parts in (line.split() for line in lines)]
    return sorted(found, key=lambda pair: -len(pair[0]))


def _mount_point(path: Path) -> str:
    return next((at for at, _ in _mounts() if path.is_relative_to(at)), "/")


def _file_system(path: Path) -> str:
    return next((kind for at, kind in _mounts() if path.is_relative_to(at)), "")


def check_disk(args: argparse.Namespace, run: Path) -> list[str]:
    """Room for checkpoints: at least two, because the older one must stay until the newer is whole.

    Returns:
        a note where not all of them fit.

    Raises:
        UserError: not even two do.
    """
    existing = run.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    each = checkpoint_bytes(args)
    if free < 2 * each:
        raise UserError(
            f"megatron.save: two checkpoints of {each / _GB:.1f} GB need {2 * each / _GB:.1f} GB,"
            f" but {existing} has {free / _GB:.1f} GB free: make room, or save elsewhere"
        )
    saves = (args.train_iters or 0) // args.save_interval
    kept = args.save_retain_interval or args.save_interval
    saves = min(saves, (args.train_iters or 0) // kept + 2)
    if saves * each > free:
        return [
            f"{saves} checkpoints of {each / _GB:.1f} GB come to {saves * each / _GB:.0f} GB, but"
            f" {existing} has {free / _GB:.0f} GB free: set megatron.save_retain_interval"
        ]
    return []


def checkpoint_bytes(args: argparse.Namespace) -> float:
    """Size of a checkpoint with Adam's state: 12 bytes a parameter, 14 in 16-bit training."""
    return _parameters(args) * (14 if args.bf16 or args.fp16 else 12)


def _parameters(args: argparse.Namespace) -> float:
    """Parameters of the transformer, the fusion's few left out."""
    hidden, layers = args.hidden_size, args.num_layers or 0
    head = args.kv_channels or hidden // args.num_attention_heads
    queries = head * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    attention = hidden * (2 * queries + 2 * head * groups)
    matrices = 3 if args.swiglu else 2
    dense = matrices * hidden * (args.ffn_hidden_size or 4 * hidden)
    mixture = (
        matrices
        * hidden
        * (args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * hidden)
        * (args.num_experts or 0)
    )
    embeddings = 2 if args.untie_embeddings_and_output_weights else 1
    return embeddings * (args.vocab_size or 50_000) * hidden + layers * (
        attention + (mixture or dense)
    )
