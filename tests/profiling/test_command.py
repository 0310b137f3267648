"""The command line of the profiler: what it runs, and mistakes in one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalatent.cli import main
from megalatent.config import Config
from megalatent.passes.costs import Costs
from megalatent.profiling.cases import CasePlan, left_out, profile_overrides, read_cases
from megalatent.profiling.command import _load
from megalatent.profiling.output import Targets, publish
from tests.profiling.test_advice import recorded
from tests.training.runs import MODEL

GIVEN: dict[str, Any] = {
    "latent": {"passes": {"schedule": {1: 0.75, 2: 0.25}}},
    "megatron": {**MODEL, "mock_data": True, "train_iters": 10},
}


def config(path: Path, **latent: Any) -> str:
    file = path / "run.yaml"
    file.write_text(yaml.safe_dump({**GIVEN, "latent": {**GIVEN["latent"], **latent}}))
    return str(file)


def test_every_case_has_a_turn_in_every_round() -> None:
    plan = CasePlan(({1: 1.0}, {2: 1.0}, {1: 0.75, 2: 0.25}), warmup=2, steps=4)
    assert plan.iterations == 3 * (1 + 2 + 4)
    assert (plan.counted, plan.recorded) == (range(3), range(9, 21))
    rounds = [[plan.passes(3 * r + turn, 4) for turn in range(3)] for r in range(7)]
    assert all(set(r) == {(1,) * 4, (2,) * 4, (1, 1, 1, 2)} for r in rounds)
    # Who begins changes, and so does who follows whom.
    assert [r[0] for r in rounds[:3]] == [(1,) * 4, (2,) * 4, (1, 1, 1, 2)]


def test_cases_from_the_options() -> None:
    own = Config.from_mapping(GIVEN)
    assert read_cases(own, None, None) == ({1: 1.0}, {2: 1.0})
    assert read_cases(own, "3,1", None) == ({3: 1.0}, {1: 1.0})
    assert read_cases(own, None, "1:0.5,4:0.5") == ({1: 0.5, 4: 0.5},)
    assert read_cases(own, "1", "1:0.5,4:0.5") == ({1: 1.0}, {1: 0.5, 4: 0.5})


def test_small_shares_of_a_mixture_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight micro-batches none can have a share of 3%."""
    assert left_out(({1: 1.0}, {1: 0.75, 2: 0.22, 3: 0.03}), 8) == [3]
    assert left_out(({1: 0.75, 2: 0.22, 3: 0.03},), 32) == []
    monkeypatch.setattr("megalatent.launch.train_command.start", lambda *args, **kwargs: None)
    assert main(["profile", config(tmp_path), "--mixture", "1:0.9,4:0.1"]) == 0
    said = capsys.readouterr().err
    assert "--mixture: none of the 2 micro-batches of a step has K = 4" in said


def test_a_profile_leaves_nothing_behind() -> None:
    given = {
        **GIVEN,
        "megatron": {
            **GIVEN["megatron"],
            "save": "s",
            "load": "s",
            "tensorboard_dir": "t",
            "skip_train": True,
            "iterations_to_skip": [3],
        },
    }
    overrides = profile_overrides(Config.from_mapping(given), 30)
    assert overrides == [
        "megatron.save=null",
        "megatron.tensorboard_dir=null",
        "megatron.iterations_to_skip=null",
        "megatron.skip_train=null",
        "megatron.exit_interval=30",
        "megatron.eval_iters=0",
        "megatron.finetune=true",
        "megatron.no_load_optim=true",
        "megatron.no_load_rng=true",
        "megatron.train_iters=30",
    ]


def test_the_run_that_was_trained_can_be_profiled(tmp_path: Path) -> None:
    """Its folder holds checkpoints, which a training would replace; a profile does not save."""
    tracker = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("9")
    args = argparse.Namespace(
        config=config(tmp_path),
        overrides=[f"megatron.save={tracker.parent}", "megatron.save_interval=5"],
        nproc=1, passes=None, mixture=None, warmup=1, steps=2,
    )  # fmt: skip
    settled, cases, world_size = _load(args, None)
    assert "save" not in settled.megatron
    assert (len(cases), world_size) == (2, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "what is to be profiled? give a CONFIG, or --compare BEFORE AFTER"),
        (["{config}", "--steps", "0"], "--steps: 0 is too few"),
        (["{config}", "--warmup", "0"], "--warmup: 0 is too few"),
        (["{config}", "--nproc", "2", "--replicas", "3"],
         "--replicas: 3 are to be recorded, and 2 processes of this layout make 2: give"),
        (["{config}", "--passes", "1,x"], "--passes: '1,x': give numbers of passes"),
        (["{config}", "--steps", "1000000000"], "--steps: 1000000000 is too many: give 10000 at"),
        (["{config}", "--passes", "2,2"], "names a number twice"),
        (["{config}", "--passes", "0"], "--passes: '0': give numbers of passes"),
        (["{config}", "--passes", ""], "--passes: '': give numbers of passes"),
        (["{config}", "--passes", "9" * 5000], "give numbers of passes"),
        (["{config}", "--mixture", "1:0.5,1:0.5"], "names K = 1 twice"),
        (["{config}", "--mixture", "1:0.5,2:0.4"], "sum to 0.9: they must sum to 1"),
        (["{config}", "--mixture", "1:nan,2:0.4"], "is not a share"),
        (["{config}", "--mixture", "1:1.5,2:-0.5"], "is not a share"),
        (["{config}", "--mixture", "1"], "--mixture: '1': give K:SHARE pairs"),
        (["{config}", "--json", "{folder}/none/p.json"], "is no folder: make it"),
        (["{config}", "--html", "{folder}"], "is a folder"),
        (["{config}", "--costs", "{config}"], "is also CONFIG"),
        (["{config}", "--set", "latent.fusion.kind=none", "--set", "latent.passes=null",
          "--passes", "2"], "K = 2 with latent.fusion.kind: none"),
        (["{config}", "--passes", "3", "--set", "latent.passes.max_in_flight=2"],
         "K = 3: max_in_flight is 2, but one micro-batch with 3 passes holds 3"),
        (["{config}", "--passes", "900000000"], "K = 900000000: a plan for 1 stages"),
        (["{config}", "--compare", "a", "b"], "leave CONFIG out"),
        (["--compare", "{folder}/a.json", "{folder}/b.json"], "No such file"),
        (["--compare", "{config}", "{config}"], "no JSON file"),
        (["--compare", "{folder}", "{config}"], "Is a directory"),
        (["--compare", "a", "b", "--json", "{folder}/none/p.json"], "is no folder: make it"),
        (["--compare", "a", "b", "--html", "p.html"], "--html: goes with a CONFIG"),
    ],
)  # fmt: skip
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    file = config(tmp_path)
    given = [option.format(config=file, folder=tmp_path) for option in options]
    assert main(["profile", *given]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("megalatent: error: ")
    assert "\n" not in said
    assert words in said


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"steps": "9-12"}, "latent.profile.steps: 9-12 goes beyond megatron.train_iters: 10"),
        ({"steps": "3-2"}, "latent.profile.steps: '3-2' is no range of steps"),
        ({"steps": 2, "replicas": 0}, "latent.profile.replicas"),
        ({"steps": 2, "output": 3}, "latent.profile.output: 3 is no path"),
        ({"steps": 2, "output": "/"}, "latent.profile.output: / is a folder: give the beginning"),
        ({"steps": 2, "output": "/dev/null/prof"}, "/dev/null is a file, not a folder"),
    ],
)
def test_mistakes_in_the_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: dict[str, Any], words: str
) -> None:
    assert main(["train", config(tmp_path, profile=profile), "--dry-run"]) == 2
    assert words in capsys.readouterr().err


def test_steps_on_the_command_line_of_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config(tmp_path), "--dry-run", "--profile-steps", "3-4"]) == 0
    assert "steps: 3-4" in capsys.readouterr().out


def costs_file(tmp_path: Path, **values: Any) -> dict[str, Any]:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(values))
    return {"passes": {**GIVEN["latent"]["passes"], "costs": str(file)}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"forwards": 1}, "no entry named forwards; did you mean forward?"),
        ({"forward": [1, 2, 3]}, "cost forward has 3 entries for 1 stages"),
        ({"forward": -1}, "not negative"),
    ],
)
def test_wrong_costs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], words: str
) -> None:
    assert main(["train", config(tmp_path, **costs_file(tmp_path, **values)), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"latent.passes.costs: {tmp_path}/costs.json: " in said
    assert words in said


def test_files_of_a_profile(tmp_path: Path) -> None:
    import io

    said = io.StringIO()
    costs = tmp_path / "costs.json"
    targets = Targets(json=str(tmp_path / "p.json"), costs=str(costs))
    publish(recorded(), targets, said)
    values = json.loads((tmp_path / "p.json").read_text())
    assert (values["schema"], values["version"]) == ("megalatent.profile", 1)
    case = values["report"]["cases"][1]
    assert {"step_seconds", "simulated_step_seconds", "lower_bound_seconds"} <= set(case)
    for stage in case["stages"]:
        for own in stage["passes"]:
            assert {"forward_seconds", "backward_seconds", "overhead_over_pass_1"} <= set(own)
    assert all({"wait_seconds", "bubble_fraction"} <= set(rank) for rank in case["ranks"])
    own = Costs.load(costs)
    assert own.forward == pytest.approx(values["report"]["costs"]["forward"])
    assert own.head == pytest.approx(values["report"]["costs"]["head"])
    for option in values["report"]["advice"]["options"]:
        assert not option["costs_file"] or Costs.load(option["costs_file"]).to_dict()
    text = said.getvalue()
    for words in ("slowest", "imbalance", "settings, best first", "the best with this batch"):
        assert words in text


@pytest.mark.full
def test_a_whole_profile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out = config(tmp_path), tmp_path / "p.json"
    words = f"profile {file} --nproc 2 --steps 2 --warmup 1 --json {out}"
    words += f" --set megatron.pipeline_model_parallel_size=2 --html {tmp_path}/p.html"
    status = main(words.split())
    said = capfd.readouterr()
    assert status == 0, said.err
    assert "ranks, K = 2: where a step goes" in said.out
    assert "iteration" not in said.out  # what Megatron says is left out
    assert main(["profile", "--compare", str(out), str(out)]) == 0
