"""What reports and advice need to know about the model and the run besides its times."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

__all__ = ["model_facts"]

# Options that say how the layers are divided.
_PIPELINE = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)


def model_facts(session: Any) -> dict[str, Any]:
    """Facts of a run, the same on all ranks but for `own_layers` (per chunk, on this rank).

    Args:
        session: `megalatent.training.pretrain.Session`.
    """
    from megalatent.launch.mfu import flops_per_token, peak_flops

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
        "pipeline_options": [name for name in session.config.megatron if name in _PIPELINE],
        "costs_file": latent.passes.costs,
        "mixture": _mean_mixture(session),
        # What a layer keeps when it is recomputed: its input.
        "layer_input_bytes": rows * args.hidden_size * args.params_dtype.itemsize,
        "flops_per_token": flops_per_token(args),
        "peak_flops": peak,
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
