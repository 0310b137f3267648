"""The Hugging Face model: K passes over a Llama-like stack, each fed by the states of the last.

`MegalatentForCausalLM` computes the multi-pass objective when it gets labels, and decodes with the
state carried from position to position through the ordinary `generate()` (see
`decoding_megalatent.py`). The state of a position is the output of the final norm, the tensor the
head reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing

from .cache_megalatent import LatentCacheMixin, LatentDynamicCache, as_latent_cache
from .configuration_megalatent import MegalatentConfig
from .decoding_megalatent import MegalatentGenerationMixin
from .fusion_megalatent import MegalatentFusion
from .layers_megalatent import MegalatentDecoderLayer, MegalatentRMSNorm, MegalatentRotaryEmbedding
from .losses_megalatent import balance_loss, weighted_over_passes
from .positions_megalatent import document_starts, fused_positions
from .pretrained_megalatent import (
    MegalatentCausalLMOutput,
    MegalatentModelOutput,
    MegalatentPreTrainedModel,
)

__all__ = ["MegalatentForCausalLM", "MegalatentModel"]

_MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}
_NO_DOCUMENT_ENDS = (
    "document_end_token_id is set, and inputs_embeds do not say where documents end: use input_ids."
)


class MegalatentModel(MegalatentPreTrainedModel):
    """Embedding, fusion, layers and final norm."""

    def __init__(self, config: MegalatentConfig) -> None:
        super().__init__(config)
        self.layer_types = list(config.layer_types or [])
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [MegalatentDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.norm = MegalatentRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = MegalatentRotaryEmbedding(config=config)
        if config.fusion != "none":
            self.fusion = MegalatentFusion(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_passes: int | None = None,
        fused_mask: torch.Tensor | None = None,
        use_carried_state: bool = False,
        padding_mask: torch.Tensor | None = None,
        output_pass_states: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> MegalatentModelOutput:
        """Run `num_passes` passes over the tokens `[b, s]`.

        Args:
            num_passes: all passes, the plain first one included; default `config.num_passes`, or 1
                when the cache already holds positions.
            fused_mask: `[b, s]`, which positions may read the state of the position before in
                passes 2 and later (default: all). The first position of a document never does.
            use_carried_state: fuse the first of these tokens with the state in `past_key_values`.
            padding_mask: the 2-dimensional mask, where `attention_mask` is a prepared one.

        Raises:
            ValueError: for inputs that contradict each other.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if padding_mask is None and isinstance(attention_mask, torch.Tensor):
            padding_mask = attention_mask if attention_mask.ndim == 2 else None

        sequence_ids = None
        if position_ids is not None and attention_mask is None and embeds.shape[1] > 1:
            may_pack = not is_tracing(embeds) or (past_key_values is None and not use_cache)
            if may_pack and not _is_filled(past_key_values):
                rows = position_ids.expand(embeds.shape[0], -1)
                sequence_ids = find_packed_sequence_indices(rows)
        cache = self._cache(past_key_values, use_cache, packed=sequence_ids is not None)
        passes = self._num_passes(num_passes, cache)
        if self.config.document_end_token_id is None:
            ends_document = None
        elif input_ids is not None:
            ends_document = input_ids == self.config.document_end_token_id
        elif passes > 1:
            raise ValueError(_NO_DOCUMENT_ENDS)
        else:
            ends_document = None

        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(embeds.shape[1], device=embeds.device) + seen)[None]
        want_attentions = output_attentions or self.config.output_attentions
        if want_attentions and self.config._attn_implementation != "eager":
            raise ValueError(
                f"attn_implementation={self.config._attn_implementation!r} gives no attention "
                "weights: load the model with attn_implementation='eager'."
            )
        shared = {
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(embeds, position_ids),
            "packed": sequence_ids is not None,
            "want_hidden": output_hidden_states or self.config.output_hidden_states,
            "want_attentions": want_attentions,
            **kwargs,
        }
        plain = self._plain(embeds)
        stage_input = self._with_carried_state(plain, embeds, cache) if use_carried_state else plain

        if passes > 1:
            starts = document_starts(stage_input, padding_mask, sequence_ids, ends_document)
            token_term = self.fusion.token_term(embeds)
            uncached_mask = padding_mask if isinstance(attention_mask, dict) else attention_mask
        outputs: list[MegalatentModelOutput] = []
        for number in range(1, passes + 1):
            if number == passes:  # the KV cache is the last pass's
                output = self._run(stage_input, attention_mask, cache, **shared)
            else:
                output = self._run(stage_input, uncached_mask, None, **shared)
                mixin = self.training and bool(self.config.prefix_mixin)  # drawn anew each pass
                fused = fused_positions(starts, padding_mask, fused_mask, mixin)
                states = self._jittered(output.last_hidden_state)
                stage_input = self._fused(states, token_term, plain, fused)
            outputs.append(output)

        last = outputs[-1]
        if cache is not None:
            cache.set_state(last.last_hidden_state, ends_document)
            last.past_key_values = cache
        if output_pass_states:
            last.pass_states = tuple(output.last_hidden_state for output in outputs)
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        if output_router_logits and self.config.num_experts:
            last.pass_router_logits = tuple(output.router_logits or () for output in outputs)
        else:
            last.router_logits = None
        return last

    def _run(
        self,
        stage_input: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        cache: LatentCacheMixin | None,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        packed: bool,
        want_hidden: bool,
        want_attentions: bool,
        **kwargs: Any,
    ) -> MegalatentModelOutput:
        """One pass of the stack over stage inputs `[b, s, h]`."""
        masks = attention_mask
        if not isinstance(masks, dict):  # a static cache gives generate() a ready-made dict
            masks = {
                kind: _MASKS[kind](
                    config=self.config,
                    inputs_embeds=stage_input,
                    attention_mask=attention_mask,
                    past_key_values=cache,
                    position_ids=position_ids if packed else None,
                )
                for kind in sorted(set(self.layer_types))
            }
        hidden_states, hidden, attentions, router_logits = stage_input, [], [], []
        for layer, kind in zip(self.layers, self.layer_types, strict=True):
            if want_hidden:
                hidden.append(hidden_states)
            hidden_states, weights, logits = layer(
                hidden_states,
                attention_mask=masks[kind],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=cache,
                **kwargs,
            )
            attentions.append(weights)
            if logits is not None:
                router_logits.append(logits)
        state = self.norm(hidden_states)
        return MegalatentModelOutput(
            last_hidden_state=state,
            hidden_states=(*hidden, state) if want_hidden else None,
            attentions=tuple(attentions) if want_attentions else None,
            router_logits=tuple(router_logits) or None,
        )

    # -- stage inputs

    def _plain(self, embeds: torch.Tensor) -> torch.Tensor:
        if self.config.fusion == "none":
            return embeds
        # A device map may put the fusion on another device, there and below.
        return self.fusion.plain(embeds).to(embeds.device)

    def _jittered(self, states: torch.Tensor) -> torch.Tensor:
        """Training noise of FBT, uniform on [-jitter, jitter], on the state before it is used."""
        if not (self.training and self.config.jitter):
            return states
        return states + torch.empty_like(states).uniform_(-1, 1) * self.config.jitter

    def _fused(
        self,
        states: torch.Tensor,
        token_term: torch.Tensor,
        plain: torch.Tensor,
        fused: torch.Tensor,
    ) -> torch.Tensor:
        """Shift the states right by one position and fuse them where `fused` says so."""
        inputs = self.fusion(states[:, :-1], token_term[:, 1:]).to(plain.device)
        inputs = torch.where(fused[:, 1:, None], inputs, plain[:, 1:])
        return torch.cat([plain[:, :1], inputs], dim=1)

    def _with_carried_state(
        self, plain: torch.Tensor, embeds: torch.Tensor, cache: LatentCacheMixin | None
    ) -> torch.Tensor:
        """Stage inputs whose first position reads the state in the cache."""
        if self.config.fusion == "none":
            raise ValueError("use_carried_state needs a fusion, and this model has none.")
        if cache is None or cache.state is None:
            why = "there is no cache" if cache is None else cache.state_missing
            raise ValueError(
                f"There is no latent state to continue from: {why}. Read the whole text again "
                "without past_key_values, or decode with mode='standard'."
            )
        first = self.fusion(cache.state, self.fusion.token_term(embeds[:, :1])).to(plain.device)
        if self.config.document_end_token_id is not None:
            if cache.ends_document is None:
                raise ValueError(_NO_DOCUMENT_ENDS)
            first = torch.where(cache.ends_document[..., None], plain[:, :1], first)
        return first if embeds.shape[1] == 1 else torch.cat([first, plain[:, 1:]], dim=1)

    # -- arguments

    def _num_passes(self, num_passes: int | None, cache: LatentCacheMixin | None) -> int:
        if num_passes is None:
            num_passes = self.config.num_passes
            if num_passes > 1 and _is_filled(cache):
                return 1
        if num_passes < 1:
            raise ValueError(f"num_passes={num_passes}: a forward has at least one pass.")
        if num_passes > 1 and self.config.fusion == "none":
            raise ValueError(f"num_passes={num_passes} needs a fusion, and this model has none.")
        if num_passes > 1 and _is_filled(cache):
            raise ValueError(
                f"num_passes={num_passes} over tokens after cached ones needs the whole text "
                "again: give all tokens without past_key_values, or use num_passes=1."
            )
        return num_passes

    def _cache(
        self, cache: Cache | None, use_cache: bool | None, packed: bool
    ) -> LatentCacheMixin | None:
        if self.gradient_checkpointing and self.training:
            if cache is not None:
                raise ValueError(
                    "Gradient checkpointing runs each layer twice and cannot write a cache: leave "
                    "past_key_values out."
                )
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not packed
        if cache is None and not use_cache:
            return None
        if packed:
            raise ValueError(
                "position_ids pack several sequences into a row: that cannot be cached. Use "
                "use_cache=False, or one sequence a row with an attention_mask."
            )
        return LatentDynamicCache(config=self.config) if cache is None else as_latent_cache(cache)


class MegalatentForCausalLM(MegalatentGenerationMixin, MegalatentPreTrainedModel):
    """The model with its head, tied to the embedding unless the config says otherwise."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MegalatentConfig) -> None:
        super().__init__(config)
        self.model = MegalatentModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_passes: int | None = None,
        fused_mask: torch.Tensor | None = None,
        use_carried_state: bool = False,
        padding_mask: torch.Tensor | None = None,
        output_pass_states: bool = False,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> MegalatentCausalLMOutput:
        """Logits of the last pass; with `labels` also the loss over all passes.

        The arguments are those of `MegalatentModel.forward`. Labels are the input tokens (shifted
        here), -100 where no loss is taken; the same labels serve every pass.
        """
        if labels is not None and use_cache is None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_passes=num_passes,
            fused_mask=fused_mask,
            use_carried_state=use_carried_state,
            padding_mask=padding_mask,
            output_pass_states=output_pass_states or labels is not None,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))

        loss, aux_loss, pass_losses = None, None, None
        if outputs.pass_router_logits is not None:
            mask = padding_mask if isinstance(attention_mask, dict) else attention_mask
            mask = mask if mask is not None and mask.ndim == 2 else None
            aux_loss = weighted_over_passes(
                [balance_loss(logits, self.config, mask) for logits in outputs.pass_router_logits],
                self.config,
            )
        if labels is not None:
            earlier = (
                self.lm_head(slice_logits_to_keep(state, logits_to_keep))
                for state in outputs.pass_states[:-1]
            )
            pass_losses = tuple(
                self.loss_function(each, labels, self.vocab_size, **kwargs)
                for each in (*earlier, logits)
            )
            loss = weighted_over_passes(pass_losses, self.config)
            if aux_loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MegalatentCausalLMOutput(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            pass_losses=pass_losses,
            pass_states=outputs.pass_states if output_pass_states else None,
        )


def _is_filled(cache: Cache | None) -> bool:
    return cache is not None and int(cache.get_seq_length()) > 0


# An export carries this code, and AutoConfig/AutoModel find it there.
MegalatentConfig.register_for_auto_class()
MegalatentModel.register_for_auto_class("AutoModel")
MegalatentForCausalLM.register_for_auto_class("AutoModelForCausalLM")
