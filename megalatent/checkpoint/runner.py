"""A converted checkpoint in Megatron: one process, local layers, single precision, no padding.

It computes passes, and decoding as the recurrence without a cache: slow, and independent of the
Hugging Face model.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["MegatronRunner", "open_runner"]


@contextlib.contextmanager
def open_runner(
    checkpoint: Path, length: int, document_end: int | None
) -> Iterator[MegatronRunner]:
    """The model of a checkpoint, ready to compute. Imports Megatron.

    Args:
        checkpoint: the folder of an iteration.
        length: of the rows of tokens that it will get.
        document_end: token after which no state is read.
    """
    from megalatent import platform

    platform.install()
    from megalatent.checkpoint.arguments import config_from_args
    from megalatent.checkpoint.reader import CheckpointReader
    from megalatent.hf.configuration_megalatent import MegalatentConfig

    reader = CheckpointReader(checkpoint)
    rows = reader.tensors["embedding.word_embeddings.weight"].size[0]
    config = MegalatentConfig(**config_from_args(reader.args(), rows))
    with _one_rank(), torch.no_grad():
        yield MegatronRunner(_build(config, checkpoint, length).cuda(), document_end)


class MegatronRunner:
    """Logits of a model, padding columns of the vocabulary included. All are on the CPU."""

    def __init__(self, model: Any, document_end: int | None) -> None:
        from megalatent import kernels

        self._model, self._document_end = model, document_end
        device = next(model.parameters()).device
        self._pointwise = kernels.select("torch", device, torch.float32)

    def passes(self, tokens: Tensor, count: int) -> list[Tensor]:
        """Logits `[b, s, v]` of passes 1 … `count` over tokens `[b, s]`."""
        text = _Text(self, tokens)
        state = text.stack(text.plain)
        logits = [text.logits(state)]
        for k in range(2, count + 1):
            state = text.stack(text.fused(state, k))
            logits.append(text.logits(state))
        return logits

    def decode(self, tokens: Tensor, prompt: int, prefill_passes: int, fused: bool) -> Tensor:
        """Logits `[b, n, v]` from which the `n` tokens after the prompt are chosen.

        Sweeps of the recurrence until every position holds its fixed point: after j of them the
        first j generated positions do.

        Args:
            tokens: `[b, prompt + n]`.
            prefill_passes: all passes over the prompt.
            fused: whether generated positions read the state of the position before.
        """
        text = _Text(self, tokens)
        inputs = text.plain
        state = text.stack(inputs)
        for k in range(2, prefill_passes + 1):
            inputs = text.fused(state, k)
            state = text.stack(inputs)
        generated = tokens.shape[1] - prompt
        for _ in range(generated - 1 if fused else 0):
            tail = text.fused(state, 2)[prompt:]
            state = text.stack(torch.cat([inputs[:prompt], tail]))
        return text.logits(state)[:, prompt - 1 : -1]


class _Text:
    """What the model makes of one batch of tokens; inside it is Megatron's `[s, b, h]`."""

    def __init__(self, runner: MegatronRunner, tokens: Tensor) -> None:
        self._model, self._pointwise = runner._model, runner._pointwise
        self._batch = _batch(self._model, tokens, runner._document_end)
        self._embedding = self._model("embed", self._batch)
        self.plain = self._model("plain", self._embedding)

    def fused(self, state: Tensor, k: int) -> Tensor:
        rows, token = self._model("prepare", self._embedding)
        return self._model("fuse", self._pointwise, self._batch, k, state, rows, token)

    def stack(self, inputs: Tensor) -> Tensor:
        return self._model("stack", self._batch, inputs)

    def logits(self, state: Tensor) -> Tensor:
        backbone = self._model.backbone
        tied = backbone.share_embeddings_and_output_weights
        head = backbone.shared_embedding_or_output_weight() if tied else None
        return backbone.output_layer(state, weight=head)[0].transpose(0, 1).cpu()


def _batch(model: Any, tokens: Tensor, document_end: int | None) -> Any:
    from megalatent.model.batch import RowSettings
    from megalatent.training.data import DataSettings, micro_batch_from

    tokens = tokens.to(next(model.parameters()).device)
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
    return micro_batch_from(raw, samples, settings, first_stage=True)


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

    from megalatent.checkpoint.arguments import megatron_options, model_config
    from megalatent.checkpoint.fresh import use_saved_names
    from megalatent.checkpoint.reader import CheckpointReader
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
        layer_spec(transformer, model=model_config(config)),
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
    use_saved_names(state["model"], CheckpointReader(checkpoint).tensors)
    loaded = dist_checkpointing.load(state, str(checkpoint))
    model.load_state_dict(loaded["model"])
    return model.float()
