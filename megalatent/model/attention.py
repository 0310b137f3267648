"""Core attention in plain torch: packed documents, windows, grouped heads, context parallelism.

Megatron's local `DotProductAttention` has neither context parallelism nor packing, and its window
layers forget a given mask. Here the scores are written out in fp32, so memory grows with the square
of the sequence: a reference, and what machines without Transformer Engine run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megalatent.model.shift import context_parallel_positions, document_parallel_positions

__all__ = ["LocalAttention", "ReferenceAttention", "attend", "masked_positions"]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.arbitrary)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masked: Tensor,
    scale: float,
    dropout: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
) -> Tensor:
    """Softmax attention; scores and softmax in fp32 (fp64 for fp64 inputs).

    Args:
        query: `[q, b, heads, d]`.
        key: `[k, b, groups, d]`; each group serves `heads / groups` neighbouring heads.
        value: `[k, b, groups, d_v]`.
        masked: bool, broadcastable to `[b, heads, q, k]`; True = not seen. A row that sees nothing
            gives the mean of the values, not NaN.

    Returns:
        `[q, b, heads * d_v]`, in the query's dtype.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows, batch, heads, _ = query.shape
    groups = key.shape[2]
    query_, key_, value_ = query.to(dtype), key.to(dtype), value.to(dtype)
    query_ = query_.view(rows, batch, groups, heads // groups, -1)
    scores = torch.einsum("qbgrd,kbgd->bgrqk", query_, key_).flatten(1, 2) * scale
    scores = scores.masked_fill(masked, torch.finfo(dtype).min)
    probabilities = dropout(scores.softmax(-1)).unflatten(1, (groups, -1))
    context = torch.einsum("bgrqk,kbgd->qbgrd", probabilities, value_)
    return context.reshape(rows, batch, -1).to(query.dtype)


def masked_positions(
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    window: tuple[int, int] | None = None,
    boundaries: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """True where a query must not see a key, `[…, q, k]`.

    Args:
        query_positions: `[q]`, in the whole sequence.
        key_positions: `[k]`, likewise, in any order.
        window: keys seen (before, after) the query's own position; -1 = no bound.
        boundaries: `[documents + 1]`, starts of packed documents and the end; documents do not see
            each other.
        mask: `[b, 1, q, s]`, True = masked, keys in the order of the sequence. It replaces the
            causal rule, as in Megatron, but not the window.
    """
    distance = key_positions[None, :] - query_positions[:, None]
    masked = distance > 0 if mask is None else mask.index_select(-1, key_positions)
    if boundaries is not None:
        document_of_query = torch.bucketize(query_positions, boundaries, right=True)
        document_of_key = torch.bucketize(key_positions, boundaries, right=True)
        masked = masked | (document_of_query[:, None] != document_of_key[None, :])
    if window is not None:
        before, after = window
        if before >= 0:
            masked = masked | (distance < -before)
        if after >= 0:
            masked = masked | (distance > after)
    return masked


class ReferenceAttention(MegatronModule):
    """Core attention under context parallelism: keys and values are gathered over the CP group.

    The gather's backward reduce-scatters, so gradients of keys and values are exact. Ordinary
    sequences are split load-balanced (chunks i and 2·cp-1-i); of packed sequences each document is,
    and its length is a multiple of 2·cp (pad it, and say so with `cu_seqlens_q_padded`).

    Raises:
        ValueError: what it lacks: attention dropout under CP (the draws would depend on the
            layout), a mask other than causal or explicit, softmax variants.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        rate = config.attention_dropout if attention_dropout is None else attention_dropout
        if rate:
            raise ValueError(
                f"attention_dropout: {rate} with context_parallel_size: "
                f"{config.context_parallel_size} is not supported without Transformer Engine; "
                "set attention_dropout: 0"
            )
        _refuse_softmax_variants(config)
        self.attn_mask_type = attn_mask_type
        # Scaling by layer number cancels out: scores are divided by it and multiplied again.
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.window = _window(config, layer_number)
        cp_group = getattr(pg_collection, "cp", None)
        self.cp_group = cp_group or parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's queries over the whole sequence.

        Args:
            query: `[s / cp, b, heads, d]`, or `[t / cp, heads, d]` packed.
            key, value: `[s / cp, b, groups, d]`, or `[t / cp, groups, d]` packed.
            attention_mask: None (causal) or `[b, 1, s / cp, s]`, True = masked; not with packing.

        Returns:
            `[s / cp, b, heads * d]`, or `[t / cp, heads * d]` packed.
        """
        _refuse(attn_mask_type or self.attn_mask_type, attention_mask, attention_bias)
        if packed_seq_params is not None:
            return _packed(
                query, key, value, packed_seq_params, self.scale, self.window, self.cp_group
            )
        cp = self.cp_group.size()
        length = query.shape[0] * cp
        positions = [context_parallel_positions(length, cp, rank) for rank in range(cp)]
        return _gathered(
            query,
            key,
            value,
            [x.to(query.device) for x in positions],
            self.cp_group,
            self.scale,
            window=self.window,
            mask=attention_mask,
        )


class LocalAttention(DotProductAttention):
    """Megatron's local core attention, with packing and with masks in window layers.

    Ordinary batches take Megatron's own path, operation by operation.
    """

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.window = _window(config, layer_number)
        # Megatron's softmax would replace the mask by the window: it gets both as one mask.
        self.scale_mask_softmax.window_size = None
        # The fused kernel is in no wheel, and applies neither a window nor a given mask.
        self.scale_mask_softmax.scaled_masked_softmax_fusion = False
        cp_group = getattr(self.pg_collection, "cp", None)
        self.cp_group = cp_group or parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """As `ReferenceAttention.forward`, with cp = 1."""
        if packed_seq_params is not None:
            _refuse(attn_mask_type or self.attn_mask_type, attention_mask, attention_bias)
            _refuse_softmax_variants(self.config)
            return _packed(
                query,
                key,
                value,
                packed_seq_params,
                1 / math.sqrt(self.hidden_size_per_attention_head)
                if self.config.softmax_scale is None
                else self.config.softmax_scale,
                self.window,
                self.cp_group,
                self._dropout,
            )
        if self.window is not None:
            queries = torch.arange(query.shape[0], device=query.device)
            queries = queries + key.shape[0] - query.shape[0]
            keys = torch.arange(key.shape[0], device=key.device)
            attention_mask = masked_positions(
                queries, keys, window=self.window, mask=attention_mask
            )
        return super().forward(
            query, key, value, attention_mask, attn_mask_type, attention_bias, None
        )

    def _dropout(self, probabilities: Tensor) -> Tensor:
        if self.config.sequence_parallel:
            return self.attention_dropout(probabilities)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.attention_dropout(probabilities)


def _window(config: Any, layer_number: int) -> tuple[int, int] | None:
    windowed = is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    )
    return config.window_size if windowed else None


def _refuse_softmax_variants(config: Any) -> None:
    if config.softmax_type != "vanilla":
        raise ValueError(
            f"softmax_type: {config.softmax_type} needs Transformer Engine where sequences are "
            "packed or context_parallel_size > 1; use softmax_type: vanilla"
        )


def _refuse(kind: AttnMaskType, mask: Tensor | None, bias: Tensor | None) -> None:
    if bias is not None:
        raise ValueError("an attention bias is not supported by transformer_impl: local")
    if mask is None and kind not in _CAUSAL:
        raise ValueError(
            f"attention mask type {kind.name} without a mask: pass a mask, or use a causal type"
        )


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: PackedSeqParams,
    scale: float,
    window: tuple[int, int] | None,
    cp_group: Any,
    dropout: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
) -> Tensor:
    """Attention inside each document; `[t / cp, heads, d]` in, `[t / cp, heads * d]` out."""
    if packing.qkv_format != "thd":
        raise ValueError(
            f"packed sequences in format {packing.qkv_format!r}: only 'thd' is supported"
        )
    boundaries = packing.cu_seqlens_q_padded
    if boundaries is None:
        boundaries = packing.cu_seqlens_q
    ends = boundaries.tolist()
    cp = cp_group.size()
    if ends[-1] != query.shape[0] * cp:
        raise ValueError(
            f"packed documents end at position {ends[-1]}, but the sequence has "
            f"{query.shape[0] * cp}: the last boundary must be its length"
        )
    odd = [b - a for a, b in itertools.pairwise(ends) if (b - a) % (2 * cp)]
    if cp > 1 and odd:
        raise ValueError(
            f"a packed document of {odd[0]} positions cannot be split over "
            f"context_parallel_size: {cp}; pad every document to a multiple of {2 * cp}"
        )
    positions = [document_parallel_positions(ends, cp, rank) for rank in range(cp)]
    return _gathered(
        query[:, None],
        key[:, None],
        value[:, None],
        [x.to(query.device) for x in positions],
        cp_group,
        scale,
        dropout,
        window=window,
        boundaries=boundaries.to(query.device),
    ).squeeze(1)


def _gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: list[Tensor],
    cp_group: Any,
    scale: float,
    dropout: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
    **rules: Any,
) -> Tensor:
    """Attention over the keys and values of all CP ranks; `positions[r]` are rank r's."""
    if cp_group.size() > 1:
        key, value = (
            tensor_parallel.gather_from_sequence_parallel_region(
                x.contiguous(), tensor_parallel_output_grad=True, group=cp_group
            )
            for x in (key, value)
        )
    # Gathered keys come in rank order: they are not sorted, the mask knows where each one is.
    masked = masked_positions(positions[cp_group.rank()], torch.cat(positions), **rules)
    return attend(query, key, value, masked, scale, dropout)
