"""The CUDA kernels run on the CPU by `emulation/cuda_emulator.h`, as operators of torch.

The very sources of `kernels/src/cuda` are compiled as C++ and called through ctypes, behind the
schemas and gradient formulas of the real operators. It shows that indexing, barriers and arithmetic
are right; what nvcc and a card make of them it cannot show.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from megalatent.kernels.backend import accumulation_dtype
from megalatent.kernels.ops import SCHEMAS, register_formulas
from megalatent.kernels.philox_scalar import jitter_key

__all__ = ["NAMESPACE", "emulated_card", "register"]

NAMESPACE = "megalatent_emulated"
_HERE = Path(__file__).parent / "emulation"
_ROOT = Path(__file__).parents[2]
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


def _struct(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


# The structs of kernels/src/contract.h.
_NormForward = _struct(
    "NormForward",
    *_fields(ctypes.c_int32, "combine dtype weight_dtype"),
    *_fields(_INT64, "rows width"),
    ("eps", ctypes.c_double),
    *_fields(_POINTER, "a b e weight mask x rstd"),
)
_NormBackward = _struct(
    "NormBackward",
    *_fields(ctypes.c_int32, "combine dtype weight_dtype"),
    *_fields(_INT64, "rows width"),
    *_fields(_POINTER, "dx a b weight rstd mask da db de dweight partials"),
    ("partial_rows", _INT64),
)
_MaskedAdd = _struct(
    "MaskedAdd",
    ("dtype", ctypes.c_int32),
    *_fields(_INT64, "rows width"),
    *_fields(_POINTER, "a e mask x"),
)
_ShiftForward = _struct(
    "ShiftForward",
    ("dtype", ctypes.c_int32),
    *_fields(_INT64, "s batch width boundary_rows"),
    *_fields(_POINTER, "h boundary source position sample"),
    *_fields(ctypes.c_uint32, "key0 key1 k"),
    ("scale", ctypes.c_float),
    ("out", _POINTER),
)
_ShiftBackward = _struct(
    "ShiftBackward",
    ("dtype", ctypes.c_int32),
    *_fields(_INT64, "s batch width boundary_rows"),
    *_fields(_POINTER, "dout source inverse dh dboundary"),
)
_STRUCTS = (_NormForward, _NormBackward, _MaskedAdd, _ShiftForward, _ShiftBackward)


@functools.cache
def register() -> None:
    """Build the emulated kernels if need be, and define their operators, once per process."""
    _library()
    for name, schema in SCHEMAS.items():
        torch.library.define(f"{NAMESPACE}::{name}", schema)
        torch.library.impl(f"{NAMESPACE}::{name}", "cpu", _IMPLEMENTATIONS[name])
    register_formulas(NAMESPACE)


def emulated_card(
    processors: int = 3,
    shared_per_block: int = 227 * 1024,
    most_blocks: int = 2**31 - 1,
    order: int = 0,
) -> None:
    """Set the card's size, and in what order threads run (0 up, 1 down, else a shuffle's seed)."""
    _library().emulated_card(processors, shared_per_block, most_blocks, order)


@functools.cache
def _library() -> ctypes.CDLL:
    sources = sorted((_ROOT / "kernels/src/cuda").glob("*.cu"))
    inputs = [*_HERE.iterdir(), *(_ROOT / "kernels/src").rglob("*.[hc]*")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(inputs))).hexdigest()
    library = _ROOT / "build/kernels" / f"emulated-{digest[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            command = [
                *("g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w"),
                *("-U_FORTIFY_SOURCE",),  # it takes a jump between stacks for a mistake
                *("-DMEGALATENT_EMULATE_CUDA", f"-I{_HERE}", "-x", "c++"),
                *map(str, (_HERE / "emulated.cpp", *sources)),
                *("-o", str(built)),
            ]
            subprocess.run(command, check=True)
            os.replace(built, library)
    loaded = ctypes.CDLL(str(library))
    loaded.emulated_partial_rows.restype = _INT64
    loaded.emulated_struct_size.restype = _INT64
    for which, struct in enumerate(_STRUCTS):
        assert loaded.emulated_struct_size(which) == ctypes.sizeof(struct), struct
    return loaded


def _call(name: str, struct: ctypes.Structure) -> None:
    assert getattr(_library(), f"emulated_{name}")(ctypes.byref(struct)) == 0


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Outputs start as nan, so that an element nobody writes is seen."""
    return torch.full(shape, float("nan"), dtype=dtype)


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm_forward(
    combine: int,
    a: torch.Tensor,
    b: torch.Tensor,
    e: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = _poisoned(tuple(a.shape), a.dtype)
    rstd = _poisoned(tuple(mask.shape), accumulation_dtype(a.dtype))
    struct = _NormForward(
        *(combine, _DTYPES[a.dtype], _DTYPES[weight.dtype], mask.numel(), a.shape[-1], eps),
        *map(_at, (a, b, e, weight, mask, x, rstd)),
    )
    _call("norm_forward", struct)
    return x, rstd


def _norm_backward(
    combine: int,
    dx: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    need_e: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = tuple(a.shape)
    da = _poisoned(shape, a.dtype)
    db = _poisoned(shape, a.dtype) if combine == 0 else None
    de = _poisoned(shape if need_e else (0,), a.dtype)
    dweight = _poisoned(tuple(weight.shape), weight.dtype)
    struct = _NormBackward(
        *(combine, _DTYPES[a.dtype], _DTYPES[weight.dtype], mask.numel(), a.shape[-1]),
        *map(_at, (dx, a, b, weight, rstd, mask, da, db, de if need_e else None, dweight)),
    )
    struct.partial_rows = _library().emulated_partial_rows(ctypes.byref(struct))
    partials = _poisoned((struct.partial_rows, a.shape[-1]), torch.float32)
    struct.partials = partials.data_ptr()
    _call("norm_backward", struct)
    return da, da if db is None else db, de, dweight


def _concat_backward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dc, _, de, dweight = _norm_backward(1, *arguments)  # type: ignore[arg-type]
    return dc, de, dweight


def _masked_add(a: torch.Tensor, e: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    x = _poisoned(tuple(a.shape), a.dtype)
    struct = _MaskedAdd(*(_DTYPES[a.dtype], mask.numel(), a.shape[-1]), *map(_at, (a, e, mask, x)))
    _call("masked_add", struct)
    return x


def _shift_forward(
    h: torch.Tensor,
    boundary: torch.Tensor,
    source: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
    k: int,
    seed: int,
    sigma: float,
) -> torch.Tensor:
    out = _poisoned(tuple(h.shape), h.dtype)
    struct = _ShiftForward(
        *(_DTYPES[h.dtype], *h.shape, boundary.shape[0]),
        *map(_at, (h, boundary, source, position, sample)),
        *(*jitter_key(seed), k, sigma * 2.0**-23, _at(out)),
    )
    _call("shift_forward", struct)
    return out


def _shift_backward(
    dout: torch.Tensor, source: torch.Tensor, boundary_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    s, batch, width = dout.shape
    dh = _poisoned((s, batch, width), dout.dtype)
    dboundary = _poisoned((boundary_rows, batch, width), dout.dtype)
    inverse = torch.full((s + boundary_rows,), -(2**40), dtype=torch.int64)
    struct = _ShiftBackward(
        *(_DTYPES[dout.dtype], s, batch, width, boundary_rows),
        *map(_at, (dout, source, inverse, dh, dboundary)),
    )
    _call("shift_backward", struct)
    return dh, dboundary


_IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "gated": functools.partial(_norm_forward, 0),
    "gated_backward": functools.partial(_norm_backward, 0),
    "concat": functools.partial(_norm_forward, 1),
    "concat_backward": _concat_backward,
    "additive": _masked_add,
    "additive_backward": lambda dx, mask: _masked_add(dx, None, mask),
    "shift_jitter": _shift_forward,
    "shift_jitter_backward": _shift_backward,
}
