"""KV caches that carry the state, so that whatever moves the cache moves the state with it.

`generate()` creates plain `DynamicCache`/`StaticCache` objects; `as_latent_cache` turns them into
the classes below in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache

__all__ = ["LatentCacheMixin", "LatentDynamicCache", "LatentStaticCache", "as_latent_cache"]

_NOTHING_READ = "nothing was read through this cache yet"


class LatentCacheMixin:
    """The carried state of latent feedback, one vector per sequence.

    Attributes:
        state: final-norm output at the last cached position, `[b, 1, h]`, or None.
        ends_document: whether the last cached token ends a document, `[b, 1]`; None if the model
            knows no such token.
        state_missing: why there is no state, for error messages.
        generated_length: the number of cached positions after which the next token is a generated
            one. `generate()` keeps it; it tells a later call that continues from this cache that
            its first new token is to be fused.
        from_beam_search: the rows are running beams, not the returned sequences.
    """

    layers: list[Any]
    get_seq_length: Callable[..., Any]

    state: torch.Tensor | None = None
    ends_document: torch.Tensor | None = None
    state_missing: str = _NOTHING_READ
    generated_length: int | None = None
    from_beam_search: bool = False

    def set_state(self, states: torch.Tensor, ends_document: torch.Tensor | None) -> None:
        """Keep the last position of `states` `[b, s, h]` and of `ends_document` `[b, s]`."""
        self.state = _last(states)
        self.ends_document = None if ends_document is None else _last(ends_document)

    def _map_state(self, change: Any) -> None:
        if self.state is not None:
            self.state = change(self.state)
        if self.ends_document is not None:
            self.ends_document = change(self.ends_document)

    def _drop_state(self, reason: str) -> None:
        self.state = self.ends_document = self.generated_length = None
        self.state_missing = reason

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._map_state(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._map_state(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._map_state(lambda state: state[indices, ...])

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._drop_state(_NOTHING_READ)
        self.from_beam_search = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` positions; this loses the state."""
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if tokens_to_remove != 0:
            # Only the last position's state is kept, and that position is gone.
            self._drop_state(f"the cache was cropped by {abs(tokens_to_remove)} positions")

    @property
    def is_croppable(self) -> bool:
        """False: a crop cannot bring back an earlier state."""
        return False


class LatentDynamicCache(LatentCacheMixin, DynamicCache):
    """A `DynamicCache` (full and sliding layers) with the carried state."""


class LatentStaticCache(LatentCacheMixin, StaticCache):
    """A `StaticCache` with the carried state in buffers of fixed address."""

    _state_buffer: torch.Tensor | None = None
    _ends_buffer: torch.Tensor | None = None

    def set_state(self, states: torch.Tensor, ends_document: torch.Tensor | None) -> None:
        self.state = self._state_buffer = _into_buffer(self._state_buffer, _last(states))
        self.ends_document = None
        if ends_document is not None:
            ends = _into_buffer(self._ends_buffer, _last(ends_document))
            self.ends_document = self._ends_buffer = ends

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.state is not None:  # back into the buffers
            self.set_state(self.state, self.ends_document)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError(_STATIC.format("repeat rows"))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError(_STATIC.format("select rows"))

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(_STATIC.format("crop"))


_STATIC = "A static cache cannot {}: use a dynamic cache (the default of generate())."


def as_latent_cache(cache: Cache) -> LatentCacheMixin:
    """Give a plain dynamic or static cache, in place, the ability to carry the state.

    Raises:
        ValueError: for caches whose layers cannot carry it (quantised, encoder-decoder, others).
    """
    if isinstance(cache, LatentCacheMixin):
        return cache
    if type(cache) is DynamicCache:
        cache.__class__ = LatentDynamicCache
    elif type(cache) is StaticCache:
        cache.__class__ = LatentStaticCache
    else:
        raise ValueError(
            f"{type(cache).__name__} cannot carry the latent state: it would be lost whenever the "
            "cache is moved, repeated or reordered. Use a DynamicCache or a StaticCache."
        )
    return cache


def _last(values: torch.Tensor) -> torch.Tensor:
    # A decoding step's own output is kept as it is; of a prompt only a copy of the last row, so
    # that the other rows can be freed.
    return values if values.shape[1] == 1 else values[:, -1:].clone()


def _into_buffer(buffer: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    if buffer is not None and buffer.shape == values.shape and buffer.dtype == values.dtype:
        buffer.copy_(values)
        return buffer
    buffer = values.clone()
    if not torch.compiler.is_compiling():
        # A compiled step replayed as a CUDA graph reads and writes this address.
        torch._dynamo.mark_static_address(buffer)
    return buffer
