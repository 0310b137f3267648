"""Which of many errors came first, and what must never be shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalatent.launch.failure import (
    RankError,
    bad_loss_in_logs,
    describe_failure,
    first_exit_code,
    holds_secret,
    is_secret,
    redact,
    write_rank_error,
)

LOST = RankError(0, "node0", 10.0, "RuntimeError", "Connection closed by peer [10.0.0.2]", "")
NCCL = RankError(1, "node0", 9.0, "DistBackendError", "NCCL error: remote process exited", "")
REAL = RankError(5, "node1", 11.0, "OutOfMemoryError", "CUDA out of memory.\nTried 2 GiB", "")

KILLED = [
    "srun: error: node1: task 6: Killed",
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    "srun: error: node0: tasks 0-3: Exited with exit code 1",
]
MUTE = [
    "srun: error: node1: task 6: Exited with exit code 137",
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
]
EXITED = [
    "srun: error: node0: tasks 0-1: Exited with exit code 1",
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    "srun: error: node1: task 2: Killed",
]


@pytest.mark.parametrize(
    ("errors", "srun", "says"),
    [
        # later than its peers' complaints, but a reason of its own
        ([LOST, NCCL, REAL], EXITED, "rank 5 on node1: OutOfMemoryError: CUDA out of memory."),
        # nobody has a reason of his own: a killed rank leaves none
        ([LOST, NCCL], KILLED, "rank 6 on node1: Killed"),
        # it ended without a word, and before those that lost it
        ([LOST, NCCL], MUTE, "rank 6 on node1: Exited with exit code 137"),
        # killed by srun, after the others had ended
        ([LOST, NCCL], EXITED, "rank 1 on node0: DistBackendError: NCCL error: remote process"),
        ([], EXITED, "ranks 0-1 on node0: Exited with exit code 1"),
        ([LOST], ["srun: error: Node failure on node1"], "node node1 failed"),
        ([], [], "the ranks ended with exit code 9 and left no error"),
    ],
)
def test_what_failed_first(
    tmp_path: Path, errors: list[RankError], srun: list[str], says: str
) -> None:
    for error in errors:
        write_rank_error(tmp_path / "errors", error)
    (tmp_path / "errors").mkdir(exist_ok=True)
    (tmp_path / "errors" / "rank-9.json").write_text('{"rank": 9, "ho')
    said = describe_failure(tmp_path, srun, 9)
    assert said.startswith(says)
    assert "\n" not in said


def test_a_wrong_config_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "node-node0.log").write_text("0: megalatent: error: megatron.lr: missing\n")
    assert describe_failure(tmp_path, EXITED, 2) == "megatron.lr: missing"
    assert first_exit_code(["srun: error: n: task 0: Exited with exit code 2"], 143) == 2
    assert first_exit_code(["srun: error: n: task 0: Killed"], 137) == 137


def test_a_rank_that_was_killed_under_torchrun(tmp_path: Path) -> None:
    """srun sees torchrun end, which reports on its ranks; the others lost their peer."""
    write_rank_error(tmp_path / "errors", LOST)
    report = """\
0: [1]:
0:   time      : 2026-11-30_16:11:12
0:   host      : node11
0:   rank      : 1 (local_rank: 1)
0:   exitcode  : -9 (pid: 62)
0:   error_file: <N/A>
""".replace("(pid: 62)", "(pid: 62)  (SIGKILL)")
    (tmp_path / "node-node11.log").write_text(report)
    said = describe_failure(tmp_path, EXITED, 1)
    assert said == "rank 1 on node11: ended by SIGKILL"


def test_a_bad_loss_that_was_only_printed(tmp_path: Path) -> None:
    assert bad_loss_in_logs(tmp_path) is None
    (tmp_path / "node-node3.log").write_text(
        "x\n25:  loss of pass 2, 3 is not finite at iteration 41\n"
    )
    assert str(bad_loss_in_logs(tmp_path)) == "the loss of pass 2 is not a number at iteration 41"


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "password",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "OPENAI_APIKEY",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "KEYBOARD", "TOKENIZERS_PARALLELISM", "MONKEY"])
def test_other_names(name: str) -> None:
    assert not is_secret(name)


def test_secrets_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    error = RankError(0, "n", 1.0, "ValueError", "401 for hf_abcdef", "… hf_abcdef …")
    write_rank_error(tmp_path / "errors", error)
    assert "hf_abcdef" not in (tmp_path / "errors" / "rank-0.json").read_text()
    assert describe_failure(tmp_path, [], 1) == "rank 0 on n: ValueError: 401 for <HF_TOKEN>"
    assert redact("short", {"A_KEY": "s"}) == "short"


def test_secrets_with_characters_that_json_writes_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", 'pä"ss\\wörd')
    monkeypatch.setenv("A_KEY", "message")  # also a word of the file itself
    error = RankError(0, "n", 1.0, "ValueError", 'refused: pä"ss\\wörd', "")
    write_rank_error(tmp_path / "errors", error)
    assert "wörd" not in json.loads((tmp_path / "errors" / "rank-0.json").read_text())["message"]
    assert describe_failure(tmp_path, [], 1) == "rank 0 on n: ValueError: refused: <PGPASSWORD>"


def test_passwords_in_addresses() -> None:
    proxy = "http://me:hidden@proxy:3128"
    assert holds_secret("https_proxy", proxy)
    assert not holds_secret("https_proxy", "http://proxy:3128/a@b")
    assert redact(f"via {proxy}", {"https_proxy": proxy}) == "via <https_proxy>"
