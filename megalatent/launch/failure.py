"""Finds, among all that fails when one rank fails, what failed first.

When a rank dies its peers lose their connections and die too, often with longer error messages.
Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megalatent.launch.progress import BadLoss

__all__ = [
    "RankError",
    "bad_loss_in_logs",
    "describe_failure",
    "first_exit_code",
    "holds_secret",
    "is_secret",
    "redact",
    "write_rank_error",
]

# What a rank says when it was not the first to fail.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|peer|timed? ?out|"
    r"ncclremoteerror|socket|rendezvous|store->get|eof",
    re.IGNORECASE,
)
_TASK_ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<node>\S+)")
_USER_ERROR = re.compile(r"megalatent: error: (?P<text>.+)")
_BAD_LOSS = re.compile(
    r"loss of pass (?P<passes>[\d, ]+) is not finite at iteration (?P<iteration>\d+)"
)
# In torchrun's report, each line of which srun labels.
_KILLED_UNDER_TORCHRUN = re.compile(
    r"host +: (?P<host>\S+)\n.* rank +: (?P<rank>\d+) .*\n"
    r".* exitcode +: -\d+ .*\((?P<signal>SIG(?!TERM)\w+)\)"  # SIGTERM is torchrun's own
)
_LOG_TAIL_BYTES = 200_000
_ABORTED = re.compile(r"srun: .*(Job step aborted|forcing job termination)")
_SIGNALS = ("killed", "segmentation fault", "bus error", "aborted", "out of memory", "floating")
_SECRET_NAME = re.compile(
    r"(^|_)((API)?KEY|TOKEN|SECRET|CREDENTIALS?)(_|$)|PASSWORD|PASSWD|PASSPHRASE", re.I
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


@dataclass(frozen=True)
class RankError:
    """An exception that ended a rank; `time` in seconds since the epoch."""

    rank: int
    host: str
    time: float
    kind: str
    message: str
    traceback: str

    def __str__(self) -> str:
        first = next((line for line in self.message.splitlines() if line.strip()), "")
        return f"rank {self.rank} on {self.host}: {self.kind}: {first.strip()}"


def write_rank_error(folder: Path, error: RankError) -> None:
    """Leave the error where `describe_failure` finds it, without any secret."""
    folder.mkdir(parents=True, exist_ok=True)
    # before it becomes JSON, which writes some characters of a secret in another way
    shown = {k: redact(v) if isinstance(v, str) else v for k, v in asdict(error).items()}
    (folder / f"rank-{error.rank}.json").write_text(json.dumps(shown))


def describe_failure(logs: Path, srun_lines: Iterable[str], returncode: int) -> str:
    """One line on what failed first.

    Args:
        logs: the attempt's folder, with node logs and the ranks' error files.
        srun_lines: what srun wrote to standard error, in order.
        returncode: srun's exit code, for when nobody left a word.
    """
    records = _read_errors(logs / "errors")
    own = [record for record in records if not _LOST_PEER.search(record.message)]
    if own:
        return redact(str(own[0]))
    said = _search_node_logs(logs, _USER_ERROR)
    if said is not None:
        return redact(said["text"])
    killed = _search_node_logs(logs, _KILLED_UNDER_TORCHRUN)
    if killed is not None:
        return f"rank {killed['rank']} on {killed['host']}: ended by {killed['signal']}"
    # a process that was killed leaves no error, but srun reports it before it ends the others
    ended = _first_end(srun_lines)
    mute = ended is not None and ended.tasks not in {str(record.rank) for record in records}
    if ended is not None and (ended.by_signal or not records or (mute and ended.tasks.isdigit())):
        return ended.text
    if records:
        return redact(str(records[0]))
    return f"the ranks ended with exit code {returncode} and left no error: see the node logs"


def first_exit_code(srun_lines: Iterable[str], returncode: int) -> int:
    """The exit code of the rank that ended first; srun's own is that of any rank it killed."""
    for line in srun_lines:
        found = re.search(r"Exited with exit code (\d+)", line)
        if found:
            return int(found.group(1))
    return returncode


def bad_loss_in_logs(logs: Path) -> BadLoss | None:
    """The loss that a rank found not to be finite, before anything was logged of it."""
    found = _search_node_logs(logs, _BAD_LOSS)
    if found is None:
        return None
    iteration = int(found["iteration"])
    return BadLoss(iteration, int(found["passes"].split(",")[0]), math.nan, since=iteration)


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds something that no script or log may show."""
    return bool(_SECRET_NAME.search(name))


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable is a secret by its name, or has a password in a URL."""
    return is_secret(name) or bool(_PASSWORD_IN_URL.search(value))


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text without the values of secret variables."""
    for name, value in environment.items():
        if len(value) >= 6 and holds_secret(name, value):
            text = text.replace(value, f"<{name}>")
    return text


@dataclass(frozen=True)
class _End:
    tasks: str
    text: str
    by_signal: bool


def _first_end(srun_lines: Iterable[str]) -> _End | None:
    plain = None
    for line in srun_lines:
        if _ABORTED.search(line) and plain is not None:
            break  # from here on srun itself ends the others
        failed_node = _NODE_FAILED.search(line)
        if failed_node:
            return _End("", f"node {failed_node['node']} failed", by_signal=True)
        ended = _TASK_ENDED.search(line)
        if not ended:
            continue
        tasks = ended["tasks"]
        ranks = f"ranks {tasks}" if re.search("[,-]", tasks) else f"rank {tasks}"
        text = f"{ranks} on {ended['node']}: {ended['how'].strip()}"
        if ended["how"].strip().lower().startswith(_SIGNALS):
            return _End(tasks, text, by_signal=True)
        plain = plain or _End(tasks, text, by_signal=False)
    return plain


def _search_node_logs(logs: Path, pattern: re.Pattern[str]) -> re.Match[str] | None:
    for path in sorted(logs.glob("node-*.log")):
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            found = pattern.search(stream.read().decode(errors="replace"))
        if found:
            return found
    return None


def _read_errors(folder: Path) -> list[RankError]:
    records = []
    for path in folder.glob("rank-*.json"):
        try:
            records.append(RankError(**json.loads(path.read_text())))
        except (ValueError, TypeError):  # cut off by the end of the rank that wrote it
            continue
    return sorted(records, key=lambda record: record.time)
