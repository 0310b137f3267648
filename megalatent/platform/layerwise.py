"""Megatron's layer-wise optimiser in fp32, which it supports in bf16 only."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["gather_by_broadcast", "wrap_fp32_too"]


def wrap_fp32_too(original: Any) -> Any:
    """Give the layer-wise optimiser Megatron optimisers where it would take plain torch ones.

    In bf16 it wraps them itself. Its ranks' parts are cut out of ``param_groups`` in place, which
    works on wrapped optimisers just as well.
    """
    from megatron.core.optimizer.optimizer import FP32Optimizer

    class PartInFp32(FP32Optimizer):
        """An `FP32Optimizer` whose state has the form of the bf16 one's, which is expected."""

        def state_dict(self) -> Any:
            return {"optimizer": super().state_dict()}

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict["optimizer"])

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            plain = FP32Optimizer(self.optimizer, self.config, self.init_state_fn)
            return {"optimizer": plain.sharded_state_dict(*args, **kwargs)}

    @functools.wraps(original)
    def __init__(
        self: Any,
        optimizers: Any,
        config: Any,
        pg_collection: Any = None,
        init_state_fn_list: Any = None,
        model_chunks: Any = None,
    ) -> None:
        if not config.bf16:
            functions = init_state_fn_list or [None] * len(optimizers)
            optimizers = [
                PartInFp32(optimizer, config, function)
                for optimizer, function in zip(optimizers, functions, strict=True)
            ]
        original(self, optimizers, config, pg_collection, init_state_fn_list, model_chunks)

    return __init__


def gather_by_broadcast(original: Any) -> Any:
    """Ranks update different weights, of different sizes, which gloo's all-gather refuses."""

    @functools.wraps(original)
    def allgather_params(self: Any) -> None:
        self.broadcast_params()

    return allgather_params
