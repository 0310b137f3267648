"""Memory and time of converting a model there and back.

    python tools/bench_convert.py                       # 2 GB
    python tools/bench_convert.py --layers 32 --hidden 4096 --vocab 128256 --dtype bf16

Makes a random Llama on disk, imports it and exports the result, each in a process of its own, and
prints the memory that the conversion took at its peak beyond what its imports take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of the model, and of the largest group of tensors that become one."""

    total: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """Bytes of memory before and at the peak, and seconds."""

    before: int
    peak: int
    seconds: float


def make_llama(folder: Path, layers: int, hidden: int, vocab: int, dtype: str) -> Sizes:
    """Write a random Llama with a tied head, shard by shard."""
    import torch
    from transformers import LlamaConfig

    from megalatent.checkpoint.families import find_family
    from megalatent.checkpoint.mapping import units
    from megalatent.checkpoint.writer import write_safetensors
    from megalatent.hf import MegalatentConfig

    inner, kind = 11 * hidden // 4 // 64 * 64, getattr(torch, DTYPES[dtype])
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "tie_word_embeddings": True,
    }
    config = LlamaConfig(**settings, architectures=["LlamaForCausalLM"], dtype=DTYPES[dtype])
    config.save_pretrained(folder)
    own = MegalatentConfig(**settings, fusion="none")
    groups: dict[int | None, list[Any]] = {}
    for unit in units(find_family("llama").rules, own):
        groups.setdefault(unit.layer, []).append(unit)
    weight_map: dict[str, str] = {}
    sizes: list[int] = []
    generator = torch.Generator().manual_seed(0)
    for number, members in enumerate(groups.values()):
        name = f"model-{number:05d}.safetensors"
        entries = [
            (tensor, kind, shape)
            for unit in members
            for tensor, shape in zip(unit.names(), unit.shapes(), strict=True)
        ]
        randoms = (torch.randn(shape, generator=generator).to(kind) for _, _, shape in entries)
        write_safetensors(folder / name, entries, randoms)
        weight_map |= {tensor: name for tensor, _, _ in entries}
        sizes += [torch.Size(u.megatron_shape()).numel() * kind.itemsize for u in members]
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Sizes(total=sum(sizes), largest=max(sizes))


def measure(direction: str, source: Path, out: Path) -> Result:
    """Convert in a fresh process and read its memory from the kernel."""
    command = [sys.executable, __file__, "--child", direction, str(source), str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def _child(direction: str, source: Path, out: Path) -> None:
    import megalatent.hf  # noqa: F401
    from megalatent import platform

    platform.install()
    import megatron.core.dist_checkpointing  # noqa: F401
    import torch

    from megalatent.checkpoint.convert import from_hf, to_hf

    # The kernel's high-water mark starts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.monotonic()
    if direction == "from-hf":
        from_hf(source, out)
    else:
        to_hf(source, out, dtype=torch.bfloat16 if direction == "to-hf-bf16" else None)
    result = Result(before=before, peak=_status("VmHWM"), seconds=time.monotonic() - start)
    print(json.dumps(asdict(result)))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def run(folder: Path, layers: int, hidden: int, vocab: int, dtype: str) -> Iterator[str]:
    """Lines of the report."""
    (folder / "llama").mkdir()
    sizes = make_llama(folder / "llama", layers, hidden, vocab, dtype)
    mb = 1e6
    yield f"model {sizes.total / mb:.0f} MB, largest group {sizes.largest / mb:.0f} MB"
    steps = [("from-hf", "llama", "megatron"), ("to-hf", "megatron", "back")]
    if dtype == "fp32":
        steps.append(("to-hf-bf16", "megatron", "rounded"))
    for direction, source, out in steps:
        found = measure(direction, folder / source, folder / out)
        taken = found.peak - found.before
        yield (
            f"{direction:<11} {taken / mb:6.0f} MB at the peak, {(taken - sizes.largest) / mb:+.0f}"
            f" MB beyond the largest group; imports {found.before / mb:.0f} MB;"
            f" {found.seconds:.0f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=65_536)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--folder", type=Path, help="where there is room (default: temporary)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for line in run(Path(folder), args.layers, args.hidden, args.vocab, args.dtype):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main())
