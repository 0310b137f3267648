"""Every family there and back, bit by bit, and the same logits through Megatron."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalatent import platform

platform.install()

from megalatent.checkpoint.convert import from_hf, to_hf  # noqa: E402
from megalatent.checkpoint.logits import compare_logits  # noqa: E402
from megalatent.cli import main  # noqa: E402
from tests.checkpoint import models  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402

# fp32 on both sides; sums run in another order, a few ulp a layer on logits of about 2.
TOLERANCE = 1e-5


def logit_differences(checkpoint: Path, model: Path) -> dict[str, Any]:
    def compare(rank: int) -> dict[str, Any]:
        init(Layout())
        return compare_logits(checkpoint / "release", model)

    return run_ranks(1, compare)[0]


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


def own_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mixtral's names, as the export has them; other families have the export's names."""
    renames = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w2.": ".down_proj."}
    renames[".w3."] = ".up_proj."
    found = {}
    for name, tensor in weights.items():
        if "block_sparse_moe" in name:
            for old, new in renames.items():
                name = name.replace(old, new)
        found[name] = tensor
    return found


@pytest.mark.parametrize("name", models.PLAIN)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    original = models.save_plain(name, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", max_shard=20_000)
    same_weights(own_names(models.weights(tmp_path / "hf")), models.weights(tmp_path / "back"))
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()

    differences = logit_differences(tmp_path / "megatron", tmp_path / "hf")
    assert list(differences) == ["K = 1", "mode standard"]
    for found in differences.values():
        assert found["scale"] > 0.5  # else a small difference would mean little
        assert found["max"] < TOLERANCE

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = models.tokens()
    with torch.no_grad():
        difference = exported(ids).logits - original(ids).logits
    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("fusion", "settings"),
    [
        ("gated", {"input_norm": "all", "qk_norm": True, "document_end_token_id": 7}),
        ("additive", {"tie_word_embeddings": True, "attention_bias": True}),
        ("concat", {"num_experts": 4, "moe_intermediate_size": 20, "sliding_window": 6}),
    ],
)
def test_own_exports_are_inverted_exactly(
    tmp_path: Path, fusion: str, settings: dict[str, Any]
) -> None:
    training = {"loss_weighting": "sum", "jitter": 0.05, "prefix_mixin": False, "num_passes": 2}
    models.save_own(tmp_path / "hf", fusion=fusion, eos_token_id=7, **settings, **training)
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    same_weights(models.weights(tmp_path / "hf"), models.weights(tmp_path / "back"))

    from transformers import AutoConfig

    configs = [AutoConfig.from_pretrained(tmp_path / x).to_dict() for x in ("hf", "back")]
    for config in configs:  # how it was saved, not what it is
        for name in ("architectures", "auto_map", "transformers_version", "_name_or_path"):
            config.pop(name, None)
    assert configs[0] == configs[1]

    differences = logit_differences(tmp_path / "megatron", tmp_path / "hf")
    modes = [f"mode {mode}" for mode in ("standard", "soft", "fused")]
    assert list(differences) == ["K = 1", "K = 2", "K = 3", *modes]
    for found in differences.values():
        assert found["max"] < TOLERANCE


def test_the_command_prints_the_differences(tmp_path: Path) -> None:
    models.save_own(tmp_path / "hf", fusion="additive")

    def command(rank: int) -> tuple[int, str]:
        init(Layout())
        printed = io.StringIO()
        arguments = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out")]
        with contextlib.redirect_stdout(printed):
            return main([*arguments, "--verify-logits"]), printed.getvalue()

    (status, printed), *_ = run_ranks(1, command)
    assert status == 0
    kept = json.loads((tmp_path / "out" / "conversion.json").read_text())["logits"]
    assert len(kept) == 6
    for what, found in kept.items():
        line = f"logits, {what}: largest difference {found['max']:.3e}, mean {found['mean']:.3e}"
        assert line in printed


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    models.save_plain("qwen2", tmp_path / "hf", torch.bfloat16)
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    same_weights(models.weights(tmp_path / "hf"), models.weights(tmp_path / "back"))


def test_dtype_is_that_of_rounding(tmp_path: Path) -> None:
    models.save_plain("qwen3", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", dtype=torch.bfloat16)
    rounded = {k: v.bfloat16() for k, v in models.weights(tmp_path / "hf").items()}
    same_weights(rounded, models.weights(tmp_path / "back"))


def test_the_export_loads_alone_and_generates(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    models.save_own(tmp_path / "hf", fusion="gated")
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    wanted, got = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, trust_remote_code=folder == "back")
        for folder in ("hf", "back")
    )
    ids = models.tokens(1, 5)
    for mode in ("standard", "soft", "fused"):
        options = {"mode": mode, "max_new_tokens": 6, "do_sample": False}
        assert got.generate(ids, **options).tolist() == wanted.generate(ids, **options).tolist()


@pytest.mark.parametrize("fusion", ["gated", "additive", "concat"])
def test_a_fresh_fusion(tmp_path: Path, fusion: str) -> None:
    original = models.save_plain("mistral", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "megatron", fusion=fusion)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = models.tokens()
    with torch.no_grad():
        plain = original(ids).logits
        one, two = (exported(ids, num_passes=k).logits for k in (1, 2))
    assert torch.allclose(one, plain, atol=TOLERANCE)
    # The additive adapter starts at zero: the model is the one that was imported, in every pass.
    assert torch.allclose(two, plain, atol=TOLERANCE) == (fusion == "additive")
    if fusion != "additive":
        table = exported.model.embed_tokens.weight
        norm = exported.model.fusion.fused_norm.weight
        assert torch.allclose(norm, table.square().mean().sqrt().expand_as(norm))
