"""`convert`: checkpoints between Megatron and Hugging Face, verified bit by bit."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from megalatent.errors import UserError

__all__ = ["add_convert_parser", "run_convert_command"]

_DESCRIPTION = """\
Converts checkpoints between Megatron (torch_dist, any layout) and Hugging Face (safetensors), in
one process and without a GPU. Every tensor is read back and compared bit by bit; the output
appears under its name only when it is complete.
"""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Keys of `megalatent.checkpoint.quantize.FORMATS`, without importing torch.
QUANTIZATIONS = ("fp8", "int8", "int4_awq")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_convert_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convert` to the command line."""
    parser = subparsers.add_parser("convert", description=_DESCRIPTION)
    directions = parser.add_subparsers(dest="direction", metavar="to-hf|from-hf", required=True)

    to_hf = directions.add_parser(
        "to-hf", description="Exports a Megatron checkpoint as a Hugging Face model."
    )
    to_hf.add_argument(
        "source", metavar="CKPT", type=Path, help="a run's checkpoint folder, or one iteration's"
    )
    to_hf.add_argument("--dtype", choices=sorted(_DTYPES), help="default: the checkpoint's own")
    to_hf.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="tokenizer to put beside the model (default: the one that the checkpoint names)",
    )
    to_hf.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_size,
        default=_size("5GB"),
        help="of one file, as 5GB or 500MB (default: 5GB)",
    )
    to_hf.add_argument(
        "--vocab-size",
        metavar="N",
        type=int,
        help="tokens without padding, where neither checkpoint nor tokenizer says it",
    )
    to_hf.add_argument(
        "--document-end-token",
        metavar="ID",
        type=int,
        help="token after which no state is read, where neither checkpoint nor tokenizer says it",
    )

    to_hf.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="also quantise the model, for serving (default: do not); needs megalatent[quantize]"
        " and memory for the whole model",
    )
    to_hf.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="text to calibrate the quantisation with (default: the manual of Python)",
    )

    from_hf = directions.add_parser(
        "from-hf", description="Turns a Hugging Face model into a Megatron checkpoint."
    )
    from_hf.add_argument("source", metavar="MODEL", type=Path, help="the model's folder")
    from_hf.add_argument(
        "--fusion",
        choices=("none", "gated", "additive", "concat"),
        help="give a plain model a fresh fusion (default: none; an own export keeps its fusion)",
    )
    for direction in (to_hf, from_hf):
        direction.add_argument("out", metavar="OUT", type=Path, help="folder to make")
        direction.add_argument(
            "--overwrite", action="store_true", help="replace an earlier conversion"
        )
        direction.add_argument(
            "--verify-logits",
            action="store_true",
            help="also run both models on sample text, with one, two and three passes and in all"
            " decoding modes, and print the differences of their logits",
        )


def run_convert_command(args: argparse.Namespace) -> int:
    """Convert; 0 when the output is complete and verified.

    Raises:
        UserError: the conversion cannot be made; nothing was changed at the output.
    """
    for name in ("vocab_size", "document_end_token"):
        value = getattr(args, name, None)
        if value is not None and value < (1 if name == "vocab_size" else 0):
            raise UserError(f"--{name.replace('_', '-')} {value}: give a number of the vocabulary")
    if getattr(args, "calibration", None) and not args.quantize:
        raise UserError("--calibration goes with --quantize: give --quantize, or leave it out")
    source, out = (Path(os.path.realpath(path)) for path in (args.source, args.out))
    if out == source or out in source.parents or source in out.parents:
        raise UserError(f"{args.out} and {args.source} lie in one another: choose another folder")
    show = _Bar()
    with warnings.catch_warnings():
        # One process is what is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        (_to_hf if args.direction == "to-hf" else _from_hf)(args, show)
    show.end()
    print(f"wrote and verified {args.out}")
    return 0


def _to_hf(args: argparse.Namespace, show: _Bar) -> None:
    # Megatron after the model classes: on a CPU it is made to run by replacing parts of torch.cuda
    # that those classes name in their annotations.
    import torch

    import megalatent.hf  # noqa: F401
    from megalatent import platform

    platform.install()
    from megalatent.checkpoint.convert import to_hf
    from megalatent.checkpoint.quantize import Quantization

    quantization = None
    if args.quantize:
        quantization = Quantization(format=args.quantize, calibration=args.calibration)
    to_hf(
        args.source,
        args.out,
        dtype=getattr(torch, _DTYPES[args.dtype]) if args.dtype else None,
        tokenizer=args.tokenizer,
        max_shard=args.max_shard_size,
        overwrite=args.overwrite,
        vocab_size=args.vocab_size,
        document_end=args.document_end_token,
        quantization=quantization,
        check=_check_export if args.verify_logits else None,
        progress=show,
    )


def _from_hf(args: argparse.Namespace, show: _Bar) -> None:
    from megalatent.checkpoint.convert import from_hf

    from_hf(
        args.source,
        args.out,
        fusion=args.fusion,
        overwrite=args.overwrite,
        check=_check_import if args.verify_logits else None,
        progress=show,
    )


def _check_export(reader: Any, folder: Path) -> dict[str, Any]:
    from megalatent.checkpoint.logits import compare_logits

    return _report(compare_logits(reader.folder, folder))


def _check_import(model: Path, checkpoint: Path) -> dict[str, Any]:
    from megalatent.checkpoint.logits import compare_logits

    return _report(compare_logits(checkpoint / "release", model))


def _report(differences: dict[str, Any]) -> dict[str, Any]:
    for what, found in differences.items():
        print(
            f"logits, {what}: largest difference {found['max']:.3e}, mean"
            f" {found['mean']:.3e} (logits up to {found['scale']:.1f})"
        )
    return differences


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)?", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


class _Bar:
    """Progress with bytes on stderr: a line that is rewritten, or one a tenth where it is kept."""

    def __init__(self) -> None:
        self._stage = ""
        self._done = 0
        self._shown = 0.0
        self._tenth = -1
        self._live = sys.stderr.isatty()

    def __call__(self, stage: str, count: int, total: int) -> None:
        if stage != self._stage:
            self.end()
            self._stage, self._done, self._tenth = stage, 0, -1
        self._done += count
        tenth = 10 * self._done // max(total, 1)
        now = time.monotonic()
        due = now - self._shown > 0.2 or self._done >= total
        if not (due if self._live else tenth != self._tenth):
            return
        self._shown, self._tenth = now, tenth
        line = f"{stage:>6} {self._done / 1e9:8.3f} / {total / 1e9:.3f} GB"
        start, end = ("\r", "") if self._live else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live and self._stage:
            print(file=sys.stderr)
        self._stage = ""
