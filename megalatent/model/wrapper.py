"""The latent model: a Megatron language model and a fusion, joined by composition.

This is the only file that knows how Megatron's ``GPTModel`` is built inside. It uses three of
its facts: the model accepts a ready-made stage input (``decoder_input``); ``post_process`` and
``mtp_process`` are read at run time, so the stack can run without the head; ``_postprocess``
runs the head alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megalatent.model.batch import MicroBatch
from megalatent.model.fusion import Fusion
from megalatent.model.z_loss import LossesWithLogZ, cross_entropy_and_log_z

__all__ = ["FUSION_PREFIX", "LatentModel"]

FUSION_PREFIX = "fusion."


class LatentModel(MegatronModule):
    """One model chunk: the fusion on the first stage, the backbone on all.

    Checkpoint keys of the backbone carry no prefix, so plain Megatron checkpoints fit; the
    fusion's keys start with ``fusion.``.

    Args:
        backbone: a Megatron language model chunk (``GPTModel``).
        fusion: the fusion, on the chunk that embeds tokens; None elsewhere, or if the model is
            to stay plain.
        vocab_size: true vocabulary size; logits of padding columns are masked so that losses do
            not depend on the padding, hence not on TP.
    """

    def __init__(self, backbone: Any, fusion: Fusion | None, vocab_size: int) -> None:
        super().__init__(config=backbone.config)
        # The fusion comes first: parameter gathers are waited for in the order of registration,
        # and a fusion left over at the end would keep its gather open through a plain step.
        self.fusion = fusion if backbone.pre_process else None
        self.backbone = backbone
        self.vocab_size = vocab_size
        self.model_type = backbone.model_type
        if self.fusion is not None:
            self.fusion.scale_to_embedding(self.embedding_rms())
        if backbone.post_process:
            _drop_unused_output_weight(backbone)
            _mask_padded_vocabulary(backbone, vocab_size)

    # -- what Megatron asks of a model ------------------------------------------------------

    @property
    def pre_process(self) -> bool:
        return self.backbone.pre_process

    @property
    def post_process(self) -> bool:
        return self.backbone.post_process

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        return self.backbone.share_embeddings_and_output_weights

    @property
    def pg_collection(self) -> Any:
        return self.backbone.pg_collection

    @property
    def decoder(self) -> Any:
        return self.backbone.decoder

    @property
    def vp_stage(self) -> int | None:
        return self.backbone.vp_stage

    @vp_stage.setter
    def vp_stage(self, value: int | None) -> None:
        self.backbone.vp_stage = value

    def shared_embedding_or_output_weight(self) -> Tensor:
        return self.backbone.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.backbone.set_input_tensor(input_tensor)

    # -- the actions ------------------------------------------------------------------------

    def forward(self, action: str, *args: Any) -> Any:
        """Run ``embed``, ``prepare``, ``fuse``, ``plain``, ``stack``, ``head`` or
        ``head_with_log_z``.

        One entry point, so that hooks on this module see every use.
        """
        return getattr(self, f"_{action}")(*args)

    def _embed(self, batch: MicroBatch) -> Tensor:
        """Token embeddings ``[s/cp, b, h]`` (``[s/(cp*tp), b, h]`` under SP)."""
        return self.backbone.embedding(input_ids=batch.tokens, position_ids=batch.position_ids)

    def _prepare(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows of the embeddings, ``[s_local, b, h]``, and the fusion's token part."""
        assert self.fusion is not None
        rows = self._scatter(embedding)
        return rows, self.fusion("token", rows)

    def _fuse(
        self, kernels: Any, batch: MicroBatch, k: int, state: Tensor, rows: Tensor, token: Tensor
    ) -> Tensor:
        """Stack input of pass ``k >= 2`` from the states of pass ``k - 1``.

        Args:
            kernels: pointwise kernels.
            batch: gives which rows are fused and how they are shifted.
            state: un-jittered states of pass ``k - 1`` as the last stage made them,
                ``[s/cp, b, h]``, or ``[s/(cp*tp), b, h]`` under SP.
            rows, token: results of ``prepare``.

        Returns:
            ``[s/cp, b, h]``, or ``[s/(cp*tp), b, h]`` under SP.
        """
        assert self.fusion is not None
        assert batch.latent is not None
        shifted = batch.latent.shift(kernels, self._scatter(state), k, training=self.training)
        fused = batch.latent.fused_rows(k, training=self.training)
        return self._gather(self.fusion("combine", kernels, shifted, token, rows, fused))

    def _plain(self, embedding: Tensor) -> Tensor:
        """Stack input of pass 1: the embeddings, normed if ``input_norm`` is ``all``."""
        if self.fusion is None or self.fusion.settings.input_norm != "all":
            return embedding
        return self._gather(self.fusion("plain", self._scatter(embedding)))

    def _stack(self, batch: MicroBatch, stage_input: Tensor) -> Tensor:
        """This chunk's layers without the head.

        Args:
            stage_input: ``[s/cp(/tp under SP), b, h]``: stack input on the first chunk, the
                previous chunk's output elsewhere.

        Returns:
            Output of the same shape and dtype; on the last chunk the state (after the final norm).
        """
        backbone = self.backbone
        if backbone.pre_process:
            decoder_input: Tensor | None = stage_input
            backbone.set_input_tensor(None)
        else:
            decoder_input = None
            backbone.set_input_tensor(stage_input)
        with _without_head(backbone):
            return backbone(
                input_ids=batch.tokens,
                position_ids=batch.position_ids,
                attention_mask=batch.attention_mask,
                decoder_input=decoder_input,
                packed_seq_params=batch.packed_seq_params,
            )

    def _head(self, batch: MicroBatch, state: Tensor) -> Tensor:
        """Per-token losses ``[b, s/cp]`` (fp32) from states, with MTP if the model has it."""
        return self._postprocess(batch, state).float()

    def _head_with_log_z(self, batch: MicroBatch, state: Tensor) -> LossesWithLogZ:
        """The same losses, and the logarithm of each softmax's normaliser, ``[b, s/cp]`` too.

        The normaliser is the LM head's alone, over the true vocabulary.
        """
        return self._postprocess(batch, state, output_processor=self._losses_and_log_z)

    def _postprocess(self, batch: MicroBatch, state: Tensor, output_processor: Any = None) -> Any:
        backbone = self.backbone
        rotary: dict[str, Any] = dict.fromkeys(
            ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")
        )
        if backbone.mtp_process:
            _, *tables = backbone._preprocess(
                input_ids=batch.tokens,
                position_ids=batch.position_ids,
                decoder_input=state,
                packed_seq_params=batch.packed_seq_params,
            )
            rotary = dict(zip(rotary, tables, strict=False))
        return backbone._postprocess(
            hidden_states=state,
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            labels=batch.labels,
            mtp_in_postprocess=backbone.mtp_process,
            loss_mask=batch.loss_mask,
            attention_mask=batch.attention_mask,
            packed_seq_params=batch.packed_seq_params,
            output_processor=output_processor,
            **rotary,
        )

    def _losses_and_log_z(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        runtime_gather_output: bool | None,
        scale_logits: Any,
        **_: Any,
    ) -> LossesWithLogZ:
        """Megatron's output processor: runs in place of its LM head, after MTP's."""
        logits, _bias = output_layer(
            hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        logits = scale_logits(logits)
        _mask_padding(self.backbone, self.vocab_size, logits)
        pair = cross_entropy_and_log_z(logits, labels.transpose(0, 1), self.pg_collection.tp)
        losses, log_z = (x.transpose(0, 1).contiguous() for x in pair)
        return losses, log_z

    # -- sequence slices --------------------------------------------------------------------

    def _sliced_over_tp(self) -> bool:
        """Whether states are whole on every TP rank and must be sliced for the fusion."""
        config = self.config
        return config.tensor_model_parallel_size > 1 and not config.sequence_parallel

    def _scatter(self, x: Tensor) -> Tensor:
        if not self._sliced_over_tp():
            return x
        return tensor_parallel.scatter_to_sequence_parallel_region(x)

    def _gather(self, x: Tensor) -> Tensor:
        if not self._sliced_over_tp():
            return x
        # The gradient that comes back is whole and equal on every TP rank: take the own rows.
        # The default, a reduce-scatter, would multiply it by TP.
        return tensor_parallel.gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=False
        )

    def sum_fusion_gradients(self) -> None:
        """Sum the fusion's gradients over TP where Megatron's finalize does not.

        Each TP rank fused its own rows. Under SP the weights are marked and Megatron sums them.
        """
        if self.fusion is None or not self._sliced_over_tp():
            return
        group = parallel_state.get_tensor_model_parallel_group()
        for parameter in self.fusion.parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                dist.all_reduce(gradient, group=group)

    # -- initial values ---------------------------------------------------------------------

    def embedding_rms(self) -> float:
        """RMS of the entries of the (true) embedding table, the same on every TP rank."""
        weight = self.backbone.embedding.word_embeddings.weight
        if weight.is_meta:
            return 1.0
        group = self.pg_collection.tp
        first = group.rank() * weight.shape[0]
        rows = min(max(self.vocab_size - first, 0), weight.shape[0])
        total = weight.detach()[:rows].double().square().sum()
        if group.size() > 1:
            dist.all_reduce(total, group=group)
        return float((total / (self.vocab_size * weight.shape[1])).sqrt())

    # -- checkpoints ------------------------------------------------------------------------

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        sharded = self.backbone.sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.fusion is not None:
            sharded.update(
                make_sharded_tensors_for_checkpoint(
                    self.fusion.state_dict(keep_vars=True),
                    prefix + FUSION_PREFIX,
                    {},
                    sharded_offsets,
                    tp_group=self.pg_collection.tp,
                    dp_cp_group=(metadata or {}).get("dp_cp_group"),
                )
            )
        return sharded

    def state_dict(self, *, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        state = self.backbone.state_dict(prefix=prefix, **kwargs)
        if self.fusion is not None:
            state.update(self.fusion.state_dict(prefix=prefix + FUSION_PREFIX))
        return state

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict:
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        fusion = {
            key.removeprefix(FUSION_PREFIX): value
            for key, value in state_dict.items()
            if key.startswith(FUSION_PREFIX)
        }
        rest = {k: v for k, v in state_dict.items() if not k.startswith(FUSION_PREFIX)}
        self.backbone.load_state_dict(rest, strict=strict)
        if self.fusion is None:
            return
        if fusion:
            self.fusion.load_state_dict(fusion, strict=strict)
        else:
            # A plain checkpoint: the fusion stays fresh, on the scale of the loaded embeddings.
            self.fusion.scale_to_embedding(self.embedding_rms())


@contextmanager
def _without_head(backbone: Any) -> Iterator[None]:
    saved = backbone.post_process, backbone.mtp_process
    backbone.post_process = backbone.mtp_process = False
    try:
        yield
    finally:
        backbone.post_process, backbone.mtp_process = saved


def _drop_unused_output_weight(backbone: Any) -> None:
    """Take away the output weight of a last stage that computes logits with its embedding.

    With multi-token prediction that stage has a copy of the tied embedding. Megatron allocates an
    output weight besides it, never uses it, and fails to save it.
    """
    if (
        backbone.mtp_process
        and not backbone.pre_process
        and backbone.share_embeddings_and_output_weights
    ):
        backbone.output_layer.weight = None


def _mask_padded_vocabulary(backbone: Any, vocab_size: int) -> None:
    """Give logits of padding columns no probability, in the LM loss and in MTP losses.

    A tied table padded with zero rows would otherwise add logits of 0 to every softmax.
    """
    plain_loss = backbone.compute_language_model_loss

    def masked_loss(labels: Tensor, logits: Tensor) -> Tensor:
        _mask_padding(backbone, vocab_size, logits)
        return plain_loss(labels, logits)

    backbone.compute_language_model_loss = masked_loss


def _mask_padding(backbone: Any, vocab_size: int, logits: Tensor) -> None:
    rows = backbone.output_layer.output_size_per_partition
    start = backbone.pg_collection.tp.rank() * rows
    keep = min(max(vocab_size - start, 0), rows)
    if keep < rows:
        logits[..., keep:] = torch.finfo(logits.dtype).min
