"""What a run reports: losses and state changes per pass, passes, tokens, operations, gradients.

Megatron's own log keeps its meaning (``lm loss`` is the loss of pass 1). Losses of further passes
are averaged and printed here, because Megatron's log takes the keys of the first micro-batch and
divides by all iterations, also those that had no such pass.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalatent.launch.progress import Heartbeat
from megalatent.training.losses import PassSums

__all__ = ["MetricsLog", "RunState", "Writers", "reduce_sums"]

METRICS_FILE = "metrics.jsonl"


@dataclass
class RunState:
    """Counts over the whole run; saved with every checkpoint.

    Attributes:
        pass_counts: K -> micro-batches (of the global batch) trained with K passes.
        token_equivalent_tokens: tokens times passes.
        fusion_updates: optimiser steps that updated the fusion.
    """

    pass_counts: Counter[int] = field(default_factory=Counter)
    token_equivalent_tokens: int = 0
    fusion_updates: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "pass_counts": dict(self.pass_counts),
            "token_equivalent_tokens": self.token_equivalent_tokens,
            "fusion_updates": self.fusion_updates,
        }

    def mixture(self) -> dict[int, float]:
        """K -> share of the micro-batches trained so far."""
        total = sum(self.pass_counts.values())
        return {k: n / total for k, n in sorted(self.pass_counts.items())}

    @staticmethod
    def from_dict(state: dict[str, Any]) -> RunState:
        return RunState(
            Counter({int(k): int(n) for k, n in state["pass_counts"].items()}),
            int(state["token_equivalent_tokens"]),
            int(state["fusion_updates"]),
        )


def reduce_sums(
    sums: Sequence[dict[int, Tensor]], group: dist.ProcessGroup | None
) -> dict[int, float]:
    """Mean per pass from ``[sum, count]`` pairs of several steps and all ranks of ``group``.

    Every rank of the group must hold the same passes.
    """
    total: dict[int, Tensor] = {}
    for step in sums:
        for k, pair in step.items():
            total[k] = pair.double() if k not in total else total[k] + pair
    if not total:
        return {}
    passes = sorted(total)
    stacked = torch.stack([total[k] for k in passes])
    if group is not None and group.size() > 1:
        dist.all_reduce(stacked, group=group)
    return {
        k: float(s / n) if n > 0 else float("nan")
        for k, (s, n) in zip(passes, stacked, strict=True)
    }


@dataclass(frozen=True)
class Writers:
    """Where numbers go besides the printed line and the metrics file.

    Attributes:
        tensorboard: a TensorBoard writer, or None.
        wandb: the module of Weights & Biases with a run open, or None.
    """

    tensorboard: Any = None
    wandb: Any = None

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """Write each value under `latent/` and its name."""
        named = {f"latent/{name}": value for name, value in values.items()}
        if self.tensorboard is not None:
            for name, value in named.items():
                self.tensorboard.add_scalar(name, value, iteration)
        if self.wandb is not None:
            self.wandb.log(named, iteration)


class MetricsLog:
    """Collects, reduces, prints and writes the metrics of a run.

    Args:
        folder: where ``metrics.jsonl`` goes, or None.
        loss_group: ranks that share a step's tokens (DP x CP).
        change_group: ranks that share a step's positions (DP x CP, and TP under SP).
        last_stage: whether this rank has losses.
        speaks: whether this rank prints and writes.
        ranks: of the whole run.
        peak_flops: operations a second that one rank's device can do; None if not known.
    """

    def __init__(
        self,
        *,
        folder: Path | None,
        loss_group: dist.ProcessGroup | None,
        change_group: Sequence[dist.ProcessGroup | None],
        last_stage: bool,
        speaks: bool,
        state: RunState,
        ranks: int = 1,
        peak_flops: float | None = None,
    ) -> None:
        self.folder = folder
        self.loss_group = loss_group
        self.change_groups = change_group
        self.last_stage = last_stage
        self.speaks = speaks
        self.state = state
        self.ranks = ranks
        self.peak_flops = peak_flops
        self.listeners: list[Any] = []
        self._heartbeat = Heartbeat()
        self._steps: list[tuple[int, ...]] = []
        self._tokens = 0
        self._flops = 0.0
        self._seconds = 0.0
        self._began = 0.0

    def step_begins(self) -> None:
        """Called before a training step's forward and backward."""
        self._began = time.perf_counter()

    def step_ends(
        self, passes: Sequence[int], replicas: int, tokens: int, flops: float = 0.0
    ) -> None:
        """Called after a training step's optimiser update.

        Args:
            passes: K of this rank's micro-batches.
            replicas: data-parallel ranks, which all drew the same.
            tokens: tokens of the global batch.
            flops: operations of the step on all ranks.
        """
        if self.speaks:
            self._heartbeat.beat()
        self._seconds += time.perf_counter() - self._began
        self._steps.append(tuple(passes))
        self._tokens += tokens
        self._flops += flops
        self.state.pass_counts.update({k: n * replicas for k, n in Counter(passes).items()})
        self.state.token_equivalent_tokens += tokens * sum(passes) // len(passes)

    @property
    def fused_steps(self) -> int:
        """Steps of this interval in which a micro-batch had a second pass."""
        return sum(max(passes) > 1 for passes in self._steps)

    def train(
        self,
        sums: Sequence[PassSums],
        *,
        iteration: int,
        total: int,
        consumed_samples: int,
        writers: Writers,
        fusion_gradient_norm: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Log an interval of training steps and start the next one.

        Args:
            sums: of the steps since the last call.
            fusion_gradient_norm: mean over the interval's fused steps, None if there were none.
        """
        losses = reduce_sums([s.loss for s in sums], self.loss_group) if self.last_stage else {}
        steps, self._steps = self._steps, []
        tokens, self._tokens = self._tokens, 0
        flops, self._flops = self._flops, 0.0
        seconds, self._seconds = self._seconds, 0.0
        if not self.speaks or not steps:
            return
        mean_passes = sum(sum(s) / len(s) for s in steps) / len(steps)
        speed = flops / seconds / self.ranks if seconds else 0.0
        mixture = self.state.mixture()
        record: dict[str, Any] = {
            "kind": "train",
            "iteration": iteration,
            "iterations": total,
            "consumed_samples": consumed_samples,
            "loss_per_pass": {str(k): v for k, v in losses.items()},
            "passes_per_step": mean_passes,
            "pass_counts": {str(k): n for k, n in sorted(self.state.pass_counts.items())},
            "mixture": {str(k): share for k, share in mixture.items()},
            "token_equivalent_tokens": self.state.token_equivalent_tokens,
            "fusion_gradient_norm": fusion_gradient_norm,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "seconds": seconds,
            "flops": flops,
            "flops_per_second_and_rank": speed,
        }
        if learning_rate is not None:
            record["learning_rate"] = learning_rate
        values = {f"loss pass {k}": v for k, v in losses.items()}
        values["passes per step"] = mean_passes
        values |= {f"share of K={k}": share for k, share in mixture.items()}
        values["token-equivalent tokens"] = self.state.token_equivalent_tokens
        values["TFLOP per second and rank"] = speed / 1e12
        parts = [f" latent iteration {iteration:8d}/{total:8d} | passes: {mean_passes:.2f}"]
        parts += [f"loss pass {k}: {v:.6E}" for k, v in losses.items()]
        if fusion_gradient_norm is not None:
            values["fusion gradient norm"] = fusion_gradient_norm
            parts.append(f"fusion grad norm: {fusion_gradient_norm:.3E}")
        parts.append(f"tokens/s: {record['tokens_per_second']:,.0f}")
        parts.append(f"TFLOP/s per rank: {speed / 1e12:.3g}")
        if self.peak_flops:
            record["mfu"] = values["MFU"] = speed / self.peak_flops
            parts.append(f"MFU: {record['mfu']:.1%}")
        parts.append(f"token-equivalent tokens: {self.state.token_equivalent_tokens:,}")
        shares = ", ".join(f"K={k} {share:.1%}" for k, share in mixture.items())
        parts.append(f"so far: {shares}")
        print(" | ".join(parts), flush=True)
        writers.write(values, iteration)
        self._write(record)

    def evaluation(
        self,
        sums: list[PassSums],
        *,
        iteration: int,
        writers: Writers = Writers(),
        name: str = "validation",
    ) -> None:
        """Log losses and state changes of k = 1, 2, ... of one evaluation; empties ``sums``.

        Args:
            name: of the evaluated set: ``validation``, ``test``, or one of several validation sets.
        """
        losses: dict[int, float] = {}
        changes: dict[int, float] = {}
        if self.last_stage:
            losses = reduce_sums([s.loss for s in sums], self.loss_group)
            changes = self._changes(sums)
        sums.clear()
        if not self.speaks or not losses:
            return
        title = f" latent {name} by pass"
        print(f"{title} |    k |      loss | state change", flush=True)
        for k, loss in losses.items():
            change = f"{changes[k]:12.3e}" if k in changes else " " * 12
            print(f"{' ' * len(title)} | {k:4d} | {loss:9.5f} | {change}", flush=True)
        values = {f"{name} loss pass {k}": loss for k, loss in losses.items()}
        # The curves of the one validation set that most runs have keep their short names.
        where = "" if name == "validation" else f" {name}"
        values |= {f"state change{where} pass {k}": change for k, change in changes.items()}
        writers.write(values, iteration)
        self._write(
            {
                "kind": "evaluation",
                "set": name,
                "iteration": iteration,
                "loss_per_pass": {str(k): v for k, v in losses.items()},
                "state_change": {str(k): v for k, v in changes.items()},
            }
        )

    def _changes(self, sums: list[PassSums]) -> dict[int, float]:
        total: list[dict[int, Tensor]] = [s.change for s in sums]
        *inner, outer = self.change_groups
        for group in inner:
            if group is not None and group.size() > 1:
                for step in total:
                    for k in sorted(step):
                        step[k] = step[k].clone()
                        dist.all_reduce(step[k], group=group)
        return reduce_sums(total, outer)

    def _write(self, record: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener(record)
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / METRICS_FILE).open("a") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become texts, which ``float()`` reads back."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
