"""One micro-batch as a rank sees it, and which of its rows are fused in each pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalatent.kernels.philox import philox4x32
from megalatent.model.shift import SequenceSlice, exchange_boundary_rows

__all__ = ["FusedRows", "MicroBatch", "RowSettings", "document_starts", "response_tokens"]

_PREFIX_DOMAIN = 0x70726566  # "pref"


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Training-time draws of a run.

    Attributes:
        seed: seed of all keyed draws.
        jitter: sigma of the uniform noise on the state, 0 for none.
        prefix_mixin: whether each document keeps a random plain prefix in each pass.
    """

    seed: int
    jitter: float
    prefix_mixin: bool


@dataclass(kw_only=True)
class FusedRows:
    """What the first stage knows of a micro-batch: where documents start and what is fused.

    All draws are keyed by what is trained (seed, sample, pass, position), never by the layout,
    so that every TP, SP, CP and PP layout and a restarted run see the same ones.

    Attributes:
        starts: ``[b, S]`` bool over whole (unsharded) rows: first position of a document.
        samples: ``[b]`` int64, consumed-sample index of each row.
        piece: this rank's positions of a row; of all rows laid end to end if ``flat``.
        flat: packed (THD) layout, in which the micro-batch is one sequence of ``b * S``.
        settings: draws.
        responses: ``[b, S]`` bool over whole rows: tokens of a response, the only ones that are
            fused (Recycler's fine-tuning with ``k_prefill`` 1); None fuses prompts as well.
    """

    starts: Tensor
    samples: Tensor
    piece: SequenceSlice
    flat: bool
    settings: RowSettings
    responses: Tensor | None = None
    _fused: dict[tuple[int, bool], Tensor] = field(default_factory=dict)

    @cached_property
    def _documents(self) -> tuple[Tensor, Tensor]:
        """First position and length of the document at every position, both ``[b, S]``."""
        _, length = self.starts.shape
        position = torch.arange(length, device=self.starts.device)
        first = torch.where(self.starts, position, -1).cummax(dim=1).values
        # the next start at or after t + 1, or S
        following = torch.where(self.starts, position, length).roll(-1, dims=1)
        following[:, -1] = length
        end = following.flip(1).cummin(dim=1).values.flip(1)
        return first, end - first

    def _local(self, whole: Tensor) -> Tensor:
        """This rank's rows of a ``[b, S]`` tensor: ``[s_local, b]`` (``[s_local, 1]`` if flat)."""
        if self.flat:
            whole = whole.reshape(1, -1)
        return whole.index_select(1, self.piece.positions).t().contiguous()

    def prefix_lengths(self, k: int) -> Tensor:
        """Prefix of the document at every position in pass ``k``, ``[b, S]``, in 1..n.

        One draw per (seed, sample, pass, document start), uniform.
        """
        first, size = self._documents
        seed, samples = self.settings.seed, self.samples[:, None].expand_as(first)
        word, *_ = philox4x32(
            seed & 0xFFFFFFFF,
            (seed >> 32) ^ _PREFIX_DOMAIN,
            first,
            torch.zeros_like(first),
            samples & 0xFFFFFFFF,
            (k << 16) | ((samples >> 32) & 0xFFFF),
        )
        return 1 + ((word * size) >> 32)

    def fused_rows(self, k: int, *, training: bool) -> Tensor:
        """Which of this rank's rows take the state in pass ``k >= 2``: ``[s_local, b]`` bool.

        Document starts have no predecessor. In training with the prefix mixin, the first
        ``p`` positions of each document are plain, ``p`` drawn afresh for every pass.
        """
        mixin = training and self.settings.prefix_mixin
        key = (k if mixin else 0, mixin)
        if key not in self._fused:
            fused = ~self.starts
            if self.responses is not None:
                fused = fused & self.responses
            if mixin:
                first, _ = self._documents
                position = torch.arange(first.shape[1], device=first.device)
                fused = fused & (position - first >= self.prefix_lengths(k))
            self._fused[key] = self._local(fused)
        return self._fused[key]

    @cached_property
    def _predecessors(self) -> tuple[Tensor, Tensor]:
        """Row position and sample of the state each local row reads, both ``[s_local, b]``."""
        rows, length = self.starts.shape
        position = torch.arange(length, device=self.starts.device).expand(rows, length) - 1
        samples = self.samples[:, None].expand(rows, length)
        return self._local(position), self._local(samples)

    def shift(self, kernels: Any, state: Tensor, k: int, *, training: bool) -> Tensor:
        """Jittered states of the previous position, ``[s_local, b, h]``.

        Args:
            kernels: pointwise kernels.
            state: this rank's rows of the states of pass ``k - 1``, ``[s_local, b, h]``.
        """
        position, samples = self._predecessors
        return kernels.shift_jitter(
            state,
            exchange_boundary_rows(state, self.piece),
            self.piece.source,
            position,
            samples,
            k,
            self.settings.seed,
            self.settings.jitter if training else 0.0,
        )


@dataclass(kw_only=True)
class MicroBatch:
    """What a rank needs of one micro-batch; sequence tensors are this CP rank's part.

    Attributes:
        tokens, position_ids, labels: ``[b, s/cp]`` int64, or None on stages that do not use them.
        loss_mask: ``[b, s/cp]`` float.
        attention_mask: ``[b, 1, s/cp, s]`` bool (True: masked) or None for a causal mask.
        packed_seq_params: Megatron's description of packed (THD) sequences, or None.
        latent: on the first stage, which rows are fused.
    """

    tokens: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    attention_mask: Tensor | None = None
    packed_seq_params: Any = None
    latent: FusedRows | None = None


def response_tokens(loss_mask: Tensor) -> Tensor:
    """Tokens of responses, ``[b, S]`` bool, from a loss mask that marks what predicts them.

    The masks are one position apart: position t has a loss where token t + 1 is of a response.
    """
    responses = torch.zeros_like(loss_mask, dtype=torch.bool)
    responses[:, 1:] = loss_mask[:, :-1] > 0
    return responses


def document_starts(tokens: Tensor, end_of_document: int | None, cu_seqlens: Any) -> Tensor:
    """First positions of documents, ``[b, S]`` bool.

    Position 0, the position after an end-of-document token, and every boundary of
    ``cu_seqlens``.

    Args:
        tokens: whole rows, ``[b, S]``.
        end_of_document: token id, or None if the tokenizer has none.
        cu_seqlens: boundaries ``[b, n]`` within each row (values above S are ignored), or None.
    """
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 0] = True
    if end_of_document is not None:
        starts[:, 1:] |= tokens[:, :-1] == end_of_document
    if cu_seqlens is not None:
        length = tokens.shape[1]
        wide = torch.zeros(
            tokens.shape[0], length + 1, dtype=torch.bool, device=tokens.device
        )  # one more column takes the closing boundary
        wide.scatter_(1, cu_seqlens.long().clamp(max=length), True)
        starts |= wide[:, :length]
    return starts
