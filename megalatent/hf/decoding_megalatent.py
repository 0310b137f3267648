"""Decoding with the carried state, through the ordinary `generate()`.

| mode | prompt | generated positions |
|---|---|---|
| standard | one plain pass | plain |
| soft | one plain pass | fused with the state of the position before |
| fused | a plain pass, then a fused one | fused |

`prefill_passes=k` reads the prompt in one plain and k-1 fused passes instead. The KV cache is the
last prefill pass's; between steps one vector per sequence, the state, travels inside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from .cache_megalatent import LatentCacheMixin, as_latent_cache

__all__ = ["MODES", "DecodingPlan", "MegalatentGenerationMixin"]

MODES = {"standard": 1, "soft": 1, "fused": 2}
"""Decoding modes and the number of passes each makes over the prompt."""

_SUPPORTED = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
_FORWARD_ONLY = ("num_passes", "fused_mask", "use_carried_state", "padding_mask")


@dataclass
class DecodingPlan:
    """How one `generate()` call decodes.

    Attributes:
        mode: one of `MODES`.
        prefill_passes: all passes over the prompt.
        seen: positions in the cache when the call began.
        first_is_generated: the first new token after those is one that an earlier call generated:
            its KV is still missing, and it is fused like any generated position.
    """

    mode: str
    prefill_passes: int
    seen: int = 0
    first_is_generated: bool = False


class MegalatentGenerationMixin(GenerationMixin):
    """`generate(mode="standard"|"soft"|"fused", prefill_passes=k)`."""

    # Candidates of assisted generation cannot be verified together: each needs the state before it.
    _is_stateful = True

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Resolve mode and prefill_passes; the plan travels in the model arguments."""
        for name in _FORWARD_ONLY:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"generate() sets {name} itself: choose the decoding with mode=... and "
                    "prefill_passes=..."
                )
        plan = self.decoding_plan(generation_config, kwargs)
        options = {k: v for k, v in kwargs.items() if k not in ("mode", "prefill_passes")}
        config, model_kwargs = super()._prepare_generation_config(generation_config, **options)
        if config.cache_implementation in ("paged", "quantized"):
            raise ValueError(
                f"cache_implementation={config.cache_implementation!r} cannot carry the latent "
                "state from step to step. Use the dynamic cache (default) or 'static'."
            )
        if config.prefill_chunk_size is not None and plan.prefill_passes > 1:
            raise ValueError(
                f"prefill_chunk_size={config.prefill_chunk_size} with prefill_passes="
                f"{plan.prefill_passes}: a later pass reads states of the whole earlier pass. "
                "Use prefill_passes=1 or no chunks."
            )
        if config.use_cache is False and plan.mode != "standard":
            raise ValueError(
                f"mode={plan.mode!r} with use_cache=False: the state of the position before lives "
                "in the cache. Use use_cache=True or mode='standard'."
            )
        if config.guidance_scale not in (None, 1) and plan.mode != "standard":
            raise ValueError(
                f"guidance_scale={config.guidance_scale} with mode={plan.mode!r}: the unguided text"
                " would be decoded without its state. Use mode='standard'."
            )
        model_kwargs["latent_plan"] = plan
        return config, model_kwargs

    def decoding_plan(
        self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> DecodingPlan:
        """Arguments of the call come first, then its generation config, then the model's."""

        def asked(name: str) -> Any:
            value = kwargs.get(name)
            return getattr(generation_config, name, None) if value is None else value

        own_mode = getattr(self.generation_config, "mode", None)
        mode = next(x for x in (asked("mode"), own_mode, "standard") if x is not None)
        if mode not in tuple(MODES):
            raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}.")
        passes = asked("prefill_passes")
        if passes is None and mode == own_mode:  # the model's own number belongs to its own mode
            passes = getattr(self.generation_config, "prefill_passes", None)
        if passes is None:
            passes = MODES[mode]
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(f"prefill_passes={passes!r}: give a whole number of at least 1.")
        if mode == "standard" and passes > 1:
            raise ValueError(
                f"prefill_passes={passes} with mode='standard': standard decoding reads the prompt "
                "in one plain pass. Use mode='soft' or mode='fused'."
            )
        if mode != "standard" and self.config.fusion == "none":
            raise ValueError(f"mode={mode!r} needs a fusion, and this model has none.")
        return DecodingPlan(mode, passes)

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, kwargs: Any
    ) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                "Assisted generation (assistant_model, prompt_lookup_num_tokens, use_mtp) is not "
                "supported: a verifier reads several draft tokens at once, but each stack input "
                "needs the state of the position before it."
            )
        if generation_mode not in _SUPPORTED:
            raise ValueError(
                f"{generation_mode.value} is not supported: use greedy search, sampling or beams."
            )
        super()._validate_generation_mode(generation_mode, generation_config, kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if model_kwargs.get("past_key_values") is None:
            return
        cache = as_latent_cache(model_kwargs["past_key_values"])
        beams = generation_config.num_beams or 1
        plan: DecodingPlan = model_kwargs["latent_plan"]
        plan.seen = int(cache.get_seq_length())
        if plan.seen > 0:
            rows = max(beams, generation_config.num_return_sequences or 1) * batch_size
            _check_continuation(cache, plan, rows)
        cache.from_beam_search = beams > 1

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        latent_plan: DecodingPlan | None = None,
        **kwargs: Any,  # this very name: generate() then also accepts the arguments of forward()
    ) -> dict[str, Any]:
        """Inputs of one forward, with what the plan says of these tokens."""
        if next_sequence_length is not None and int(next_sequence_length) < 1:
            raise ValueError(
                f"past_key_values already holds {int(past_key_values.get_seq_length())} positions "
                f"and input_ids only {input_ids.shape[1]}: pass the whole text, the cached part "
                "included, followed by at least one new token."
            )
        plan = latent_plan or self.decoding_plan(None, {})
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        inputs["num_passes"] = 1
        if not is_first_iteration:
            inputs["use_carried_state"] = plan.mode != "standard"
            if getattr(past_key_values, "generated_length", None) is not None:
                past_key_values.generated_length += 1
            return inputs

        seen = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        if seen == 0:
            inputs["num_passes"] = plan.prefill_passes
            inputs["padding_mask"] = attention_mask
        # With a chunked prompt only its first chunk begins where the call began.
        inputs["use_carried_state"] = plan.first_is_generated and seen == plan.seen
        if past_key_values is not None:
            tokens = inputs["input_ids"]
            tokens = inputs["inputs_embeds"] if tokens is None else tokens
            past_key_values.generated_length = seen + tokens.shape[1]
        return inputs

    # -- continuous batching keeps its own paged cache, without the state

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(_NO_PAGED)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(_NO_PAGED)


_NO_PAGED = (
    "Continuous batching is not supported: its paged cache cannot carry the latent state from "
    "step to step. Use generate() on a left-padded batch."
)


def _check_continuation(cache: LatentCacheMixin, plan: DecodingPlan, rows: int) -> None:
    """Settle how a call goes on from a filled cache, or say why it cannot."""
    if cache.from_beam_search:
        raise ValueError(
            "past_key_values comes from beam search: its rows are the beams that were running, not "
            "the sequences that were returned. Read the whole text again without it."
        )
    cached_rows = cache.layers[0].keys.shape[0]
    if cached_rows != rows:
        raise ValueError(
            f"past_key_values holds {cached_rows} sequences, and this call decodes {rows} "
            "(sequences x beams): repeat it first with batch_repeat_interleave()."
        )
    if plan.prefill_passes > 1:
        raise ValueError(
            f"prefill_passes={plan.prefill_passes} with a filled past_key_values: several passes "
            "over the new tokens need the whole text again. Leave past_key_values out, or use "
            "prefill_passes=1."
        )
    plan.first_is_generated = plan.mode != "standard" and cache.generated_length == plan.seen
