"""Runs the node check on all nodes of the job and says which of them are bad.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalatent.launch.srun import verbatim

__all__ = ["NodeCheck"]

Report = dict[str, Any]

# srun names the node on which it could not start anything.
_LAUNCH_FAILED = re.compile(
    r"srun: error: Task launch .*failed on node (?P<node>\S+?): (?P<why>.+)"
)


@dataclass(frozen=True)
class NodeCheck:
    """`run(mode)` starts `megalatent.launch.node_check` on all nodes of the job.

    Attributes:
        hosts: the job's nodes, the first of which is the master.
        port: the first of two that are free there.
    """

    srun: Sequence[str]
    python: str
    arguments: Sequence[str]
    folder: Path
    hosts: Sequence[str]
    port: int
    seconds: float
    say: Callable[[str], None]

    def run(self, mode: str, name: str | None = None) -> dict[str, str]:
        """Bad node -> reason; empty where all is well. A node that leaves no result is bad."""
        name = name or f"check-{mode}"
        results = self.folder / name
        results.mkdir(parents=True, exist_ok=True)
        module = ["-m", "megalatent.launch.node_check"]
        command = [
            *self.srun,
            # alone, a node that cannot even start the check must not end it on the others
            f"--kill-on-bad-exit={int(mode != 'basic')}",
            f"--job-name={name}",
            f"--output={verbatim(results)}/%N.log",
            self.python,
            *module,
            f"--mode={mode}",
            f"--results={results}",
            f"--seconds={self.seconds}",
            *self.arguments,
        ]
        said, silence = "", "left no result"
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "MASTER_ADDR": self.hosts[0], "MASTER_PORT": str(self.port)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=2 * self.seconds + 60,
            )
            said = done.stderr
        except subprocess.TimeoutExpired:
            silence = f"gave no result within {self.seconds:g} s"
        unreachable = {found["node"]: found["why"] for found in _LAUNCH_FAILED.finditer(said)}
        if unreachable:
            # srun gives up on the other nodes too: their missing results say nothing
            return {node: f"does not answer: {why.strip()}" for node, why in unreachable.items()}
        reports = {host: _read(results / f"{host}.json") for host in self.hosts}
        bad = _bad_nodes(reports, silence)
        if not bad:
            self.say(f"node check passed on {len(self.hosts)} node(s){_bandwidth(reports)}")
        return bad

    def all_bad(self, bad: Mapping[str, str]) -> bool:
        """Whether leaving the bad nodes out makes no sense: something else is wrong."""
        return len(self.hosts) > 1 and len(bad) == len(self.hosts)

    def summary(self, bad: Mapping[str, str]) -> str:
        """One line: each node with its reason; the first of them where all are bad."""
        if self.all_bad(bad):
            host, reason = next(iter(bad.items()))
            return f"all {len(bad)} nodes failed the node check: {host}: {reason}"
        return ", ".join(f"{host}: {reason}" for host, reason in bad.items())


def _bad_nodes(reports: Mapping[str, Report | None], silence: str) -> dict[str, str]:
    bad: dict[str, str] = {}
    for host, report in reports.items():
        if report is None:
            bad[host] = silence
        elif report["problems"]:
            bad[host] = "; ".join(report["problems"])
    bad |= {host: why for host, why in _slow_nodes(reports).items() if host not in bad}
    if bad:
        return bad
    # what went wrong between nodes counts only where no node is known to be at fault
    return {
        host: "; ".join(report["consequences"])
        for host, report in reports.items()
        if report is not None and report["consequences"]
    }


def _slow_nodes(reports: Mapping[str, Report | None]) -> dict[str, str]:
    """Nodes whose own all-reduce is at less than half the speed of the median node."""
    name = "all_reduce_in_node_gb_per_s"
    speeds = {
        host: report["facts"][name]
        for host, report in reports.items()
        if report is not None and name in report["facts"]
    }
    if len(speeds) < 3:
        return {}
    usual = statistics.median(speeds.values())
    return {
        host: f"all-reduce inside the node at {speed:.1f} GB/s, others reach {usual:.1f}"
        for host, speed in speeds.items()
        if speed < usual / 2
    }


def _read(path: Path) -> Report | None:
    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return report


def _bandwidth(reports: Mapping[str, Report | None]) -> str:
    for report in reports.values():
        if report is not None and "all_reduce_gb_per_s" in report["facts"]:
            return f", all-reduce {report['facts']['all_reduce_gb_per_s']:.2f} GB/s"
    return ""
