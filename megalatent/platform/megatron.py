"""Megatron names replaced on a machine without CUDA."""

from __future__ import annotations

import contextlib
import functools
import queue
from typing import Any

import torch
from megatron.training import global_vars

from megalatent.platform.device import cuda_type_names
from megalatent.platform.layerwise import gather_by_broadcast
from megalatent.platform.patching import Patch
from megalatent.platform.rng import DEVICE_RNG

__all__ = ["MEGATRON_PATCHES"]


def _with_cuda_type_names(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with cuda_type_names():
            return original(*args, **kwargs)

    return call


def _initialize_without_cuda(original: Any) -> Any:
    """`allow_no_cuda` is out of reach of `pretrain()`; the device count gates model parallelism."""

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        device_count = torch.cuda.device_count
        torch.cuda.device_count = lambda: 1
        try:
            return original(*args, **{**kwargs, "allow_no_cuda": True})
        finally:
            torch.cuda.device_count = device_count

    return initialize_megatron


def _set_state_of_device_generator(original: Any) -> Any:
    def _set_cuda_rng_state(
        new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False
    ) -> None:
        if graph_safe:
            raise RuntimeError("CUDA graphs need a GPU: use --cuda-graph-impl none")
        DEVICE_RNG.set_state(new_state)

    return _set_cuda_rng_state


def _fork_draws_from_device(original: Any) -> Any:
    """What draws inside `fork()` (initialisation, attention dropout) uses the tracker's state."""

    @contextlib.contextmanager
    def fork(self: Any, name: str = "model-parallel-rng") -> Any:
        with original(self, name), DEVICE_RNG.drawing():
            yield

    return fork


def _splits_as_sequences(original: Any) -> Any:
    """`all_to_all_single` takes split sizes as sequences; Megatron converts CUDA tensors only."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def _send_aliases(original: Any) -> Any:
    """The schedules free a sent output by `out.data = …` while gloo may still be reading it.

    The alias shares the storage and lives as long as the send, so the memory stays valid.
    """

    @functools.wraps(original)
    def p2p_ops(*, tensor_send_prev: Any, tensor_send_next: Any, **kwargs: Any) -> Any:
        return original(
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            **kwargs,
        )

    return p2p_ops


def _results_in_this_process(original: Any) -> Any:
    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        args = global_vars._GLOBAL_ARGS
        if args is not None and args.async_save:
            return original(mp_mode)
        return queue.Queue()

    return get_write_results_queue


_INITIALIZE = (
    "allow_no_cuda",
    "skip_mpu_initialization",
    "get_embedding_ranks",
    "get_position_embedding_ranks",
    "store",
    "skip_model_parallel_init",
    "seed_pp_group",
    "seed_dp_group",
    "seed_tp_group",
    "seed_ep_group",
    "seed_etp_group",
    "skip_random_seed",
)
_P2P = (
    "tensor_send_prev",
    "tensor_recv_prev",
    "tensor_send_next",
    "tensor_recv_next",
    "group",
    "prev_pipeline_rank",
    "next_pipeline_rank",
)
_TYPE_CHECK = "compares tensor.type() with torch.cuda names to tell fp32 from 16-bit parameters"
_QUEUE = (
    "starts a process even for a save in this one: it imports torch for seconds, wants an "
    "importable main module, and outlives a killed rank"
)
_NEEDS_GPU = "demands a GPU before it sets up process groups and random states"
_ARCH = "asks a GPU for its generation; 10 switches off an old generation's requirement"
_SPLITS = "leaves split sizes as tensors, which gloo's all-to-all refuses"

MEGATRON_PATCHES = (
    Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        "reaches into the CUDA generators",
        _set_state_of_device_generator,
        ("new_state", "device", "graph_safe"),
    ),
    Patch(
        "megatron.core.tensor_parallel.random",
        "CudaRNGStatesTracker.fork",
        "its draws must come from the tracked state, not from the host generator",
        _fork_draws_from_device,
        ("self", "name"),
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        _SPLITS,
        _splits_as_sequences,
        ("tensor", "as_numpy", "record_stream"),
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _SPLITS,
        _splits_as_sequences,
        ("tensor", "as_numpy", "record_stream"),
    ),
    Patch(
        "megatron.core.pipeline_parallel.p2p_communication",
        "_p2p_ops",
        "gloo has no stream order: a sent tensor must stay alive until it is sent",
        _send_aliases,
        _P2P,
    ),
    Patch(
        "megatron.core.pipeline_parallel.p2p_communication",
        "_batched_p2p_ops",
        "gloo has no stream order: a sent tensor must stay alive until it is sent",
        _send_aliases,
        _P2P,
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "get_write_results_queue",
        _QUEUE,
        _results_in_this_process,
        ("mp_mode",),
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.__init__",
        _TYPE_CHECK,
        _with_cuda_type_names,
    ),
    Patch(
        "megatron.core.optimizer.optimizer",
        "Float16OptimizerWithFloat16Params.__init__",
        _TYPE_CHECK,
        _with_cuda_type_names,
    ),
    Patch(
        "megatron.core.optimizer.optimizer",
        "clip_grad_by_total_norm_fp32",
        _TYPE_CHECK,
        _with_cuda_type_names,
        ("parameters", "max_norm", "total_norm", "use_decoupled_grad"),
    ),
    Patch(
        "megatron.core.optimizer.layer_wise_optimizer",
        "LayerWiseDistributedOptimizer.allgather_params",
        "gathers parts of different sizes, which gloo refuses",
        gather_by_broadcast,
        ("self",),
    ),
    *(
        Patch(module, "initialize_megatron", _NEEDS_GPU, _initialize_without_cuda, _INITIALIZE)
        for module in (
            "megatron.training",
            "megatron.training.initialize",
            "megatron.training.training",
        )
    ),
    *(
        Patch(module, "get_device_arch_version", _ARCH, lambda _original: lambda: 10, ())
        for module in (
            "megatron.training.arguments",
            "megatron.training.utils",
            "megatron.training.utils.common_utils",
        )
    ),
)
