"""The gradient norm of the fusion's weights, as the optimiser sees it: before clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalatent.training.freeze import inner_parameters

__all__ = ["FusionGradientNorm"]


class FusionGradientNorm:
    """Measures every step with a fused pass; ranks talk only when the steps are read.

    A weight's gradient may be whole on several ranks or in shards on each: every rank gives the
    squares and the number of the elements it holds, and the sum over ranks of the first is divided
    by how often the second counts each element.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._now: dict[int, Tensor] = {}
        self._steps: list[Tensor] = []

    def attach(self, optimizer: Any, models: Sequence[Any]) -> None:
        """Look at the gradients of the fusion of ``models`` once they are final and unscaled.

        Args:
            optimizer: Megatron's optimiser, chained or not; None if the run does not train.
        """
        weights = [
            weight
            for model in models
            if model.fusion is not None
            for weight in model.fusion.parameters()
        ]
        self._sizes = [weight.numel() for weight in weights]
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if getattr(part, "optimizer", None) is None:
                continue
            shards = [
                (i, shard)
                for i, weight in enumerate(weights)
                for shard in inner_parameters(part, {weight})
            ]
            if shards:
                self._hook(part, shards)

    def _hook(self, part: Any, shards: list[tuple[int, Tensor]]) -> None:
        prepare_gradients = part.prepare_grads

        def prepare_grads() -> bool:
            found_inf = prepare_gradients()
            for i, shard in shards:
                gradient = getattr(shard, "decoupled_grad", None)
                gradient = shard.grad if gradient is None else gradient
                if gradient is not None:
                    squares = gradient.detach().double().square().sum()
                    self._now[i] = torch.stack(
                        [squares, torch.full_like(squares, gradient.numel())]
                    )
            return found_inf

        part.prepare_grads = prepare_grads

    def step_ends(self, *, fused: bool) -> None:
        """Keep what the step had; a plain step has no gradient to speak of."""
        now, self._now = self._now, {}
        if not fused or not self._sizes:
            return
        nothing = torch.zeros(2, dtype=torch.double, device=torch.cuda.current_device())
        self._steps.append(torch.stack([now.get(i, nothing) for i in range(len(self._sizes))]))

    def read(self, fused_steps: int, groups: Sequence[dist.ProcessGroup | None]) -> float | None:
        """Mean norm over the fused steps since the last call, on all ranks; None without one.

        Args:
            fused_steps: how many there were.
            groups: ranks that share the fusion's stage (DP x CP), and ranks of all stages.
        """
        steps, self._steps = self._steps, []
        if not fused_steps:
            return None
        shared, stages = groups
        norms = torch.zeros(fused_steps, dtype=torch.double, device=torch.cuda.current_device())
        if steps:
            held = torch.stack(steps)  # [steps, weights, (squares, elements)]
            if shared is not None and shared.size() > 1:
                dist.all_reduce(held, group=shared)
            sizes = torch.tensor(self._sizes, dtype=held.dtype, device=held.device)
            squares, elements = held.unbind(-1)
            norms = (squares * sizes / elements.clamp(min=1)).sum(-1).sqrt()
        if stages is not None and stages.size() > 1:
            # Stages without the fusion have zeros.
            dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=stages)
        finite = norms[norms.isfinite()]  # gradients of skipped steps are not
        return float(finite.mean()) if finite.numel() else None
