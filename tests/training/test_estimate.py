"""Estimates against built models, hand-computed bytes, and what autograd really keeps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalatent import platform

platform.install()

from megalatent.config import Config, ModelConfig  # noqa: E402
from megalatent.config_checks import validated  # noqa: E402
from megalatent.model.batch import MicroBatch  # noqa: E402
from megalatent.passes.plan import Action, Plan, make_plan  # noqa: E402
from megalatent.training.estimate import Memory, describe, estimate, held  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402
from tests.distributed.latent import Rig, Setup  # noqa: E402
from tests.examples.built import build  # noqa: E402

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "seq_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 4,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 256,
    "padded_vocab_size": 256,
}
FBT = {"attention_gate": True, "sandwich_norm": True, "residual_multiplier": "depth"}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": "([0]+[1]*3)",
    "moe_token_dispatcher_type": "alltoall",
}


def configured(latent: dict[str, Any], megatron: dict[str, Any]) -> Config:
    config = {"latent": latent, "megatron": {**TINY, **megatron}}
    return Config.from_mapping({k: v for k, v in config.items() if v})


def estimated(latent: dict[str, Any], megatron: dict[str, Any], world: int) -> Any:
    config = configured(latent, megatron)
    config.check(world)
    args, transformer = validated(config, world)
    return estimate(config.latent, args, transformer)


# Latent and Megatron options, ranks, and a rank of each pipeline stage.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, list[int]]] = {
    "gates and norms, TP2": (
        {"model": FBT},
        {"tensor_model_parallel_size": 2, "qk_layernorm": True},
        2,
        [1],
    ),
    "uneven stages of chunks": (
        {"model": FBT, "fusion": {"kind": "concat"}},
        {
            "num_layers": 6,
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "decoder_last_pipeline_num_layers": 2,
        },
        2,
        [0, 1],
    ),
    "biases, untied, layer norm": (
        {"fusion": {"kind": "additive"}},
        {
            "disable_bias_linear": False,
            "normalization": "LayerNorm",
            "qk_layernorm": True,
            "swiglu": False,
            "untie_embeddings_and_output_weights": True,
            "position_embedding_type": "learned_absolute",
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
        },
        4,
        [1, 3],
    ),
    "experts with biases": (
        {},
        {
            **EXPERTS,
            "disable_bias_linear": False,
            "no_bias_swiglu_fusion": True,
            "expert_model_parallel_size": 2,
        },
        2,
        [1],
    ),
    "experts": (
        {"model": FBT},
        {
            **EXPERTS,
            "moe_shared_expert_intermediate_size": 16,
            "expert_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
        },
        4,
        [1, 3],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_are_those_of_built_models(name: str, tmp_path: Path) -> None:
    latent, megatron, world, ranks = LAYOUTS[name]
    found = estimated(latent, megatron, world)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"latent": latent, "megatron": {**TINY, **megatron}}))
    for stage, rank in enumerate(ranks):
        built = build(path, world, rank=rank)
        sizes = {m.parameters for m in found.memory if m.stage == stage}
        assert sizes == {built.shared + built.experts}


def test_all_parameters_count_once() -> None:
    """A model of two stages is the model of one: its tied table counts once."""
    one, two = (
        estimated({"model": FBT}, {"pipeline_model_parallel_size": pp}, pp) for pp in (1, 2)
    )
    assert one.parameters == two.parameters == one.memory[0].parameters
    assert sum({m.stage: m.parameters for m in two.memory}.values()) == one.parameters + 256 * 32


# T = 16 x 2 tokens, h = 32, q = 32, k = 16, f = 48; fp32, 4 bytes.
STREAM = 32 * 32 * 4


def test_state_by_hand() -> None:
    """bf16 with fp32 gradients, Adam's two moments and masters spread over 4 ranks."""
    options = {"bf16": True, "use_distributed_optimizer": True, "swiglu": True}
    (found,) = estimated({"passes": {"schedule": 1, "eval_passes": 1}}, options, 4).memory
    attention, block = 32 * (32 + 2 * 16) + 32 * 32, 3 * 32 * 48
    count = 256 * 32 + 4 * (attention + block + 2 * 32) + 32 + (2 * 32 * 32 + 2 * 32)
    assert found.parameters == count
    assert (found.weights, found.gradients) == (2 * count, 4 * count)
    assert found.optimizer == pytest.approx(12 * count / 4, abs=12)


def test_state_of_normuon_by_hand() -> None:
    """Both moments have a matrix's shape; whole weights are spread, so one of 4 has the table."""
    options = {"bf16": True, "use_distributed_optimizer": True, "optimizer": "adaptive_muon"}
    latent = {"passes": {"schedule": 1, "eval_passes": 1}}
    (found,) = estimated(latent, options, 4).memory
    matrices = 4 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48) + 2 * 32 * 32
    table, vectors = 256 * 32, 4 * 2 * 32 + 32 + 2 * 32
    assert found.parameters == matrices + table + vectors
    assert found.optimizer == 12 * (matrices // 4) + 12 * (table + vectors)
    (replicated,) = estimated(latent, {**options, "use_distributed_optimizer": False}, 4).memory
    assert replicated.optimizer == 12 * found.parameters


def test_activations_by_hand() -> None:
    """Transformer Engine's layers, one stage, K = 2: bytes of each pass, term by term."""
    config = configured({"model": FBT, "passes": {"schedule": 2}}, {"qk_layernorm": True})
    args, transformer = validated(config, 1)
    transformer.transformer_impl = "transformer_engine"
    (found,) = estimate(config.latent, args, transformer).memory
    tokens = 32
    norms = 6 * STREAM  # inputs and outputs before the branches, inputs after them
    heads = 2 * 32 + 2 * 16  # query, key, value, output
    before_norms = 32 + 16
    gate = 32 + 4  # the gated output, a gate per head
    row_sums = 4  # one fp32 a head
    attention = tokens * 4 * (heads + before_norms + gate + row_sums)
    block = tokens * 4 * 3 * 48
    layers = 4 * (norms + attention + block)
    first = layers + STREAM + 2 * STREAM  # embeddings; token side of the fusion
    second = layers + STREAM + 3 * STREAM  # state; jittered, product, norm's input
    ends = 2 * STREAM  # final norm's input, and the state
    logits = tokens * 256 * (4 + 4 + 4)
    # The head of pass 2 runs while both visits are held.
    assert found.in_flight == 2
    assert found.activations == first + second + 2 * ends + logits


def test_recomputation_keeps_one_row_a_layer() -> None:
    full, extra, both = (
        estimated({"passes": {"schedule": 2, "recompute": mode}}, {}, 1).memory[0]
        for mode in ("never", "extra", "all")
    )
    # A recomputed visit keeps four inputs instead of four layers; one layer is there at a time.
    layer = (full.activations - extra.activations + 4 * STREAM) / 3
    assert layer > 4 * STREAM
    assert full.activations - both.activations == 2 * 4 * (layer - STREAM) - layer


def test_held_at_the_fullest_moment() -> None:
    def action(kind: str, k: int) -> Action:
        return Action(kind, 0, k, 0)

    order = [("F", 1), ("H", 1), ("F", 2), ("H", 2), ("B", 2), ("B", 1)]
    plan = Plan(1, 1, (2,), "by hand", (tuple(action(*x) for x in order),))
    sizes = {("F", 1): 10, ("F", 2): 1, ("H", 1): 5, ("H", 2): 3}
    assert held(plan, 0, lambda a: sizes[a.kind, a.k]) == (2, 15)
    sizes["H", 2] = 7
    assert held(plan, 0, lambda a: sizes[a.kind, a.k]) == (2, 18)
    made = make_plan(4, 1, (3,) * 8)
    for rank in range(4):
        visits, size = held(made, rank, lambda a: int(a.kind == "F"))
        assert visits == size > 3


def _kept(rank: int, model: ModelConfig) -> int:
    """Bytes that autograd keeps of a stack visit, weights and masks left out."""
    init(Layout())
    rig = Rig(Setup(fusion="none", packed=False, seq_length=64, hidden=64, model=model), Layout())
    (latent,) = rig.models
    weights = {p.untyped_storage().data_ptr() for p in latent.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    x = torch.randn(64, 2, 64, requires_grad=True)
    positions = torch.arange(64).expand(2, -1)
    batch = MicroBatch(tokens=torch.zeros(2, 64, dtype=torch.long), position_ids=positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        latent("stack", batch, x)
    return sum(found.values())


@pytest.mark.parametrize(
    "model",
    [ModelConfig(), ModelConfig(attention_gate=True, sandwich_norm=True, residual_multiplier=0.5)],
    ids=["plain", "fbt"],
)
def test_activations_are_about_what_autograd_keeps(model: ModelConfig) -> None:
    """Local layers. Left out are rotary tables, and what torch's norms keep on CPUs only: their
    output without the weight, which fused norms compute again."""
    options = {
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "seq_length": 64,
        "qk_layernorm": True,
        "no_bias_swiglu_fusion": True,  # as in the model that is measured
        "global_batch_size": 2,
    }
    latent = {"model": asdict(model), "fusion": {"kind": "none"}}
    (found,) = estimated(latent, options, 1).memory
    logits = 2 * 64 * 256 * 12
    embeddings = state = 2 * 64 * 64 * 4
    mine = found.activations - logits - embeddings - state
    assert mine == pytest.approx(run_ranks(1, _kept, model)[0], rel=0.1)


def test_what_is_not_counted_is_said() -> None:
    latent = {"multi_latent_attention": True}
    config = configured({}, {**latent, "group_query_attention": None, "num_query_groups": None})
    (line,) = describe(config, 1)
    assert line.startswith("parameters and memory: not estimated with megatron.multi_latent_atten")
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "nowhere"}
    unknown = {**tokenizer, "padded_vocab_size": None, "vocab_size": None}
    (line,) = describe(configured({}, unknown), 1)
    assert "the tokenizer does not tell its size" in line


def test_the_vocabulary_is_read_from_the_tokenizer(tmp_path: Path) -> None:
    """Added tokens count once, and rows are padded to a multiple of 8."""
    path = tmp_path / "tokenizer.json"
    vocabulary = {f"t{i}": i for i in range(241)}
    added = [{"content": "t3"}, {"content": "<end>"}]
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path)}
    unknown = {"padded_vocab_size": None, "vocab_size": None, "make_vocab_size_divisible_by": 8}
    lines = describe(configured({}, {**tokenizer, **unknown}), 1)
    count = estimated({}, {}, 1).parameters - (256 - 248) * 32
    assert lines[0].startswith(f"{count:,} parameters; ")


def test_the_table() -> None:
    """A small model's sizes are in a unit that shows them."""
    config = configured({"passes": {"schedule": {1: 0.5, 3: 0.5}}}, {})
    title, header, *rows = describe(config, 1)
    where = "parameters; estimated memory of a rank of each pipeline stage on GPUs"
    assert title.endswith((f"{where}, MiB", f"{where}, KiB"))
    assert not any("0.00" in row.split() for row in rows)
    assert header.split()[:3] == ["K", "stage", "parameters"]
    assert [row.split()[0] for row in rows] == ["1", "3"]
    assert all(isinstance(m, Memory) for m in estimated({}, {}, 1).memory)
