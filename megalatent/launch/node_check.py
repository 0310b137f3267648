"""Is this node fit to train? Runs before the first step, and leaves a file per node.

    srun … python -m megalatent.launch.node_check --mode basic --results FOLDER --gpus 8

`FOLDER/HOST.json` holds `problems` (this node's own), `consequences` (what another node may have
caused) and `facts`. The mode `basic` looks at the node alone and imports no torch; `all-reduce`
sums over the GPUs of each node, then over all, and measures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megalatent.launch.slurm_rank import set_place

__all__ = ["NodeReport", "check_gpus", "check_links", "check_memory", "main"]

_MIN_FREE_MEMORY = 0.05
_MAX_USED_GPU_MEMORY_MIB = 2048
_WRITE_BYTES = 1 << 20
_SLOW_WRITE_SECONDS = 20.0

RunCommand = Callable[[Sequence[str]], str | None]


@dataclass
class NodeReport:
    """What one node found out about itself."""

    host: str
    problems: list[str] = field(default_factory=list)
    consequences: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    gpu: str | None = None

    def write(self, folder: Path) -> None:
        path = folder / f"{self.host}.json"
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Check and leave a report; 0 unless the all-reduce failed, which ends the other ranks too."""
    options = _parser().parse_args(argv)
    set_place(os.environ)
    report = NodeReport(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    if options.mode == "all-reduce":
        return _check_all_reduce(options, report)
    if os.environ["LOCAL_RANK"] == "0":
        report.problems += check_memory(Path("/proc/meminfo").read_text())
        report.problems += _check_shared_folder(options.results, report)
        if options.gpus:
            report.problems += check_gpus(options.gpus, _command)
            report.problems += check_links(_command)
            names = _query(_command, "name")
            report.gpu = names[0][0] if names else None
        report.write(options.results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalatent.launch.node_check")
    parser.add_argument("--mode", choices=("basic", "all-reduce"), default="basic")
    parser.add_argument("--results", type=Path, required=True, help="shared folder for the reports")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that this node must have")
    parser.add_argument("--seconds", type=float, default=300.0, help="a longer all-reduce is stuck")
    parser.add_argument("--min-bandwidth", type=float, default=0.0, help="GB/s across the nodes")
    return parser


def check_memory(meminfo: str) -> list[str]:
    """Problems with free memory, from the text of /proc/meminfo."""
    sizes = {name: int(kib) for name, kib in re.findall(r"(\w+): +(\d+) kB", meminfo)}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    if free < _MIN_FREE_MEMORY * total:
        return [f"only {free / 2**20:.1f} of {total / 2**20:.0f} GiB memory are free"]
    return []


def check_gpus(wanted: int, command: RunCommand) -> list[str]:
    """GPUs that are missing, in use, slowed down, or have memory errors.

    Args:
        wanted: how many GPUs the job counts on.
        command: runs a command line; its output, None where it failed.
    """
    rows = _query(command, "index,memory.used,ecc.errors.uncorrected.volatile.total")
    if rows is None:
        return [f"0 of {wanted} GPUs visible: nvidia-smi fails"]
    problems = []
    if len(rows) < wanted:
        problems.append(f"{len(rows)} of {wanted} GPUs visible")
    for index, used, errors in rows:
        if used.isdigit() and int(used) > _MAX_USED_GPU_MEMORY_MIB:
            problems.append(f"GPU {index} is in use: {used} MiB taken")
        if errors.isdigit() and int(errors) > 0:  # "[N/A]" without ECC
            problems.append(f"GPU {index} has {errors} uncorrected memory errors")
    # the reasons were renamed in newer drivers
    slowed = _query(command, "index,clocks_event_reasons.hw_slowdown") or _query(
        command, "index,clocks_throttle_reasons.hw_slowdown"
    )
    for index, reason in slowed or ():
        if reason == "Active":
            problems.append(f"GPU {index} is slowed down by its hardware (heat or power)")
    return problems


def check_links(command: RunCommand) -> list[str]:
    """GPUs with fewer working NVLinks than the others of the node."""
    text = command(["nvidia-smi", "nvlink", "--status"]) or ""
    links: Counter[str] = Counter()
    gpu = ""
    for line in text.splitlines():
        found = re.match(r"GPU (\d+)", line)
        if found:
            gpu = found.group(1)
            links[gpu] += 0
        elif re.search(r"Link \d+: [\d.]+ GB/s", line):
            links[gpu] += 1
    most = max(links.values(), default=0)
    return [f"GPU {gpu} has {n} of {most} NVLinks" for gpu, n in links.items() if n < most]


def _query(command: RunCommand, fields: str) -> list[list[str]] | None:
    text = command(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    if text is None:
        return None
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines() if row.strip()]
    # nvidia-smi also shows the GPUs of other jobs where the site does not hide them
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if fields.startswith("index,") and all(number.isdigit() for number in ours):
        rows = [row for row in rows if row[0] in ours]
    return rows


def _command(line: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _check_shared_folder(folder: Path, report: NodeReport) -> list[str]:
    probe = folder / f".{report.host}.probe"
    data = os.urandom(_WRITE_BYTES)
    began = time.monotonic()
    try:
        with probe.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        same = probe.read_bytes() == data
        probe.unlink()
    except OSError as error:
        return [f"cannot write to {folder}: {error.strerror}"]
    seconds = time.monotonic() - began
    report.facts["write_seconds"] = seconds
    if not same:
        return [f"reads back other bytes than it wrote in {folder}"]
    if seconds > _SLOW_WRITE_SECONDS:
        return [f"took {seconds:.0f} s to write 1 MiB to {folder}"]
    return []


def _check_all_reduce(options: argparse.Namespace, report: NodeReport) -> int:
    """First inside the node, where no other node can be at fault, then across all of them."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    port = int(os.environ["MASTER_PORT"])
    local_size = int(os.environ.get("SLURM_TASKS_PER_NODE", "1").split("(")[0].split(",")[0])
    if local_rank == 0:
        report.consequences = ["the all-reduce was cut short"]
        report.write(options.results)

    def stuck(inside: bool) -> None:
        # in a thread: the main thread may never come back from the network
        what = f"did not end within {options.seconds:g} s"
        _fail(report, options.results, what, inside)
        os._exit(1)

    inside = True
    try:
        if local_size > 1:
            with _time_limit(options.seconds, lambda: stuck(inside=True)):
                speed = _all_reduce(local_rank, local_size, "127.0.0.1", port)
            report.facts["all_reduce_in_node_gb_per_s"] = speed
        inside = False
        if world > local_size:
            with _time_limit(options.seconds, lambda: stuck(inside=False)):
                speed = _all_reduce(rank, world, os.environ["MASTER_ADDR"], port + 1)
            report.facts["all_reduce_gb_per_s"] = speed
    except Exception as error:  # whatever it is, it is a finding about this node
        _fail(report, options.results, f"failed: {' '.join(str(error).split())}", inside)
        sys.stdout.flush()
        os._exit(1)
    report.consequences = []
    speed = report.facts.get("all_reduce_gb_per_s", float("inf"))
    if speed < options.min_bandwidth:
        report.consequences = [
            f"the all-reduce reaches {speed:.2f} GB/s, {options.min_bandwidth:g} are wanted"
        ]
    if local_rank == 0:
        report.write(options.results)
    return 0


def _fail(report: NodeReport, results: Path, what: str, inside: bool) -> None:
    where = "inside the node" if inside else "across the nodes"
    finding = [f"the all-reduce {where} {what}"]
    report.problems, report.consequences = (finding, []) if inside else ([], finding)
    report.write(results)


@contextlib.contextmanager
def _time_limit(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _all_reduce(rank: int, world: int, master: str, port: int) -> float:
    """Bus bandwidth of an all-reduce in GB/s: the best of five, 2 (n - 1) / n of the bytes each.

    Raises:
        RuntimeError: no connection, or wrong sums.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{master}:{port}",
        rank=rank,
        world_size=world,
    )
    values = torch.empty((64 << 20) if cuda else (1 << 18), device="cuda" if cuda else "cpu")
    best = float("inf")
    for _ in range(5):
        values.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
        if float(values.min()) != world or float(values.max()) != world:
            raise RuntimeError(f"wrong sums over {world} ranks")
    dist.destroy_process_group()
    return 2 * (world - 1) / world * values.numel() * values.element_size() / best / 1e9


if __name__ == "__main__":
    sys.exit(main())
