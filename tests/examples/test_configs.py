"""Every example config passes the dry run where the files that it names are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megalatent.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPOSITORY / "examples").rglob("*.yaml"))


def _make_files(folder: Path, megatron: dict[str, Any]) -> None:
    """What the config reads, as empty as the checks before a run allow."""
    for prefix in megatron["data_path"]:
        for ending in (".bin", ".idx"):
            path = folder / f"{prefix}{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    tokenizer = folder / megatron["tokenizer_model"]
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    if "load" in megatron and megatron["load"] != megatron.get("save"):
        weights = folder / megatron["load"] / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
        weights.parent.mkdir(parents=True)
        weights.touch()
        tracker = folder / megatron["load"] / "latest_checkpointed_iteration.txt"
        tracker.write_text("100")


@pytest.mark.parametrize(
    "path", CONFIGS, ids=lambda path: str(path.relative_to(REPOSITORY / "examples"))
)
def test_dry_run(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    given = yaml.safe_load(path.read_text())
    monkeypatch.chdir(tmp_path)
    # Without its files it says what is missing; nothing else is wrong.
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "# before it can run: megatron.data_path: " in capfd.readouterr().out
    _make_files(tmp_path, given["megatron"])
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(path), "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert "before it can run" not in out
    shown = yaml.safe_load(out.split("# Megatron's command line")[0])
    assert shown["megatron"].keys() >= given["megatron"].keys()
    assert len(shown["latent"]["passes"]["schedule"]) >= 1
    assert sorted(tmp_path.rglob("*")) == before


def test_shares_of_passes_are_the_papers() -> None:
    """Recycler: three passes on 6.6% of the steps, 3.3% more compute than two throughout."""
    from megalatent.config import Config
    from megalatent.passes.sampling import PassSampler

    config = Config.load(str(REPOSITORY / "examples/recycler-third-pass.yaml"))
    total = config.megatron["train_iters"]
    sampler = PassSampler(
        [(phase.start, phase.mixture) for phase in config.latent.passes.schedule],
        train_iters=total,
        seed=config.latent.seed,
    )
    passes = [sampler.passes(i, 1)[0] for i in range(0, total, 5)]
    assert passes.count(3) / len(passes) == pytest.approx(0.066, abs=0.005)
    assert sum(passes) / (2 * len(passes)) == pytest.approx(1.033, abs=0.003)
    assert set(passes[: len(passes) // 2]) == {2}
