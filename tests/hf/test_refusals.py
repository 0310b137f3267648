"""Ways of decoding that would lose the state are refused with the reason."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, QuantizedCache

from tests.hf.reference import prompts, tiny_model

GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "hard"}, r"mode='hard': choose one of standard, soft, fused"),
        ({"mode": ""}, "mode='': choose one of"),
        ({"mode": ["soft"]}, r"mode=\['soft'\]: choose one of"),
        ({"mode": "soft", "prefill_passes": 0}, "prefill_passes=0: give a whole number"),
        ({"mode": "soft", "prefill_passes": 1.5}, "prefill_passes=1.5"),
        ({"mode": "standard", "prefill_passes": 2}, "one plain pass"),
        ({"mode": "soft", "use_cache": False}, "lives in the cache"),
        ({"mode": "fused", "prefill_chunk_size": 2}, "a later pass reads states of the whole"),
        ({"mode": "soft", "cache_implementation": "quantized"}, "cannot carry the latent state"),
        ({"mode": "soft", "cache_implementation": "paged"}, "cannot carry the latent state"),
        ({"mode": "soft", "guidance_scale": 1.5}, "unguided text would be decoded without"),
        ({"prompt_lookup_num_tokens": 2}, "several draft tokens at once"),
        ({"use_mtp": True}, "several draft tokens at once"),
        ({"num_passes": 2}, r"generate\(\) sets num_passes itself"),
        ({"use_carried_state": True}, r"generate\(\) sets use_carried_state itself"),
        ({"fuse": True}, "fuse"),  # a misspelt argument is noticed
    ],
)
def test_refused_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(prompts(1, 4), **GREEDY, **options)


def test_an_assistant_model_is_refused() -> None:
    with pytest.raises(ValueError, match="each stack input needs the state"):
        tiny_model().generate(prompts(1, 4), assistant_model=tiny_model(), mode="soft", **GREEDY)


def test_continuous_batching_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="Continuous batching is not supported"):
        model.generate_batch([[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2))
    with (
        pytest.raises(ValueError, match="Continuous batching is not supported"),
        model.continuous_batching_context_manager(),
    ):
        pass


def test_caches_that_cannot_carry_the_state_are_refused() -> None:
    class OwnCache(DynamicCache):
        pass

    model = tiny_model()
    quantized = QuantizedCache("fp8", config=model.config)
    for cache in (OwnCache(config=model.config), quantized):
        with pytest.raises(ValueError, match=f"{type(cache).__name__} cannot carry"):
            model.generate(prompts(1, 4), past_key_values=cache, mode="soft", **GREEDY)
        with pytest.raises(ValueError, match=f"{type(cache).__name__} cannot carry"):
            model(prompts(1, 4), past_key_values=cache)


def test_a_model_without_fusion_decodes_in_standard_mode_alone() -> None:
    model, ids = tiny_model(fusion="none"), prompts(1, 4)
    with pytest.raises(ValueError, match="mode='soft' needs a fusion"):
        model.generate(ids, mode="soft", **GREEDY)
    assert model.generate(ids, **GREEDY).shape == (1, 7)


def test_standard_decoding_needs_no_cache() -> None:
    model, ids = tiny_model(), prompts(2, 4)
    assert torch.equal(
        model.generate(ids, use_cache=False, **GREEDY), model.generate(ids, **GREEDY)
    )


def test_embeddings_do_not_tell_where_documents_end() -> None:
    model = tiny_model(document_end_token_id=3)
    embeds = model.get_input_embeddings()(prompts(1, 4))
    for mode in ("soft", "fused"):
        with pytest.raises(ValueError, match="do not say where documents end"):
            model.generate(inputs_embeds=embeds, mode=mode, **GREEDY)
