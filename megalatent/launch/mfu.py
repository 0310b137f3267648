"""Model FLOPs utilisation: the operations the model needs over what its GPUs could do."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megalatent.launch.runfolder import RunFolder, Submission
from megalatent.training.flops import visible_pairs

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


def flops_per_token(args: argparse.Namespace) -> float:
    """Operations for one token in one pass, forward and backward, without recomputation.

    Six per weight that the token meets (of experts, the chosen ones), and causal attention,
    within the sliding window in layers that have one.

    Args:
        args: Megatron's options.
    """
    hidden, layers = args.hidden_size, args.num_layers or 0
    head = args.kv_channels or hidden // args.num_attention_heads
    queries = head * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    attention = hidden * (2 * queries + 2 * head * groups)
    ffn = (args.moe_ffn_hidden_size if args.num_experts else None) or args.ffn_hidden_size
    experts = args.moe_router_topk if args.num_experts else 1
    mlp = (3 if args.swiglu else 2) * hidden * (ffn or 4 * hidden) * experts
    pairs = sum(visible_pairs(args, args.seq_length)) / args.seq_length
    scores = 2 * queries * pairs  # of all layers: two products for each pair
    return 6.0 * (layers * (attention + mlp) + scores + hidden * (args.vocab_size or 0))


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
