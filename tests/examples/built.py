"""The model of an example as one rank of a large run builds it, without memory or peers."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.harness import run_ranks

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    """Parameters of one rank.

    Attributes:
        shared: in weights that are no expert's; split over tensor-parallel ranks and stages.
        experts: in experts; split over expert-parallel ranks too.
        fusion: in the fusion, which is part of `shared`.
        layers: on this rank.
    """

    shared: int
    experts: int
    fusion: int
    layers: int


def build(path: Path, world_size: int, *, rank: int = 0, **megatron: object) -> Built:
    """Build the model of a config on the meta device.

    Args:
        path: of the config.
        world_size: ranks of the pretended run.
        rank: the one to build.
        megatron: options to change, where a machine without CUDA cannot have them.
    """
    return run_ranks(1, _build, path, world_size, rank, megatron)[0]


def _build(_: int, path: Path, world_size: int, rank: int, megatron: dict[str, object]) -> Built:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.models.gpt import GPTModelBuilder
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megalatent.config import Config
    from megalatent.model.build import latent_model
    from megalatent.model.layers import layer_spec

    vocabulary = Config.load(str(path)).megatron["padded_vocab_size"]
    tokenizer = {"tokenizer_type": "NullTokenizer", "tokenizer_model": "null"}
    changed = {**tokenizer, "vocab_size": vocabulary, **megatron}
    config = Config.load(str(path), [f"megatron.{name}={value}" for name, value in changed.items()])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    sys.argv = ["megalatent", *config.megatron_argv()]
    args = parse_and_validate_args()
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    given = gpt_config_from_args(args)
    given.transformer_layer_spec = functools.partial(layer_spec, model=config.latent.model)
    given.transformer.use_cpu_initialization = True  # on the default device, which is meta below
    given.transformer.perform_initialization = False
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = args.virtual_pipeline_model_parallel_size
    models = []
    with torch.device("meta"):
        for chunk in range(chunks) if chunks else (None,):
            backbone = GPTModelBuilder(given).build_model(groups, vp_stage=chunk)
            models.append(latent_model(backbone, config.latent, args.padded_vocab_size))
    parameters = {
        name if i == 0 else f"chunk{i}.{name}": weight
        for i, model in enumerate(models)
        for name, weight in model.named_parameters()
    }
    assert all(weight.is_meta for weight in parameters.values())
    experts = {
        name for name, weight in parameters.items() if not getattr(weight, "allreduce", True)
    }
    sizes = {name: weight.numel() for name, weight in parameters.items()}
    return Built(
        shared=sum(n for name, n in sizes.items() if name not in experts),
        experts=sum(n for name, n in sizes.items() if name in experts),
        fusion=sum(n for name, n in sizes.items() if name.startswith("fusion.")),
        layers=sum(len(model.decoder.layers) for model in models),
    )
