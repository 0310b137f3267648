"""Saved models: what lies on disk, and that it loads with and without the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

from megalatent.hf import MegalatentConfig, MegalatentForCausalLM, MegalatentModel
from megalatent.hf.configuration_megalatent import AUTO_MAP
from megalatent.hf.export import write_config_and_code
from tests.hf.reference import FBT, MOE, TINY, prompts, tiny_model

GREEDY = {"do_sample": False, "max_new_tokens": 5}
CODE = {
    "cache_megalatent.py",
    "configuration_megalatent.py",
    "decoding_megalatent.py",
    "fusion_megalatent.py",
    "layers_megalatent.py",
    "losses_megalatent.py",
    "modeling_megalatent.py",
    "positions_megalatent.py",
    "pretrained_megalatent.py",
}
ALONE = Path(__file__).with_name("export_alone.py")
HIDDEN = ("PYTHONPATH", "TORCHDYNAMO_DISABLE")  # what the tests' own process is set up with


def names_on_disk(folder) -> dict[str, list[int]]:
    names: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    return names


def test_an_export_loads_alone(tmp_path) -> None:
    models = {
        "plain": tiny_model(),
        "fbt": tiny_model(**FBT),
        "moe": tiny_model(seed=3, fusion="additive", tie_word_embeddings=False, **MOE),
    }
    ids = prompts(2, 6)
    (tmp_path / "ids.json").write_text(json.dumps(ids.tolist()))
    for name, model in models.items():
        model.generation_config = GenerationConfig(mode="fused", prefill_passes=3)
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
        files = {file.name for file in (tmp_path / name).iterdir()}
        assert files >= CODE | {"config.json", "generation_config.json"}
        assert "model.safetensors.index.json" in files
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAP
    run = subprocess.run(
        [sys.executable, str(ALONE), str(tmp_path), *models],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **{k: v for k, v in os.environ.items() if k not in HIDDEN},
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers = json.loads(run.stdout.splitlines()[-1])
    # Decoding steps compile whole, and once: the state stays in its buffer.
    for mode, (text, graphs) in answers["compiled"].items():
        assert text == answers["plain"]["texts"][mode]
        assert graphs == 1
    for name, model in models.items():
        texts = answers[name]["texts"]
        for mode in ("standard", "soft", "fused"):
            assert texts[mode] == model.generate(ids, mode=mode, **GREEDY).tolist(), mode
        three = model.generate(ids, mode="fused", prefill_passes=3, **GREEDY)
        assert texts["null"] == three.tolist()
        assert answers[name]["loss"] == pytest.approx(
            model(ids, labels=ids, num_passes=3).loss.item(), abs=1e-5
        )
        states = model.model(ids).last_hidden_state
        assert answers[name]["states"] == pytest.approx(states.double().sum().item(), abs=1e-4)
        # What the export saves again is the export.
        assert names_on_disk(tmp_path / f"{name}-again") == names_on_disk(tmp_path / name)
        assert (tmp_path / f"{name}-again" / "fusion_megalatent.py").exists()


def test_the_code_that_is_exported_imports_nothing_else_of_the_package() -> None:
    import megalatent.hf

    folder = Path(megalatent.hf.__file__).parent
    assert {file.name for file in folder.glob("*_megalatent.py")} == CODE
    for name in CODE:
        text = (folder / name).read_text()
        imports = [line.split()[1] for line in text.splitlines() if line.startswith("from .")]
        assert all(f"{module[1:]}.py" in CODE for module in imports)
        assert "import megalatent" not in text
        assert "from megalatent" not in text


def test_names_on_disk_are_llamas_and_qwens_plus_the_fusion(tmp_path) -> None:
    model = tiny_model(
        num_hidden_layers=2, mlp_only_layers=[0], **{**MOE, "num_experts": 2}, qk_norm=True
    )
    model.save_pretrained(tmp_path)
    layer = "model.layers.{}."
    attention = [f"self_attn.{p}_proj" for p in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    dense = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    experts = ["mlp.gate"] + [
        f"mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up", "down")
    ]
    fusion = [f"model.fusion.{n}" for n in ("state_proj", "gate_proj", "gate_norm", "fused_norm")]
    expected = ["model.embed_tokens", "model.norm", *fusion]
    expected += [layer.format(0) + name for name in attention + norms + dense]
    expected += [layer.format(1) + name for name in attention + norms + experts]
    names = names_on_disk(tmp_path)
    assert set(names) == {f"{name}.weight" for name in expected}
    assert names["model.layers.1.mlp.experts.1.gate_proj.weight"] == [20, 24]
    assert names["model.layers.1.mlp.experts.1.down_proj.weight"] == [24, 20]


def test_the_auto_classes_know_the_model_when_the_package_is_there(tmp_path) -> None:
    model, ids = tiny_model(**MOE), prompts(1, 5)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is MegalatentForCausalLM
    assert not any(info.values())
    assert torch.equal(loaded(ids, num_passes=2).logits, model(ids, num_passes=2).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is MegalatentModel


@pytest.mark.parametrize("fusion", ["gated", "additive"])
def test_a_plain_checkpoint_gets_a_fresh_fusion(tmp_path, fusion: str) -> None:
    plain, ids = tiny_model(fusion="none"), prompts(1, 5)
    plain.save_pretrained(tmp_path)
    config = MegalatentConfig(**TINY, fusion=fusion)
    model, info = MegalatentForCausalLM.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )
    assert info["missing_keys"] == {f"model.{k}" for k in model.model.state_dict() if "fusion" in k}
    assert not info["unexpected_keys"]
    weights = dict(model.model.fusion.named_parameters())
    if fusion == "additive":
        assert torch.equal(model(ids, num_passes=2).logits, plain(ids).logits)
    else:
        assert torch.equal(model(ids).logits, plain(ids).logits)
        scale = plain.model.embed_tokens.weight.square().mean().sqrt()
        assert torch.allclose(weights["fused_norm.weight"], scale.expand(24))
        assert abs(weights["state_proj.weight"].std() / TINY["initializer_range"] - 1) < 0.1


def test_half_precision_models_decode(tmp_path) -> None:
    tiny_model(**FBT).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.model.fusion.state_proj.weight.dtype == torch.bfloat16
    for cache in (None, "static"):
        out = model.generate(
            prompts(2, 6),
            mode="fused",
            cache_implementation=cache,
            return_dict_in_generate=True,
            **GREEDY,
        )
        assert out.past_key_values.state.dtype == torch.bfloat16
        assert out.sequences.shape == (2, 11)


def test_the_modes_own_passes_are_not_forced_on_another_mode() -> None:
    model, ids = tiny_model(), prompts(1, 5)
    expected = {m: model.generate(ids, mode=m, **GREEDY).tolist() for m in ("standard", "soft")}
    model.generation_config = GenerationConfig(mode="fused", prefill_passes=3)
    for mode, text in expected.items():
        assert model.generate(ids, mode=mode, **GREEDY).tolist() == text
    asked = GenerationConfig(mode="soft", **GREEDY)
    assert model.generate(ids, generation_config=asked).tolist() == expected["soft"]


def test_config_and_code_can_be_written_without_the_weights(tmp_path) -> None:
    """For writers that stream the weights: the very files that save_pretrained writes."""
    model = tiny_model(**FBT)
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "streamed").mkdir()
    config = MegalatentConfig(**{**TINY, **FBT, "dtype": "float32"})
    written = write_config_and_code(config, tmp_path / "streamed")
    for file in written:
        assert file.read_bytes() == (tmp_path / "whole" / file.name).read_bytes(), file.name
    names = {file.name for file in (tmp_path / "whole").iterdir()}
    assert names - {f.name for f in written} == {"model.safetensors", "generation_config.json"}
