"""Steps without a fused pass leave the fusion's weights and optimiser state untouched.

In a step whose largest K is 1 the fusion has no gradient. Weight decay and decaying moments would
still move it, and during a long plain phase erase it. Hooks on the inner torch optimisers hide
the fusion's shards from such a step, whatever the optimiser and however it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

__all__ = ["FusionFreeze", "inner_parameters"]

_GRADIENTS = ("grad", "decoupled_grad")


class FusionFreeze:
    """Keeps the fusion still in plain steps, and warms it up after its first fused step.

    Attributes:
        plain_step: set before each optimiser step: whether the step had no fused pass.
        updates: optimiser steps that updated the fusion so far; counted by whoever trains, which
            knows on every rank alike whether a step was skipped.

    Args:
        warmup: the first ``warmup`` updates are scaled by 1/warmup, 2/warmup, ... A weight that
            starts late otherwise gets a first update several times the learning rate, because
            the common step count switches Adam's bias correction off.
    """

    def __init__(self, warmup: int = 0) -> None:
        self.plain_step = False
        self.updates = 0
        self.warmup = warmup
        self._before: list[tuple[Tensor, Tensor]] = []

    def attach(self, optimizer: Any, models: Sequence[Any]) -> None:
        """Hook every inner optimiser that holds weights of the fusion of ``models``.

        Args:
            optimizer: Megatron's optimiser, chained or not; None if the run does not train.
        """
        frozen: set[torch.nn.Parameter] = set()
        for model in models:
            if model.fusion is not None:
                frozen |= set(model.fusion.parameters())
                frozen -= set(model.fusion.trained_by_plain_passes())
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        parts = [part for part in parts if getattr(part, "optimizer", None) is not None]
        for part in parts:
            shards = list(inner_parameters(part, frozen))
            if shards:
                self._hook(part, shards)

    def _hook(self, part: Any, shards: list[Tensor]) -> None:
        inner, prepare_gradients = part.optimizer, part.prepare_grads

        def prepare_grads() -> bool:
            found_inf = prepare_gradients()
            # Before the gradient norm is taken: even zeros change the order in which it is summed,
            # and a plain step is to be Megatron's to the last bit.
            self._hide(shards)
            return found_inf

        def before(*_: Any) -> None:
            self._hide(shards)
            if not self.plain_step and self.updates < self.warmup:
                self._before += [(shard, shard.detach().clone()) for shard in shards]

        def after(*_: Any) -> None:
            if self.plain_step:
                _keep_common_step(part, shards)
                return
            share = (self.updates + 1) / self.warmup if self.warmup else 1.0
            for shard, old in self._before:
                with torch.no_grad():
                    shard.copy_(torch.lerp(old, shard, share))
            self._before.clear()

        part.prepare_grads = prepare_grads
        inner.register_step_pre_hook(before)
        inner.register_step_post_hook(after)

    def _hide(self, shards: list[Tensor]) -> None:
        """Take the gradients away in a plain step; every step sets them anew."""
        if self.plain_step:
            for shard in shards:
                for name in _GRADIENTS:
                    if getattr(shard, name, None) is not None:
                        setattr(shard, name, None)


def inner_parameters(part: Any, wanted: Iterable[torch.nn.Parameter]) -> Iterator[Tensor]:
    """The tensors the inner optimiser steps on this rank for ``wanted`` model weights."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, index) in part.model_param_group_index_map.items():
            if parameter in wanted:
                yield part.optimizer.param_groups[group]["params"][index]
        return
    held = {id(p) for group in part.optimizer.param_groups for p in group["params"]}
    for parameter in wanted:
        shard = getattr(parameter, "main_param", None)
        shard = parameter if shard is None else shard
        if id(shard) in held:
            yield shard


def _keep_common_step(part: Any, shards: list[Tensor]) -> None:
    """Give hidden weights the state a step would have left, save for their moments.

    Checkpoints store one step count for all weights and the moments of each.
    """
    inner = part.optimizer
    if part.init_state_fn is not None:
        part.init_state_fn(inner, getattr(part, "config", None))
    # Fused Adams count in the group. So do, idly, torch's own once they have been loaded.
    own_steps = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    if not own_steps and any("step" in group for group in inner.param_groups):
        return
    for shard in shards:
        state = inner.state[shard]
        if "step" in state:
            state["step"] += 1
        elif "exp_avg" in state:
            state["step"] = torch.ones((), dtype=torch.float32)
