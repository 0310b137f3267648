"""Sizes of a model's parts on one rank, from its configuration: parameters and activations.

`h` hidden, `d` head, `q`/`k` all query/key heads, `f` inner size, `T` tokens of a micro-batch on a
context-parallel rank, `T_s` the rows of the residual stream (`T / tp` under sequence parallelism).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megalatent.config_latent import LatentConfig
from megalatent.training.expert_layers import expert_layers

__all__ = ["LayerShapes", "Shapes"]

# Moments that an optimiser keeps of a matrix, each of the matrix's shape. All but SGD leave what is
# no matrix to Adam.
_MOMENTS = {"adam": 2, "sgd": 1, "muon": 1, "adaptive_muon": 2, "lion": 1}


@dataclass(frozen=True)
class _Count:
    """Parameters on a rank: matrices, what else is replicated or split as they are, experts'."""

    matrices: int = 0
    rest: int = 0
    experts: int = 0

    def __add__(self, other: _Count) -> _Count:
        return _Count(
            self.matrices + other.matrices, self.rest + other.rest, self.experts + other.experts
        )

    @property
    def total(self) -> int:
        return self.matrices + self.rest + self.experts


@dataclass(frozen=True)
class LayerShapes:
    """One layer.

    Attributes:
        here: its parameters on a rank.
        everywhere: its parameters in all.
        activations: bytes that autograd keeps of a visit.
    """

    here: _Count
    everywhere: int
    activations: int


class Shapes:
    """Everything that depends on the layout.

    Args:
        args: Megatron's arguments, validated.
        transformer: the `TransformerConfig` made of them.

    Attributes:
        stages, chunks: of the pipeline.
        layers: of each chunk, `[stage][chunk]`.
        stream: bytes of the residual stream's rows, `T_s x h`.
        logits: bytes while a head runs: logits and their gradient, and the softmax in fp32.
    """

    def __init__(self, latent: LatentConfig, args: Any, transformer: Any) -> None:
        self._latent, self._args, self._config = latent, args, transformer
        self.stages = transformer.pipeline_model_parallel_size
        self.chunks = transformer.virtual_pipeline_model_parallel_size or 1
        self._tp = transformer.tensor_model_parallel_size
        tokens = args.seq_length * args.micro_batch_size // transformer.context_parallel_size
        self._tokens = tokens
        self._rows = tokens // self._tp if transformer.sequence_parallel else tokens
        self._element = 2 if transformer.bf16 or transformer.fp16 else 4
        self.stream = self._rows * transformer.hidden_size * self._element
        vocabulary = args.padded_vocab_size // self._tp
        self.logits = tokens * vocabulary * (2 * self._element + 4)
        self._embedding = vocabulary * transformer.hidden_size
        full = args.recompute_granularity == "full"
        self.recompute_everything = full and not latent.passes.recomputes
        pattern = self._expert_layers()
        kinds = {moe: self._layer(moe) for moe in set(pattern)}
        self.layers = [
            [[kinds[pattern[i]] for i in self._numbers(stage, chunk)] for chunk in self._chunks()]
            for stage in range(self.stages)
        ]

    def _chunks(self) -> range:
        return range(self.chunks)

    def is_last(self, stage: int, chunk: int) -> bool:
        """Whether this chunk ends in the final norm and the head."""
        return stage == self.stages - 1 and chunk == self.chunks - 1

    # -- layers -----------------------------------------------------------------------------

    def _expert_layers(self) -> list[bool]:
        config = self._config
        if not config.num_moe_experts:
            return [False] * config.num_layers
        return expert_layers(config.moe_layer_freq, config.num_layers)

    def _numbers(self, stage: int, chunk: int) -> list[int]:
        """Numbers of a chunk's layers, from 0, as Megatron distributes them."""
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        vp = chunk if self.chunks > 1 else None
        layout = self._config.pipeline_model_parallel_layout
        if layout is not None:
            return layout.get_layer_id_list(LayerType.decoder, vp_stage=chunk, pp_rank=stage)
        first = get_transformer_layer_offset(self._config, vp_stage=vp, pp_rank=stage)
        count = get_num_layers_to_build(self._config, vp_stage=vp, pp_rank=stage)
        return list(range(first, first + count))

    def _layer(self, moe: bool) -> LayerShapes:
        attention, attention_kept = self._attention()
        block, block_everywhere, block_kept = self._experts() if moe else self._dense()
        config, model, h = self._config, self._latent.model, self._config.hidden_size
        norms = 2 + 2 * model.sandwich_norm
        vector = h * (1 if config.normalization == "RMSNorm" else 2)
        rest = _Count(rest=norms * vector)
        here = attention + block + rest
        whole = self._attention(tp=1)[0].total + block_everywhere + rest.total
        # Inputs and outputs of both first norms; inputs of the norms after the branches.
        kept = (4 + 2 * model.sandwich_norm) * self.stream
        if config.hidden_dropout:
            kept += 2 * self._rows * h  # masks of one byte
        return LayerShapes(here, whole, kept + attention_kept + block_kept)

    def _attention(self, tp: int | None = None) -> tuple[_Count, int]:
        config, tp = self._config, tp or self._tp
        h, heads, d = config.hidden_size, config.num_attention_heads, config.kv_channels
        q, k = heads * d, config.num_query_groups * d
        gated = self._latent.model.attention_gate
        rows = q + 2 * k + (q if config.attention_output_gate else 0)
        matrices = h * rows // tp + q // tp * h + (heads * h if gated else 0)
        rest = 2 * d * (1 if config.normalization == "RMSNorm" else 2) if config.qk_layernorm else 0
        if config.add_bias_linear or config.add_qkv_bias:
            rest += rows // tp
        if config.add_bias_linear:
            rest += h
        # Query, key and value as attention gets them, its output and row sums; queries and keys
        # before their norms; the gated output, or the output once more for a gate per channel.
        widths = 2 * q + 2 * k
        widths += q + k if config.qk_layernorm else 0
        widths += q + heads if gated else 2 * q if config.attention_output_gate else 0
        kept = self._tokens * (widths * self._element + 4 * heads) // self._tp
        if config.transformer_impl == "local":
            # Scores, masked scores and probabilities written out; keys and values once per head.
            keys = self._args.seq_length
            wide = 4 if config.context_parallel_size > 1 else self._element
            kept += 3 * self._tokens * keys * heads // self._tp * wide
            kept += 2 * self._tokens * (q - k) // self._tp * self._element
        return _Count(matrices=matrices, rest=rest), kept

    def _dense(self) -> tuple[_Count, int, int]:
        config = self._config
        h, f = config.hidden_size, config.ffn_hidden_size
        wide = 2 * f if config.gated_linear_unit else f
        here = _Count(matrices=h * (wide + f) // self._tp)
        whole = h * (wide + f)
        if config.add_bias_linear:
            here += _Count(rest=wide // self._tp + h)
            whole += wide + h
        # The activation of the gate, where it is not computed again in the backward.
        once_more = f if config.gated_linear_unit and not config.bias_activation_fusion else 0
        return here, whole, self._tokens * (wide + f + once_more) // self._tp * self._element

    def _experts(self) -> tuple[_Count, int, int]:
        config = self._config
        h, m, experts = config.hidden_size, config.moe_ffn_hidden_size, config.num_moe_experts
        ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
        wide = 2 * m if config.gated_linear_unit else m
        one, router = h * (wide + m), experts * h
        here = _Count(matrices=router, experts=experts // ep * one // etp)
        whole = router + experts * one
        if config.add_bias_linear:
            here += _Count(rest=experts, experts=experts // ep * (wide // etp + h))
            whole += experts + experts * (wide + h)
        # Even routing: each token's copies, once whole per expert-tensor rank, then split in width.
        copies = self._rows * config.moe_router_topk
        kept = copies * (etp * h + wide + m + h) * self._element + 4 * self._rows * experts
        shared = config.moe_shared_expert_intermediate_size
        if shared:
            wide = 2 * shared if config.gated_linear_unit else shared
            gate = h if config.moe_shared_expert_gate else 0
            here += _Count(matrices=h * (wide + shared) // self._tp + gate)
            whole += h * (wide + shared) + gate
            kept += self._tokens * (wide + shared) // self._tp * self._element
        return here, whole, kept

    # -- ends -------------------------------------------------------------------------------

    def _fusion(self) -> _Count:
        from megalatent.model.fusion import FUSIONS, FusionSettings

        if not self._latent.fusion.fuses:
            return _Count()
        settings = FusionSettings(hidden_size=self._config.hidden_size, eps=1.0)
        with torch.device("meta"):
            weights = list(FUSIONS[self._latent.fusion.kind](settings).parameters())
        matrices = sum(weight.numel() for weight in weights if weight.dim() > 1)
        return _Count(matrices, sum(weight.numel() for weight in weights) - matrices)

    def _vector(self) -> int:
        return self._config.hidden_size * (1 if self._config.normalization == "RMSNorm" else 2)

    def _positions(self) -> int:
        args = self._args
        learned = args.position_embedding_type == "learned_absolute" and args.add_position_embedding
        return args.max_position_embeddings * self._config.hidden_size if learned else 0

    def fusion_activations(self, k: int) -> int:
        """Bytes that the first chunk keeps of pass k besides its layers'.

        Pass 1: the embeddings, and the fusion's token side, shared by all passes. Later passes: the
        state, shifted and jittered, its product, and the norm's input; on slices over TP.
        """
        slice_ = self._tokens // self._tp * self._config.hidden_size * self._element
        if not self._latent.fusion.fuses:
            return self.stream
        return self.stream + (2 if k == 1 else 3) * slice_

    # -- state ------------------------------------------------------------------------------

    def _stage(self, stage: int) -> _Count:
        found = _Count()
        for chunk in self.layers[stage]:
            for layer in chunk:
                found += layer.here
        tied = not self._args.untie_embeddings_and_output_weights
        if stage == 0:
            found += self._fusion() + _Count(rest=self._embedding + self._positions())
        if stage == self.stages - 1:
            found += _Count(rest=self._vector())
            if not tied or self.stages > 1:
                found += _Count(rest=self._embedding)
        return found

    def total_parameters(self) -> int:
        """Of the model, a tied head counted once."""
        layers = sum(x.everywhere for stage in self.layers for chunk in stage for x in chunk)
        tables = 2 if self._args.untie_embeddings_and_output_weights else 1
        ends = tables * self._embedding * self._tp + self._positions() + self._vector()
        return layers + ends + self._fusion().total

    def state(self, stage: int) -> dict[str, int]:
        """Parameters, and bytes of weights, gradients and optimiser state of a rank."""
        args, count = self._args, self._stage(stage)
        fp32_gradients = self._element == 4 or args.accumulate_allreduce_grads_in_fp32
        return {
            "parameters": count.total,
            "weights": count.total * self._element,
            "gradients": count.total * (4 if fp32_gradients else 2),
            "optimizer": self._optimizer(count),
        }

    def _optimizer(self, count: _Count) -> int:
        args, config = self._args, self._config
        world = args.world_size
        dp = world // (self._tp * self.stages)  # context parallelism shards too
        etp = config.expert_tensor_parallel_size or 1
        expert_dp = world // (etp * config.expert_model_parallel_size * self.stages)
        layer_wise = args.use_layer_wise_distributed_optimizer
        if not (args.use_distributed_optimizer or layer_wise):
            dp = expert_dp = 1
        # Layer-wise a rank has whole weights, and the fullest one a table.
        rest_over = min(dp, max(count.rest // self._embedding, 1)) if layer_wise else dp
        master = 4 if self._element == 2 else 0
        matrix = 4 * _MOMENTS[args.optimizer]
        rest = matrix if args.optimizer == "sgd" else 8
        return (
            math.ceil(count.matrices / dp) * (master + matrix)
            + math.ceil(count.rest / rest_over) * (master + rest)
            + math.ceil(count.experts / expert_dp) * (master + matrix)
        )
