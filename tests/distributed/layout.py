"""The same model on every layout: initial weights by name, and tensors put together from all ranks.

A *global name* is a parameter's name in the model on one rank: layers and experts are numbered
globally, wrapper prefixes (`module.`, `backbone.`) are dropped, and the last stage's copy of a tied
embedding is called as the embedding. A *shard* says which part of the full tensor a rank holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

__all__ = [
    "OPTIMIZER_TENSORS",
    "Shard",
    "full_gradients",
    "full_optimizer_tensors",
    "full_parameters",
    "global_name",
    "initialise",
    "named_parameters",
]

EMBEDDING = "embedding.word_embeddings.weight"
# Masters, and the states of Adam and of NorMuon.
OPTIMIZER_TENSORS = ("param", "exp_avg", "exp_avg_sq", "momentum_buffer", "moment2_buffer")
VOCABULARY = (EMBEDDING, "output_layer.weight")


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP and Float16Module."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def named_parameters(chunk: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of a chunk, wrapped or not."""
    model = unwrap(chunk)
    for name, param in model.named_parameters():
        yield global_name(name, model), param


def global_name(name: str, model: torch.nn.Module) -> str:
    """The name `name` of the unwrapped `model` would have in the whole model on one rank."""
    parts = name.split(".")
    modules = dict(model.named_modules())
    for i, part in enumerate(parts):
        if part == "layers" and i and parts[i - 1] == "decoder":
            # Right under PP and VPP: the layer knows its global number, which starts at 1.
            parts[i + 1] = str(modules[".".join(name.split(".")[: i + 2])].layer_number - 1)
        elif part == "local_experts":
            parts[i + 1] = str(int(parts[i + 1]) + _first_local_expert(model))
    name = ".".join(parts).removeprefix("backbone.")
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    return EMBEDDING if tied and name == "output_layer.weight" else name


def _first_local_expert(model: torch.nn.Module) -> int:
    config: Any = next(m.config for m in model.modules() if hasattr(m, "config"))
    local = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return local * parallel_state.get_expert_model_parallel_rank()


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` along `dim` (None: the whole tensor); `gated`: [gate_r; up_r] rows."""

    dim: int | None
    size: int
    rank: int
    gated: bool

    @staticmethod
    def of(name: str, param: torch.nn.Parameter, model: torch.nn.Module) -> Shard:
        expert = ".experts." in name
        if expert:
            size = parallel_state.get_expert_tensor_parallel_world_size()
            rank = parallel_state.get_expert_tensor_parallel_rank()
        else:
            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
        split = getattr(param, "tensor_model_parallel", False) and size > 1
        config: Any = next(m.config for m in model.modules() if hasattr(m, "config"))
        gated = config.gated_linear_unit and ".linear_fc1." in name
        return Shard(param.partition_dim if split else None, size, rank, gated)  # type: ignore[attr-defined]

    def full_shape(self, local: torch.Size) -> list[int]:
        shape = list(local)
        if self.dim is not None:
            shape[self.dim] *= self.size
        return shape

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the full tensor."""
        if self.dim is None:
            return full
        if self.gated:
            halves = [half.chunk(self.size, self.dim)[self.rank] for half in full.chunk(2, 0)]
            return torch.cat(halves, 0)
        return full.chunk(self.size, self.dim)[self.rank]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor of all ranks' parts, in rank order."""
        if self.dim is None:
            return parts[0]
        if self.gated:
            halves = [part.chunk(2, 0) for part in parts]
            gates, ups = zip(*halves, strict=True)
            return torch.cat([*gates, *ups], self.dim)
        return torch.cat(list(parts), self.dim)


def initialise(
    chunk: torch.nn.Module,
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    std: float = 0.05,
    std_of: Callable[[str], float | None] = lambda name: None,
) -> None:
    """Fill every parameter with values that depend on its global name and `seed` alone.

    Vectors (norm weights) are 1 + 0.1 x, biases 0.1 x, matrices std x, with x normal. Rows of the
    embedding from `vocab_size` on are padding, and zero. `std_of(name)` may give another std.
    """
    model = unwrap(chunk)
    for name, param in named_parameters(model):
        shard = Shard.of(name, param, model)
        shape = shard.full_shape(param.shape)
        rows = shape[0]
        if vocab_size is not None and name in VOCABULARY:
            shape[0] = vocab_size
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
        x = torch.randn(shape, generator=generator)
        if param.dim() == 1:
            x = 0.1 * x + (0.0 if name.endswith("bias") else 1.0)
        else:
            x = (std_of(name) or std) * x
        if rows > x.shape[0]:
            x = torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
        with torch.no_grad():
            param.copy_(shard.take(x))


def full_parameters(
    chunks: Sequence[torch.nn.Module], *, vocab_size: int | None = None
) -> dict[str, torch.Tensor]:
    """All parameters in full, by global name, on every rank. Collective."""
    return _assemble(chunks, lambda param: param.detach(), vocab_size)


def full_gradients(
    chunks: Sequence[torch.nn.Module], *, vocab_size: int | None = None
) -> dict[str, torch.Tensor]:
    """All gradients in full, by global name, on every rank. Collective.

    Call it after `finalize_model_grads`, before the optimiser steps. Takes `main_grad` of chunks in
    Megatron's DDP (with the distributed optimiser, where a rank has the reduced gradient of its own
    shard only, the shards are gathered), else `grad`. A parameter without gradient has zeros.
    """
    reduced: dict[torch.nn.Parameter, torch.Tensor] = {}
    for chunk in chunks:
        reduced.update(_reduced_gradients(chunk))

    def gradient(param: torch.nn.Parameter) -> torch.Tensor:
        grad = reduced.get(param, getattr(param, "main_grad", param.grad))
        return torch.zeros_like(param) if grad is None else grad.detach()

    return _assemble(chunks, gradient, vocab_size)


def full_optimizer_tensors(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    key: str,
    *,
    vocab_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """The optimiser's `key` ("param": masters, "exp_avg", …) in full, by global name. Collective.

    Works for Megatron's distributed, layer-wise, 16-bit and fp32 optimisers, chained or not. Holds
    the parameters whose optimiser has such a tensor.
    """
    local: dict[torch.nn.Parameter, torch.Tensor] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for chunk in chunks:
            for param in unwrap(chunk).parameters():
                tensor = _optimizer_tensor(part, param, key)
                if tensor is not None:
                    local[param] = tensor
    return _assemble(chunks, local.get, vocab_size)


def _optimizer_tensor(part: Any, param: torch.nn.Parameter, key: str) -> torch.Tensor | None:
    if not hasattr(part, "model_param_gbuf_map"):
        main = getattr(param, "main_param", param)
        if main is not param and key == "param":
            return main.detach()
        state = part.optimizer.state.get(main)
        if state is None:
            return None
        tensor = main if key == "param" else state.get(key)
        return None if tensor is None else tensor.detach()
    if not any(param in buffer.param_index_map for buffer in part.buffers):
        return None
    full = torch.zeros(param.numel() + 1)  # the last one: on how many ranks there is something
    # Only the parameters of this rank's shard are in its maps.
    if param in part.model_param_gbuf_map:
        group, index = part.model_param_group_index_map[param]
        main = part.optimizer.param_groups[group]["params"][index]
        tensor = main if key == "param" else part.optimizer.state[main].get(key)
        if tensor is not None:
            own = part._get_model_param_range_map(param)["param"]
            full[own.start : own.end] = tensor.detach().float()
            full[-1] = 1
    dist.all_reduce(full, group=part.data_parallel_group)
    return full[:-1].view(param.shape) if full[-1] else None


def _reduced_gradients(chunk: torch.nn.Module) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Gradients gathered from the distributed optimiser's shards; empty without it."""
    if not isinstance(chunk, DistributedDataParallel):
        return {}
    if not chunk.ddp_config.use_distributed_optimizer:
        return {}
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.view(group.size(), -1)[group.rank()].contiguous()
            shards = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(shards, own, group=group)
            data = torch.cat(shards)
            for param, (start, end) in bucket.param_to_index.items():
                found[param] = data[start:end].view(param.shape)
    return found


def _assemble(
    chunks: Sequence[torch.nn.Module],
    value: Callable[[torch.nn.Parameter], torch.Tensor | None],
    vocab_size: int | None,
) -> dict[str, torch.Tensor]:
    mine = []
    for chunk in chunks:
        model = unwrap(chunk)
        for name, param in named_parameters(model):
            tensor = value(param)
            if tensor is not None:
                mine.append((name, Shard.of(name, param, model), tensor.float().clone()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, dict[int, torch.Tensor]] = {}
    shards: dict[str, Shard] = {}
    for rank, parts in enumerate(everyone):
        for name, shard, tensor in parts:
            shards[name] = shard
            index = 0 if shard.dim is None else shard.rank
            first = found.setdefault(name, {}).setdefault(index, tensor)
            difference = (first - tensor).norm()
            # Replicas are sums of the same numbers in another order, if not copies.
            assert difference <= 1e-5 * first.norm() + 1e-12, (
                f"{name}: the copy on rank {rank} differs from the first one by {difference:.2e} "
                f"(norm {first.norm():.2e})"
            )
    full = {}
    for name, parts in sorted(found.items()):
        shard = shards[name]
        count = 1 if shard.dim is None else shard.size
        tensor = shard.join([parts[i] for i in range(count)])
        full[name] = tensor[:vocab_size] if name in VOCABULARY else tensor
    return full
