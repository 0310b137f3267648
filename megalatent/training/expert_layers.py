"""Which layers have experts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["expert_layers"]


def expert_layers(frequency: int | Sequence[int], layers: int) -> list[bool]:
    """Whether each layer has experts, in a model that has some.

    Args:
        frequency: Megatron's `moe_layer_freq`: every so many layers from the first, or one entry a
            layer.
        layers: of the decoder.
    """
    if isinstance(frequency, int):
        return [i % frequency == 0 for i in range(layers)]
    return [bool(x) for x in frequency]
