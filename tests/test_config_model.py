"""`latent.model:` and the options of Megatron that it meets: values, `depth`, contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from megalatent.config import Config, ModelConfig
from megalatent.errors import UserError
from tests.test_config import MODEL as PLAIN

MODEL: dict[str, Any] = {**PLAIN, "position_embedding_type": "rope"}


def config(model: Any, **megatron: Any) -> Config:
    given = {k: v for k, v in {**MODEL, **megatron}.items() if v != "gone"}
    return Config.from_mapping({"latent": {"model": model}, "megatron": given})


def test_defaults_change_nothing() -> None:
    plain = Config.from_mapping({"megatron": MODEL}).latent.model
    assert plain == config(None).latent.model == ModelConfig()
    assert (plain.attention_gate, plain.sandwich_norm, plain.residual_multiplier) == (
        False,
        False,
        1.0,
    )


def test_depth_is_one_over_the_root_of_the_layers() -> None:
    found = config({"residual_multiplier": "depth", "sandwich_norm": True}, num_layers=25)
    assert found.latent.model == ModelConfig(sandwich_norm=True, residual_multiplier=0.2)
    # What is shown and saved is the number, which reads back.
    assert found.resolved()["latent"]["model"]["residual_multiplier"] == 0.2
    assert Config.from_mapping(found.resolved()).latent == found.latent


@pytest.mark.parametrize(
    ("model", "megatron", "parts"),
    [
        ({"residual_multiplier": 0}, {}, ("residual_multiplier: 0", "above 0")),
        ({"residual_multiplier": "deep"}, {}, ("'deep' is no factor", "depth")),
        ({"residual_multiplier": True}, {}, ("true is no factor",)),
        (
            {"residual_multiplier": "depth"},
            {"num_layers": "gone"},
            ("needs megatron.num_layers",),
        ),
        ({"attention_gates": True}, {}, ("latent.model.attention_gates", "'attention_gate'")),
        ({"sandwich_norm": 1}, {}, ("latent.model.sandwich_norm", "true or false")),
        (
            {"attention_gate": True},
            {"attention_output_gate": True},
            ("megatron.attention_output_gate", "second gate", "leave one"),
        ),
        (
            {"attention_gate": True},
            {"multi_latent_attention": True},
            ("megatron.multi_latent_attention", "another attention"),
        ),
        (
            None,
            {"window_attn_skip_freq": 6},
            ("megatron.window_attn_skip_freq: 6", "no effect without window_size"),
        ),
        (None, {"window_size": [15]}, ("window_size: [15]", "[W - 1, 0]")),
        (
            None,
            {"window_size": [15, 0], "window_attn_skip_freq": [1, 0, 1]},
            ("3 entries for num_layers: 4",),
        ),
        (
            None,
            {"window_size": [15, 0], "window_attn_skip_freq": 0},
            ("window_attn_skip_freq: 0", "every Nth layer"),
        ),
        (
            None,
            {"transformer_impl": "transformer_engine", "reset_attention_mask": True},
            ("reset_attention_mask: true has no effect", "dataloader_inter_document_masking"),
        ),
        (
            None,
            {"no_create_attention_mask_in_dataloader": True, "reset_attention_mask": True},
            ("no effect with no_create_attention_mask_in_dataloader", "keep one"),
        ),
        (
            None,
            {"context_parallel_size": 2, "attention_dropout": 0.1},
            ("attention_dropout: 0.1 with context_parallel_size: 2", "attention_dropout: 0"),
        ),
        (
            None,
            {"softmax_type": "learnable", "dataloader_inter_document_masking": True},
            ("softmax_type: 'learnable' with packed documents", "vanilla"),
        ),
        (None, {"apply_layernorm_1p": True}, ("apply_layernorm_1p: true needs", "leave it out")),
        (
            None,
            {"transformer_impl": "inference_optimized"},
            ("'inference_optimized' cannot be trained", "or local"),
        ),
        (
            None,
            {
                "context_parallel_size": 2,
                "cp_comm_type": "a2a",
                "transformer_impl": "transformer_engine",
                "group_query_attention": True,
                "num_query_groups": 1,
            },
            ("cp_comm_type: a2a spreads whole heads", "num_query_groups: 1", "all_gather"),
        ),
        (
            None,
            {"num_experts": 2, "moe_router_topk": 1, "moe_layer_freq": "[0,1]"},
            ("moe_layer_freq: 2 entries for num_layers: 4",),
        ),
        (None, {"num_experts": 2, "moe_router_topk": 1, "moe_layer_freq": 0}, ("_layer_freq: 0",)),
        (
            None,
            {"num_experts": 2, "moe_router_topk": 1, "swiglu": True},
            ("num_experts: 2 with swiglu: true and biases", "disable_bias_linear: true"),
        ),
        (None, {"spec": ["local"]}, ("megatron.spec", "transformer_impl")),
        (
            None,
            {"heterogeneous_layers_config_encoded_json": "{}"},
            ("heterogeneous_layers_config_encoded_json", "from latent.model alone"),
        ),
        (
            None,
            {"experimental_attention_variant": "gated_delta_net"},
            ("experimental_attention_variant", "from latent.model alone"),
        ),
        (
            None,
            {
                "window_size": [15, 0],
                "context_parallel_size": 2,
                "transformer_impl": "transformer_engine",
            },
            ("megatron.cp_comm_type: p2p has no sliding window", "a2a"),
        ),
    ],
)
def test_mistakes(model: Any, megatron: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        config(model, **megatron).check(2)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_windows_on_other_layouts_are_allowed() -> None:
    """Local attention under context parallelism, and windows without it."""
    windows = {"window_size": [15, 0], "window_attn_skip_freq": 2}
    exchanged = {"context_parallel_size": 2, "attention_dropout": 0.0}
    config(None, **windows, **exchanged, transformer_impl="local").check(2)
    config({"attention_gate": True}, **windows).check(2)
