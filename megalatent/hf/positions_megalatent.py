"""Which positions of a pass are fused and which keep their plain token embedding.

All masks are boolean `[b, s]`.
"""

from __future__ import annotations

import torch

__all__ = ["document_starts", "fused_positions", "prefix_positions"]


def document_starts(
    rows: torch.Tensor,
    padding_mask: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    ends_document: torch.Tensor | None = None,
) -> torch.Tensor:
    """True where a position has no predecessor of its own document.

    Args:
        rows: any tensor `[b, s, ...]`; only its shape and device matter.
        padding_mask: 1 at real tokens. The first real token of a row starts a document.
        sequence_ids: number of the packed sequence each position belongs to.
        ends_document: True at tokens that end a document.
    """
    starts = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
    starts[:, 0] = True
    if padding_mask is not None:
        starts[:, 1:] |= ~padding_mask[:, :-1].bool()
    if sequence_ids is not None:
        starts[:, 1:] |= sequence_ids[:, 1:] != sequence_ids[:, :-1]
    if ends_document is not None:
        starts[:, 1:] |= ends_document[:, :-1]
    return starts


def fused_positions(
    starts: torch.Tensor,
    padding_mask: torch.Tensor | None,
    fused_mask: torch.Tensor | None,
    prefix_mixin: bool,
) -> torch.Tensor:
    """True where the next pass reads the state of the position before.

    Never at document starts; only where `fused_mask` (if given) allows it; with the mixin, not on
    the prefixes that this call draws.
    """
    fused = ~starts
    if fused_mask is not None:
        fused = fused & fused_mask.bool()
    if prefix_mixin:
        fused = fused & ~prefix_positions(starts, padding_mask)
    return fused


def prefix_positions(
    starts: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Prefix mixin of FBT: True on a random plain prefix of every document.

    For each document of n positions a length is drawn uniformly from {1, ..., n}. Padded positions
    belong to no document and do not count.
    """
    batch, length = starts.shape
    real = torch.ones_like(starts) if padding_mask is None else padding_mask.bool()
    document = starts.cumsum(1) - 1
    row_zeros = torch.zeros(batch, length, dtype=torch.long, device=starts.device)
    size = row_zeros.scatter_add(1, document, real.long())
    before = real.long().cumsum(1)
    # Real positions seen before the document's first one, to number positions from 1 inside it.
    opening = row_zeros.scatter_add(1, document, (before - real.long()) * starts)
    number = before - opening.gather(1, document)
    draws = torch.rand(batch, length, device=starts.device)
    prefix = (draws * size).long().clamp(max=size - 1) + 1
    return (number <= prefix.gather(1, document)) & real
