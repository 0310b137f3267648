"""A stand-in for Transformer Engine where it cannot be installed: same classes, same state.

`install()` makes `import transformer_engine` find it; call it before Megatron is imported. Then
Megatron's own wrappers (`TELayerNormColumnParallelLinear`, …) and specs are built from it as they
are from the real one. The modules have the parameters, attributes and state of the real ones
(module/linear.py, module/layernorm_linear.py, module/rmsnorm.py, module/grouped_linear.py and
attention/dot_product_attention of version 2.6), and compute in plain torch on one rank. What
Megatron imports besides is an empty class: it must not be used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["install"]

VERSION = "2.6.0"
NAME = "transformer_engine"


class _Module(nn.Module):
    """What all modules with scaling factors have; without FP8 there are none."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


def _shard(parameter: nn.Parameter, dim: int | None) -> None:
    """As `set_tensor_model_parallel_attributes`."""
    parameter.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]
    parameter.partition_dim = dim or 0  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int,
        parallel_mode: str | None,
        bias: bool,
        return_bias: bool,
        init_method: Callable[[Tensor], Any],
        params_dtype: torch.dtype,
        device: Any,
        sequence_parallel: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp_size, self.parallel_mode, self.use_bias = tp_size, parallel_mode, bias
        self.return_bias = return_bias
        if parallel_mode == "column":
            self.out_features = out_features // tp_size
        elif parallel_mode == "row":
            self.in_features = in_features // tp_size
        shape = self.out_features, self.in_features
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        if not self.weight.is_meta:
            init_method(self.weight)
        _shard(self.weight, {"column": 0, "row": 1}.get(parallel_mode or ""))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(
                torch.zeros(self.out_features, dtype=params_dtype, device=device)
            )

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        assert self.tp_size == 1
        if self.return_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, eps: float, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, **kwargs)
        assert kwargs["normalization"] == "RMSNorm"
        self.eps = eps
        dtype, device = kwargs["params_dtype"], kwargs["device"]
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=dtype, device=device))
        self.layer_norm_weight.sequence_parallel = kwargs["sequence_parallel"]  # type: ignore[attr-defined]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


class RMSNorm(_Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        device: Any,
        zero_centered_gamma: bool,
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        weight = torch.ones(normalized_shape, dtype=params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class DotProductAttention(_Module):
    def __init__(
        self,
        *,
        attn_mask_type: str,
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == "causal"
        self.window_size, self.softmax_scale = window_size, softmax_scale
        self.register_load_state_dict_post_hook(self._ignore_missing_state)

    def _ignore_missing_state(self, _: nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if "core_attention._extra_state" not in key]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        """`[s, b, heads, d]` -> `[s, b, heads * d]`, causal, inside the window."""
        assert kwargs["attn_mask_type"] == "causal"
        seen = torch.ones(len(query), len(key), dtype=torch.bool).tril()
        if self.window_size is not None:
            seen &= ~torch.ones_like(seen).tril(-self.window_size[0] - 1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        scale = self.softmax_scale
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[Tensor], Any],
        params_dtype: torch.dtype,
        device: Any,
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        self.in_features, self.out_features = in_features, out_features
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"recipe": None, "fp8_checkpoint": False}
        for i in range(num_gemms):
            shape = out_features, in_features
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
            init_method(weight)
            self.register_parameter(f"weight{i}", weight)

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """There is none."""


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False


_DEFINED: dict[str, dict[str, Any]] = {
    NAME: {"__version__": VERSION},
    f"{NAME}.pytorch": {
        c.__name__: c
        for c in (Linear, LayerNormLinear, RMSNorm, DotProductAttention, GroupedLinear)
    },
    f"{NAME}.pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager},
}
# Imported as functions by code that falls back to something else without them.
_MISSING = {
    "_SplitAlongDim",
    "Fp8Padding",
    "apply_rotary_pos_emb",
    "general_gemm",
    "get_cpu_offload_context",
    "parallel_cross_entropy",
}


class _StandinModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _MISSING:
            raise AttributeError(name)
        if name.islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        placeholder = type(name, (), {})
        setattr(self, name, placeholder)
        return placeholder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] == NAME and fullname.split(".")[-1] not in _MISSING:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StandinModule(spec.name)
        module.__dict__.update(_DEFINED.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Make `import transformer_engine` find the stand-in."""
    assert not any(name.startswith("megatron") for name in sys.modules)
    sys.meta_path.insert(0, _Finder())
