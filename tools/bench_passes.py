"""What passes cost: step time and memory of K = 1, 2, 3, and of K = 1 against plain Megatron.

    python tools/bench_passes.py [--rounds 8] [--hidden 256] [--layers 6] [--json FILE]

All variants train the same weights in one process and take turns step by step, so that a busy
machine disturbs them alike; the figures are ratios of each variant's fastest step. Memory is
counted, not sampled: the bytes of all tensors alive at once during a step, beyond weights and
gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megalatent import platform

VOCAB = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    platform.install()
    bench = Bench(args)
    times = bench.times()
    memory = bench.memory()
    one = min(times["K = 1"])
    report = {
        "plain Megatron over which K = 1 takes": one / min(times["plain Megatron"]),
        "step time over K = 1": {
            name: min(t) / one for name, t in times.items() if name != "K = 1"
        },
        "peak memory over K = 1": {name: m / memory["K = 1"] for name, m in memory.items()},
        "seconds of a K = 1 step": one,
    }
    print(
        f"hidden {args.hidden}, {args.layers} layers, {args.micro_batches} micro-batches of "
        f"{args.seq_length} tokens, {args.rounds} rounds"
    )
    print(f"{'variant':28} {'step':>10} {'over K = 1':>10} {'memory':>10} {'over K = 1':>10}")
    for name, seconds in times.items():
        best = min(seconds)
        row = f"{name:28} {best:9.3f}s {best / one:10.3f}"
        print(f"{row} {memory[name] / 2**20:8.1f}MB {memory[name] / memory['K = 1']:10.3f}")
    print(f"K = 1 over plain Megatron: {report['plain Megatron over which K = 1 takes']:.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


class Bench:
    """One model, and a step function for each variant."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch.nn.functional as F
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megalatent.config import FusionConfig, LatentConfig, PassesConfig
        from megalatent.model.build import latent_model
        from megalatent.model.layers import layer_spec

        self.args = args
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        self.config = TransformerConfig(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=4 * args.hidden,
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,
            transformer_impl="local",
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        backbone = GPTModel(
            self.config,
            layer_spec(self.config),
            VOCAB,
            args.seq_length,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
        )
        self.config.recompute_granularity = None
        self.latent = LatentConfig(
            seed=1,
            fusion=FusionConfig(jitter=0.02, prefix_mixin=True, init_std=0.02),
            passes=PassesConfig(),
        )
        self.model = latent_model(backbone, self.latent, VOCAB)
        self.chunk = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(), self.model
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0), [self.chunk]
        )
        shape = (1, args.seq_length)
        self.rows = {
            "tokens": torch.randint(0, VOCAB, shape),
            "labels": torch.randint(0, VOCAB, shape),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(args.seq_length)[None],
        }
        self.variants: dict[str, Callable[[], Any]] = {
            "plain Megatron": self._plain(),
            "K = 1": self._passes(1),
            "K = 2": self._passes(2),
            "K = 3": self._passes(3),
            "K = 2, extra recomputed": self._passes(2, "extra"),
            "K = 3, extra recomputed": self._passes(3, "extra"),
            "K = 3, all recomputed": self._passes(3, "all"),
        }

    def _data(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield self.rows

    def _call(self, schedule: Callable[..., Any], forward_step: Any = None) -> None:
        schedule(
            forward_step_func=forward_step,
            data_iterator=self._data(),
            model=[self.chunk],
            num_microbatches=self.args.micro_batches,
            seq_length=self.args.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )

    def _plain(self) -> Callable[[], Any]:
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        backbone = self.model.backbone

        def loss(output: torch.Tensor) -> Any:
            total = (output.view(-1).float() * self.rows["loss_mask"].view(-1)).sum()
            tokens = self.rows["loss_mask"].sum().to(torch.int)
            return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

        def forward_step(iterator: Any, model: Any) -> Any:
            rows = next(iterator)
            output = backbone(rows["tokens"], rows["position_ids"], None, labels=rows["labels"])
            return output, loss

        return lambda: self._call(forward_backward_no_pipelining, forward_step)

    def _passes(self, count: int, recompute: str = "never") -> Callable[[], Any]:
        from megalatent import kernels
        from megalatent.model.batch import RowSettings
        from megalatent.passes.sampling import PassSampler
        from megalatent.training.data import DataSettings
        from megalatent.training.schedule import LatentSchedule, StepPosition

        latent = replace(
            self.latent,
            passes=replace(self.latent.passes, recompute=recompute),  # type: ignore[arg-type]
        )
        schedule = LatentSchedule(
            latent,
            sampler=PassSampler([(0, {count: 1.0})], train_iters=1, seed=1),
            data=DataSettings(
                seq_length=self.args.seq_length,
                end_of_document=None,
                rows=RowSettings(seed=1, jitter=0.02, prefix_mixin=True),
            ),
            kernels=kernels.select("auto", torch.device("cpu"), torch.float32),
            position=lambda: StepPosition(0, 0),
        )
        return lambda: self._call(schedule)

    def _step(self, run: Callable[[], Any]) -> None:
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        run()
        self.optimizer.step()

    def times(self) -> dict[str, list[float]]:
        """Seconds of each step of each variant; a first round warms up and is dropped."""
        seconds: dict[str, list[float]] = {name: [] for name in self.variants}
        for round_ in range(self.args.rounds + 1):
            for name, run in self.variants.items():
                began = time.perf_counter()
                self._step(run)
                if round_:
                    seconds[name].append(time.perf_counter() - began)
        return seconds

    def memory(self) -> dict[str, int]:
        """Most bytes alive at once in forward and backward, beyond what lives between steps."""
        peaks = {}
        for name, run in self.variants.items():
            self.chunk.zero_grad_buffer()
            with LiveBytes() as live:
                run()
            peaks[name] = live.peak
        return peaks


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made inside the mode and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id_of(x) for x in flat((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in flat(result):
            key = id_of(tensor)
            if key not in before and key not in self._known:
                self._add(tensor, key)
        return result

    def _add(self, tensor: torch.Tensor, key: int) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def flat(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from flat(x)
    elif isinstance(tree, dict):
        yield from flat(list(tree.values()))


if __name__ == "__main__":
    sys.exit(main())
