"""Cross-entropy over a tensor-parallel vocabulary, with the normaliser's logarithm beside it.

The z-loss ``coefficient * (log Z)^2``, ``Z`` the softmax's normaliser, keeps logits from drifting.
Its gradient needs the softmax, which the cross-entropy keeps anyway: made together they hold one
tensor of vocabulary size, not two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["LossesWithLogZ", "cross_entropy_and_log_z"]

LossesWithLogZ = tuple[Tensor, Tensor]


def cross_entropy_and_log_z(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> LossesWithLogZ:
    """Per-token losses and ``log Z``, both ``[s, b]``, fp32 and differentiable.

    Args:
        logits: ``[s, b, vocabulary/tp]``, any float dtype; left as they are.
        labels: ``[s, b]``, over the whole vocabulary.
        group: ranks that share the vocabulary.
    """
    return _CrossEntropyAndLogZ.apply(logits, labels, group)


class _CrossEntropyAndLogZ(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup
    ) -> LossesWithLogZ:
        scores = logits.float()
        largest = scores.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = scores - largest[..., None]

        own = labels - group.rank() * logits.shape[-1]
        elsewhere = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(elsewhere, 0)
        predicted = shifted.gather(-1, own[..., None])[..., 0].masked_fill(elsewhere, 0.0)
        softmax = shifted.exp_()
        total = softmax.sum(-1)
        dist.all_reduce(predicted, group=group)
        dist.all_reduce(total, group=group)
        softmax.div_(total[..., None])

        ctx.save_for_backward(softmax, own, elsewhere)
        ctx.dtype = logits.dtype
        log_total = total.log()
        return log_total - predicted, log_total + largest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        of_loss, of_log_z = gradients
        softmax, own, elsewhere = ctx.saved_tensors
        gradient = softmax * (of_loss + of_log_z)[..., None]
        at_label = of_loss.masked_fill(elsewhere, 0.0)[..., None]
        gradient.scatter_add_(-1, own[..., None], -at_label)
        return gradient.to(ctx.dtype), None, None
