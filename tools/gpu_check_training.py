"""Short training runs on a card: losses against the CPU's, memory for each K, FP8."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml

from tools.gpu_check_report import Outcome

__all__ = ["against_cpu", "fp8", "layers", "set_deadline"]

PASSES = (1, 2, 3)
# bfloat16 keeps 8 bits: losses near 6 then differ by some 1e-2.
LOSS_TOLERANCE = 0.02
RUN_SECONDS = 200
# What each run wrote stays here.
LOGS = Path("runs/gpu_check")
FP8_CARDS, BLOCKWISE_CARDS = (8, 9), (9, 0)
# Recipe, Megatron's options, and options of the fusion.
FP8: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (
        "delayed",
        {
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 32,
            "fp8_amax_compute_algo": "max",
        },
        {},
    ),
    ("per-tensor current", {"fp8_recipe": "tensorwise"}, {}),
    ("blockwise", {"fp8_recipe": "blockwise"}, {}),
    ("current, fusion too", {"fp8_recipe": "tensorwise"}, {"fp8": True}),
)
_MAX_ALLOCATED = re.compile(r"max allocated: ([0-9.]+)")
# Lines of torch's C++ parts, which come last when a process ends: "[rank0]:[W1130 15:02:26 …".
_REMARK = re.compile(r"(\[rank\d+\]:)?\[?[IW]\d{4} ")
_deadline = math.inf


def set_deadline(moment: float) -> None:
    """No run goes on beyond this time of `time.monotonic()`."""
    global _deadline
    _deadline = moment


def against_cpu(device: str) -> Iterator[Outcome]:
    """Three steps with K = 1, 2, 3: bfloat16 on the card, float32 on the CPU.

    All start from one checkpoint: a card draws other initial weights than a CPU.
    """
    precision = "bf16" if device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=2) as pool:
        folder = Path(name)
        _train(folder / "start", max(PASSES), "cpu", {"train_iters": 1, "lr": 0.0})
        start = {"load": str(folder / "start" / "checkpoints"), "finetune": True}
        # The CPU's runs go on beside the card's.
        cpu = [pool.submit(_train, folder / f"cpu{k}", k, "cpu", start) for k in PASSES]
        for k, reference in zip(PASSES, cpu, strict=True):
            options = start | ({"bf16": True} if device == "cuda" else {})
            what = f"K = {k}, {precision} against CPU float32"
            try:
                losses, log = _train(folder / f"card{k}", k, device, options)
                wanted, _ = reference.result()
            except RuntimeError as error:
                yield Outcome(what, "failed", str(error))
                continue
            worst = _worst(losses, wanted)
            detail = f"losses differ by {worst:.1e}, allowed {LOSS_TOLERANCE}"
            passed = worst <= LOSS_TOLERANCE and all(len(row) == k for row in losses)
            yield Outcome.of(what, passed, detail)
            if device == "cuda":
                peak = max(map(float, _MAX_ALLOCATED.findall(log)), default=math.nan)
                yield Outcome(f"K = {k}, memory", "measured", f"{peak:.0f} MB at most")


def fp8(device: str) -> Iterator[Outcome]:
    """Training in FP8 with several passes stays close to bfloat16, with every recipe.

    The learning rate is high: with weights that are not quantised anew in each step the losses
    would not fall with bfloat16's.
    """
    name = "K = 2, FP8"
    if device == "cpu":
        yield Outcome(name, "skipped", "a rehearsal: FP8 needs a GPU")
        return
    if importlib.util.find_spec("transformer_engine") is None:
        yield Outcome(name, "skipped", "Transformer Engine is not installed")
        return
    card = torch.cuda.get_device_capability()
    if card < FP8_CARDS:
        yield Outcome(name, "skipped", f"this card is sm_{card[0]}{card[1]}, FP8 needs sm_89")
        return
    common = {"bf16": True, "train_iters": 8, "lr": 3.0e-3}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=5) as pool:

        def train(label: str, options: dict[str, Any], **fusion: Any) -> Any:
            path = Path(folder) / label.replace(" ", "-")
            return pool.submit(_train, path, 2, device, common | options, fusion)

        plain = train("bf16", {})
        recipes = {
            label: train(label, {"fp8_format": "hybrid", **options}, **fusion)
            for label, options, fusion in FP8
            if label != "blockwise" or card >= BLOCKWISE_CARDS
        }
        wanted, _ = plain.result()
        fell = wanted[0][0] - wanted[-1][0]
        for label, run in recipes.items():
            try:
                losses, _ = run.result()
            except RuntimeError as error:
                yield Outcome(f"{name} {label}", "failed", str(error))
                continue
            worst = _worst(wanted, losses)
            detail = f"losses differ from bfloat16's by {worst:.1e}, which fell by {fell:.2f}"
            yield Outcome.of(f"{name} {label}", worst <= min(0.1, fell / 4), detail)


def layers(device: str) -> Iterator[Outcome]:
    """The full-bandwidth layers on the card and on the CPU, from each other's checkpoints.

    A small model learns the rows of the mock data on the CPU. Its loss is far below a fresh
    model's, so layers that compute something else, or weights that end up elsewhere, show.
    """
    model = {"attention_gate": True, "sandwich_norm": True, "residual_multiplier": "depth"}
    options = {
        "qk_layernorm": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "window_size": [31, 0],
        "window_attn_skip_freq": 2,
    }
    card = {"bf16": True} if device == "cuda" else {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=2) as pool:
        folder = Path(name)

        def start(run: str, where: str, more: dict[str, Any]) -> Any:
            given = options | (card if where == device else {}) | more
            return pool.submit(_train, folder / run, 2, where, given, model=model)

        learnt, _ = start("first", "cpu", {"train_iters": 30, "lr": 3.0e-3}).result()
        resumed = {"finetune": True, "train_iters": 1, "lr": 0.0}
        load = {"load": str(folder / "first" / "checkpoints")}
        there = start("there", device, resumed | load)
        here = start("here", "cpu", resumed | load)
        (wanted, _), (found, _) = here.result(), there.result()
        load = {"load": str(folder / "there" / "checkpoints")}
        back, _ = start("back", "cpu", resumed | load).result()
    fell = min(a - b for a, b in zip(learnt[0], wanted[0], strict=True))
    for what, losses in (("the CPU's checkpoint", found), ("a checkpoint back on the CPU", back)):
        worst = _worst(losses, wanted)
        detail = f"losses differ by {worst:.1e}, after falling by {fell:.2f}"
        yield Outcome.of(f"full-bandwidth layers, {what}", worst <= min(0.02, fell / 4), detail)


def _worst(losses: list[list[float]], others: list[list[float]]) -> float:
    rows = zip(losses, others, strict=True)
    found = [abs(a - b) for row, other in rows for a, b in zip(row, other, strict=True)]
    # `max` may pass over a nan.
    return max(found) if all(map(math.isfinite, found)) else math.inf


def _train(
    folder: Path,
    passes: int,
    device: str,
    options: dict[str, Any],
    fusion: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> tuple[list[list[float]], str]:
    """Losses `[step][pass]` of a few steps, and the log.

    Raises:
        RuntimeError: the run failed; with the last line it wrote.
    """
    folder.mkdir(parents=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{folder.name}.log"
    config = folder / "config.yaml"
    given = _config(folder, passes, device, options)
    given["latent"]["fusion"] |= fusion or {}
    given["latent"]["model"] = model or {}
    config.write_text(yaml.safe_dump(given))
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    what = f"training with K = {passes} on {device}"
    # One process, whatever else the machine has and whatever started this.
    command = [sys.executable, "-m", "megalatent.cli", "train", str(config), "--nproc", "1"]
    seconds = max(1.0, min(RUN_SECONDS, _deadline - time.monotonic()))
    with path.open("w") as log:
        try:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{what} took more than {seconds:.0f} s; see {path}") from None
    text = path.read_text(errors="replace")
    if done.returncode != 0:
        raise RuntimeError(f"{what} failed: {_reason(text)}; see {path}")
    lines = (folder / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return [list(record["loss_per_pass"].values()) for record in records], text


def _reason(log: str) -> str:
    """The last line that a failed run wrote."""
    lines = [line for line in log.splitlines() if line.strip() and not _REMARK.match(line)]
    return lines[-1].strip() if lines else "it wrote nothing"


def _config(folder: Path, passes: int, device: str, options: dict[str, Any]) -> dict[str, Any]:
    megatron: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 512,
        "mock_data": True,
        "seq_length": 128,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "num_workers": 0,
        "train_iters": 3,
        "lr": 1.0e-3,
        "lr_decay_style": "constant",
        "log_interval": 1,
        "eval_iters": 0,
        "save": str(folder / "checkpoints"),
        "save_interval": 1000,
    }
    if device == "cuda" and importlib.util.find_spec("transformer_engine") is None:
        # Megatron's own layers; the fused kernels of apex and Transformer Engine are not there.
        megatron |= {
            "transformer_impl": "local",
            "no_rope_fusion": True,
            "no_masked_softmax_fusion": True,
        }
    latent = {"fusion": {"kind": "gated"}, "passes": {"schedule": passes, "eval_passes": 1}}
    return {"latent": latent, "megatron": megatron | options}
