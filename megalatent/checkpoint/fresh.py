"""Loading checkpoints into a latent model: exact keys, or all but the fusion's.

A plain Megatron checkpoint has everything but the fusion. It loads, the fusion starts fresh, and
the log names what is fresh. Any other missing or unexpected weight is an error before anything
is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megalatent.errors import UserError
from megalatent.model.wrapper import FUSION_PREFIX

__all__ = ["FreshFusion", "compare_keys", "model_keys"]

_OPTIMIZER = re.compile(r"^(chained_\d+\.)?optimizer\.")
_MODEL = re.compile(r"^model\d*$")


def model_keys(checkpoint: str | Path) -> set[str]:
    """Keys of the model weights in a torch_dist checkpoint folder."""
    metadata = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {
        key
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not _OPTIMIZER.match(key)
    }


def compare_keys(wanted: set[str], found: set[str], checkpoint: str | Path) -> set[str]:
    """Decide whether a checkpoint fits a model.

    Returns:
        Keys that start fresh: all of the fusion's, or none.

    Raises:
        UserError: anything else is missing, or the checkpoint has weights that the model lacks.
    """
    missing, unexpected = wanted - found, found - wanted
    fusion = {key for key in wanted if key.startswith(FUSION_PREFIX)}
    if not missing and not unexpected:
        return set()
    if missing == fusion and not unexpected:
        return fusion
    problems = []
    if missing:
        problems.append(f"lacks {_some(missing)}")
    if unexpected:
        problems.append(f"has {_some(unexpected)}, which the model does not have")
    other = {k for k in unexpected if k.startswith(FUSION_PREFIX)}
    remedy = (
        "set latent.fusion.kind to the fusion it was trained with"
        if other
        else "check the model's options under megatron: against those it was trained with"
    )
    raise UserError(f"the checkpoint {checkpoint} {' and '.join(problems)}: {remedy}")


def _some(keys: set[str], limit: int = 4) -> str:
    shown = sorted(keys)[:limit]
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(shown) + more


class FreshFusion:
    """Wraps Megatron's reading of a global torch_dist checkpoint.

    Args:
        read: Megatron's function.
        say: prints one line on one rank.
    """

    def __init__(self, read: Callable[..., Any], say: Callable[[str], None] = print) -> None:
        self._read = read
        self._say = say

    def __call__(
        self,
        load_dir: str,
        args: Any,
        rank0: bool,
        sharded_state_dict: dict[str, Any] | None,
        iteration: int,
        release: bool,
        **kwargs: Any,
    ) -> Any:
        if rank0 or not sharded_state_dict:
            return self._read(
                load_dir, args, rank0, sharded_state_dict, iteration, release, **kwargs
            )
        from megatron.training.checkpointing import get_checkpoint_name

        checkpoint = get_checkpoint_name(load_dir, iteration, release, return_base_dir=True)
        wanted = _everywhere({base.key for base in _sharded(_models(sharded_state_dict))})
        fresh = compare_keys(wanted, model_keys(checkpoint), checkpoint)
        if fresh and "optimizer" in sharded_state_dict:
            raise UserError(
                f"the checkpoint {checkpoint} has no fusion weights, so its optimiser state does "
                "not fit: set megatron.finetune: true (start of a new run from its weights), or "
                "megatron.no_load_optim: true (same run, fresh optimiser)"
            )
        if fresh:
            for model in _models(sharded_state_dict).values():
                for key in [k for k in model if k.startswith(FUSION_PREFIX)]:
                    del model[key]
            self._say(f" fresh weights, not in the checkpoint: {', '.join(sorted(fresh))}")
        return self._read(load_dir, args, rank0, sharded_state_dict, iteration, release, **kwargs)


def _models(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if _MODEL.match(key)}


def _sharded(tree: Any) -> Iterator[ShardedBase]:
    if isinstance(tree, ShardedObject):
        return
    if isinstance(tree, ShardedBase):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _sharded(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _sharded(value)


def _everywhere(keys: set[str]) -> set[str]:
    """Union over all ranks: a pipeline stage asks for its own layers only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return keys
    every: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(every, keys)
    return set().union(*every)
