"""Shifting states right by one position when the sequence is spread over TP and CP ranks.

Row ``t`` of a fused input needs the state of position ``t - 1``. Under sequence and context
parallelism that state may live on another rank, but only for the first row of each run of
consecutive positions: a rank exchanges the *last row of each of its runs* and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "SequenceSlice",
    "context_parallel_positions",
    "document_parallel_positions",
    "exchange_boundary_rows",
    "sequence_slice",
]


@dataclass(frozen=True)
class SequenceSlice:
    """The rows one (TP, CP) rank fuses, and where each row's predecessor lives.

    Attributes:
        positions: ``[n]`` int64, position of each row in the unsharded sequence.
        source: ``[n]`` int64. ``source[i] < n``: the predecessor is local row ``source[i]``;
            ``source[i] >= n``: it is row ``source[i] - n`` of the exchanged boundary rows;
            ``-1``: position 0, which has no predecessor.
        last_rows: ``[runs]`` int64, local rows this rank gives to the others, padded by
            repeating row 0 to the largest number of runs on any rank of the group.
        group: the TP x CP process group that exchanges rows, or None on a single rank.
    """

    positions: Tensor
    source: Tensor
    last_rows: Tensor
    group: dist.ProcessGroup | None


def context_parallel_positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a CP rank under Megatron's load-balanced split, ``[length / cp]`` int64.

    The sequence is cut into ``2 * cp`` parts; rank ``i`` holds parts ``i`` and ``2 * cp - 1 - i``.
    """
    if cp_size == 1:
        return torch.arange(length)
    chunk = length // (2 * cp_size)
    first = torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk)
    mirror = 2 * cp_size - 1 - cp_rank
    return torch.cat([first, torch.arange(mirror * chunk, (mirror + 1) * chunk)])


def document_parallel_positions(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a CP rank when every packed document is split load-balanced (THD layout).

    Args:
        cu_seqlens: document boundaries ``0 = c_0 < c_1 < ...``; every length is a multiple of
            ``2 * cp_size``.
    """
    parts = [
        start + context_parallel_positions(end - start, cp_size, cp_rank)
        for start, end in pairwise(cu_seqlens)
    ]
    return torch.cat(parts)


def _runs(positions: Tensor) -> list[tuple[int, int]]:
    """Maximal runs of consecutive positions as ``(first row, last row)``."""
    breaks = (torch.nonzero(positions[1:] != positions[:-1] + 1).flatten() + 1).tolist()
    starts = [0, *breaks]
    ends = [*breaks, positions.numel()]
    return [(start, end - 1) for start, end in zip(starts, ends, strict=True)]


def _slice_of(
    positions_of_cp_rank: Callable[[int], Tensor],
    tp_size: int,
    tp_rank: int,
    cp_size: int,
    cp_rank: int,
    group: dist.ProcessGroup | None,
) -> SequenceSlice:
    owned = []  # in the group's rank order: TP varies fastest, then CP
    for cp in range(cp_size):
        positions = positions_of_cp_rank(cp)
        owned += [(tp, cp, part) for tp, part in enumerate(positions.chunk(tp_size))]
    runs = [_runs(part) for _, _, part in owned]
    width = max(len(r) for r in runs)
    # position of the last row of every run -> index among the gathered rows
    gathered = {
        int(part[last]): rank * width + j
        for rank, (_, _, part) in enumerate(owned)
        for j, (_, last) in enumerate(runs[rank])
    }
    mine = next(i for i, (tp, cp, _) in enumerate(owned) if (tp, cp) == (tp_rank, cp_rank))
    positions, my_runs = owned[mine][2], runs[mine]
    rows = positions.numel()
    source = torch.arange(-1, rows - 1)
    for first, _ in my_runs:
        position = int(positions[first])
        source[first] = rows + gathered[position - 1] if position > 0 else -1
    last_rows = torch.tensor(
        [last for _, last in my_runs] + [0] * (width - len(my_runs)), dtype=torch.int64
    )
    return SequenceSlice(positions, source, last_rows, group)


def sequence_slice(
    *,
    length: int,
    cu_seqlens: Sequence[int] | None,
    tp_size: int,
    tp_rank: int,
    cp_size: int,
    cp_rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> SequenceSlice:
    """The slice of this rank for a sequence of ``length`` positions.

    Args:
        length: number of positions of the unsharded (packed) sequence.
        cu_seqlens: boundaries of packed documents if CP splits each document on its own;
            None for the ordinary split of the whole sequence.
        group: the TP x CP group, whose rank order is TP fastest, then CP.
    """
    key = (length, tuple(cu_seqlens) if cu_seqlens is not None and cp_size > 1 else None)
    made = _cached_slice(key, tp_size, tp_rank, cp_size, cp_rank, group)
    if made.positions.device == device:
        return made
    return SequenceSlice(
        made.positions.to(device, non_blocking=True),
        made.source.to(device, non_blocking=True),
        made.last_rows.to(device, non_blocking=True),
        made.group,
    )


@lru_cache(maxsize=64)
def _cached_slice(
    key: tuple[int, tuple[int, ...] | None],
    tp_size: int,
    tp_rank: int,
    cp_size: int,
    cp_rank: int,
    group: dist.ProcessGroup | None,
) -> SequenceSlice:
    length, cu_seqlens = key

    def positions_of(cp: int) -> Tensor:
        if cu_seqlens is None:
            return context_parallel_positions(length, cp_size, cp)
        return document_parallel_positions(cu_seqlens, cp_size, cp)

    return _slice_of(positions_of, tp_size, tp_rank, cp_size, cp_rank, group)


class _GatherRows(torch.autograd.Function):
    """All-gather of ``[n, b, h]`` rows; the backward sums over ranks and keeps the own part."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(out, rows.contiguous(), group=group)
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every row has at most one reader, so this sum adds zeros and is exact in any dtype.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


def exchange_boundary_rows(state: Tensor, piece: SequenceSlice) -> Tensor:
    """Boundary rows of all ranks of the group, ``[ranks * runs, b, h]``, differentiable.

    Every rank must run the backward of the exchange, also one that reads none of the rows
    (position 0): consumers therefore take the rows as an input of one operation, whose backward
    always yields a gradient for them.

    Args:
        state: ``[n, b, h]``, the states of this rank's positions.
    """
    if piece.group is None or piece.group.size() == 1:
        return state[:0]
    return _GatherRows.apply(state.index_select(0, piece.last_rows), piece.group)
