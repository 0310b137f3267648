"""From Megatron to Hugging Face, tensor by tensor, checking every bit of what was written.

The mapping says what corresponds to what; this file plans, moves and compares. The whole plan is
made from shapes alone, so that a tensor that no rule takes, or a rule that finds no tensor, is an
error before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalatent.checkpoint.mapping import VOCABULARY, Family, Unit, units
from megalatent.checkpoint.reader import CheckpointReader, SafetensorsReader
from megalatent.checkpoint.slices import BLOCK, blocks, same_bits
from megalatent.checkpoint.writer import Staging, write_safetensors
from megalatent.errors import UserError

__all__ = ["Progress", "export_weights"]

# (what is being done, bytes done since the last call, bytes in all)
Progress = Callable[[str, int, int], None]


@dataclass
class _Export:
    """A unit and where its tensor is in the checkpoint."""

    unit: Unit
    key: str
    index: list[int]
    dtype: torch.dtype  # as written

    def read(self, reader: CheckpointReader, rows: tuple[int, int] | None = None) -> Tensor:
        if rows is None and self.unit.rule.form is VOCABULARY:
            rows = (0, self.unit.dims["v"])
        return reader.read(self.key, self.index, rows, self.dtype)

    def places(self, reader: CheckpointReader) -> list[Tensor]:
        """The parts as they are written.

        Raises:
            UserError: a value is too large for the dtype.
        """
        tensor = self.read(reader)
        largest = torch.finfo(self.dtype).max
        if largest < torch.finfo(reader.tensors[self.key].properties.dtype).max and any(
            bool(block.isinf().any()) for block in blocks(tensor)
        ):
            raise UserError(
                f"{self.key} {self.index} has values beyond {largest:.3g}, the largest that"
                f" {self.dtype} holds: give another --dtype"
            )
        return self.unit.places(tensor)

    def equals(self, reader: CheckpointReader, written: SafetensorsReader) -> bool:
        """Whether what was written gives the checkpoint's tensor again, to the last bit."""
        back = torch.empty(self.unit.megatron_shape(), dtype=self.dtype)
        for name, place in zip(self.unit.names(), self.unit.places(back), strict=True):
            written.fill(name, place)
        step = max(1, BLOCK // max(back[:1].nbytes, 1))
        return all(
            same_bits(rows, self.read(reader, (first, len(rows))))
            for first, rows in zip(range(0, len(back), step), back.split(step), strict=True)
        )

    def entries(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        names, shapes = self.unit.names(), self.unit.shapes()
        return [(name, self.dtype, shape) for name, shape in zip(names, shapes, strict=True)]

    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in self.entries())


def export_weights(
    reader: CheckpointReader,
    staging: Staging,
    family: Family,
    config: Any,
    *,
    dtype: torch.dtype | None,
    max_shard: int,
    progress: Progress,
    copies: int = 1,
) -> None:
    """Write and verify the safetensors shards of a checkpoint, with their index.

    Args:
        config: `MegalatentConfig` of the model.
        dtype: of all tensors; None leaves each as it is.
        max_shard: bytes a shard may hold, unless a single tensor is larger.
        copies: how many times the weights are going to stand on the disk.

    Raises:
        UserError: the checkpoint does not have exactly the tensors of such a model, it cannot be
            read, or the disk is too small.
    """
    plan = plan_export(reader, family, config, dtype)
    total = sum(item.nbytes() for item in plan)
    staging.require_space(copies * total + (1 << 12) * len(plan))
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
            (place for item in shard for place in item.places(reader)),
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
        if not item.equals(reader, written):
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
