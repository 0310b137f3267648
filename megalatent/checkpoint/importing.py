"""From Hugging Face to Megatron, tensor by tensor, checking every bit of what was written.

As in `megalatent.checkpoint.exporting`, the whole plan is made from shapes before anything is
written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalatent.checkpoint.arguments import megatron_options, to_args
from megalatent.checkpoint.exporting import Progress
from megalatent.checkpoint.mapping import Family, Unit, units
from megalatent.checkpoint.reader import CheckpointReader, SafetensorsReader
from megalatent.checkpoint.slices import BLOCK, same_bits, same_blocks
from megalatent.checkpoint.writer import StackedTensor, Staging, hash_file, write_checkpoint
from megalatent.errors import UserError

__all__ = ["import_weights"]


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


@dataclass
class _Group:
    """The units whose tensors are pieces of one key."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[tuple[int, ...], Unit] = field(default_factory=dict)


class _Source:
    """The model's own weights, and a fresh fusion's beside them."""

    def __init__(self, reader: SafetensorsReader, fresh: Mapping[str, Tensor]) -> None:
        self._reader, self._fresh = reader, fresh
        self.tensors = reader.tensors | {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in fresh.items()
        }

    def fill(self, name: str, target: Tensor) -> None:
        if name in self._fresh:
            target.copy_(self._fresh[name].view(target.shape))
        else:
            self._reader.fill(name, target)

    def elements(self, name: str, first: int, count: int) -> Tensor:
        if name in self._fresh:
            return self._fresh[name].view(-1)[first : first + count]
        return self._reader.elements(name, first, count)


def import_weights(
    reader: SafetensorsReader,
    staging: Staging,
    family: Family,
    config: Any,
    *,
    fresh: Mapping[str, Tensor],
    extra_rules: Sequence[Any],
    progress: Progress,
) -> None:
    """Write and verify a torch_dist checkpoint of a Hugging Face model.

    Args:
        config: `MegalatentConfig` of the result.
        fresh: weights that the model lacks, by Hugging Face name, with `extra_rules` for them.

    Raises:
        UserError: the model does not have exactly the tensors of its family, or the disk is too
            small.
    """
    source = _Source(reader, fresh)
    rules = [*family.rules, *extra_rules]
    groups = plan_import(source, reader, family, rules, config)
    total = sum(_nbytes(group.shape, group.dtype) for group in groups.values())
    staging.require_space(total + (1 << 12) * sum(len(g.pieces) for g in groups.values()))

    def maker(group: _Group) -> Callable[[tuple[int, ...]], Tensor]:
        def make(index: tuple[int, ...]) -> Tensor:
            unit = group.pieces[index]
            tensor = torch.empty(unit.megatron_shape(), dtype=group.dtype)
            for name, place in zip(unit.names(), unit.places(tensor), strict=True):
                source.fill(name, place)
            return tensor

        return make

    tensors = {
        key: StackedTensor(
            shape=group.shape,
            dtype=group.dtype,
            stacked=len(next(iter(group.pieces))),
            make=maker(group),
        )
        for key, group in groups.items()
    }
    args = argparse.Namespace(**to_args(config, megatron_options(config)))
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    objects = _extra_states(config)
    folder = write_checkpoint(
        staging.folder, tensors, common, objects, lambda n: progress("write", n, total)
    )

    written = CheckpointReader(folder)
    for key, group in groups.items():
        for index, unit in group.pieces.items():
            tensor = written.read(key, list(index))
            for name, place in zip(unit.names(), unit.places(tensor), strict=True):
                if not same_blocks(place, partial(source.elements, name)):
                    raise UserError(
                        f"{key} {list(index)} as written differs from {name}: the disk or the"
                        f" memory is faulty, or the rule is ({unit.rule})"
                    )
                progress("verify", place.nbytes, total)
    for file in folder.glob("*.distcp"):
        staging.done[file.name] = hash_file(file)


def plan_import(
    source: _Source,
    reader: SafetensorsReader,
    family: Family,
    rules: Sequence[Any],
    config: Any,
) -> dict[str, _Group]:
    """Keys of the checkpoint and what each is made of; every tensor is used exactly once."""
    groups: dict[str, _Group] = {}
    used = set()
    differ = bool(config.num_experts and config.mlp_only_layers)
    for unit in units(rules, config):
        dtype = _check_parts(source, reader, unit)
        used.update(unit.names())
        template = _written_name(unit, config)
        index = () if unit.expert is None else (unit.expert,)
        lead = () if unit.expert is None else (config.num_experts,)
        if unit.layer is not None and not differ:
            template = template.replace("{layer}.", "")
            index, lead = (unit.layer, *index), (config.num_hidden_layers, *lead)
        key = template.replace("{layer}", str(unit.layer))
        group = groups.setdefault(key, _Group((*lead, *unit.megatron_shape()), dtype))
        if group.dtype != dtype:
            raise UserError(
                f"{reader.folder}: {unit.names()[0]} is {dtype}, and in other layers or experts it"
                f" is {group.dtype}: save the model in one dtype"
            )
        group.pieces[index] = unit
    _check_left(source, reader, family, config, used)
    return groups


def _check_parts(source: _Source, reader: SafetensorsReader, unit: Unit) -> torch.dtype:
    dtypes = set()
    for name, shape in zip(unit.names(), unit.shapes(), strict=True):
        if name not in source.tensors:
            raise UserError(
                f"{reader.folder} lacks {name}, shape {list(shape)}: the rule is {unit.rule}"
            )
        dtype, found = source.tensors[name]
        if found != shape:
            raise UserError(
                f"{reader.folder}: {name} has shape {list(found)}, and config.json asks for"
                f" {list(shape)}: the rule is {unit.rule}"
            )
        dtypes.add(dtype)
    if len(dtypes) > 1:
        raise UserError(
            f"{reader.folder}: {', '.join(unit.names())} have several dtypes and become one tensor:"
            " save the model in one dtype"
        )
    return dtypes.pop()


def _check_left(
    source: _Source, reader: SafetensorsReader, family: Family, config: Any, used: set[str]
) -> None:
    left = [n for n in source.tensors if n not in used and not n.endswith(family.derived)]
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if head in left and config.tie_word_embeddings:
        # Some exporters write the tied table twice.
        if not _same_tensor(source, head, table):
            raise UserError(
                f"{reader.folder}: {head} differs from {table}, and config.json says that they are"
                " one (tie_word_embeddings): correct the one that is wrong"
            )
        left.remove(head)
    if left:
        shown = [f"{name} {list(source.tensors[name][1])}" for name in sorted(left)[:4]]
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        raise UserError(
            f"{reader.folder} has tensors that no rule of the family {family.model_type!r} takes:"
            f" {', '.join(shown)}{more}: this model cannot be converted"
        )


def _same_tensor(source: _Source, a: str, b: str) -> bool:
    if source.tensors[a] != source.tensors[b]:
        return False
    dtype, shape = source.tensors[a]
    count, step = torch.Size(shape).numel(), BLOCK // dtype.itemsize
    return all(
        same_bits(source.elements(a, first, size), source.elements(b, first, size))
        for first in range(0, count, step)
        for size in (min(step, count - first),)
    )


def _written_name(unit: Unit, config: Any) -> str:
    """The norm before a router stands apart, that of a dense block is a part of the block."""
    names = unit.rule.megatron
    apart = unit.layer is not None and config.is_moe_layer(unit.layer)
    if apart and names[-1].endswith("pre_mlp_layernorm.weight"):
        return names[-1]
    return names[0]


def _extra_states(config: Any) -> Iterator[str]:
    """Keys of Transformer Engine's scaling factors, of which a converted model has none."""
    layers = config.num_hidden_layers
    differ = bool(config.num_experts and config.mlp_only_layers)
    attention = [
        "self_attention.linear_qkv",
        "self_attention.core_attention",
        "self_attention.linear_proj",
    ]
    for layer in range(layers):
        moe = config.is_moe_layer(layer)
        dense = ["mlp.linear_fc1", "mlp.linear_fc2"]
        experts = ["mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"]
        for name in [*attention, *([] if moe else dense)]:
            if differ:
                yield f"decoder.layers.{layer}.{name}._extra_state/shard_0_1"
            else:
                yield f"decoder.layers.{name}._extra_state/shard_{layer}_{layers}"
        for name in experts if moe else ():
            for expert in range(config.num_experts):
                if differ:
                    where = f"{expert}_{config.num_experts}"
                    yield f"decoder.layers.{layer}.{name}._extra_state/shard_{where}"
                else:
                    where = f"{layer}.{expert}_{layers}.{config.num_experts}"
                    yield f"decoder.layers.{name}._extra_state/shard_{where}"
