"""The backbone: equal to transformers' own classes, and to the slow reference where they end."""

from typing import Any

import pytest
import torch
import transformers

from megalatent.hf import MegalatentConfig, MegalatentForCausalLM
from tests.hf.reference import FBT, MOE, TINY, Reference, prompts, tiny_model

SIZES: dict[str, Any] = {k: v for k, v in TINY.items() if k != "num_hidden_layers"} | {
    "num_hidden_layers": 2
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# family: its own settings, and what they are called here
FAMILIES: dict[str, Any] = {
    "Llama": (
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
        {
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3_ROPE,
            "rms_norm_eps": 1e-6,
        },
    ),
    "Qwen2": ({}, {"attention_bias": True, "rms_norm_eps": 1e-6}),
    "Qwen3": ({}, {"qk_norm": True, "rms_norm_eps": 1e-6}),
    "Mistral": ({"sliding_window": 4}, {"sliding_window": 4, "rms_norm_eps": 1e-6}),
    "Mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"num_experts": 4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ),
    "Qwen3Moe": (
        {**MOE, "mlp_only_layers": [1]},
        {**MOE, "mlp_only_layers": [1], "qk_norm": True, "norm_topk_prob": False}
        | {"rms_norm_eps": 1e-6},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_family_of_transformers(family: str) -> None:
    theirs_settings, ours_settings = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if not (family == "Qwen2" and k == "head_dim")}
    theirs_settings = {"tie_word_embeddings": False, **sizes, **theirs_settings}
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**theirs_settings)
    ).eval()
    settings = {"tie_word_embeddings": False, "fusion": "none", **sizes, **ours_settings}
    ours = MegalatentForCausalLM(MegalatentConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    # One to one: the same names, the same shapes, nothing missing and nothing left over.
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ids = prompts(2, 13)
    with torch.no_grad():
        difference = (ours(ids).logits - theirs(ids).logits).abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        FBT,
        {**FBT, **MOE, "mlp_only_layers": [0]},
        {**MOE, "norm_topk_prob": False, "tie_word_embeddings": False},
        {"attention_gate": True, "residual_multiplier": 0.5, "num_key_value_heads": 4},
    ],
    ids=["fbt", "fbt-moe", "moe-untied", "gate"],
)
def test_equals_the_slow_reference(settings: dict) -> None:
    ids = prompts(1, 9)
    for attn in ("sdpa", "eager"):
        model = tiny_model(dtype=torch.float64, attn_implementation=attn, **settings)
        out = model(ids, output_pass_states=True)
        if attn == "sdpa":
            reference = Reference(model)
            states = reference.stack(reference.embed(ids[0]))
            logits = torch.stack([reference.logits(state) for state in states])
        # RoPE angles and eager softmax are single precision.
        assert (out.pass_states[0][0] - states).abs().max() < 1e-5
        assert (out.logits[0] - logits).abs().max() < 1e-5


def test_hidden_states_and_attention_weights_are_those_of_the_last_pass() -> None:
    model = tiny_model(attn_implementation="eager")
    ids = prompts(1, 6)
    out = model(ids, num_passes=2, output_hidden_states=True, output_attentions=True)
    reference = Reference(model)
    first = reference.passes(ids[0], 1)[0]
    embedded = reference.embed(ids[0])
    inputs = [embedded[0], *[reference.fuse(first[t - 1], embedded[t]) for t in range(1, 6)]]
    assert len(out.hidden_states) == 4
    assert (out.hidden_states[0][0] - torch.stack(inputs)).abs().max() < 1e-5
    assert (out.hidden_states[-1][0] - reference.stack(torch.stack(inputs))).abs().max() < 1e-4
    assert len(out.attentions) == 3
    assert torch.allclose(out.attentions[0].sum(-1), torch.ones(1, 4, 6))


def test_attention_weights_of_sdpa_are_refused() -> None:
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        tiny_model()(prompts(1, 3), output_attentions=True)


def test_the_fbt_1b_model_has_the_number_of_parameters_of_its_recipe() -> None:
    layers = ["full_attention" if n % 6 == 0 else "sliding_attention" for n in range(1, 25)]
    config = MegalatentConfig(
        vocab_size=100_352,
        hidden_size=1536,
        intermediate_size=6656,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        sliding_window=2048,
        layer_types=layers,
        qk_norm=True,
        attention_gate=True,
        sandwich_norm=True,
        residual_multiplier=24**-0.5,
        fusion="gated",
    )
    assert config.head_dim == 96
    with torch.device("meta"):
        model = MegalatentForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == 1_065_575_424


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"layer_types": ["sliding_attention"] * 3}, "set sliding_window"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"fusion": "additive", "input_norm": "all"}, "input_norm='all' needs"),
        ({"fusion": "none", "num_passes": 2}, "needs a fusion"),
        ({"num_passes": 0}, "at least one pass"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ],
)
def test_contradictory_configs_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegalatentConfig(**{**TINY, **settings})


@pytest.mark.parametrize("settings", [{"fusion": "gate"}, {"hidden_size": "24"}])
def test_wrong_values_of_config_fields_are_refused(settings: dict) -> None:
    from huggingface_hub.errors import StrictDataclassError

    with pytest.raises(StrictDataclassError, match=next(iter(settings))):
        MegalatentConfig(**{**TINY, **settings})
