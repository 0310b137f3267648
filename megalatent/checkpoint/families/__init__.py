"""The families of models that convert, one short file each.

To add one: a file with a `Family`, and its name in `_MODULES`.
"""

from __future__ import annotations

import importlib

from megalatent.checkpoint.mapping import Family
from megalatent.config_values import nearest
from megalatent.errors import UserError

__all__ = ["find_family", "names"]

_MODULES = {  # model_type -> module, which is imported when it is needed
    "megalatent": "megalatent",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
}


def names() -> list[str]:
    """`model_type` of every family."""
    return list(_MODULES)


def find_family(model_type: str) -> Family:
    """The family of a `config.json`.

    Raises:
        UserError: there is none.
    """
    if model_type not in _MODULES:
        close = nearest(model_type, names())
        hint = f" (nearest by name: {close})" if close else ""
        raise UserError(
            f"models of type {model_type!r} do not convert{hint}: convert one of "
            f"{', '.join(names())}"
        )
    module = importlib.import_module(f"{__name__}.{_MODULES[model_type]}")
    family: Family = module.FAMILY
    return family
