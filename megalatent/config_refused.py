"""Options of Megatron that cannot work with several passes, each with its reason.

An option here is refused whatever the schedule, K = 1 included: one configuration must be able to
change its number of passes on a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalatent.config_values import describe
from megalatent.errors import UserError

__all__ = ["REFUSED", "Refused", "refuse"]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An option, the values that are refused, why, and what to write instead."""

    option: str
    reason: str
    remedy: str = "leave it out"
    when: Callable[[Any], bool] = bool


_GRAPHS = (
    "a captured graph replays the visits it was captured with, and the number of passes changes"
    " from batch to batch"
)
_FSDP = (
    "FSDP frees and reduces a layer's weights after one visit, and a layer is visited once per pass"
)

_LAYERS = "the layers are made from Megatron's other options and from latent.model alone"

REFUSED = (
    Refused(option="enable_cuda_graph", reason=_GRAPHS),
    Refused(option="external_cuda_graph", reason=_GRAPHS),
    Refused(
        option="cuda_graph_impl",
        reason=_GRAPHS,
        remedy="write cuda_graph_impl: none",
        when=lambda value: value != "none",
    ),
    Refused(
        option="optimizer_cuda_graph",
        reason="steps of one pass leave the fusion weights out, a captured optimiser step cannot",
    ),
    Refused(
        option="optimizer_cpu_offload",
        reason="its copies of gradients outlive their step, and steps of one pass would train the"
        " fusion with those of an earlier step",
    ),
    Refused(
        option="defer_embedding_wgrad_compute",
        reason="it puts the head's weight gradient after Megatron's own schedule, which the plan of"
        " passes replaces",
    ),
    Refused(
        option="distribute_saved_activations",
        reason="it overwrites the token embeddings, which every pass reads again",
    ),
    Refused(
        option="fine_grained_activation_offloading",
        reason="it counts one visit of a layer per micro-batch, and there is one per pass",
    ),
    Refused(
        option="cpu_offloading_num_layers",
        reason="it counts one visit of a layer per micro-batch, and there is one per pass",
    ),
    Refused(
        option="moe_paged_stash",
        reason="it lays out its pages by Megatron's own schedule, which the plan of passes"
        " replaces",
    ),
    Refused(
        option="overlap_moe_expert_parallel_comm",
        reason="it runs its own order of forwards and backwards in place of the plan of passes",
    ),
    Refused(
        option="delay_wgrad_compute",
        reason="the weight gradients are computed by Megatron's own schedule, which the plan of"
        " passes replaces",
    ),
    Refused(
        option="hybrid_context_parallel",
        reason="it splits every micro-batch differently, and the shift between passes needs one"
        " split",
    ),
    Refused(
        option="variable_seq_lengths",
        reason="states are handed from pass to pass in buffers of one length",
    ),
    Refused(option="use_megatron_fsdp", reason=_FSDP, remedy="use use_distributed_optimizer: true"),
    Refused(option="use_torch_fsdp2", reason=_FSDP, remedy="use use_distributed_optimizer: true"),
    Refused(
        option="overlap_param_gather_with_optimizer_step",
        reason="it fetches the weights chunk by chunk in Megatron's own order, which the plan of"
        " passes replaces",
        remedy="use overlap_param_gather: true",
    ),
    Refused(
        option="spec",
        reason=_LAYERS,
        remedy="leave it out; transformer_impl says whose layers they are",
    ),
    Refused(option="heterogeneous_layers_config_path", reason=_LAYERS),
    Refused(option="heterogeneous_layers_config_encoded_json", reason=_LAYERS),
    Refused(option="experimental_attention_variant", reason=_LAYERS),
    Refused(
        option="perform_rl_step",
        reason="that loop generates its own batches and knows nothing of passes",
    ),
    Refused(
        option="yaml_cfg",
        reason="this file is the configuration",
        remedy="move its options under `megatron:`",
    ),
    Refused(
        option="use_checkpoint_args",
        reason="the checkpoint would replace what this file says after it has been checked",
        remedy="write the model's options under `megatron:`",
    ),
    Refused(
        option="rampup_batch_size",
        reason="Megatron 0.19 ignores it",
        remedy="use step_batch_size_schedule",
    ),
)


def refuse(megatron: Mapping[str, Any]) -> None:
    """Raise a `UserError` for the first refused option among those given."""
    for row in REFUSED:
        value = megatron.get(row.option)
        if value is not None and row.when(value):
            raise UserError(
                f"megatron.{row.option}: {describe(value)} is not supported, because {row.reason}:"
                f" {row.remedy}"
            )
