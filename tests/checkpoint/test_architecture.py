"""Gates, norms after branches, multiplier and windows: to Hugging Face, and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megalatent import platform

platform.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from megalatent.checkpoint.convert import from_hf, to_hf  # noqa: E402
from megalatent.checkpoint.fresh import use_saved_names  # noqa: E402
from megalatent.checkpoint.reader import CheckpointReader  # noqa: E402
from megalatent.config import Config, ModelConfig  # noqa: E402
from tests.checkpoint import models, test_families, test_layouts  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402
from tests.distributed.latent import VOCAB, Rig, Setup  # noqa: E402
from tests.distributed.layout import initialise  # noqa: E402

MODEL = ModelConfig(attention_gate=True, sandwich_norm=True, residual_multiplier=4**-0.5)
OPTIONS: dict[str, Any] = dataclasses.asdict(MODEL)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"attention_gate": True}, marks=pytest.mark.full),
        pytest.param(
            {"sandwich_norm": True, "residual_multiplier": 2**-0.5}, marks=pytest.mark.full
        ),
        {
            **OPTIONS,
            "qk_norm": True,
            "tie_word_embeddings": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ],
    ids=["gate", "norms", "all"],
)
def test_own_exports_are_inverted_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    """Weights and configuration bit by bit, and the same logits in every pass and mode."""
    test_families.test_own_exports_are_inverted_exactly(tmp_path, "gated", options)
    run = yaml.safe_load((tmp_path / "megatron" / "model.yaml").read_text())
    options = {name: value for name, value in options.items() if name in OPTIONS}
    assert run["latent"]["model"] == dataclasses.asdict(ModelConfig(**options))
    # The options are a configuration's own: they read without a mistake.
    assert Config.from_mapping(run).latent.model == ModelConfig(**options)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sp=True), pytest.param(Layout(pp=2), marks=pytest.mark.full)], ids=str
)
def test_an_export_has_the_losses_of_the_checkpoint(tmp_path: Path, layout: Layout) -> None:
    """Trained in Megatron's layers -> Hugging Face -> Megatron's layers."""
    given: Setup = dataclasses.replace(
        test_layouts.setup("gated"), model=MODEL, window=((5, 0), 3), layers=4
    )
    args = test_layouts.arguments(given)
    args.window_size, args.window_attn_skip_freq = (5, 0), 3
    args.latent_config["model"] = OPTIONS
    folder = tmp_path / "iter_0000005"
    folder.mkdir()

    def save(rank: int) -> dict[int, float]:
        init(layout)
        rig = Rig(given, layout)
        for model in rig.models:
            initialise(model, vocab_size=VOCAB, std=0.1)
        losses = test_layouts.evaluated(rig)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
        state |= {"model": rig.models[0].sharded_state_dict(metadata={"dp_cp_group": replicas})}
        dist_checkpointing.save(state, str(folder))
        return losses

    losses = run_ranks(layout.world_size, save)[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    to_hf(tmp_path, tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config
    assert {name: getattr(exported, name) for name in OPTIONS} == OPTIONS
    sliding = "sliding_attention"
    assert exported.layer_types == [sliding, sliding, "full_attention", sliding]
    assert exported.sliding_window == 6
    found = test_layouts.hf_losses(tmp_path / "hf", given)
    assert found.keys() == losses.keys() == {1, 2, 3}
    for k, loss in losses.items():
        assert found[k] == pytest.approx(loss, abs=1e-5)

    from_hf(tmp_path / "hf", tmp_path / "back")
    before, after = CheckpointReader(folder), CheckpointReader(tmp_path / "back")
    assert before.tensors.keys() == after.tensors.keys()
    for key in after.tensors:
        rows = (0, VOCAB) if key == "embedding.word_embeddings.weight" else None
        assert torch.equal(before.read(key, [], rows), after.read(key, [])), key


def test_the_norm_before_experts_is_found_by_either_name() -> None:
    """Megatron's local layers save it as a part of a linear layer that they do not have."""
    ours, megatrons = (
        f"decoder.layers.1.{name}weight"
        for name in ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    )
    for asked, saved in ((ours, ours), (ours, megatrons), (megatrons, ours)):
        entry = SimpleNamespace(key=asked)
        use_saved_names({"norm": entry, "other": None}, {saved})
        assert entry.key == saved


def test_missing_parts_are_named(tmp_path: Path) -> None:
    """An export that says it has gates, and has none."""
    from megalatent.errors import UserError

    models.save_own(tmp_path / "hf", fusion="gated")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace('"attention_gate": false', '"attention_gate": true'))
    with pytest.raises(UserError, match="gate_proj"):
        from_hf(tmp_path / "hf", tmp_path / "megatron")
