"""Converting a model, tensor by tensor, and checking every bit of what was written.

The mapping says what corresponds to what; this file plans, moves and compares. Both directions
first make the whole plan from shapes alone, so that a tensor that no rule takes, or a rule that
finds no tensor, is an error before anything is written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalatent.checkpoint.arguments import megatron_options, to_args
from megalatent.checkpoint.mapping import VOCABULARY, Family, Unit, units
from megalatent.checkpoint.reader import CheckpointReader, SafetensorsReader
from megalatent.checkpoint.writer import (
    StackedTensor,
    Staging,
    hash_file,
    write_checkpoint,
    write_safetensors,
)
from megalatent.errors import UserError

__all__ = ["Progress", "export_weights", "import_weights", "same_bits"]

# (what is being done, bytes done since the last call, bytes in all)
Progress = Callable[[str, int, int], None]


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


# -- Megatron to Hugging Face -----------------------------------------------------------------


@dataclass
class _Export:
    """A unit and where its tensor is in the checkpoint."""

    unit: Unit
    key: str
    index: list[int]
    dtype: torch.dtype  # as written

    def read(self, reader: CheckpointReader) -> Tensor:
        rows = self.unit.dims["v"] if self.unit.rule.form is VOCABULARY else None
        return reader.read(self.key, self.index, rows).to(self.dtype)

    def entries(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        names, shapes = self.unit.names(), self.unit.shapes()
        return [(name, self.dtype, shape) for name, shape in zip(names, shapes, strict=True)]

    def nbytes(self) -> int:
        return sum(_nbytes(shape, dtype) for _, dtype, shape in self.entries())


def export_weights(
    reader: CheckpointReader,
    staging: Staging,
    family: Family,
    config: Any,
    *,
    dtype: torch.dtype | None,
    max_shard: int,
    progress: Progress,
) -> None:
    """Write and verify the safetensors shards of a checkpoint, with their index.

    Args:
        config: `MegalatentConfig` of the model.
        dtype: of all tensors; None leaves each as it is.
        max_shard: bytes a shard may hold, unless a single tensor is larger.

    Raises:
        UserError: the checkpoint does not have exactly the tensors of such a model, it cannot be
            read, or the disk is too small.
    """
    plan = plan_export(reader, family, config, dtype)
    total = sum(item.nbytes() for item in plan)
    staging.require_space(total + (1 << 12) * len(plan))
    shards = _shards(plan, max_shard)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        if name in staging.done:
            progress("write", sum(item.nbytes() for item in shard), total)
            continue
        entry = write_safetensors(
            staging.folder / name,
            [entry for item in shard for entry in item.entries()],
            (part for item in shard for part in item.unit.split(item.read(reader))),
            lambda n: progress("write", n, total),
        )
        staging.record(name, entry)
    if len(shards) > 1:
        weight_map = {
            entry[0]: name
            for name, shard in zip(names, shards, strict=True)
            for item in shard
            for entry in item.entries()
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staging.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    written = SafetensorsReader(staging.folder)
    for item in plan:
        back = item.unit.join([written.read(name) for name in item.unit.names()])
        if not same_bits(back, item.read(reader)):
            raise UserError(
                f"{' + '.join(item.unit.names())} as written differs from {item.key} {item.index}:"
                f" the disk or the memory is faulty, or the rule is ({item.unit.rule})"
            )
        progress("verify", item.nbytes(), total)


def plan_export(
    reader: CheckpointReader, family: Family, config: Any, dtype: torch.dtype | None
) -> list[_Export]:
    """Which tensor of the checkpoint each unit takes; every tensor is taken exactly once."""
    plan, used = [], set()
    for unit in units(family.rules, config):
        key, index = _find(reader, unit, config)
        used.add(key)
        plan.append(_Export(unit, key, index, dtype or reader.tensors[key].properties.dtype))
    if left := sorted(set(reader.tensors) - used):
        shapes = [f"{key} {list(reader.tensors[key].size)}" for key in left[:4]]
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        raise UserError(
            f"{reader.folder} has tensors that no rule of the family {family.model_type!r} takes:"
            f" {', '.join(shapes)}{more}: this model cannot be exported"
        )
    return plan


def _find(reader: CheckpointReader, unit: Unit, config: Any) -> tuple[str, list[int]]:
    for template in unit.rule.megatron:
        key, index = reader.locate(template, unit.layer, unit.expert)
        if key in reader.tensors:
            break
    else:
        raise UserError(
            f"{reader.folder} lacks {unit.rule.megatron[0]} of layer {unit.layer}, shape"
            f" {list(unit.megatron_shape())}: the rule is {unit.rule}"
        )
    size = list(reader.tensors[key].size)
    lead = [] if unit.expert is None else [config.num_experts]
    if len(index) > len(lead):
        lead = [config.num_hidden_layers, *lead]
    wanted = [*lead, *unit.megatron_shape()]
    fits = size == wanted
    if unit.rule.form is VOCABULARY:
        fits = size[1:] == wanted[1:] and size[0] >= wanted[0]
    if not fits:
        raise UserError(
            f"{reader.folder}: {key} has shape {size}, and the configuration asks for {wanted}: the"
            f" rule is {unit.rule}"
        )
    return key, index


def _shards(plan: Sequence[_Export], max_shard: int) -> list[list[_Export]]:
    shards: list[list[_Export]] = [[]]
    size = 0
    for item in plan:
        if shards[-1] and size + item.nbytes() > max_shard:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes()
    return shards


# -- Hugging Face to Megatron -----------------------------------------------------------------


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

    def read(self, name: str) -> Tensor:
        return self._fresh[name] if name in self._fresh else self._reader.read(name)


def import_weights(
    reader: SafetensorsReader,
    staging: Staging,
    family: Family,
    config: Any,
    *,
    fresh: Mapping[str, Tensor],
    extra_rules: Sequence[Any],
    transformer_engine: bool,
    progress: Progress,
) -> None:
    """Write and verify a torch_dist checkpoint of a Hugging Face model.

    Args:
        config: `MegalatentConfig` of the result.
        fresh: weights that the model lacks, by Hugging Face name, with `extra_rules` for them.
        transformer_engine: the layers that load it are Transformer Engine's.

    Raises:
        UserError: the model does not have exactly the tensors of its family, or the disk is too
            small.
    """
    source = _Source(reader, fresh)
    rules = [*family.rules, *extra_rules]
    groups = plan_import(source, reader, family, rules, config, transformer_engine)
    total = sum(_nbytes(group.shape, group.dtype) for group in groups.values())
    staging.require_space(total + (1 << 12) * sum(len(g.pieces) for g in groups.values()))

    def maker(group: _Group) -> Callable[[tuple[int, ...]], Tensor]:
        def make(index: tuple[int, ...]) -> Tensor:
            unit = group.pieces[index]
            return unit.join([source.read(name) for name in unit.names()])

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
    objects = _extra_states(config, transformer_engine)
    folder = write_checkpoint(
        staging.folder, tensors, common, objects, lambda n: progress("write", n, total)
    )

    written = CheckpointReader(folder)
    for key, group in groups.items():
        for index, unit in group.pieces.items():
            parts = unit.split(written.read(key, list(index)))
            for name, part in zip(unit.names(), parts, strict=True):
                if not same_bits(part, source.read(name)):
                    raise UserError(
                        f"{key} {list(index)} as written differs from {name}: the disk or the"
                        f" memory is faulty, or the rule is ({unit.rule})"
                    )
                progress("verify", part.numel() * part.element_size(), total)
    for file in folder.glob("*.distcp"):
        staging.done[file.name] = hash_file(file)


def plan_import(
    source: _Source,
    reader: SafetensorsReader,
    family: Family,
    rules: Sequence[Any],
    config: Any,
    transformer_engine: bool,
) -> dict[str, _Group]:
    """Keys of the checkpoint and what each is made of; every tensor is used exactly once."""
    groups: dict[str, _Group] = {}
    used = set()
    differ = bool(config.num_experts and config.mlp_only_layers)
    for unit in units(rules, config):
        dtype = _check_parts(source, reader, unit)
        used.update(unit.names())
        template = _written_name(unit, config, transformer_engine)
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
        if not same_bits(source.read(head), source.read(table)):
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


def _written_name(unit: Unit, config: Any, transformer_engine: bool) -> str:
    """Transformer Engine keeps the norm before a router apart, other layers call it as dense."""
    names = unit.rule.megatron
    apart = transformer_engine and unit.layer is not None and config.is_moe_layer(unit.layer)
    if apart and names[-1].endswith("pre_mlp_layernorm.weight"):
        return names[-1]
    return names[0]


def _extra_states(config: Any, transformer_engine: bool) -> Iterator[str]:
    """Keys of Transformer Engine's scaling factors, of which a converted model has none."""
    layers = config.num_hidden_layers
    differ = bool(config.num_experts and config.mlp_only_layers)
    attention = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    if transformer_engine:
        attention.append("self_attention.core_attention")
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
