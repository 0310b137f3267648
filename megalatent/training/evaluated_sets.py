"""Which sets Megatron is about to evaluate, by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_set", "set_names"]


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


@contextmanager
def one_set(args: Any, iterations: int) -> Iterator[None]:
    """Inside, options of validation are those of the one test set, which is not read whole.

    Megatron would go through it as often as through the validation sets, and take it for a list.

    Args:
        args: Megatron's, changed in place for the time.
        iterations: `eval_iters` as it was given, for which the test set was built.
    """
    changed = {
        "multiple_validation_sets": False,
        "validation_set_names": None,
        "full_validation": False,
        "eval_iters": iterations,
    }
    kept = {name: getattr(args, name) for name in changed}
    vars(args).update(changed)
    try:
        yield
    finally:
        vars(args).update(kept)
