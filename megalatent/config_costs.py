"""The file of measured costs that a config names: it is one, and it is for this pipeline."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.passes.problem import Problem

__all__ = ["check_costs", "virtual_chunks"]


def check_costs(args: argparse.Namespace, path: str | None) -> None:
    """Raise a `UserError` if the costs in `path` cannot be those of the pipeline in `args`.

    A file that is not there is for `check_files` to name.
    """
    if path is None or not Path(path).is_file():
        return
    stages, chunks = args.pipeline_model_parallel_size, virtual_chunks(args)
    try:
        # It looks up every stage's costs, of the first pass and of a later one.
        Problem(stages, chunks, (2,), Costs.load(path))
    except UserError as error:
        raise UserError(
            f"latent.passes.costs: {path}: {error}: measure them for {stages} stages of {chunks}"
            " chunk(s) with `megalatent profile --costs`"
        ) from None


def virtual_chunks(args: argparse.Namespace) -> int:
    """Virtual chunks of each pipeline stage, from Megatron's options before it validates them."""
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout:
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        layout = args.pipeline_model_parallel_layout
        return max(1, PipelineParallelLayerLayout.get_num_stages_from_str(layout) // stages)
    if args.num_layers_per_virtual_pipeline_stage:
        return max(1, args.num_layers // stages // args.num_layers_per_virtual_pipeline_stage)
    return args.num_virtual_stages_per_pipeline_rank or 1
