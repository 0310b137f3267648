"""Real runs, recorded: everything is there, on every stage, and the run is none the wiser."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalatent.config import Config
from megalatent.passes.simulate import peak_in_flight
from megalatent.profiling.cases import CasePlan
from megalatent.profiling.output import document
from megalatent.profiling.records import ACTIONS, PARTS, Recording
from megalatent.profiling.run import RunProfiler
from megalatent.training import pretrain
from tests.distributed.harness import run_ranks
from tests.training.runs import MIXED, Outcome, configuration, train

CASES = ({1: 1.0}, {2: 1.0}, {1: 0.5, 3: 0.5})


def profiled(given: dict[str, Any], ranks: int, plan: CasePlan, replicas: int = 1) -> Recording:
    """The recording that the first rank is handed."""
    config = Config.from_mapping(given)
    config.check(ranks)

    def rank(_: int) -> Recording | None:
        kept: list[Recording] = []
        profiler = RunProfiler(
            steps=plan.recorded,
            count=plan.counted,
            replicas=replicas,
            passes=plan.passes,
            done=kept.append,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            pretrain.run(config, profiler)
        return kept[0] if kept else None

    first, *rest = run_ranks(ranks, rank)
    assert rest == [None] * len(rest)
    assert first is not None
    return first


def check_complete(recording: Recording) -> None:
    """Every action of every plan once, in time, with its parts inside it."""
    for case in recording.cases:
        for step in case.steps:
            for info, rank in zip(recording.ranks, step.ranks, strict=True):
                actions = [span.action for span in rank.of_kind(*ACTIONS)]
                assert actions == list(case.plan.actions[info.stage])
                last = rank.start
                for span in rank.spans:
                    if span.kind not in PARTS:
                        assert last <= span.start <= span.end
                        last = span.end
                assert last <= rank.end
                around = {span.action: span for span in rank.of_kind(*ACTIONS)}
                for part in rank.of_kind(*PARTS):
                    outer = around[part.action]
                    assert outer.start <= part.start <= part.end <= outer.end
                assert [span.kind for span in rank.of_kind("optimizer")] == ["optimizer"]
                assert any(rank.of_kind("reduce"))
                held = [sample.in_flight for sample in rank.memory]
                assert max(held) == peak_in_flight(case.plan)[info.stage]
                assert held[-1] == 0


def parts(recording: Recording, stage: int, passes: tuple[int, ...]) -> set[tuple[str, int]]:
    """Kinds of parts on a stage, with the passes they were seen in."""
    case = next(c for c in recording.cases if c.plan.passes == passes)
    spans = case.steps[0].ranks[stage].of_kind(*PARTS)
    return {(span.kind, span.k) for span in spans}


def test_two_stages(tmp_path: Path) -> None:
    plan = CasePlan(CASES, warmup=1, steps=2)
    given = configuration(
        tmp_path,
        {"passes": {"schedule": {1: 0.5, 3: 0.5}}},
        pipeline_model_parallel_size=2,
        global_batch_size=8,
        train_iters=plan.iterations,
    )
    recording = profiled(given, 2, plan)
    assert [info.stage for info in recording.ranks] == [0, 1]
    names = ["K = 1", "K = 2", "K = 2x1 + 2x3"]
    assert sorted(case.name for case in recording.cases) == sorted(names)
    assert [len(case.steps) for case in recording.cases] == [2, 2, 2]
    check_complete(recording)
    fused = {("fusion", 2), ("fusion", 3), ("fusion_backward", 2), ("fusion_backward", 3)}
    mixed = (1, 1, 3, 3)
    assert parts(recording, 0, mixed) == fused | {
        ("data", 1),
        ("embedding", 1),
        ("embedding_backward", 1),
        ("fusion_backward", 1),  # of the gates, once for all passes
    }
    assert parts(recording, 1, mixed) == {("data", 1)}
    assert parts(recording, 0, (1,) * 4) == {
        ("data", 1),
        ("embedding", 1),
        ("embedding_backward", 1),
    }
    facts = recording.facts
    assert (facts["stages"], facts["layers"], facts["tokens_per_micro_batch"]) == (2, [1, 1], 64)
    assert facts["mixture"] == {"1": 0.5, "3": 0.5}
    kept = {(a.stage, a.k): a.bytes for a in recording.activations}
    assert set(kept) == {(stage, k) for stage in (0, 1) for k in (1, 2, 3)}
    # The last stage keeps the same in every pass; on the first one the fusion keeps more, and its
    # second pass keeps what the gates need in all later ones, too.
    assert kept[1, 1] == kept[1, 2] == kept[1, 3] > 0
    assert kept[0, 1] < kept[0, 3] < kept[0, 2]
    values = document(recording)
    assert values["report"]["advice"]["options"]
    for case in values["report"]["cases"]:
        for rank in case["ranks"]:
            assert sum(rank["parts"].values()) == pytest.approx(rank["step_seconds"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "options", "replicas"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 1),
        (
            2,
            {
                "pipeline_model_parallel_size": 2,
                "num_layers": 4,
                "num_virtual_stages_per_pipeline_rank": 2,
            },
            1,
        ),
        (4, {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}, 2),
    ],
    ids=["alone", "dp2", "tp2-pp2", "pp2-vp2", "pp2-dp2"],
)
def test_other_layouts(tmp_path: Path, ranks: int, options: dict[str, Any], replicas: int) -> None:
    plan = CasePlan(CASES, warmup=1, steps=1)
    given = configuration(
        tmp_path,
        {"passes": {"schedule": {1: 0.5, 3: 0.5}, "recompute": "extra"}},
        global_batch_size=8,
        train_iters=plan.iterations,
        **options,
    )
    recording = profiled(given, ranks, plan, replicas)
    stages = options.get("pipeline_model_parallel_size", 1)
    expected = [(replica, stage) for replica in range(replicas) for stage in range(stages)]
    assert [(info.replica, info.stage) for info in recording.ranks] == expected
    if stages > 1 or replicas > 1:
        check_complete(recording)
    # Recomputed passes keep the inputs of their layers only.
    kept = {(a.stage, a.chunk, a.k): a.bytes for a in recording.activations}
    last = stages - 1
    assert kept[last, 0, 2] < kept[last, 0, 1]
    assert document(recording)["report"]["cases"]


def test_recording_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights of a run are the same to the last bit with some of its steps profiled."""
    given = configuration(tmp_path, train_iters=4)
    [plain] = train(given)
    monkeypatch.chdir(tmp_path)
    given["latent"]["profile"] = {"steps": "2-3", "output": str(tmp_path / "seen")}
    kept: list[Any] = []

    def with_profiler(config: Config) -> None:
        from megalatent.profiling.in_training import step_profiler

        kept.append(step_profiler(config))
        run(config, kept[0])

    run = pretrain.run
    monkeypatch.setattr(pretrain, "run", with_profiler)
    [seen] = train(given)
    assert seen.log == plain.log
    assert all(torch.equal(seen.weights[name], w) for name, w in plain.weights.items())
    assert " profile of steps 2-3" in seen.printed
    recording = Recording.load(tmp_path / "seen.json")
    assert [step.iteration for case in recording.cases for step in case.steps] == [1, 2]
    assert (tmp_path / "seen.html").exists()
    assert (tmp_path / "seen.trace.json").exists()


def profiled_in_training(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """What a run on one rank gave that profiles steps of its own."""
    run = pretrain.run

    def with_profiler(config: Config) -> None:
        from megalatent.profiling.in_training import step_profiler

        run(config, step_profiler(config))

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "run", with_profiler)
        [outcome] = train(given)
    return outcome


def test_a_run_that_ends_early_leaves_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also says which costs its plans are made for."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": [2.0], "head": 0.25}))
    latent = {"passes": {**MIXED, "draw": "micro_batch", "costs": str(costs)}}
    given = configuration(tmp_path, latent, train_iters=9, exit_interval=3, global_batch_size=8)
    given["latent"]["profile"] = {"steps": "2-8", "output": str(tmp_path / "new" / "seen")}
    outcome = profiled_in_training(given, monkeypatch)
    assert outcome.exit_code == 0
    recording = Recording.load(tmp_path / "new" / "seen.json")
    assert sorted(step.iteration for case in recording.cases for step in case.steps) == [1, 2]
    assert " profile of steps 2-3\n" in outcome.printed
    line = f" plans are made for the stage costs in {costs}: forward 2, backward 2, head 0.25"
    assert outcome.printed.count(line) == 1


def test_a_profile_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = configuration(tmp_path, train_iters=3)
    given["latent"]["profile"] = {"steps": "2-2", "output": str(tmp_path / "seen")}

    def broken(*args: object) -> None:
        raise KeyError("layers")

    monkeypatch.setattr("megalatent.profiling.in_training.publish", broken)
    outcome = profiled_in_training(given, monkeypatch)
    assert list(outcome.log) == [1, 2, 3]
    assert "megalatent: profile of steps 2-2: KeyError: 'layers'" in capfd.readouterr().err
