"""The model in Hugging Face form: configuration, modeling, decoding.

Importing this package makes `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the model,
so that an export loads without `trust_remote_code`. It imports transformers; the command line
imports it only where a model is needed.
"""

from __future__ import annotations

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: models in Hugging Face form need transformers, install megalatent[hf]",
        name=error.name,
    ) from error

from .cache_megalatent import LatentDynamicCache, LatentStaticCache
from .configuration_megalatent import MegalatentConfig
from .modeling_megalatent import MegalatentForCausalLM, MegalatentModel

__all__ = [
    "MegalatentConfig",
    "MegalatentForCausalLM",
    "MegalatentModel",
    "LatentDynamicCache",
    "LatentStaticCache",
]

transformers.AutoConfig.register(MegalatentConfig.model_type, MegalatentConfig, exist_ok=True)
transformers.AutoModel.register(MegalatentConfig, MegalatentModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(MegalatentConfig, MegalatentForCausalLM, exist_ok=True)
