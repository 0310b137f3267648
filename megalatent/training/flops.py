"""Operations that training steps need, counting every pass, sliding windows and the fusion.

Megatron counts one pass of its own layers, each attending to the whole row. Its count of the matrix
products is taken over; the attention is counted anew, and what it does not know is added. Counted
are the products the mathematics asks for, forward and backward: no recomputation, no work on
positions that a mask hides, no norms and other pointwise operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megalatent.training.expert_layers import expert_layers

if TYPE_CHECKING:
    from megalatent.config import LatentConfig

__all__ = ["StepFlops", "attention_pairs", "visible_pairs"]

# Forward, and a gradient each for the weight and the input; a multiplication and an addition.
_PER_PRODUCT = 3 * 2

Count = Callable[..., float]


def attention_pairs(length: float, window: int | None) -> float:
    """Pairs (query, key) in a causal row: the sum of ``min(t, window)`` over t = 1 … length.

    Args:
        window: keys that a position sees, itself included; None: all before it.
    """
    if window is None or window >= length:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window


def visible_pairs(args: argparse.Namespace, length: float) -> list[float]:
    """Pairs of a row in each layer; multi-token prediction's layers are the last.

    Args:
        args: Megatron's options, `window_size` and `window_attn_skip_freq` among them.
        length: tokens of the row.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    window = None
    if args.window_size and args.window_size[0] >= 0:
        window = args.window_size[0] + 1  # the position itself comes on top
    # Prediction's layers are numbered from 1 again.
    numbers = [*range(1, args.num_layers + 1), *range(1, (args.mtp_num_layers or 0) + 1)]
    frequency = args.window_attn_skip_freq
    return [
        attention_pairs(
            length, window if is_layer_window_attention(args.window_size, frequency, n) else None
        )
        for n in numbers
    ]


class StepFlops:
    """Counts the operations of whole training steps.

    Args:
        args: Megatron's options, validated.
        latent: our configuration.
        count: Megatron's `num_floating_point_operations`.
    """

    def __init__(self, args: argparse.Namespace, latent: LatentConfig, count: Count) -> None:
        self.args = args
        self.latent = latent
        self.count = count

    def step(
        self,
        rows: int,
        passes: Sequence[int],
        *,
        squares: float | None = None,
        tokens: float | None = None,
    ) -> float:
        """Operations of one step on all ranks together.

        Args:
            rows: sequences of the global batch.
            passes: K of each micro-batch; all have as many tokens.
            squares: sum of the squared lengths of all documents, with packed sequences.
            tokens: of the global batch without padding, with packed sequences.
        """
        tokens = rows * self.args.seq_length if tokens is None else tokens
        mean = sum(passes) / len(passes)
        one_pass = self._products(rows, tokens) + self._attention(rows, tokens, squares)
        return mean * one_pass + self._fusion(tokens, passes)

    def per_token(self, passes: int) -> float:
        """Operations for each token of a micro-batch of K = `passes`, in whole rows."""
        return self.step(1, [passes]) / self.args.seq_length

    def _products(self, rows: int, tokens: float) -> float:
        """Products with weights in one pass."""
        args = self.args
        known = self.count(
            args, rows, seqlen_squared_sum_in_batch=0, total_real_tokens_in_batch=tokens
        )
        weights = 0
        if self.latent.model.attention_gate:
            layers = args.num_layers + (args.mtp_num_layers or 0)
            weights += layers * args.hidden_size * args.num_attention_heads
        if args.num_experts:
            weights += _expert_layers(args) * args.hidden_size * args.num_experts  # the router
        return known + _PER_PRODUCT * tokens * weights

    def _attention(self, rows: int, tokens: float, squares: float | None) -> float:
        """Scores and weighted values in one pass."""
        args = self.args
        # Megatron takes half of the square for the causal mask.
        each = 2 * self.count(
            args, rows, seqlen_squared_sum_in_batch=1, total_real_tokens_in_batch=0
        )
        count, length = float(rows), float(args.seq_length)
        if squares is not None:
            # The lengths themselves are not known: documents of one length with this sum.
            length = squares / tokens if tokens else 0.0
            count = tokens / length if length else 0.0
        pairs = visible_pairs(args, length)
        return each * count * sum(pairs) / len(pairs)

    def _fusion(self, tokens: float, passes: Sequence[int]) -> float:
        from megalatent.model.fusion import FUSIONS

        if not self.latent.fusion.fuses:
            return 0.0
        kind = FUSIONS[self.latent.fusion.kind]
        # The token's part is the same in all fused passes, and done once.
        products = sum(
            kind.state_products * (k - 1) + kind.token_products * (k > 1) for k in passes
        )
        square = self.args.hidden_size**2
        return _PER_PRODUCT * tokens * square * products / len(passes)


def _expert_layers(args: argparse.Namespace) -> int:
    """Layers with experts, multi-token prediction's among them."""
    pattern = expert_layers(args.moe_layer_freq, args.num_layers)
    return sum(pattern) + (args.mtp_num_layers or 0) * bool(pattern and pattern[-1])
