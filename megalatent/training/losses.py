"""The multi-pass objective: weights, averages and reports of the losses of all passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megalatent.model.batch import MicroBatch
from megalatent.model.z_loss import LossesWithLogZ
from megalatent.passes.sampling import pass_weight

__all__ = ["PassLoss", "PassSums"]


@dataclass
class PassSums:
    """Sums over micro-batches of one rank, per pass.

    Attributes:
        loss: pass -> ``[loss sum, token count]``, fp32.
        change: pass -> ``[sum over positions of |h_k - h_(k-1)| / |h_k|, positions]``, fp32.
    """

    loss: dict[int, Tensor] = field(default_factory=dict)
    change: dict[int, Tensor] = field(default_factory=dict)


class PassLoss:
    """Turns per-token losses of each pass into the objective, and keeps what is reported.

    The objective of a step is ``1/m sum_m sum_k w_k L_k`` (FBT eq. 12 or Recycler eq. 4), each
    ``L_k`` a mean over the micro-batch's tokens; with per-token normalisation the sum over tokens,
    divided once by the step's tokens, each counted once and not per pass.

    Args:
        config: the model's ``TransformerConfig``.
        micro_batches: m of this step.
        weighting, lambda_: how passes are weighed.
        cp_group: ranks that share each micro-batch's tokens.
        measure_change: whether states of consecutive passes are compared.
        z_loss: coefficient of the z-loss; with 0 the head need not give ``log Z``.
    """

    def __init__(
        self,
        config: Any,
        *,
        micro_batches: int,
        weighting: Literal["mean", "sum"],
        lambda_: float,
        cp_group: dist.ProcessGroup | None,
        measure_change: bool = False,
        z_loss: float = 0.0,
    ) -> None:
        self.config = config
        self.micro_batches = micro_batches
        self.weighting = weighting
        self.lambda_ = lambda_
        self.cp_group = cp_group if cp_group is not None and cp_group.size() > 1 else None
        self.measure_change = measure_change
        self.z_loss = z_loss
        self.sums = PassSums()
        self.reports: dict[int, dict[int, Tensor]] = {}
        self.tokens: Tensor | None = None
        self._previous: dict[int, Tensor] = {}
        self._cp_tokens: dict[int, Tensor] = {}

    # -- training ---------------------------------------------------------------------------

    @property
    def head_action(self) -> str:
        """The action of `LatentModel` that gives what `objective` needs."""
        return "head_with_log_z" if self.z_loss else "head"

    def weight(self, k: int, passes: int) -> float:
        return pass_weight(k, passes, weighting=self.weighting, lambda_=self.lambda_)

    def objective(
        self,
        micro_batch: int,
        k: int,
        passes: int,
        losses: Tensor | LossesWithLogZ,
        batch: MicroBatch,
        visit: Any,
    ) -> Tensor:
        """Scalar to differentiate for pass ``k``, weighed and scaled.

        The z-loss ``coefficient * (log Z)^2`` is averaged over the same tokens and weighs the same
        as the loss of its pass; reports are without it.

        Args:
            losses: per-token losses ``[b, s/cp]``, fp32; with a z-loss also ``log Z``, alike.
            visit: the chunk visit whose ``output`` is the state.
        """
        losses, log_z = losses if isinstance(losses, tuple) else (losses, None)
        loss, tokens = self._report(micro_batch, k, losses, batch, visit.output)
        if log_z is not None:
            assert batch.loss_mask is not None
            mask = batch.loss_mask.view(-1).float()
            loss = loss + self.z_loss * torch.sum(log_z.view(-1).square() * mask)
        if not self.config.calculate_per_token_loss:
            # The order of these operations is Megatron's, so that K = 1 rounds alike.
            loss = loss / self._denominator(micro_batch, tokens)
            loss = loss / self.micro_batches
        elif k == 1:
            self.tokens = tokens if self.tokens is None else self.tokens + tokens
        weight = self.weight(k, passes)
        if weight != 1.0:
            loss = loss * weight
        if self.config.grad_scale_func is not None:
            loss = self.config.grad_scale_func(loss)
        return loss

    def _denominator(self, micro_batch: int, tokens: Tensor) -> Tensor:
        """Tokens of the micro-batch as each CP rank must count them.

        Gradients are averaged over CP ranks. Dividing by the local count would weigh ranks with
        few unmasked tokens too high; the mean count makes the average exact.
        """
        if self.cp_group is None:
            return torch.clamp(tokens, min=1)
        if micro_batch not in self._cp_tokens:
            total = tokens.clone()
            dist.all_reduce(total, group=self.cp_group)
            self._cp_tokens[micro_batch] = torch.clamp(total, min=1) / self.cp_group.size()
        return self._cp_tokens[micro_batch]

    def set_auxiliary_scales(self, k: int, passes: int) -> None:
        """Scale of the MoE and MTP losses of the backward about to run.

        Both scales are class-wide and read in the backward, so they are set before each one, to
        the pass weight: everything that belongs to pass k carries ``w_k``.
        """
        config = self.config
        moe = getattr(config, "num_moe_experts", None) is not None
        mtp = getattr(config, "mtp_num_layers", None) is not None
        if not (moe or mtp):
            return
        device = torch.device(torch.cuda.current_device())
        scale = torch.ones(1, device=device) * self.weight(k, passes)
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        per_token = config.calculate_per_token_loss
        if moe:
            from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

            # A fresh tensor: the scaler keeps the first one it is given by reference.
            MoEAuxLossAutoScaler.set_loss_scale(
                scale.clone() if per_token else scale * cp_size / self.micro_batches
            )
        if mtp:
            from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

            MTPLossAutoScaler.set_loss_scale(
                scale.clone() if per_token else scale / self.micro_batches
            )

    # -- reports ----------------------------------------------------------------------------

    def evaluate(
        self, micro_batch: int, k: int, losses: Tensor, batch: MicroBatch, visit: Any
    ) -> None:
        """Record pass ``k`` without an objective."""
        self._report(micro_batch, k, losses, batch, visit.output)

    def _report(
        self, micro_batch: int, k: int, losses: Tensor, batch: MicroBatch, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert batch.loss_mask is not None
        mask = batch.loss_mask.view(-1).float()
        loss = torch.sum(losses.view(-1) * mask)
        tokens = mask.sum().to(torch.int)
        report = torch.stack([loss.detach(), tokens.to(loss.dtype)])
        self.reports.setdefault(micro_batch, {})[k] = report
        self._add(self.sums.loss, k, report)
        if self.measure_change:
            self._compare(micro_batch, k, state.detach())
        return loss, tokens

    def _compare(self, micro_batch: int, k: int, state: Tensor) -> None:
        previous = self._previous.pop(micro_batch, None)
        if k > 1 and previous is not None:
            now = state.float()
            difference = (now - previous.float()).norm(dim=-1)
            ratio = difference / now.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            count = torch.tensor(float(ratio.numel()), device=ratio.device)
            self._add(self.sums.change, k, torch.stack([ratio.sum(), count]))
        self._previous[micro_batch] = state

    @staticmethod
    def _add(sums: dict[int, Tensor], k: int, value: Tensor) -> None:
        sums[k] = value if k not in sums else sums[k] + value


Reduce = Callable[[Tensor], Tensor]
