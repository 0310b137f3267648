"""What a run needs on each pipeline stage: parameters, and memory for each number of passes.

Weights, gradients and optimiser state are counted from the shapes. Activations are the tensors that
autograd keeps of one chunk visit, times the visits that the plan of passes holds at once. Kernels'
scratch space, communication buffers and fragmentation come on top: leave a tenth free.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megalatent.config import Config
from megalatent.config_latent import LatentConfig
from megalatent.errors import UserError
from megalatent.passes.plan import Action, Plan, make_plan
from megalatent.profiling.units import byte_unit
from megalatent.training.shapes import LayerShapes, Shapes

__all__ = ["Estimate", "Memory", "describe", "estimate", "held"]

# Uniform plans hold no more with further micro-batches, and take longer to make.
_MOST_MICRO_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of a rank of one pipeline stage, in bytes.

    Attributes:
        parameters: held by the rank, a count.
        passes: K of the step.
        in_flight: most chunk visits between forward and backward.
        activations: at the fullest moment of the step, the head's logits included.
    """

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    passes: int
    in_flight: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run needs.

    Attributes:
        parameters: of the whole model, a tied head counted once.
        memory: one entry for each number of passes and stage.
    """

    parameters: int
    memory: tuple[Memory, ...]


def describe(config: Config, world_size: int) -> list[str]:
    """The estimate of a checked configuration as lines of text."""
    from megalatent.config_checks import validated

    args, transformer = validated(config, world_size)
    where = ""
    if "transformer_impl" in config.filled_in:
        # Memory matters where the run will be, and there attention is fused.
        transformer.transformer_impl = "transformer_engine"
        where = " on GPUs"
    args.padded_vocab_size = _vocabulary(args)
    if args.padded_vocab_size is None:
        return ["parameters and memory: not estimated, the tokenizer does not tell its size"]
    if reason := _not_estimated(args):
        return [f"parameters and memory: not estimated with {reason}"]
    try:
        found = estimate(config.latent, args, transformer)
    except UserError as error:
        return [f"parameters and memory: not estimated: {error}"]
    return _table(found, where)


def _table(found: Estimate, where: str) -> list[str]:
    unit, scale = byte_unit(max(m.total for m in found.memory))

    def text(size: int) -> str:
        # A small part of something large still shows a figure.
        value = size / scale
        return f"{value:.2f}" if value >= 0.01 or size == 0 else f"{value:.1g}"

    names = ("K", "stage", "parameters", "weights", "gradients", "optimiser", "in flight")
    rows: list[tuple[str, ...]] = [(*names, "activations", "total")]
    for m in found.memory:
        sizes = (m.weights, m.gradients, m.optimizer)
        rows.append(
            (
                str(m.passes),
                str(m.stage),
                f"{m.parameters:,}",
                *map(text, sizes),
                str(m.in_flight),
                text(m.activations),
                text(m.total),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    title = f"estimated memory of a rank of each pipeline stage{where}, {unit}"
    return [f"{found.parameters:,} parameters; {title}", *lines]


def _vocabulary(args: Any) -> int | None:
    """Rows of the embedding table, padding included; None if that is known in training only."""
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    size = args.vocab_size
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    if args.tokenizer_type == "HuggingFaceTokenizer":
        size = _tokens(Path(args.tokenizer_model) / "tokenizer.json")
    if size is None:
        return None
    tp = args.tensor_model_parallel_size
    return calculate_padded_vocab_size(
        size, args.make_vocab_size_divisible_by, tp, logging_enabled=False
    )


def _tokens(path: Path) -> int | None:
    """Tokens of a Hugging Face tokenizer's file, those added to its model included."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        added = [token["content"] for token in content.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    own = vocabulary if isinstance(vocabulary, dict) else [token for token, _ in vocabulary]
    return len({*own, *added})


def _not_estimated(args: Any) -> str | None:
    """The option, if there is one, whose layers are not counted here."""
    for name in ("multi_latent_attention", "mtp_num_layers", "moe_latent_size"):
        if getattr(args, name, None):
            return f"megatron.{name}: {getattr(args, name)}"
    return None


def estimate(latent: LatentConfig, args: Any, transformer: Any) -> Estimate:
    """Parameters and memory of the configured run.

    Args:
        args: Megatron's arguments, validated for the size of the run.
        transformer: the `TransformerConfig` made of them.

    Raises:
        UserError: no plan of passes fits the cap on activations in flight.
    """
    shapes = Shapes(latent, args, transformer)
    stages, chunks = shapes.stages, shapes.chunks
    count = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    count = min(count, _MOST_MICRO_BATCHES * stages)
    depths = sorted({k for p in latent.passes.schedule for k, share in p.mixture.items() if share})
    found = []
    for passes in depths:
        plan = make_plan(
            stages, chunks, (passes,) * count, max_in_flight=latent.passes.max_in_flight
        )
        for stage in range(stages):
            visits = _Visits(shapes, latent, stage, passes)
            in_flight, activations = held(plan, stage, visits)
            found.append(
                Memory(
                    stage=stage,
                    **shapes.state(stage),
                    passes=passes,
                    in_flight=in_flight,
                    activations=activations + visits.transient,
                )
            )
    return Estimate(parameters=shapes.total_parameters(), memory=tuple(found))


def held(plan: Plan, rank: int, size: Callable[[Action], int]) -> tuple[int, int]:
    """Most visits, and most bytes, that a rank holds at once.

    Args:
        size: bytes from the forward of a visit ("F") to its backward; of a head ("H") while it
            runs.
    """
    visits = accumulate({"F": 1, "B": -1}.get(action.kind, 0) for action in plan.actions[rank])
    now = most = 0
    for action in plan.actions[rank]:
        if action.kind == "F":
            now += size(action)
        most = max(most, now + (size(action) if action.kind == "H" else 0))
        if action.kind == "B":
            now -= size(action._replace(kind="F"))
    return max(visits, default=0), most


class _Visits:
    """Bytes of the visits of one stage in a step with `passes` passes."""

    def __init__(self, shapes: Shapes, latent: LatentConfig, stage: int, passes: int) -> None:
        self._shapes, self._stage = shapes, stage
        given = shapes.recompute_everything
        mode = "all" if given else latent.passes.recompute_for(passes)
        self._recomputed = {
            k: mode == "all" or (mode == "extra" and k > 1) for k in range(1, passes + 1)
        }
        layers = [layer for chunk in shapes.layers[stage] for layer in chunk]
        #: Recomputation has the activations of one layer at a time besides those that are held.
        self.transient = 0
        if any(self._recomputed.values()) and layers:
            self.transient = max(map(self._layer, layers))

    def __call__(self, action: Action) -> int:
        shapes, last = self._shapes, self._shapes.is_last(self._stage, action.chunk)
        if action.kind == "H":
            return shapes.logits
        layers = shapes.layers[self._stage][action.chunk]
        if self._recomputed[action.k]:
            size = len(layers) * shapes.stream
        else:
            size = sum(map(self._layer, layers))
        if self._stage == 0 and action.chunk == 0:
            size += shapes.fusion_activations(action.k)
        # Input of the final norm, and the state.
        return size + (2 * shapes.stream if last else 0)

    def _layer(self, layer: LayerShapes) -> int:
        return layer.activations
