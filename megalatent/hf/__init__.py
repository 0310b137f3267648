"""The model in Hugging Face form: configuration, modeling, decoding.

Nothing of transformers is imported until a name is used, so that the command line stays quick.
`register()` makes `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the model without
`trust_remote_code`; using any other name of this module does so as well.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "MegalatentConfig",
    "MegalatentForCausalLM",
    "MegalatentModel",
    "LatentDynamicCache",
    "LatentStaticCache",
    "register",
]

_HOMES = {
    "MegalatentConfig": "configuration_megalatent",
    "MegalatentForCausalLM": "modeling_megalatent",
    "MegalatentModel": "modeling_megalatent",
    "LatentDynamicCache": "cache_megalatent",
    "LatentStaticCache": "cache_megalatent",
}


def register() -> None:
    """Register the configuration and the models with transformers' Auto classes."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .configuration_megalatent import MegalatentConfig
    from .modeling_megalatent import MegalatentForCausalLM, MegalatentModel

    AutoConfig.register(MegalatentConfig.model_type, MegalatentConfig, exist_ok=True)
    AutoModel.register(MegalatentConfig, MegalatentModel, exist_ok=True)
    AutoModelForCausalLM.register(MegalatentConfig, MegalatentForCausalLM, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
