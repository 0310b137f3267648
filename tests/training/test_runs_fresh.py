"""A plain checkpoint starts a latent run; what else does not fit is refused in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalatent.cli import main
from tests.distributed.layout import full_optimizer_tensors, full_parameters
from tests.training.runs import Outcome, configuration, train

NONE = {"fusion": {"kind": "none"}}
TABLE = "embedding.word_embeddings.weight"
FUSED_NORM = "fusion.fused_norm.weight"


def _latent(kind: str) -> dict[str, Any]:
    return {"fusion": {"kind": kind}, "passes": {"schedule": 2, "timeout_seconds": 300}}


class _Saved:
    """A plain run and a gated run of three steps, both saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plain = self._run("plain", NONE)
        self.gated = self._run("gated", _latent("gated"))

    def _run(self, name: str, latent: Any) -> Outcome:
        # The plain table moves far from its start, so that its RMS tells which one was measured.
        lr = 0.3 if name == "plain" else 3e-3
        save = str(self.folder / name)
        return train(configuration(self.folder, latent, train_iters=3, lr=lr, save=save))[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> _Saved:
    return _Saved(tmp_path_factory.mktemp("saved"))


def _rms(table: torch.Tensor) -> float:
    return float(table.double().square().mean().sqrt())


def _weights_and_masters(chunks: list[Any], optimizer: Any, step: int) -> Any:
    has_masters = optimizer.config.bf16
    masters = full_optimizer_tensors(chunks, optimizer, "param") if has_masters else {}
    return full_parameters(chunks), masters


@pytest.mark.parametrize(
    ("ranks", "kind", "options"),
    [
        pytest.param(1, "gated", {}, id="gated"),
        pytest.param(
            2,
            "concat",
            {"bf16": True, "use_distributed_optimizer": True},
            id="concat-sharded-bf16",
        ),
        pytest.param(
            2,
            "gated",
            {"bf16": True, "pipeline_model_parallel_size": 2},
            id="pp2-bf16",
            marks=pytest.mark.full,
        ),
        pytest.param(
            2,
            "additive",
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            id="additive-tp2-sp",
            marks=pytest.mark.full,
        ),
    ],
)
def test_finetune_from_a_plain_checkpoint(
    saved: _Saved, ranks: int, kind: str, options: dict[str, Any]
) -> None:
    load = str(saved.folder / "plain")
    given = configuration(
        saved.folder, _latent(kind), train_iters=2, load=load, finetune=True, **options
    )
    outcome = train(given, ranks, each_step=_weights_and_masters)[0]
    start, masters = outcome.kept[0]
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    fresh = {name for name in start if name.startswith("fusion.")}
    assert fresh
    assert start.keys() - fresh == saved.plain.weights.keys()
    for name, weight in saved.plain.weights.items():
        assert torch.equal(start[name], weight.to(dtype).float()), name
    line = re.search(r" fresh weights, not in the checkpoint: (.*)", outcome.printed)
    assert line is not None
    assert set(line.group(1).split(", ")) == fresh
    if kind != "additive":
        expected = _rms(saved.plain.weights[TABLE])
        assert expected > 2 * 0.1  # not that of the initial table
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        assert start[FUSED_NORM] == pytest.approx(torch.full([32], expected), rel=tolerance)
    assert bool(masters) == ("bf16" in options)
    for name, master in masters.items():
        assert torch.equal(master, start[name]), name
    assert outcome.steps == {2.0}
    assert not torch.equal(outcome.weights[TABLE], start[TABLE])


def test_same_run_with_a_fresh_optimiser(saved: _Saved) -> None:
    load = str(saved.folder / "plain")
    given = configuration(
        saved.folder, _latent("gated"), train_iters=5, load=load, no_load_optim=True
    )
    outcome = train(given, each_step=lambda chunks, optimizer, step: full_parameters(chunks))[0]
    assert list(outcome.log) == [4, 5]
    assert torch.equal(outcome.kept[0][TABLE], saved.plain.weights[TABLE])
    assert outcome.kept[0][FUSED_NORM][0] == pytest.approx(_rms(saved.plain.weights[TABLE]))


@pytest.mark.parametrize(
    ("checkpoint", "kind", "changes", "words"),
    [
        ("plain", "gated", {"finetune": False}, ["megatron.finetune: true"]),
        ("gated", "additive", {}, ["fusion.adapter_proj", "latent.fusion.kind"]),
        ("gated", "none", {}, ["fusion.gate_proj", "latent.fusion.kind"]),
        ("plain", "gated", {"num_layers": 3}, ["has 2 layers where the model has 3"]),
        ("gated", "gated", {"num_layers": 1}, ["has 2 layers where the model has 1"]),
        ("plain", "gated", {"ffn_hidden_size": 64}, ["linear_fc1", "96, 32", "128, 32"]),
        ("plain", "gated", {"untie_embeddings_and_output_weights": True}, ["lacks output_layer"]),
        ("gated", "gated", {"qk_layernorm": False}, ["q_layernorm.weight", "megatron:"]),
    ],
    ids=["plain", "other", "none", "more", "fewer", "shape", "untied", "unexpected"],
)
def test_what_does_not_fit_is_one_line(
    saved: _Saved,
    tmp_path: Path,
    checkpoint: str,
    kind: str,
    changes: dict[str, Any],
    words: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    latent = _latent(kind) if kind != "none" else NONE
    written = {
        "save": str(tmp_path / "save"),
        "tensorboard_dir": str(tmp_path / "tensorboard"),
        "data_cache_path": str(tmp_path / "cache"),
    }
    load = str(saved.folder / checkpoint)
    given = configuration(
        saved.folder,
        latent,
        **{"train_iters": 2, "load": load, "finetune": True, **changes},
        **written,
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    assert main(["train", str(path), "--nproc", "1"]) == 2
    errors = [x for x in capfd.readouterr().err.splitlines() if x.startswith("megalatent")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]
