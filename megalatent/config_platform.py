"""Options that Megatron needs and that follow from the machine or from other options.

What is filled in is shown by `--dry-run`; an option that the config gives is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from megalatent.config_megatron import value_of

__all__ = ["fill_in"]

# Iterations between evaluations; Megatron has no default and divides by it.
_EVAL_INTERVAL = 1000


def fill_in(megatron: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Name -> (value, reason) of every option to add to those given."""
    from megalatent.platform import on_cpu

    wanted: dict[str, tuple[Any, str]] = {
        "eval_interval": (_EVAL_INTERVAL, "Megatron has no default"),
    }
    if megatron.get("seq_length") is not None:
        wanted["max_position_embeddings"] = (megatron["seq_length"], "as long as the sequences")
    if value_of(megatron, "optimizer") == "adaptive_muon":
        wanted["muon_tp_mode"] = ("duplicated", "tensor parallelism then changes no update")
    if on_cpu():
        wanted |= _for_cpu(megatron)
    elif find_spec("fused_weight_gradient_mlp_cuda") is None:
        # Megatron's output layer refuses to be built, also beside Transformer Engine's layers.
        wanted["no_gradient_accumulation_fusion"] = (True, "apex is not installed")
    return {name: found for name, found in wanted.items() if name not in megatron}


def _for_cpu(megatron: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    no_cuda = "no CUDA device here"
    wanted: dict[str, tuple[Any, str]] = {
        "transformer_impl": ("local", no_cuda),
        "distributed_backend": ("gloo", no_cuda),
        "no_gradient_accumulation_fusion": (True, no_cuda),
    }
    if value_of(megatron, "position_embedding_type") in ("rope", "yarn", "mrope") or megatron.get(
        "use_rotary_position_embeddings"
    ):
        wanted["no_rope_fusion"] = (True, no_cuda)
    if megatron.get("bf16") or megatron.get("fp16"):
        wanted["no_masked_softmax_fusion"] = (True, no_cuda)
    if value_of(megatron, "optimizer") == "adaptive_muon":
        wanted["muon_fp32_matmul_prec"] = ("high", "bf16 products are slow without a CUDA device")
    return wanted
