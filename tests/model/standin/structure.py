"""Builds models from both layer implementations and prints what they are made of, as JSON.

Run as `python -m tests.model.standin.structure FOLDER`, in a process of its own: Transformer Engine
must be found before Megatron is imported.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from tests.model.standin import transformer_engine

transformer_engine.install()

from megalatent import platform  # noqa: E402

platform.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megalatent.checkpoint.fresh import FreshFusion  # noqa: E402
from megalatent.config import ModelConfig  # noqa: E402
from megalatent.model.layers import layer_spec  # noqa: E402

FBT = ModelConfig(attention_gate=True, sandwich_norm=True, residual_multiplier=0.5)
WINDOW: dict[str, Any] = {"window_size": (4, 0), "window_attn_skip_freq": 2}
MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1],
    "moe_token_dispatcher_type": "alltoall",
}
GROUPED = {**MOE, "moe_grouped_gemm": True}
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "plain": (ModelConfig(), {}),
    "gate": (replace(FBT, sandwich_norm=False), {}),
    "sandwich": (replace(FBT, attention_gate=False), {}),
    "fbt": (FBT, WINDOW),
    "experts": (FBT, {**WINDOW, **MOE}),
    "grouped experts": (FBT, GROUPED),
}
SEQ, VOCAB = 12, 64


def build(implementation: str, case: str, tp: int) -> Any:
    model, changes = CASES[case]
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        transformer_impl=implementation,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        **changes,
    )
    return GPTModel(
        config,
        layer_spec(config, model=model),
        VOCAB,
        SEQ,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )


def state_of(model: Any) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": model.sharded_state_dict(metadata={"dp_cp_group": group})}


def facts(model: Any) -> dict[str, Any]:
    """Classes, parameters and checkpoint entries of a model."""
    tensors: dict[str, Any] = {}
    objects = set()

    def visit(entry: Any) -> None:
        if isinstance(entry, ShardedTensor):
            tensors.setdefault(entry.key, []).append(
                [list(entry.global_shape), list(entry.local_shape), list(entry.global_offset)]
            )
        elif isinstance(entry, ShardedObject):
            objects.add(entry.unique_key)
        elif hasattr(entry, "build"):
            visit(entry.build())
        elif isinstance(entry, dict | list):
            for part in entry.values() if isinstance(entry, dict) else entry:
                visit(part)

    visit(state_of(model))
    return {
        "classes": {name: type(module).__name__ for name, module in model.named_modules()},
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
        "marked": sorted(
            name for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)
        ),
        "tensors": {key: sorted(pieces) for key, pieces in tensors.items()},
        "objects": sorted(objects),
        "windows": [
            getattr(layer.self_attention.core_attention, "window_size", None)
            or getattr(layer.self_attention.core_attention, "window", None)
            for layer in model.decoder.layers
        ],
    }


def save(model: Any, folder: Path) -> None:
    path = folder / "iter_0000001"
    path.mkdir(parents=True)
    dist_checkpointing.save(state_of(model), str(path))


def load(model: Any, folder: Path) -> None:
    """As in training, where this wrapper stands around Megatron's reading."""

    def read(folder: str, _args: Any, _rank0: bool, state: Any, *_: Any) -> tuple[Any, ...]:
        return (dist_checkpointing.load(state, f"{folder}/iter_0000001"),)

    (loaded,) = FreshFusion(read)(str(folder), None, False, state_of(model), 1, False)
    model.load_state_dict(loaded["model"])


def hidden(model: Any) -> torch.Tensor:
    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model.eval()(tokens, torch.arange(SEQ).expand(2, -1), mask)


def there_and_back(case: str, folder: Path) -> dict[str, float]:
    """A local checkpoint in Transformer Engine's layers, and theirs in local ones."""
    found = {}
    for i, (first, second) in enumerate(
        (("local", "transformer_engine"), ("transformer_engine", "local"))
    ):
        model, other = build(first, case, 1), build(second, case, 1)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
        before = float((hidden(model) - hidden(other)).abs().max())
        save(model, folder / f"{case}-{i}")
        load(other, folder / f"{case}-{i}")
        found[f"{first} before"] = before
        found[f"{first} after"] = float((hidden(model) - hidden(other)).abs().max())
    return found


def main() -> None:
    folder, report = Path(sys.argv[1]), dict[str, Any]()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    implementations = ("local", "transformer_engine")
    for case in CASES:
        report[case] = {i: facts(build(i, case, 1)) for i in implementations}
        if case != "grouped experts":  # the stand-in has no grouped product
            report[case]["outputs"] = there_and_back(case, folder)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    # Rank 1 of 2, without a second process: nothing is sent while models are built.
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    for case in CASES:
        report[f"{case}, tp2"] = {i: facts(build(i, case, 2)) for i in implementations}
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
