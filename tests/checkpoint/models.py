"""Tiny random models of every family, made and saved by transformers itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from megalatent.hf import MegalatentConfig, MegalatentForCausalLM

VOCAB = 53  # odd: any padding shows

_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MOE = {"num_experts_per_tok": 2}

# name -> (model_type, settings)
PLAIN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 12, "rope_parameters": _LLAMA3}),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **_MOE,
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-some-dense": (
        "qwen3_moe",
        {
            **_MOE,
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {**_MOE, "num_local_experts": 4}),
}


def randomise(model: torch.nn.Module) -> None:
    """Make every weight matter: norms are not one, biases and adapters not zero."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith(("bias", "adapter_proj.weight")):
                parameter.normal_(std=0.1)


def save_plain(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model of a family in `PLAIN`, saved in several shards; returns it."""
    model_type, settings = PLAIN[name]
    torch.manual_seed(1)
    config = CONFIG_MAPPING[model_type](**{**_TINY, **settings})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    randomise(model)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


def save_own(folder: Path, **settings: Any) -> MegalatentForCausalLM:
    """A model of the project's own, saved; returns it."""
    torch.manual_seed(1)
    model = MegalatentForCausalLM(MegalatentConfig(**{**_TINY, **settings})).eval()
    randomise(model)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


def tokens(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model, by the safetensors library."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
