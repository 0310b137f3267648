"""Loading a quantised export (`convert to-hf --quantize`) without the engine it is made for.

The weights are what the quantised ones stand for; activations keep their precision. It shows what
quantisation did to the weights, and serves tests; it is neither smaller nor faster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .configuration_megalatent import MegalatentConfig
from .modeling_megalatent import MegalatentForCausalLM

__all__ = ["is_quantized", "load_quantized"]

_WHOLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def is_quantized(folder: Path) -> bool:
    """Whether a folder holds a model quantised by modelopt."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    quantization = json.loads(config.read_text()).get("quantization_config") or {}
    return quantization.get("quant_method") == "modelopt"


def load_quantized(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A quantised export with the weights that the quantised ones stand for.

    Args:
        dtype: of the model; None for that of the weights that were not quantised.

    Raises:
        ValueError: weights are missing, or quantised in a way that this function does not know.
        OSError: a file cannot be read.
    """
    from safetensors.torch import load_file

    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    config = MegalatentConfig.from_dict(raw)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    table = stored.get("model.embed_tokens.weight")
    if table is None:
        raise ValueError("model.embed_tokens.weight is missing: export it again")
    weights = {
        name: _dequantized(name.removesuffix(".weight"), stored).to(dtype or table.dtype)
        for name in stored
        if not name.endswith(("_scale", "_scale_2"))
    }
    model, info = MegalatentForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype or table.dtype,
        output_loading_info=True,
    )
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(
            f"{', '.join(wrong[:3])} ({len(wrong)} in all) missing or of another model: export it"
            " again"
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _dequantized(module: str, stored: dict[str, Tensor]) -> Tensor:
    """`[out, in]` of a linear layer, or a tensor as it is."""
    weight = stored.get(f"{module}.weight", stored.get(module))
    assert weight is not None
    scale = stored.get(f"{module}.weight_scale")
    if scale is None and weight.dtype not in _WHOLE:
        raise ValueError(f"{module}.weight_scale is missing: export it again")
    if scale is not None:
        if weight.dtype == torch.uint8:
            weight = _unpacked(weight)
        elif weight.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"{module}.weight is quantised as {weight.dtype}, which is unknown")
        weight = weight.float() * _spread(scale.float(), weight.shape)
    smoothing = stored.get(f"{module}.pre_quant_scale")
    if smoothing is not None:  # inputs are multiplied by it before the product
        weight = weight.float() * smoothing.float()
    return weight


def _unpacked(packed: Tensor) -> Tensor:
    """4-bit integers `[out, in]` from bytes `[out / 2, in]`: the even row is in the low half."""
    low, high = (packed & 15).to(torch.int8), (packed >> 4).to(torch.int8)
    rows = torch.stack([low, high], dim=1).flatten(0, 1)
    return torch.where(rows > 7, rows - 16, rows)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """One scale for all, for each row, or for each block of inputs in a row, as `[out, in]`."""
    if scale.dim() == 2:
        return scale.repeat_interleave(shape[1] // scale.shape[1], dim=1)
    return scale.reshape(-1, 1).expand(shape)
