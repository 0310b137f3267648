"""`torch.cuda` on a machine without CUDA: the CPU is the device, and every call is synchronous."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megalatent.platform import rng
from megalatent.platform.patching import Patch

__all__ = ["TORCH_PATCHES", "HostDeviceMode", "cuda_type_names", "enter_host_device_mode"]

CPU = torch.device("cpu")


class Event:
    """A CUDA event: everything before it has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event's record to `end`'s."""
        return (end._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class Stream:
    """A CUDA stream: work is done when the call returns, so there is nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class HostDeviceMode(TorchFunctionMode):
    """Puts `device="cuda"` tensors on the CPU, unpinned, and lets dropout draw as a GPU would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            # Pinning asks the driver even for a CPU tensor.
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and any(_is_cuda(a) for a in args[1:]):
            args = tuple(CPU if _is_cuda(a) else a for a in args)
        if func is torch.nn.functional.dropout and rng.DEVICE_RNG.in_use:
            with rng.DEVICE_RNG.drawing():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


_MODE: HostDeviceMode | None = None


def enter_host_device_mode() -> None:
    """Switch the mode on for the rest of the process (threads started later do not have it)."""
    global _MODE
    if _MODE is None:
        _MODE = HostDeviceMode()
        _MODE.__enter__()


_TYPE = torch.Tensor.type


def _type_as_cuda(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is not None:
        return _TYPE(self, dtype, *args, **kwargs)
    # A torch function mode looks the method up again by name: this may run on its own answer.
    return "torch.cuda." + _TYPE(self).removeprefix("torch.").removeprefix("cuda.")


@contextlib.contextmanager
def cuda_type_names() -> Any:
    """Inside, `tensor.type()` says `torch.cuda.FloatTensor`: what Megatron's checks ask for."""
    before = torch.Tensor.type
    torch.Tensor.type = _type_as_cuda  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = before  # type: ignore[method-assign]


def _in_host_device_mode(original: Any) -> Any:
    """torch suspends a mode while one of its functions runs, and `backward` is one of them."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with HostDeviceMode():
            return original(*args, **kwargs)

    return run


def _always(value: Any) -> Any:
    """A patch that answers `value` to any call."""

    def make(_original: Any) -> Any:
        return lambda *args, **kwargs: value

    return make


def _is(replacement: Any) -> Any:
    return lambda _original: replacement


def _identity(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


_ASYNC = "calls return when the work is done, there is nothing to wait for"
_RNG = "the device generator is our own saved state"

TORCH_PATCHES = (
    Patch("torch.cuda", "current_device", "the CPU is the device", _always(CPU), ()),
    Patch("torch.cuda", "set_device", "there is one device", _always(None), ("device",)),
    Patch(
        "torch.cuda",
        "device",
        "there is one device",
        lambda _original: lambda *args, **kwargs: contextlib.nullcontext(),
    ),
    Patch(
        "torch.cuda",
        "get_device_capability",
        "no kernels for any compute capability",
        _always((0, 0)),
        ("device",),
    ),
    Patch("torch.cuda", "synchronize", _ASYNC, _always(None), ("device",)),
    Patch("torch.cuda", "Stream", _ASYNC, _is(Stream)),
    Patch("torch.cuda", "Event", _ASYNC, _is(Event)),
    Patch(
        "torch.cuda", "current_stream", _ASYNC, lambda _: lambda device=None: Stream(), ("device",)
    ),
    Patch(
        "torch.cuda", "default_stream", _ASYNC, lambda _: lambda device=None: Stream(), ("device",)
    ),
    Patch("torch.cuda", "set_stream", _ASYNC, _always(None), ("stream",)),
    Patch(
        "torch.cuda",
        "stream",
        _ASYNC,
        lambda _: lambda stream: contextlib.nullcontext(),
        ("stream",),
    ),
    Patch("torch.cuda.nvtx", "range_push", "no profiler to talk to", _always(0), ("msg",)),
    Patch("torch.cuda.nvtx", "range_pop", "no profiler to talk to", _always(0), ()),
    Patch("torch.cuda", "get_rng_state", _RNG, _is(rng.get_rng_state), ("device",)),
    Patch("torch.cuda", "set_rng_state", _RNG, _is(rng.set_rng_state), ("new_state", "device")),
    Patch("torch.cuda", "manual_seed", _RNG, _is(rng.manual_seed), ("seed",)),
    Patch("torch.cuda", "manual_seed_all", _RNG, _is(rng.manual_seed_all), ("seed",)),
    Patch("torch.cuda.random", "get_rng_state", _RNG, _is(rng.get_rng_state), ("device",)),
    Patch(
        "torch.cuda.random", "set_rng_state", _RNG, _is(rng.set_rng_state), ("new_state", "device")
    ),
    Patch("torch", "Tensor.cuda", "tensors are where they belong", _is(_identity)),
    Patch(
        "torch.autograd",
        "_engine_run_backward",
        "hooks and recomputation in the backward need the mode that `backward` suspends",
        _in_host_device_mode,
        ("t_outputs", "args", "kwargs"),
    ),
    Patch(
        "torch",
        "nn.Module.cuda",
        "modules are where they belong",
        _is(_identity),
        ("self", "device"),
    ),
)
