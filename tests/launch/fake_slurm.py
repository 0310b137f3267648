"""Slurm's commands as far as the launcher uses them, as small scripts that write down each call.

For machines without Slurm, and for answers that a healthy Slurm does not give. State lives in one
folder: `calls` (one line per command), `job-ID` (state of a job), `answer-COMMAND` (what the next
calls print, with their exit code in the first line).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_SHELL = """#!/bin/bash
F={folder}
N=$(basename "$0")
echo "$N $*" >>"$F/calls"
if [ -e "$F/answer-$N" ]; then
  code=$(head -n 1 "$F/answer-$N")
  tail -n +2 "$F/answer-$N" >&2
  [ "$code" = 0 ] || exit "$code"
fi
{body}
"""

_COMMANDS = {
    "sbatch": """
case "$*" in --version) echo "slurm-wlm 22.05.8"; exit 0 ;; *--test-only*)
  cat >"$F/tested.sbatch"
  echo "sbatch: Job 1 to start at 2026-01-01T00:00:00 using 2 processors on nodes node[0-1]" >&2
  exit 0 ;;
esac
id=$(($(cat "$F/last" 2>/dev/null || echo 100) + 1))
echo $id >"$F/last"
echo PENDING >"$F/job-$id"
echo $id
""",
    "squeue": """
case "$*" in *--steps*) [ -e "$F/pids" ] && echo "7.1 $(cat "$F/step")"; exit 0 ;; esac
id=$(echo "$*" | grep -o 'jobs=[0-9]*' | cut -d= -f2)
for file in "$F/job-$id" "$F/job-$id"_*; do
  [ -e "$file" ] && while read -r state; do echo "${file##*job-} $state"; done <"$file" && known=1
done
[ -z "$known" ] || exit 0
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
""",
    "scontrol": """
case "$*" in
  "show hostnames node["*) echo node0; echo node1 ;;
  "show hostnames"*) echo "$3" | tr , "\n" ;;
  *"show job"*)
    reason=$(cat "$F/reason" 2>/dev/null || echo None)
    excluded=$(cat "$F/excluded" 2>/dev/null || echo "(null)")
    echo "JobId=7 Reason=$reason Partition=gpu ExcNodeList=$excluded" \\
      "StdErr=$F/stderr StdIn=/dev/null" ;;
esac
""",
    "sinfo": """
cat "$F/nodes" 2>/dev/null || exit 1
""",
    "scancel": """
signal=$(echo "$*" | grep -o 'signal=[A-Z0-9]*' | cut -d= -f2)
if [ -n "$signal" ]; then kill "-$signal" $(cat "$F/pids"); fi
exit 0
""",
}

_SRUN = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.launch.fake_slurm import srun
sys.exit(srun({folder!r}))
"""


class FakeSlurm:
    """A folder with commands, put first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        root = str(Path(__file__).parents[2])
        texts = {n: _SHELL.replace("{body}", body) for n, body in _COMMANDS.items()}
        for name, text in {**texts, "srun": _SRUN}.items():
            path = folder / name
            text = text.replace("{python}", sys.executable).replace("{root!r}", repr(root))
            text = text.replace("{folder!r}", repr(str(folder))).replace("{folder}", str(folder))
            path.write_text(text)
            path.chmod(0o755)

    def calls(self, command: str) -> list[str]:
        """What was asked of a command, without its name."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [
            line.removeprefix(f"{command} ") for line in lines if line.startswith(f"{command} ")
        ]

    def submitted(self) -> list[str]:
        return [call for call in self.calls("sbatch") if call.startswith("--parsable")]

    def job(self, number: str, state: str) -> None:
        (self.folder / f"job-{number}").write_text(state + "\n")

    def answer(self, command: str, code: int, text: str) -> None:
        (self.folder / f"answer-{command}").write_text(f"{code}\n{text}\n")


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm-commands")
    monkeypatch.setenv("PATH", f"{fake.folder}{os.pathsep}{os.environ['PATH']}")
    return fake


def srun(folder: str) -> int:
    """Two nodes with two tasks each, on this machine; the first that fails ends the others."""
    import re
    import signal
    import subprocess
    import threading
    import time

    options = [word for word in sys.argv[1:] if word.startswith("--")]
    program = sys.argv[1:]
    while program and program[0].startswith("--"):
        program.pop(0)
    given = dict(word.partition("=")[::2] for word in options)
    label = "--label" in given
    tasks: list[tuple[str, int, subprocess.Popen[str]]] = []
    readers = []

    def copy(task: subprocess.Popen[str], rank: int, target: str) -> None:
        with open(target, "a") as stream:
            for line in task.stdout or ():
                stream.write(f"{rank}: {line}" if label else line)
                stream.flush()

    def end(number: int, frame: object) -> None:
        for *_, task in tasks:
            task.kill()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    for rank in range(4):
        node = f"node{rank // 2}"
        environment = {
            **os.environ,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % 2),
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_TASKS_PER_NODE": "2(x2)",
            "SLURMD_NODENAME": node,
        }
        environment["MASTER_ADDR"] = "127.0.0.1"
        task = subprocess.Popen(
            program,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        tasks.append((node, rank, task))
        target = given["--output"].replace("%N", node)
        readers.append(threading.Thread(target=copy, args=(task, rank, target)))
        readers[-1].start()
    Path(folder, "step").write_text(given.get("--job-name", "none"))
    Path(folder, "pids").write_text(" ".join(str(task.pid) for *_, task in tasks))
    code, running = 0, list(tasks)
    while running:
        time.sleep(0.02)
        for node, rank, task in [entry for entry in running if entry[2].poll() is not None]:
            running.remove((node, rank, task))
            status = task.returncode
            if status == 0:
                continue
            how = f"Exited with exit code {status}"
            if status < 0:
                how = re.sub("^SIG", "", signal.Signals(-status).name).capitalize()
                how = {"Kill": "Killed", "Term": "Terminated"}.get(how, how)
            print(f"srun: error: {node}: task {rank}: {how}", file=sys.stderr, flush=True)
            if code == 0:
                print("srun: Job step aborted: Waiting up to 5 seconds", file=sys.stderr)
            code = code or (status if status > 0 else 128 - status)
            for *_, other in running if given.get("--kill-on-bad-exit") != "0" else ():
                other.kill()
    Path(folder, "pids").unlink()
    for reader in readers:
        reader.join()
    return code
