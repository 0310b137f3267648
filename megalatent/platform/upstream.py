"""Faults of megatron-core 0.19.2 that also bite on GPU machines, and what we do about them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megalatent.platform.layerwise import wrap_fp32_too
from megalatent.platform.param_groups import match_groups_by_weights
from megalatent.platform.patching import Patch

__all__ = ["TORCH_OPTIMIZER_FIXES", "UPSTREAM_FIXES", "unpadded_param_ranges"]


def _use_the_compiled_helper(original: Any) -> Any:
    @functools.wraps(original)
    def compile_helpers() -> None:
        # Fails here, with the reason, if an installation lacks the compiled helper.
        import megatron.core.datasets.helpers_cpp  # noqa: F401

    return compile_helpers


@contextlib.contextmanager
def unpadded_param_ranges(buffers: Iterable[Any]) -> Iterator[None]:
    """Inside, `buffer.param_index_map` counts without the padding at the end of each bucket."""
    saved = [(buffer, buffer.param_index_map) for buffer in buffers]
    try:
        for buffer, ranges in saved:
            padding, before = 0, {}
            for index, bucket in enumerate(buffer.buckets):
                before[index] = padding
                padding += bucket.grad_data.numel() - bucket.numel_unpadded
            buffer.param_index_map = {
                param: (start - before[index], end - before[index], index)
                for param, (start, end, index) in ranges.items()
            }
        yield
    finally:
        for buffer, ranges in saved:
            buffer.param_index_map = ranges


def _without_bucket_padding(original: Any) -> Any:
    """The gathered state has no padding between buckets, but is sliced with padded offsets."""

    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unpadded_param_ranges(self.buffers):
            return original(self, *args, **kwargs)

    return sharded_param_state_fully_reshardable


def _state_dict_without_state(original: Any) -> Any:
    """On resume there is no state yet: answer with step 0. Without weights there never is one.

    A rank has no weights if its part of the shards is empty, and none of experts if its pipeline
    stage is dense. What it answers may be what is saved, for all.
    """

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        state = self.optimizer.state
        if len(state):
            return original(self)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        # torch hands on keys that are no tensors as they are.
        for key in weights or ["none"]:
            state[key] = {"step": torch.tensor(0.0 if weights else getattr(self, _STEPS, 0.0))}
        try:
            return original(self)
        finally:
            state.clear()

    return state_dict


# Attribute of an optimiser: its steps, counted by us because torch counts them for each weight.
_STEPS = "megalatent_steps"


def _counting_steps(original: Any) -> Any:
    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> Any:
        setattr(self, _STEPS, getattr(self, _STEPS, 0.0) + 1.0)
        return original(self)

    return step_with_ready_grads


def _one_step_tensor_each(original: Any) -> Any:
    """Loading gives all parameters one `step` tensor: each update would then advance it N times."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
        setattr(self, _STEPS, float(state_dict["optimizer"]["param_groups"][0]["step"]))

    return load_state_dict


def _copy_into_leaves(original: Any) -> Any:
    """Loading writes into fp32 leaves, and looks for a per-parameter step that is never saved."""

    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        with torch.no_grad():
            # The step is common to all parameters and comes from the parameter groups.
            original(self, model_param, {**tensors, "step": None})

    return _set_main_param_and_optimizer_states


_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"

UPSTREAM_FIXES = (
    Patch(
        "megatron.core.datasets.utils",
        "compile_helpers",
        "runs make and exits: the wheel has the compiled helper but no Makefile",
        _use_the_compiled_helper,
        (),
    ),
    Patch(
        _OPTIMIZER,
        "DistributedOptimizer.sharded_param_state_fully_reshardable",
        "with several buckets it saves and loads shifted slices of masters and moments",
        _without_bucket_padding,
        ("self", "model_sharded_state_dict", "is_loading", "metadata"),
    ),
    Patch(
        "megatron.core.optimizer.layer_wise_optimizer",
        "LayerWiseDistributedOptimizer.__init__",
        "in fp32 it chains plain torch optimisers, which cannot do what it asks of them",
        wrap_fp32_too,
        (
            "self",
            "optimizers",
            "config",
            "pg_collection",
            "init_state_fn_list",
            "model_chunks",
        ),
    ),
    Patch(
        "megatron.core.optimizer.optimizer",
        "ChainedOptimizer.load_state_dict",
        "finds no parameter groups in a checkpoint that was trained at another learning rate",
        match_groups_by_weights,
        ("self", "state_dict"),
    ),
)

# Only where neither Transformer Engine nor apex is installed: torch.optim.Adam keeps its step per
# parameter, which the distributed optimiser's loading does not expect.
TORCH_OPTIMIZER_FIXES = (
    Patch(
        _OPTIMIZER,
        "DistributedOptimizer.state_dict",
        "asserts that there is one step: there is none yet on resume, and none without weights",
        _state_dict_without_state,
        ("self",),
    ),
    Patch(
        _OPTIMIZER,
        "DistributedOptimizer.step_with_ready_grads",
        "on a rank without weights of this optimiser nobody knows its step when it is saved",
        _counting_steps,
        ("self",),
    ),
    Patch(
        _OPTIMIZER,
        "DistributedOptimizer.load_state_dict",
        "gives every parameter the same step tensor",
        _one_step_tensor_each,
        ("self", "state_dict"),
    ),
    Patch(
        _OPTIMIZER,
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "copies into leaves that require gradients, and fails on the missing step",
        _copy_into_leaves,
        ("self", "model_param", "tensors"),
    ),
)
