"""NorMuon: orthogonalised momentum with a second moment per neuron, on tensor-parallel weights.

Megatron has an optimiser of this kind (``adaptive_muon``), but with emerging-optimizers 0.3 it
fails at its first step, and it takes the second moment and the norm of an update over each rank's
shard, so that tensor parallelism changes what is trained. This one sees whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers.muon import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz, newton_schulz_tp
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

__all__ = ["Layout", "NorMuon", "TpMode", "init_state"]

TpMode = Literal["duplicated", "distributed", "blockwise"]


@dataclass(frozen=True)
class Layout:
    """Which matrices a weight ``[rows, columns]`` is made of, and which part a rank holds.

    Attributes:
        split: rows of each matrix in one repetition, e.g. ``(q, k, v)`` of one query group; the
            weight is a sequence of such repetitions. Empty: the weight is one matrix.
        dim: dimension that is split over ``group``, or None if the weight is whole.
        group: tensor-parallel ranks of the weight.
        mode: ``duplicated`` gathers the weight's momentum and orthogonalises whole matrices on
            every rank; ``distributed`` orthogonalises them together, each rank its shard;
            ``blockwise`` takes the shard for the weight.
    """

    split: tuple[int, ...] = ()
    dim: int | None = None
    group: dist.ProcessGroup | None = None
    mode: TpMode = "duplicated"

    @property
    def sharded(self) -> bool:
        """Whether ranks must agree on what the whole matrices are."""
        return self.dim is not None and self.mode != "blockwise"

    @property
    def gathered(self) -> bool:
        return self.sharded and self.mode == "duplicated"

    def gather(self, shard: Tensor) -> Tensor:
        """The whole weight in rank order, where this layout needs it; else the shard."""
        if not self.gathered:
            return shard
        assert self.dim is not None
        assert self.group is not None
        shards = [torch.empty_like(shard) for _ in range(self.group.size())]
        dist.all_gather(shards, shard.contiguous(), group=self.group)
        return torch.cat(shards, self.dim)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of what was made from a result of `gather`."""
        if not self.gathered:
            return whole
        assert self.dim is not None
        assert self.group is not None
        return whole.chunk(self.group.size(), self.dim)[self.group.rank()]

    def matrices(self, x: Tensor) -> list[Tensor]:
        """The matrices in ``[rows, columns]``; a shard that cuts a repetition stays one matrix."""
        if not self._splits(x.shape[0]):
            return [x]
        repeated = x.view(-1, sum(self.split), x.shape[1])
        return [part.reshape(-1, x.shape[1]) for part in repeated.split(self.split, dim=1)]

    def join(self, matrices: list[Tensor]) -> Tensor:
        """Undo `matrices`."""
        if len(matrices) == 1:
            return matrices[0]
        columns = matrices[0].shape[1]
        parts = [m.view(-1, r, columns) for m, r in zip(matrices, self.split, strict=True)]
        return torch.cat(parts, dim=1).reshape(-1, columns)

    def _splits(self, rows: int) -> bool:
        return bool(self.split) and rows % sum(self.split) == 0

    def size(self, matrix: Tensor) -> tuple[int, int]:
        """Rows and columns of the whole matrix that one of `matrices` is or belongs to."""
        size = list(matrix.shape)
        if self.sharded and not self.gathered:
            assert self.dim is not None
            assert self.group is not None
            size[self.dim] *= self.group.size()
        return size[0], size[1]

    def mean_square(self, matrix: Tensor) -> Tensor:
        """Mean square of each neuron, ``[rows, 1]``, or ``[1, columns]`` of a wide matrix."""
        rows, columns = self.size(matrix)
        dim = 1 if rows >= columns else 0
        total = matrix.square().sum(dim, keepdim=True)
        if self.sharded and not self.gathered and self.dim == dim:
            dist.all_reduce(total, group=self.group)
        return total / (columns if dim == 1 else rows)

    def square_norms(self, shard: Tensor) -> Tensor:
        """Squared Frobenius norm of each whole matrix, ``[matrices]``, from this rank's shard."""
        rows = shard.square().sum(1, keepdim=True)
        if self.gathered and self.dim == 0:
            # A shard may cut a repetition: put its rows where they are in the whole weight.
            assert self.group is not None
            whole = rows.new_zeros(rows.shape[0] * self.group.size(), 1)
            self.take(whole).copy_(rows)
            rows = whole
        norms = torch.stack([m.sum() for m in self.matrices(rows)])
        if self.sharded:
            dist.all_reduce(norms, group=self.group)
        return norms

    def by_row(self, factors: list[Tensor], shard: Tensor) -> Tensor:
        """One factor for each matrix as a column ``[rows, 1]`` to multiply the shard with."""
        rows = shard.new_empty(shard.shape[0], 1)
        if self.gathered and self.dim == 0:
            assert self.group is not None
            rows = shard.new_empty(shard.shape[0] * self.group.size(), 1)
        columns = [f.expand_as(m) for f, m in zip(factors, self.matrices(rows), strict=True)]
        whole = self.join([column.contiguous() for column in columns])
        return self.take(whole) if self.gathered and self.dim == 0 else whole


class NorMuon(torch.optim.Optimizer):
    """Muon whose orthogonalised update is normed per neuron (arXiv 2510.05491).

    For each matrix, with gradient ``G``: ``M = momentum M + (1 - momentum) G``; ``O`` is ``M``
    (with ``nesterov`` a step further) orthogonalised by Newton-Schulz; ``v = beta2 v + (1 - beta2)
    mean(O^2)`` over each row (each column, if there are fewer rows than columns); the update is
    ``O / sqrt(v)`` with the Frobenius norm of ``O``, times the scale of ``scale_mode``. Weight
    decay is decoupled: the weight loses ``lr * weight_decay`` of itself.

    The state of a weight is its ``momentum_buffer`` and its ``moment2_buffer``. The latter is kept
    at the weight's shape, constant along one dimension of each matrix, as torch_dist checkpoints
    want it: it can then be cut and joined like the weight on any other layout.

    Args:
        params: weights ``[rows, columns]``, fp32, or groups of them.
        lr, momentum, weight_decay, beta2, eps: defaults of the groups.
        layout_of: tells the layout of a weight.
        nesterov, coefficient_type, num_ns_steps, scale_mode, extra_scale_factor, matmul_precision:
            Megatron's ``--muon-…`` options.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        beta2: float = 0.95,
        eps: float = 1e-8,
        layout_of: Callable[[Tensor], Layout] = lambda weight: Layout(),
        nesterov: bool = False,
        coefficient_type: Any = "quintic",
        num_ns_steps: int = 5,
        scale_mode: Any = "spectral",
        extra_scale_factor: float = 1.0,
        matmul_precision: Any = "medium",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "beta2": beta2,
            "eps": eps,
        }
        super().__init__(params, defaults)
        self.layout_of = layout_of
        self.nesterov = nesterov
        self.coefficient_type = coefficient_type
        self.num_ns_steps = num_ns_steps
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.matmul_precision = matmul_precision

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient; the others and their state stay as they are.

        Collective over the tensor-parallel ranks of each weight.
        """
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        gradient = weight.grad
        assert gradient is not None
        state, layout = self._state(weight), self.layout_of(weight)
        momentum, moment2 = state["momentum_buffer"], state["moment2_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(momentum, group["momentum"]) if self.nesterov else momentum

        matrices = layout.matrices(layout.gather(ahead))
        with fp32_matmul_precision(self.matmul_precision):
            orthogonal = [self._orthogonalise(m, layout) for m in matrices]
        square = [layout.mean_square(o).expand_as(o).contiguous() for o in orthogonal]
        moment2.lerp_(layout.take(layout.join(square)), 1 - group["beta2"])
        ours = layout.take(layout.join(orthogonal))
        update = ours * moment2.clamp_min(group["eps"]).rsqrt_()

        norms = layout.square_norms(ours).sqrt()
        ratios = norms / layout.square_norms(update).sqrt().clamp_min(group["eps"])
        scales = [ratio * self._scale(m, layout) for ratio, m in zip(ratios, matrices, strict=True)]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(update * layout.by_row(scales, update), alpha=group["lr"])

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
            state["moment2_buffer"] = torch.zeros_like(weight)
        return state

    def _orthogonalise(self, matrix: Tensor, layout: Layout) -> Tensor:
        kind, steps = self.coefficient_type, self.num_ns_steps
        if layout.sharded and not layout.gathered:
            assert layout.group is not None
            return newton_schulz_tp(
                matrix,
                steps,
                kind,
                tp_group=layout.group,
                partition_dim=layout.dim,
                tp_mode="distributed",
            )
        return newton_schulz(matrix, steps, kind)

    def _scale(self, matrix: Tensor, layout: Layout) -> float:
        rows, columns = layout.size(matrix)
        scale = get_muon_scale_factor(rows, columns, mode=self.scale_mode)
        return scale * self.extra_scale_factor


def init_state(optimizer: NorMuon, config: Any = None) -> None:
    """Make the state of every weight, also of those without a gradient so far.

    Checkpoints are written and read with a state for each weight.
    """
    del config
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer._state(weight)
