"""What stands in job scripts stays what it is, whatever names, values and shells do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from megalatent import cli
from megalatent.launch.runfolder import RunFolder
from tests.launch.fake_slurm import FakeSlurm, fake_slurm  # noqa: F401
from tests.launch.test_submit import LARGE, config, here, refused  # noqa: F401

ODD = 'it\'s 100% "odd" $(touch x) #1: größe'


def script(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert cli.main(["submit", *line, "--dry-run"]) == 0
    return capsys.readouterr().out


def run_until(text: str, probe: str, folder: Path, **environment: str) -> str:
    """What the script's settings are for bash: the settings block, then `probe`."""
    block = text[text.index("# >>> settings") : text.index("# <<< settings")]
    done = subprocess.run(
        ["bash", "-euc", f"{block}\n{probe}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_odd_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    text = script(capsys, config(here, save=str(here / ODD)))
    assert run_until(text, 'echo "$RUN"', here) == f"{here / ODD}\n"
    assert not (here / "x").exists()
    # Slurm fills in what follows a single %
    assert "100%%" in next(line for line in text.splitlines() if "--output=" in line)


def test_an_odd_file_gives_a_plain_name(
    here: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = script(capsys, config(here, name="my run; $(touch x)\n#SBATCH --time=1 größe"))
    assert "#SBATCH --job-name=my-run-touch-x-SBATCH---time-1-größe\n" in text.replace("'", "")
    assert "\n#SBATCH --time" not in text


def test_values_for_tasks_are_no_shell(
    here: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = 'megatron.tensorboard_dir="a {task} $HOME `touch x` {task}"'
    text = script(capsys, config(here), "--array=0-1", "--set", given)
    said = run_until(text, 'printf "%s\\n" "${OVERRIDES[@]}"', here, SLURM_ARRAY_TASK_ID="1")
    assert said.splitlines() == ["--set", given.replace("{task}", "1")]
    assert not (here / "x").exists()


def test_the_shell_that_submits_does_not_overrule_the_script(
    here: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = script(capsys, config(here), "--node-check=basic")
    said = run_until(
        text, "env", here, MEGALATENT_CONTAINER="other", MEGALATENT_NODE_CHECK="off", KEPT="1"
    )
    assert "MEGALATENT_CONTAINER" not in said
    assert "MEGALATENT_NODE_CHECK=basic\n" in said
    assert "KEPT=1\n" in said


@pytest.mark.parametrize(
    ("flags", "cores"),
    [
        ([], "8"),  # Megatron's two data loaders, and six
        (["--set=megatron.num_workers=6"], "12"),
        (["--cpus-per-task=3"], "3"),
        (["--sbatch-options=--exclusive"], None),
        (["--gpus-per-node=0", "--ranks-per-node=8", "--set=megatron.bf16=false"], None),
    ],
)
def test_a_rank_is_not_left_with_one_core(
    here: Path,  # noqa: F811
    flags: list[str],
    cores: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["submit", config(here), "--dry-run", *flags]) == 0
    out, err = capsys.readouterr()
    found = [line for line in out.splitlines() if line.startswith("#SBATCH --cpus-per-task=")]
    assert found == ([f"#SBATCH --cpus-per-task={cores}"] if cores else [])
    said = f"note: each rank gets {cores} CPU cores" in err
    assert said == (bool(cores) and "--cpus-per-task=3" not in flags)


# --- handing in ---


def test_variables_of_sbatch_and_of_another_job_do_not_count(
    here: Path,  # noqa: F811
    fake_slurm: FakeSlurm,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sbatch = fake_slurm.folder / "sbatch"
    sbatch.write_text(sbatch.read_text().replace('echo "$N', 'env >"$F/env"\necho "$N', 1))
    for name in ("SBATCH_TIMELIMIT", "SBATCH_ACCOUNT", "SLURM_ARRAY_JOB_ID", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    assert cli.main(["submit", config(here), "--time=30"]) == 0
    seen = dict(line.split("=", 1) for line in (fake_slurm.folder / "env").read_text().splitlines())
    # no --account is given: what the site sets for all its users still does
    assert {"SBATCH_ACCOUNT", "SLURM_CONF"} <= set(seen)
    assert not {"SBATCH_TIMELIMIT", "SLURM_ARRAY_JOB_ID"} & set(seen)


def test_a_secret_that_would_not_come_along(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    assert cli.main(["submit", config(here), "--dry-run", "--env=HF_TOKEN"]) == 2
    refused(capsys, "--env HF_TOKEN: SBATCH_EXPORT=NONE keeps your shell's variables from the job")
    monkeypatch.setenv("SBATCH_EXPORT", "ALL,A=1")
    assert cli.main(["submit", config(here), "--dry-run", "--env=HF_TOKEN"]) == 0


def test_an_answer_that_was_lost_is_not_asked_for_again(
    here: Path,  # noqa: F811
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    sbatch = fake_slurm.folder / "sbatch"
    lost = 'echo "sbatch: error: Batch job submission failed: Socket timed out" >&2; exit 1'
    sbatch.write_text(sbatch.read_text().replace("echo $id\n", f"{lost}\n"))
    assert cli.main(["submit", config(here)]) == 2
    refused(capsys, "Socket timed out: it may have done it all the same, see squeue --me")
    assert len(fake_slurm.submitted()) == 1


@pytest.mark.parametrize(
    ("said", "job"), [("7;cluster", "7"), ("Welcome!\\n7", "7"), ("7\\nBe kind.", "7")]
)
def test_the_number_of_a_job_among_other_words(
    said: str,
    job: str,
    here: Path,  # noqa: F811
    fake_slurm: FakeSlurm,  # noqa: F811
) -> None:
    sbatch = fake_slurm.folder / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("echo $id\n", f"printf '{said}\\n'\n"))
    assert cli.main(["submit", config(here)]) == 0
    assert RunFolder(here / "runs" / "fbt-1b").read_submission().jobs == [job]


def test_half_a_chain_is_taken_back(
    here: Path,  # noqa: F811
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megalatent.launch.slurm import Slurm

    submit = Slurm.submit

    def interrupted(self: Slurm, script: str, options: tuple = ()) -> str:
        if options:
            raise KeyboardInterrupt
        return submit(self, script, options)

    monkeypatch.setattr(Slurm, "submit", interrupted)
    assert cli.main(["submit", config(here), "--chain=3"]) == 130
    assert fake_slurm.calls("scancel") == ["101"]


def test_an_array_is_one_run_for_each_task(
    here: Path,  # noqa: F811
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["submit", config(here), "--array=0,2", "--set=megatron.seed={task}"]
    assert cli.main(line) == 0
    run = RunFolder(here / "runs" / "fbt-1b")
    capsys.readouterr()
    assert cli.main(["status", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert [(task["name"], task["job"], task["iterations"]) for task in found] == [
        ("fbt-1b/task-0", "101_0", 100_000),
        ("fbt-1b/task-2", "101_2", 100_000),
    ]
    # some tasks are over, and one still runs
    fake_slurm.job("101", "COMPLETED\nRUNNING\nPENDING")
    assert cli.main(line) == 2
    refused(capsys, "is in use by job 101 (running)")


def test_a_config_that_is_no_config(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    path = here / "x.yaml"
    path.write_text(yaml.safe_dump({"megatron": [LARGE]}))
    assert cli.main(["submit", str(path), "--dry-run"]) == 2
    refused(capsys, "megatron:")
