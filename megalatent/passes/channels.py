"""Ordered point-to-point channels between neighbours of a pipeline ring.

Every directed edge has a process group of its own for forward hand-overs and one for backward
hand-overs. One channel carries messages one way only and in one order, so neither gloo (which has
no stream order) nor NCCL (whose sends block their stream until received) can deadlock, also when
two ranks are both neighbours of each other (P = 2).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Inbox", "Outbox", "Ring"]

# Seconds between looks at a send that should make room.
_POLL = 1e-4


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
                    group = dist.new_group(pair, timeout=timeout, group_desc=f"latent_{way}_{edge}")
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

    Attributes:
        latest: sender index of the last message received, or -1: all that the sender did before
            is done.
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
        self._source, self._group = dist.get_group_rank(group, source), group
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._ahead = ahead
        self.latest = -1
        self._post(1 + ahead)

    def __len__(self) -> int:
        """Receives that are posted."""
        return len(self._posted)

    def _post(self, count: int) -> None:
        while self._pending and len(self._posted) < count:
            message = self._pending.popleft()
            buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            # The group's own method: `dist.irecv` checks more than a hand-over has time for.
            work = self._group.recv([buffer], self._source, 0)
            self._posted.append((message, work, buffer))

    def take(self, key: Hashable) -> Tensor:
        """Wait for the message ``key``."""
        while key not in self._arrived:
            # Before waiting, not after it: then there is time.
            self._post(1 + self._ahead)
            message, work, buffer = self._posted.popleft()
            work.wait()
            self.latest = message.sender_index
            self._arrived[message.key] = buffer
        return self._arrived.pop(key)


class Outbox:
    """Sends the hand-overs of one channel without waiting for them.

    A sent tensor must live until it has been received. NCCL says when that is. gloo only knows how
    to block until then, so there it is read off the plan: a message that a neighbour sent after it
    consumed ours proves that ours arrived.

    Args:
        target: global rank of the receiver.
        group: the channel.
        limit: most sends that the sender should leave open; see `full`. None: any number.
    """

    def __init__(self, target: int, group: Any, *, limit: int | None = None) -> None:
        self._target, self._group = dist.get_group_rank(group, target), group
        self._limit = limit
        self._open: deque[tuple[int, Any, Tensor]] = deque()

    def __len__(self) -> int:
        """Sends not known to be received."""
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether a send must be finished before the next one."""
        return self._limit is not None and len(self._open) >= self._limit

    def send(self, tensor: Tensor, consumer_index: int) -> None:
        """Start sending.

        Args:
            tensor: contiguous; not to be written to any more.
            consumer_index: index of the consuming action in the receiver's list.
        """
        while self._open and self._open[0][2].is_cuda and self._open[0][1].is_completed():
            self._open.popleft()
        work = self._group.send([tensor], self._target, 0)
        self._open.append((consumer_index, work, tensor))

    def release(self, receiver_index: int) -> None:
        """Forget the sends whose consumer comes before the receiver's action `receiver_index`.

        The receiver is known to have begun that action. One whose consumer comes later may hold
        up others, but not for long: consumers come almost in the order of sending.
        """
        while self._open and self._open[0][0] < receiver_index:
            self._open.popleft()[1].wait()

    @property
    def oldest(self) -> int:
        """`consumer_index` of the oldest open send."""
        return self._open[0][0]

    def finish_oldest(self, *, on_host: bool = True) -> None:
        """Wait until the oldest open send has been received.

        Args:
            on_host: False: with NCCL, the stream waits, and this thread goes on.
        """
        _, work, tensor = self._open.popleft()
        if on_host and tensor.is_cuda:
            while not work.is_completed():
                time.sleep(_POLL)
        work.wait()
