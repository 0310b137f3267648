"""Quantised exports: what is stored stands for the weights; calibration sees fused inputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megalatent.checkpoint import quantize
from megalatent.checkpoint.quantize import Quantization
from megalatent.cli import main
from megalatent.errors import UserError
from megalatent.hf import MegalatentConfig, MegalatentForCausalLM
from megalatent.hf.quantized import is_quantized, load_quantized
from tests.checkpoint import models

WORDS = "the of a in is to and for be as or are that with it not an by this".split()
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS) + 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "initializer_range": 0.06,
    "num_attention_heads": 4,
}
GATED = {"fusion": "gated", "qk_norm": True, "attention_gate": True, "sandwich_norm": True}
MOE = {"fusion": "additive", "num_experts": 4, "moe_intermediate_size": 128}


def export(folder: Path, **settings: Any) -> MegalatentForCausalLM:
    """A model and its tokenizer, as an export has them."""
    model = models.save_own(folder, **{**SIZES, **settings})
    vocabulary = {word: n for n, word in enumerate(["[unknown]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(SIZES["vocab_size"], (8, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return torch.stack([model(ids, num_passes=k).logits for k in (1, 3)])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.full
@pytest.mark.parametrize(
    ("format_", "settings", "bits", "limit"),
    [
        ("fp8", GATED, 8, 0.25),
        ("int8", GATED, 8, 0.1),
        ("int4_awq", GATED, 4, 0.8),  # a random model has no few channels that matter
        ("fp8", MOE, 8, 0.2),
        ("int8", MOE, 8, 0.1),
    ],
)
def test_a_quantised_export_is_near_the_model(
    tmp_path: Path, format_: str, settings: dict[str, Any], bits: int, limit: float
) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    wanted = logits(export(tmp_path, **settings))
    simulated = MegalatentForCausalLM.from_pretrained(tmp_path).eval()
    tokens = quantize.calibration_tokens(tmp_path, None)
    quantize.quantize_model(simulated, format_, tokens, 3)

    Quantization(format=format_).apply(tmp_path)
    assert is_quantized(tmp_path)
    assert not (tmp_path / "quantized").exists()
    stored = models.weights(tmp_path)
    linear = [
        n for n, t in stored.items() if t.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)
    ]
    experts = 3 * 4 * 2 if settings is MOE else 3 * 2
    assert len(linear) == 4 * 2 + experts + (2 if settings is GATED else 0)
    assert not any("fusion" in name or "mlp.gate." in name for name in linear)
    projection = stored["model.layers.0.self_attn.q_proj.weight"]
    assert projection.numel() * 8 == 128 * 128 * bits

    found = logits(load_quantized(tmp_path))
    assert error(found, wanted) < limit
    # modelopt's own simulation is an independent reading of its format; it rounds activations too,
    # and the export lets projections of one input share a scale.
    assert error(found, wanted) < 1.3 * error(logits(simulated), wanted)


@pytest.mark.full
def test_calibration_sees_fused_inputs(tmp_path: Path) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    export(tmp_path, **GATED)
    tokens = quantize.calibration_tokens(tmp_path, None)
    assert tokens.shape == (32, 64)
    largest: dict[int, dict[str, torch.Tensor]] = {}
    for passes in (1, 3):
        model = MegalatentForCausalLM.from_pretrained(tmp_path).eval()
        calls: list[int] = []
        model.model.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        quantize.calibration_loop(tokens, passes)(model)
        assert len(calls) == passes * 8  # eight batches of four rows
        quantize.quantize_model(model, "fp8", tokens, passes)
        largest[passes] = {
            name: module.amax
            for name, module in model.named_modules()
            if name.endswith("input_quantizer") and module.is_enabled
        }
    assert largest[1].keys() == largest[3].keys()
    assert not any("fusion" in name for name in largest[3])
    plain, fused = (torch.stack(list(values.values())) for values in largest.values())
    assert (fused >= plain).all()  # the first pass is a part of the three
    first = "model.layers.0.self_attn.q_proj.input_quantizer"
    assert largest[3][first] > largest[1][first]


def test_each_way_of_storing_weights_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights quantised here by hand, from the description of the formats."""
    model = export(tmp_path, fusion="gated")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored, expected = dict(state), dict(state)

    eighth = "model.layers.0.self_attn.q_proj"
    scale = state[f"{eighth}.weight"].abs().amax(1) / 127
    rounded = (state[f"{eighth}.weight"] / scale[:, None]).round()
    stored |= {f"{eighth}.weight": rounded.to(torch.int8), f"{eighth}.weight_scale": scale}
    expected[f"{eighth}.weight"] = rounded * scale[:, None]

    floating = "model.layers.0.self_attn.o_proj"
    one = state[f"{floating}.weight"].abs().max() / 448
    small = (state[f"{floating}.weight"] / one).to(torch.float8_e4m3fn)
    smoothing = torch.rand(128) + 0.5
    stored |= {
        f"{floating}.weight": small,
        f"{floating}.weight_scale": one,
        f"{floating}.pre_quant_scale": smoothing,
        f"{floating}.input_scale": torch.tensor(3.0),  # of activations: has no part here
    }
    expected[f"{floating}.weight"] = small.float() * one * smoothing

    packed = "model.layers.1.mlp.down_proj"
    blocks = state[f"{packed}.weight"].view(128, 2, 128)
    scales = blocks.abs().amax(2) / 7
    fours = (blocks / scales[..., None]).round().clamp(-8, 7).view(128, 256)
    low, high = (half.to(torch.int16) & 15 for half in (fours[0::2], fours[1::2]))
    stored |= {
        f"{packed}.weight": (low + 16 * high).to(torch.uint8),
        f"{packed}.weight_scale": scales,
    }
    expected[f"{packed}.weight"] = (fours.view(128, 2, 128) * scales[..., None]).view(128, 256)

    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"mode": "soft", "eos_token_id": [3, 4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert is_quantized(tmp_path)
    model = load_quantized(tmp_path)
    assert (model.generation_config.mode, model.generation_config.eos_token_id) == ("soft", [3, 4])
    loaded = model.state_dict()
    for name, tensor in expected.items():
        assert torch.allclose(loaded[name], tensor, atol=1e-7), name
    capsys.readouterr()
    assert main(["generate", str(tmp_path), "--prompt", "the of", "--max-new-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert "quantised weights are expanded" in err
    assert set(out.split()) <= {*WORDS, "[unknown]"}
    for lost in ("model.norm.weight", "model.embed_tokens.weight", f"{eighth}.weight_scale"):
        rest = {name: tensor for name, tensor in stored.items() if name != lost}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"{lost} .*missing"):
            load_quantized(tmp_path)
    stored[f"{eighth}.weight"] = rounded.to(torch.int16)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="int16, which is unknown"):
        load_quantized(tmp_path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("modelopt", "modelopt.torch.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"nvidia-modelopt .*pip install 'megalatent\[quantize\]'"):
        Quantization(format="fp8").require_package()


@pytest.mark.parametrize(
    ("changes", "format_", "message"),
    [
        ({"hidden_size": 96}, "int4_awq", "hidden_size is 96"),
        ({"intermediate_size": 200}, "int4_awq", "intermediate_size is 200"),
        ({"num_experts": 4}, "int4_awq", "models with experts"),
        ({}, "fp8", "names no tokenizer"),
    ],
)
def test_what_cannot_be_quantised(
    tmp_path: Path, changes: dict[str, Any], format_: str, message: str
) -> None:
    tokenizer = tmp_path if changes else None
    with pytest.raises(UserError, match=message):
        Quantization(format=format_).check(MegalatentConfig(**{**SIZES, **changes}), tokenizer)


def test_the_text_to_calibrate_with(tmp_path: Path) -> None:
    export(tmp_path)
    text = tmp_path / "text.txt"
    with pytest.raises(UserError, match="is not a file"):
        Quantization(format="fp8", calibration=text).check(MegalatentConfig(**SIZES), tmp_path)
    text.write_text("the of " * 100)
    assert quantize.calibration_tokens(tmp_path, text).tolist() == [[1, 2] * 32] * 3
    text.write_text("the of")
    with pytest.raises(UserError, match="has 2 tokens and one row takes 64"):
        quantize.calibration_tokens(tmp_path, text)
    text.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="cannot be read"):
        quantize.calibration_tokens(tmp_path, text)
