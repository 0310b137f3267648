"""Logits of a checkpoint through Megatron, beside those of a Hugging Face model.

One process, Megatron's local layers, single precision, no padding of the vocabulary: what is
compared is the conversion, not kernels.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["compare_logits", "megatron_logits"]

_SAMPLE = (2, 24)  # rows and tokens
MAX_PASSES = 3


def compare_logits(checkpoint: Path, model: Path) -> dict[str, Any]:
    """Largest and mean difference of the logits, for each number of passes, in fp32.

    Args:
        checkpoint: the folder of an iteration.
        model: a Hugging Face model of any family that converts.

    Returns:
        `"K = 1"` … -> `max`, `mean` and `scale` (the largest logit).
    """
    from transformers import AutoModelForCausalLM

    from megalatent.hf import register

    register()
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    hf = hf.eval()
    fusion = getattr(hf.config, "fusion", "none")
    passes = MAX_PASSES if fusion != "none" else 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(hf.config.vocab_size, _SAMPLE, generator=generator)
    end = getattr(hf.config, "document_end_token_id", None)
    if end is not None:
        tokens[:, _SAMPLE[1] // 2] = end  # what follows must read no state
    ours = megatron_logits(checkpoint, tokens, passes, end)
    report = {}
    for k, got in enumerate(ours, 1):
        with torch.no_grad():
            wanted = hf(tokens, **({"num_passes": k} if passes > 1 else {})).logits
        difference = (got[..., : wanted.shape[-1]] - wanted).abs()
        report[f"K = {k}"] = {
            "max": float(difference.max()),
            "mean": float(difference.mean()),
            "scale": float(wanted.abs().max()),
        }
    return report


def megatron_logits(
    checkpoint: Path, tokens: Tensor, passes: int, document_end: int | None = None
) -> list[Tensor]:
    """Logits `[b, s, v]` of passes 1 … `passes`, padding columns included. Imports Megatron.

    Args:
        tokens: `[b, s]`, each row a document, unless `document_end` ends one inside.
    """
    from megalatent import platform

    platform.install()
    from megalatent.checkpoint.arguments import config_from_args
    from megalatent.checkpoint.reader import CheckpointReader
    from megalatent.hf.configuration_megalatent import MegalatentConfig

    reader = CheckpointReader(checkpoint)
    args = reader.args()
    rows = reader.tensors["embedding.word_embeddings.weight"].size[0]
    config = MegalatentConfig(**config_from_args(args, rows))
    with _one_rank(), torch.no_grad():
        model = _build(config, checkpoint, tokens.shape[1]).cuda()
        return _run(model, tokens, passes, document_end)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Megatron's process groups with this process alone."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
        )
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _build(config: Any, checkpoint: Path, length: int) -> Any:
    import torch.nn.functional as F
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megalatent.checkpoint.arguments import megatron_options
    from megalatent.config import FusionConfig, LatentConfig
    from megalatent.model.build import latent_model
    from megalatent.model.layers import layer_spec

    options = megatron_options(config)
    window = options.get("window_size")
    moe: dict[str, Any] = {}
    if config.num_experts:
        moe = {
            "num_moe_experts": config.num_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_layer_freq": options.get("moe_layer_freq", 1),
            "moe_token_dispatcher_type": "alltoall",
        }
    transformer = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=not options["disable_bias_linear"],
        add_qkv_bias=options["add_qkv_bias"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        window_size=tuple(map(int, window.split(","))) if window else None,
        window_attn_skip_freq=options.get("window_attn_skip_freq"),
        transformer_impl="local",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        **moe,
    )
    backbone = GPTModel(
        transformer,
        layer_spec(transformer),
        config.vocab_size,
        length,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=options["rotary_base"],
        rope_scaling=options.get("use_rope_scaling", False),
        rope_scaling_factor=options.get("rope_scaling_factor", 8.0),
    )
    latent = (
        LatentConfig()
        if config.fusion != "none"
        else LatentConfig.read({"fusion": {"kind": "none"}})
    )
    if config.fusion != "none":
        settings = FusionConfig(kind=config.fusion, input_norm=config.input_norm)
        latent = LatentConfig(fusion=settings)
    model = latent_model(backbone, latent, config.vocab_size).eval()
    state = {"model": model.sharded_state_dict()}
    if config.num_experts:
        _use_names_of(checkpoint, state["model"])
    loaded = dist_checkpointing.load(state, str(checkpoint))
    model.load_state_dict(loaded["model"])
    return model.float()


def _use_names_of(checkpoint: Path, state: dict[str, Any]) -> None:
    """A checkpoint for Transformer Engine's layers has another name for the norm before experts."""
    from megalatent.checkpoint.reader import CheckpointReader

    have = CheckpointReader(checkpoint).tensors
    for entry in state.values():
        key = getattr(entry, "key", "")
        other = key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        if key not in have and other in have:
            entry.key = other


def _run(model: Any, tokens: Tensor, passes: int, document_end: int | None) -> list[Tensor]:
    from megalatent import kernels
    from megalatent.model.batch import RowSettings
    from megalatent.training.data import DataSettings, micro_batch_from

    tokens = tokens.cuda()
    rows = RowSettings(seed=0, jitter=0.0, prefix_mixin=False) if model.fusion else None
    settings = DataSettings(
        seq_length=tokens.shape[1], end_of_document=document_end, attention_mask=True, rows=rows
    )
    raw = {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones_like(tokens, dtype=torch.float32),
        "position_ids": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
        "attention_mask": None,
    }
    samples = torch.arange(tokens.shape[0], device=tokens.device)
    batch = micro_batch_from(raw, samples, settings, first_stage=True)
    pointwise = kernels.select("torch", tokens.device, torch.float32)
    embedding = model("embed", batch)
    states = [model("stack", batch, model("plain", embedding))]
    for k in range(2, passes + 1):
        rows_, token = model("prepare", embedding)
        fused = model("fuse", pointwise, batch, k, states[-1], rows_, token)
        states.append(model("stack", batch, fused))
    backbone = model.backbone
    tied = backbone.share_embeddings_and_output_weights
    head = backbone.shared_embedding_or_output_weight() if tied else None
    return [backbone.output_layer(state, weight=head)[0].transpose(0, 1).cpu() for state in states]
