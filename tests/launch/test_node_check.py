"""The node check: what it finds on a node, and which nodes are then left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalatent.launch.node_check import check_gpus, check_links, check_memory
from megalatent.launch.node_results import NodeCheck
from tests.waiting import HANG, reserve_ports

Answers = dict[str, str | None]


def answering(answers: Answers) -> Any:
    """A command runner that knows the answer to what a line contains."""

    def run(line: Sequence[str]) -> str | None:
        return next((text for key, text in answers.items() if key in " ".join(line)), None)

    return run


HEALTHY: Answers = {
    "memory.used": "0, 4, 0\n1, 17, [N/A]\n",
    "clocks_event_reasons.hw_slowdown": "0, Not Active\n1, Not Active\n",
}


@pytest.mark.parametrize(
    ("changed", "problems"),
    [
        ({}, []),
        ({"memory.used": None}, ["0 of 2 GPUs visible: nvidia-smi fails"]),
        ({"memory.used": "0, 4, 0\n"}, ["1 of 2 GPUs visible"]),
        ({"memory.used": "0, 4, 0\n1, 71680, 0\n"}, ["GPU 1 is in use: 71680 MiB taken"]),
        ({"memory.used": "0, 4, 3\n1, 4, 0\n"}, ["GPU 0 has 3 uncorrected memory errors"]),
        (
            {"clocks_event_reasons.hw_slowdown": "0, Not Active\n1, Active\n"},
            ["GPU 1 is slowed down by its hardware (heat or power)"],
        ),
        # drivers before 535 know the old name only
        (
            {
                "clocks_event_reasons.hw_slowdown": None,
                "clocks_throttle_reasons.hw_slowdown": "0, Active\n1, Not Active\n",
            },
            ["GPU 0 is slowed down by its hardware (heat or power)"],
        ),
    ],
)
def test_gpus(changed: Answers, problems: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert check_gpus(2, answering({**HEALTHY, **changed})) == problems


def test_links() -> None:
    good = "GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    bad = "GPU 1: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    assert check_links(answering({"nvlink": good})) == []
    assert check_links(answering({"nvlink": good + bad})) == ["GPU 1 has 1 of 2 NVLinks"]
    assert check_links(answering({})) == []


def test_memory() -> None:
    assert check_memory("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n") == []
    full = "MemTotal: 2097152 kB\nMemAvailable: 20971 kB\n"
    assert check_memory(full) == ["only 0.0 of 2 GiB memory are free"]


def reports(folder: Path, **nodes: dict[str, Any]) -> None:
    for host, report in nodes.items():
        content = {"problems": [], "consequences": [], "facts": {}, **report}
        (folder / f"{host}.json").write_text(json.dumps(content))


def bad_nodes(tmp_path: Path, says: str = "", **nodes: dict[str, Any]) -> dict[str, str]:
    """What a check makes of these reports, of four nodes, when srun says `says`."""
    (tmp_path / "check-basic").mkdir()
    reports(tmp_path / "check-basic", **nodes)
    check = NodeCheck(
        srun=["bash", "-c", f"echo '{says}' >&2", "srun"],
        python="python",
        arguments=[],
        folder=tmp_path,
        hosts=["node0", "node1", "node2", "node3"],
        port=29500,
        seconds=10,
        say=print,
    )
    return check.run("basic")


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine = {"facts": {"all_reduce_gb_per_s": 312.5}}
    assert bad_nodes(tmp_path, node0=fine, node1=fine, node2=fine, node3=fine) == {}
    assert "passed on 4 node(s), all-reduce 312.50 GB/s" in capsys.readouterr().out


def test_a_node_without_a_report_is_bad(tmp_path: Path) -> None:
    assert bad_nodes(tmp_path, node0={}, node1={}, node3={}) == {"node2": "left no result"}


def test_a_node_that_srun_cannot_reach_excuses_the_others(tmp_path: Path) -> None:
    says = "srun: error: Task launch for StepId=1.0 failed on node node3: Communication failure"
    assert bad_nodes(tmp_path, says, node0={}) == {
        "node3": "does not answer: Communication failure"
    }


def test_the_node_at_fault_excuses_those_that_waited_for_it(tmp_path: Path) -> None:
    waited = {"consequences": ["the all-reduce across the nodes did not end within 10 s"]}
    broken = {"problems": ["the all-reduce inside the node failed: NCCL error"]}
    found = bad_nodes(tmp_path, node0=waited, node1=broken, node2=waited, node3=waited)
    assert found == {"node1": "the all-reduce inside the node failed: NCCL error"}


def test_when_nobody_is_at_fault_all_are(tmp_path: Path) -> None:
    slow = {"consequences": ["the all-reduce reaches 3.00 GB/s, 100 are wanted"]}
    assert len(bad_nodes(tmp_path, node0=slow, node1=slow, node2=slow, node3=slow)) == 4


def test_a_slow_node_stands_out(tmp_path: Path) -> None:
    fast = {"facts": {"all_reduce_in_node_gb_per_s": 400.0}}
    slow = {"facts": {"all_reduce_in_node_gb_per_s": 150.0}}
    found = bad_nodes(tmp_path, node0=fast, node1=fast, node2=slow, node3=fast)
    assert found == {"node2": "all-reduce inside the node at 150.0 GB/s, others reach 400.0"}


def run_ranks(results: Path, ranks: int, **environment: str) -> list[int]:
    """The all-reduce as real processes: two ranks on each node."""
    port = str(reserve_ports(2))
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "megalatent.launch.node_check", "--mode=all-reduce"),
                *(f"--results={results}", f"--seconds={HANG}", "--min-bandwidth=0"),
            ],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_RANK": str(rank % 2),
                "SLURM_TASKS_PER_NODE": "2(x2)",
                "SLURMD_NODENAME": f"node{rank // 2}",
                "MASTER_ADDR": "127.0.0.1",
                # the two nodes share this machine's loopback: apart from each other by port
                "MASTER_PORT": port,
                **environment,
            },
        )
        for rank in range(ranks)
    ]
    return [process.wait(HANG) for process in processes]


def test_an_all_reduce_over_real_processes(tmp_path: Path) -> None:
    """One node of two ranks: sums are right, and a speed is measured."""
    assert run_ranks(tmp_path, 2, WORLD_SIZE="2") == [0, 0]
    report = json.loads((tmp_path / "node0.json").read_text())
    assert (report["problems"], report["consequences"]) == ([], [])
    assert report["facts"]["all_reduce_in_node_gb_per_s"] > 0


def test_the_module_writes_a_report_without_torch(tmp_path: Path) -> None:
    line = [sys.executable, "-X", "importtime", "-m", "megalatent.launch.node_check"]
    done = subprocess.run(
        [*line, "--mode=basic", f"--results={tmp_path}"],
        env={**os.environ, "SLURM_LOCALID": "0", "SLURMD_NODENAME": "node5"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert " torch" not in done.stderr
    report = json.loads((tmp_path / "node5.json").read_text())
    assert report["problems"] == []
    assert report["facts"]["write_seconds"] >= 0
