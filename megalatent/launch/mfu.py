"""Model FLOPs utilisation: the operations the model needs over what its GPUs could do."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from megalatent.launch.runfolder import RunFolder, Submission
from megalatent.training.expert_layers import expert_layers
from megalatent.training.flops import visible_pairs

if TYPE_CHECKING:
    from megalatent.config import LatentConfig

__all__ = ["flops_per_token", "peak_flops", "utilisation"]

# Dense 16-bit matrix operations per second, from NVIDIA's data sheets (half of "with sparsity").
_PEAKS = {
    "GB300": 2.5e15,
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 0.99e15,
    "H200": 0.99e15,
    "H100 PCIe": 0.756e15,
    "H100": 0.99e15,
    "H800": 0.99e15,
    "H20": 0.148e15,
    "A100": 0.312e15,
    "A800": 0.312e15,
    "L40S": 0.362e15,
}


def flops_per_token(args: argparse.Namespace, latent: LatentConfig) -> float:
    """Operations for one token in one pass, forward and backward, without recomputation.

    Six per weight that the token meets (of experts, the chosen ones), and causal attention,
    within the sliding window in layers that have one. The fusion, which the first pass has not,
    is not counted.

    Args:
        args: Megatron's options.
    """
    hidden, layers = args.hidden_size, args.num_layers or 0
    heads = args.num_attention_heads
    head = args.kv_channels or hidden // heads
    groups = args.num_query_groups if args.group_query_attention else heads
    attention = hidden * head * (2 * heads + 2 * groups)
    if latent.model.attention_gate:
        attention += hidden * heads
    per_row = (3 if args.swiglu else 2) * hidden  # of a layer's inner size
    inner = args.ffn_hidden_size or 4 * hidden
    weights = layers * (attention + per_row * inner) + hidden * (args.vocab_size or 0)
    if args.num_experts:
        chosen = (args.moe_ffn_hidden_size or inner) * args.moe_router_topk
        chosen += args.moe_shared_expert_intermediate_size or 0
        of_experts = per_row * (chosen - inner) + hidden * args.num_experts  # and the router
        weights += sum(expert_layers(args.moe_layer_freq, layers)) * of_experts
    pairs = sum(visible_pairs(args, args.seq_length)) / args.seq_length  # of all layers
    return 6.0 * (weights + 2 * head * heads * pairs)  # two products for each pair


def peak_flops(gpu: str) -> float | None:
    """16-bit operations per second of a GPU by the name that nvidia-smi gives it; None: unknown."""
    for name, peak in _PEAKS.items():
        if all(word.lower() in gpu.lower() for word in name.split()):
            return peak
    return None


def utilisation(folder: RunFolder, submission: Submission, record: dict[str, Any]) -> float | None:
    """MFU of the last logged interval; None without GPUs, or for GPUs that are not known."""
    if "mfu" in record:
        return float(record["mfu"])
    speed, passes = record.get("tokens_per_second"), record.get("passes_per_step", 1.0)
    peak = peak_flops(_gpu_name(folder) or "")
    if not (speed and peak and submission.flops_per_token and submission.ranks):
        return None
    return float(speed * passes * submission.flops_per_token / (submission.ranks * peak))


def _gpu_name(folder: RunFolder) -> str | None:
    """From the node check of the latest attempt."""
    reports = list(folder.logs.glob("*/check-basic/*.json"))
    for path in sorted(reports, key=lambda path: path.stat().st_mtime, reverse=True)[:1]:
        return json.loads(path.read_text(encoding="utf-8")).get("gpu")
    return None
