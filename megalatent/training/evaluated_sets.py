"""Which sets Megatron is about to evaluate, by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

__all__ = ["set_names"]


def set_names(prefix: str, args: Any) -> Iterator[str]:
    """Names of the sets in the order in which Megatron evaluates them.

    Args:
        prefix: what Megatron's own line says: ``iteration 10``, ``iteration 10 on test set``.
        args: Megatron's.
    """
    name = "test" if prefix.endswith(" on test set") else "validation"
    if not args.multiple_validation_sets:
        yield name
        return
    for index in itertools.count():
        own = args.validation_set_names[index] if args.validation_set_names else index
        yield f"{name}-{own}"
