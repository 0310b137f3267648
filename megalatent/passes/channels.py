"""Ordered point-to-point channels between neighbours of a pipeline ring.

Every directed edge has a process group of its own for forward hand-overs and one for backward
hand-overs. One channel carries messages one way only and in one order, so neither gloo (which has
no stream order) nor NCCL (whose sends block their stream until received) can deadlock, also when
two ranks are both neighbours of each other (P = 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Inbox", "Outbox", "Ring"]


@dataclass(frozen=True)
class Ring:
    """The process groups of one rank of a pipeline ring of ``size`` ranks.

    Attributes:
        rank, size: this rank's place.
        next_rank, previous_rank: global ranks of the neighbours.
        forward_in, forward_out: groups of the edges from the previous and to the next rank.
        backward_in, backward_out: groups of the edges from the next and to the previous rank.
    """

    rank: int
    size: int
    next_rank: int
    previous_rank: int
    forward_in: Any = None
    forward_out: Any = None
    backward_in: Any = None
    backward_out: Any = None

    @staticmethod
    def create(pipeline_group: dist.ProcessGroup | None, timeout: timedelta | None = None) -> Ring:
        """Make the channels of every pipeline. All ranks of the world must call this together.

        Groups cannot be made by their members alone (``use_local_synchronization``): torch names
        such a group by the number of groups its rank already has, which differs along a ring.
        """
        if pipeline_group is None or pipeline_group.size() == 1:
            me = dist.get_rank() if dist.is_initialized() else 0
            return Ring(0, 1, me, me)
        mine = dist.get_process_group_ranks(pipeline_group)
        every: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        size, rank = len(mine), pipeline_group.rank()
        made: dict[tuple[str, int], Any] = {}
        for ranks in sorted({tuple(ranks) for ranks in every}):
            for edge in range(size):
                pair = sorted((ranks[edge], ranks[(edge + 1) % size]))
                for way in ("forward", "backward"):
                    group = dist.new_group(
                        pair, timeout=timeout, group_desc=f"latent_{way}_{edge}"
                    )
                    if list(ranks) == mine:
                        made[way, edge] = group
        before = (rank - 1) % size
        return Ring(
            rank,
            size,
            mine[(rank + 1) % size],
            mine[before],
            forward_in=made["forward", before],
            forward_out=made["forward", rank],
            backward_in=made["backward", rank],
            backward_out=made["backward", before],
        )


@dataclass
class _Message:
    """One expected hand-over: who consumes it, and where the sender stands when it sends it."""

    key: Hashable
    sender_index: int


class Inbox:
    """Receives the hand-overs of one channel, posted ahead in the order they are sent.

    Args:
        expected: ``(key, sender_index)`` of every message, in the order of sending.
            ``sender_index`` is the index of the sending action in the sender's list.
        source: global rank of the sender.
        group: the channel.
        shape, dtype, device: of every message.
        ahead: receives kept posted beyond the one being waited for.
    """

    def __init__(
        self,
        expected: Sequence[tuple[Hashable, int]],
        source: int,
        group: Any,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        self._pending = deque(_Message(*item) for item in expected)
        self._posted: deque[tuple[_Message, Any, Tensor]] = deque()
        self._arrived: dict[Hashable, Tensor] = {}
        self._source, self._group = source, group
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._ahead = ahead
        self._post(ahead)

    def _post(self, count: int) -> None:
        while self._pending and len(self._posted) < count:
            message = self._pending.popleft()
            buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(buffer, self._source, group=self._group)
            self._posted.append((message, work, buffer))

    def take(self, key: Hashable) -> tuple[Tensor, int]:
        """Wait for the message ``key``.

        Returns:
            The tensor, and the sender index of the latest message received so far on this
            channel: all the sender did before it is done.
        """
        latest = -1
        while key not in self._arrived:
            self._post(max(self._ahead, 1))
            message, work, buffer = self._posted.popleft()
            work.wait()
            latest = message.sender_index
            self._arrived[message.key] = buffer
            self._post(self._ahead)
        return self._arrived.pop(key), latest


class Outbox:
    """Sends the hand-overs of one channel without waiting for them.

    A sent tensor must live until it has been received. The sender learns that from the order of
    the plan: a message that a neighbour sent after it consumed ours proves that ours arrived.
    """

    def __init__(self, target: int, group: Any) -> None:
        self._target, self._group = target, group
        self._open: deque[tuple[int, Any, Tensor, Hashable]] = deque()

    def send(self, tensor: Tensor, consumer_index: int, key: Hashable) -> None:
        """Start sending.

        Args:
            consumer_index: index of the consuming action in the receiver's list.
            key: given back by :meth:`release` when the tensor has left.
        """
        work = dist.isend(tensor, self._target, group=self._group)
        self._open.append((consumer_index, work, tensor, key))

    def release(self, receiver_index: int | None = None) -> list[Hashable]:
        """Finish the sends whose consumer the receiver is known to have passed.

        Args:
            receiver_index: index of an action the receiver has begun; None finishes all sends.
        """
        done: list[Hashable] = []
        still: deque[tuple[int, Any, Tensor, Hashable]] = deque()
        for item in self._open:
            consumer, work, _, key = item
            if receiver_index is None or consumer < receiver_index:
                work.wait()
                done.append(key)
            else:
                still.append(item)
        self._open = still
        return done
