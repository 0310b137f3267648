"""The full-bandwidth 1B model: its parameters by hand, its recipe, its two layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megalatent.config import Config
from tests.examples.built import build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# FBT appendix A.
VOCABULARY, HIDDEN, LAYERS, WIDTH = 100_352, 1536, 24, 6656
HEADS, GROUPS, HEAD = 16, 8, 96
TOTAL = 1_065_575_424


def _layer(tp: int = 1) -> int:
    """Parameters of a layer on one of `tp` ranks; gate and norms are on all of them."""
    attention = HIDDEN * HEAD * (2 * HEADS + 2 * GROUPS) // tp + HIDDEN * HEADS + 2 * HEAD
    return attention + 3 * HIDDEN * WIDTH // tp + 4 * HIDDEN


def test_parameters_on_8_ranks() -> None:
    fusion = 2 * HIDDEN**2 + 2 * HIDDEN
    total = VOCABULARY * HIDDEN + LAYERS * _layer() + HIDDEN + fusion
    assert total == TOTAL
    built = build(EXAMPLES / "fbt-1b.yaml", 8, rank=3)
    assert (built.shared, built.experts, built.fusion) == (total, 0, fusion)
    assert f"{total:,} parameters" in (EXAMPLES / "fbt-1b.yaml").read_text()


@pytest.mark.parametrize(("rank", "layers"), [(5, 14), (63, 10)])
def test_parameters_on_64_ranks(rank: int, layers: int) -> None:
    """Stages of 14 and 10 layers; both hold the tied table, and the first one the fusion."""
    fusion = 2 * HIDDEN**2 + 2 * HIDDEN if layers == 14 else 0
    table, final_norm = VOCABULARY * HIDDEN // 4, 0 if layers == 14 else HIDDEN
    built = build(EXAMPLES / "fbt-1b-64.yaml", 64, rank=rank)
    assert built.layers == layers
    assert built.fusion == fusion
    assert built.shared == table + layers * _layer(4) + final_norm + fusion


def test_the_recipe() -> None:
    """FBT section 4: shares of passes over the run, tokens a step and in all, schedule."""
    config = Config.load(str(EXAMPLES / "fbt-1b.yaml"))
    megatron, latent = config.megatron, config.latent
    starts = [float(phase.start) for phase in latent.passes.schedule] + [1.0]
    shares: dict[int, float] = {}
    for phase, start, end in zip(latent.passes.schedule, starts, starts[1:], strict=False):
        for k, share in phase.mixture.items():
            shares[k] = shares.get(k, 0.0) + share * (end - start)
    assert shares == pytest.approx({1: 0.75, 2: 0.22, 3: 0.03})
    a_step = megatron["global_batch_size"] * megatron["seq_length"]
    assert a_step == pytest.approx(300_000, rel=0.1)
    assert a_step * megatron["train_iters"] == pytest.approx(200e9, rel=1e-5)
    assert megatron["lr_wsd_decay_iters"] == megatron["train_iters"] / 4
    assert megatron["lr_warmup_iters"] == 200
    assert (megatron["lr"], latent.optimizer.adam_lr) == (1e-2, 5e-4)
    assert (megatron["weight_decay"], latent.optimizer.adam_weight_decay) == (0.01, 0.0)
    assert (latent.fusion.jitter, latent.fusion.prefix_mixin) == (0.02, True)
    assert latent.model.residual_multiplier == pytest.approx(LAYERS**-0.5)
    every = int(megatron["window_attn_skip_freq"])
    full = [n for n in range(1, LAYERS + 1) if n % every == 0]
    assert full == [6, 12, 18, 24]
    assert megatron["window_size"] == "2047,0"


def test_both_layouts_are_one_run() -> None:
    """Only where things are may differ, not what is trained."""
    one, other = (
        _flat(yaml.safe_load((EXAMPLES / name).read_text()))
        for name in ("fbt-1b.yaml", "fbt-1b-64.yaml")
    )
    differ = {key for key in one | other if one.get(key) != other.get(key)}
    assert differ == {
        "megatron.tensor_model_parallel_size",
        "megatron.sequence_parallel",
        "megatron.pipeline_model_parallel_size",
        "megatron.num_virtual_stages_per_pipeline_rank",
        "megatron.decoder_last_pipeline_num_layers",
        "megatron.save",
        "megatron.load",
        "megatron.tensorboard_dir",
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
