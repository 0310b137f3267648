"""Loading checkpoints into a latent model: exactly its weights, or all but the fusion's.

A plain Megatron checkpoint has everything but the fusion. It loads, the fusion starts fresh, and
the log names what is fresh. Any other missing or unexpected weight, or one of another shape, is an
error before anything is loaded.

Layers of Transformer Engine and local ones load each other's checkpoints. Weights have the same
keys; scaling factors (`_extra_state`), which local layers do not have, may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megalatent.errors import UserError
from megalatent.model.wrapper import FUSION_PREFIX

__all__ = ["FreshFusion", "compare_weights", "model_shapes", "use_saved_names"]

_OPTIMIZER = re.compile(r"^(chained_\d+\.)?optimizer\.")
_MODEL = re.compile(r"^model\d*$")


# Weight -> its shape in full; None where any shape will do (a vocabulary padded otherwise).
Shapes = Mapping[str, tuple[int, ...] | None]


def model_shapes(checkpoint: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the model weights in a torch_dist checkpoint folder, by key."""
    metadata = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {
        key: tuple(entry.size)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not _OPTIMIZER.match(key)
    }


def compare_weights(wanted: Shapes, found: Shapes, checkpoint: str | Path) -> set[str]:
    """Decide whether a checkpoint fits a model.

    Returns:
        Keys that start fresh: all of the fusion's, or none.

    Raises:
        UserError: anything else is missing, the checkpoint has weights that the model lacks, or a
            weight has another shape.
    """
    missing, unexpected = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    fusion = {key for key in wanted if key.startswith(FUSION_PREFIX)}
    other_fusion = {key for key in unexpected if key.startswith(FUSION_PREFIX)}
    fresh = fusion if fusion <= missing and not other_fusion else set[str]()
    problems = []
    if missing - fresh:
        problems.append(f"lacks {_some(missing - fresh)}")
    if unexpected:
        problems.append(f"has {_some(unexpected)}, which the model does not have")
    problems += _other_shapes(wanted, found)[:1]
    if not problems:
        return fresh
    remedy = (
        "set latent.fusion.kind to the fusion it was trained with"
        if other_fusion
        else "check the model's options under megatron: against those it was trained with"
    )
    raise UserError(f"the checkpoint {checkpoint} {' and '.join(problems)}: {remedy}")


def use_saved_names(state: Mapping[str, Any], saved: Container[str]) -> None:
    """Ask for the norm before experts by the name it was saved with.

    Megatron's local layers save it as if it were a part of a linear layer; ours and Transformer
    Engine's do not.

    Args:
        state: sharded state dict of a model; keys are changed in place.
        saved: keys of the checkpoint.
    """
    names = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    for entry in state.values():
        for name, other in (names, names[::-1]):
            key = getattr(entry, "key", "")
            if name in key and key not in saved and key.replace(name, other) in saved:
                entry.key = key.replace(name, other)


def _take_absent_objects(models: Mapping[str, Any], checkpoint: str | Path) -> list[Any]:
    """Take scaling factors that a checkpoint lacks out of what is asked of it.

    Returns:
        Those that were taken: pairs of a key of `models` and a key in there.
    """
    saved = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    absent = [
        (model, name)
        for model, state in models.items()
        for name, entry in state.items()
        if isinstance(entry, ShardedObject)
        and name.endswith("_extra_state")
        and entry.unique_key not in saved
    ]
    for model, name in absent:
        del models[model][name]
    return absent


def _other_shapes(wanted: Shapes, found: Shapes) -> list[str]:
    """What is wrong with shapes, the most telling first. Layers are stacked on the first axis."""
    problems = []
    for key in sorted(wanted.keys() & found.keys()):
        model, saved = wanted[key], found[key]
        if model is None or saved is None or model == saved:
            continue
        if key.startswith("decoder.layers.") and model[1:] == saved[1:]:
            return [f"has {saved[0]} layers where the model has {model[0]}"]
        problems.append(f"has {key} of shape {list(saved)} where the model's is {list(model)}")
    return problems


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
        models, found = _models(sharded_state_dict), model_shapes(checkpoint)
        for model in models.values():
            use_saved_names(model, found)
        wanted = _everywhere(dict(_weights(models)))
        fresh = compare_weights(wanted, found, checkpoint)
        if fresh and "optimizer" in sharded_state_dict:
            raise UserError(
                f"the checkpoint {checkpoint} has no fusion weights, so its optimiser state does "
                "not fit: set megatron.finetune: true (start of a new run from its weights), or "
                "megatron.no_load_optim: true (same run, fresh optimiser)"
            )
        if fresh:
            for model in models.values():
                for key in [k for k in model if k.startswith(FUSION_PREFIX)]:
                    del model[key]
            self._say(f" fresh weights, not in the checkpoint: {', '.join(sorted(fresh))}")
        absent = _take_absent_objects(models, checkpoint)
        if absent and getattr(args, "fp8", None):
            self._say(" fresh FP8 scaling factors: the checkpoint was saved without them")
        result = self._read(load_dir, args, rank0, sharded_state_dict, iteration, release, **kwargs)
        for model_name, name in absent:
            # Loading into a module insists on the key; none means nothing to set.
            result[0][model_name][name] = None
        return result


def _models(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if _MODEL.match(key)}


def _weights(tree: Any) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Key and full shape of every weight in a sharded state dict."""
    if isinstance(tree, ShardedTensorFactory):
        yield from _weights(tree.build())
    elif isinstance(tree, ShardedTensor):
        yield tree.key, None if tree.allow_shape_mismatch else tuple(tree.global_shape)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _weights(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _weights(value)


def _everywhere(weights: dict[str, tuple[int, ...] | None]) -> Shapes:
    """Union over all ranks: a pipeline stage asks for its own layers only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return weights
    every: list[dict[str, tuple[int, ...] | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, weights)
    return {key: shape for part in every for key, shape in part.items()}
