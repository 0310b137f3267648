"""What reports and advice need to know about the model and the run besides its times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

if TYPE_CHECKING:
    from megalatent.config import Config

__all__ = ["facts_of_config", "model_facts"]

# Options that say how the layers are divided.
_PIPELINE = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_RECOMPUTATION = ("recompute_granularity", "recompute_activations", "moe_layer_recompute")


def model_facts(session: Any) -> dict[str, Any]:
    """Facts of a run, the same on all ranks but for `own_layers` (per chunk, on this rank).

    Args:
        session: `megalatent.training.pretrain.Session`.
    """
    from megalatent.launch.mfu import peak_flops

    args, latent = session.args, session.config.latent
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    replicas = parallel_state.get_data_parallel_world_size()
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    rows = args.seq_length * args.micro_batch_size // context
    if args.sequence_parallel:
        rows //= tensor
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return {
        "stages": stages,
        "chunks": len(session.models),
        "replicas": replicas,
        "ranks_per_stage": tensor * context,
        "world_size": torch.distributed.get_world_size(),
        "num_layers": args.num_layers,
        "own_layers": [len(model.decoder.layers) for model in session.models],
        "hidden_size": args.hidden_size,
        "micro_batch_size": args.micro_batch_size,
        "global_batch_size": args.global_batch_size,
        "seq_length": args.seq_length,
        "tokens_per_micro_batch": args.seq_length * args.micro_batch_size,
        "fusion": latent.fusion.kind,
        "recompute": str(latent.passes.recompute),
        "max_in_flight": latent.passes.max_in_flight,
        **facts_of_config(session.config, mtp_layers=args.mtp_num_layers, stages=stages),
        "costs_file": latent.passes.costs,
        "mixture": _mean_mixture(session),
        # What a layer keeps when it is recomputed: its input.
        "layer_input_bytes": rows * args.hidden_size * args.params_dtype.itemsize,
        "flops_per_token": [session.flops.per_token(k) for k in (1, 2, 3)],
        "peak_flops": peak,
    }


def facts_of_config(config: Config, *, mtp_layers: int | None, stages: int) -> dict[str, Any]:
    """What decides which other settings a run may have.

    Args:
        mtp_layers: of multi-token prediction.
    """
    given = config.megatron
    return {
        "max_passes": config.latent.passes.max_passes,
        "pipeline_options": [name for name in given if name in _PIPELINE],
        # Layouts of our making have no place for layers of multi-token prediction.
        "layers_can_move": not mtp_layers,
        # Megatron has no chunks on two stages without overlap.
        "most_chunks": 1 if stages == 2 and given.get("no_overlap_p2p_communication") else None,
        "recomputed_by_megatron": any(given.get(name) for name in _RECOMPUTATION),
    }


def _mean_mixture(session: Any) -> dict[str, float]:
    """Share of each K over the whole run, as its schedule has it."""
    passes, total = session.config.latent.passes, session.args.train_iters
    phases = passes.schedule
    starts = [
        phase.start if isinstance(phase.start, float) else phase.start / total for phase in phases
    ]
    mean: dict[str, float] = {}
    for phase, start, end in zip(phases, starts, [*starts[1:], 1.0], strict=True):
        for k, share in phase.mixture.items():
            if share > 0 and start < min(end, 1.0):
                mean[str(k)] = mean.get(str(k), 0.0) + share * (min(end, 1.0) - start)
    return mean
