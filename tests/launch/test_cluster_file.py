"""Cluster files as sites write them: shell, with all that shell can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalatent.errors import UserError
from megalatent.launch import cluster_file
from megalatent.launch.cluster_file import check_secrets_file, read_cluster_file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path / "my cluster.env"


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("NCCL_DEBUG=INFO # all of it\n", {"NCCL_DEBUG": "INFO"}),
        ("export A='two words'\nA=again\n", {"A": "again"}),
        # what it prints is not what it sets, and its functions are its own
        ("echo loading B=2\nA=1\necho done >&2\n", {"A": "1"}),
        ("where() { echo here; }\nA=$(where)\n", {"A": "here"}),
        ("PATH=/opt/bin:$PATH\n", {"PATH": "/opt/bin:/usr/bin:/bin"}),
        ("read -r A || A=nobody\n", {"A": "nobody"}),  # nobody answers
        ("A='1\n2'\n", {"A": "1\n2"}),
    ],
)
def test_what_it_sets(path: Path, text: str, environment: dict[str, str]) -> None:
    path.write_text(text)
    assert read_cluster_file(path).environment == environment


def test_a_file_that_never_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_file, "_SECONDS", 0.2)
    path.write_text("exec sleep 60\n")
    with pytest.raises(UserError, match="bash was not done with it"):
        read_cluster_file(path)


def test_a_proxy_with_a_password(path: Path) -> None:
    path.write_text("https_proxy=http://me:hidden@proxy:3128\n")
    with pytest.raises(UserError, match="https_proxy would be written") as caught:
        read_cluster_file(path)
    assert "hidden" not in str(caught.value)


def test_lists_over_several_lines(path: Path) -> None:
    from megalatent.launch.settings import Settings

    path.write_text('MEGALATENT_MODULES="cuda/13\n  nccl"\nMEGALATENT_SBATCH_OPTIONS="--a\n--b"\n')
    settings = Settings.resolve({}, read_cluster_file(path).settings, {})
    assert settings.modules == "cuda/13 nccl"


@pytest.mark.parametrize("text", ["A_KEY= hidden\n", "A_KEY='hidden\n", "A_KEY=hidden\r\n"])
def test_a_wrong_line_of_secrets_is_not_shown(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UserError) as caught:
        check_secrets_file(path)
    assert "hidden" not in str(caught.value)


def test_secrets(path: Path) -> None:
    path.write_text("# mine\nexport A_KEY='hidden'\n")
    path.chmod(0o600)
    check_secrets_file(path)
