"""generate() with the carried state against the uncached sequential recurrence."""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from megalatent.hf import LatentDynamicCache
from megalatent.hf.cache_megalatent import LatentCacheMixin
from tests.hf.reference import FBT, MOE, Reference, prompts, tiny_model

FUSIONS = ["gated", "additive", "concat"]
# mode, prefill_passes (None: the mode's own), passes over the prompt
DECODINGS = [("standard", None, 1), ("soft", None, 1), ("fused", None, 2), ("fused", 4, 4)]
CACHES = [None, "static"]
GREEDY = {"do_sample": False, "eos_token_id": None}


def greedy(model, ids, count, **options):
    """Texts and the states they were read from, `[b, count]` and `[b, count, h]`."""
    out = model.generate(
        ids,
        max_new_tokens=count,
        return_dict_in_generate=True,
        output_hidden_states=True,
        **GREEDY,
        **options,
    )
    states = torch.stack([step[-1][:, -1] for step in out.hidden_states], dim=1)
    return out.sequences[:, ids.shape[1] :], states


@pytest.mark.parametrize(("mode", "passes", "total"), DECODINGS)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_cached_decoding_is_the_uncached_recurrence(fusion, mode, passes, total) -> None:
    # The sliding layers' window of 5 is exceeded by the prompt and by the text.
    model = tiny_model(fusion=fusion, **FBT)
    ids = prompts(2, 7)
    answers = [Reference(model).generate(row, 8, mode, total) for row in ids]
    for cache in CACHES:
        texts, states = greedy(
            model, ids, 8, mode=mode, prefill_passes=passes, cache_implementation=cache
        )
        for text, state, (tokens, expected) in zip(texts, states, answers, strict=True):
            assert text.tolist() == tokens
            assert (state - expected).abs().max() < 1e-4


def test_the_modes_write_different_texts() -> None:
    """Otherwise the tests above would prove little."""
    model, ids = tiny_model(**FBT), prompts(2, 7)
    texts = {
        (mode, passes): tuple(greedy(model, ids, 8, mode=mode, prefill_passes=passes)[0].flatten())
        for mode, passes, _ in DECODINGS
    }
    assert len(set(texts.values())) == len(DECODINGS)


@pytest.mark.parametrize(
    "settings",
    [
        {"input_norm": "all"},
        {"sliding_window": 4},  # every layer slides
        {**FBT, **MOE, "mlp_only_layers": [0], "tie_word_embeddings": False},
        {"attn_implementation": "eager", **FBT},
    ],
    ids=["input-norm-all", "all-sliding", "moe-untied", "eager"],
)
def test_other_models_decode_as_their_recurrence(settings: dict) -> None:
    model, ids = tiny_model(**settings), prompts(1, 6)
    tokens, expected = Reference(model).generate(ids[0], 6, "fused", 2)
    for cache in CACHES:
        texts, states = greedy(model, ids, 6, mode="fused", cache_implementation=cache)
        assert texts[0].tolist() == tokens
        assert (states[0] - expected).abs().max() < 1e-4


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    model, ids = tiny_model(), prompts(1, 1)
    for mode in ("soft", "fused"):
        tokens, _ = Reference(model).generate(ids[0], 5, mode, 1)
        assert greedy(model, ids, 5, mode=mode)[0][0].tolist() == tokens


@pytest.mark.parametrize("passes", [2, 3])
def test_fused_prefill_is_the_multi_pass_forward(passes: int) -> None:
    model, ids = tiny_model(**FBT), prompts(2, 9)
    out = model.generate(
        ids,
        mode="fused",
        prefill_passes=passes,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_logits=True,
        **GREEDY,
    )
    forward = model(ids, labels=ids, num_passes=passes, output_pass_states=True)
    assert (out.hidden_states[0][-1] - forward.pass_states[-1]).abs().max() < 1e-5
    assert (out.logits[0] - forward.logits[:, -1]).abs().max() < 1e-5
    # The cache is the last pass's alone: 9 positions, and the state of the last of them.
    assert out.past_key_values.get_seq_length() == 9
    assert torch.equal(out.past_key_values.state, out.hidden_states[0][-1][:, -1:])


@pytest.mark.parametrize("mode", ["standard", "soft", "fused"])
def test_a_left_padded_batch_decodes_as_its_rows_alone(mode: str) -> None:
    model, ids = tiny_model(**FBT), prompts(3, 8)
    lengths, passes = [8, 3, 1], 2 if mode == "fused" else 1
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, 8 - length :] = 1
    answers = [
        Reference(model).generate(row[8 - length :], 7, mode, passes)
        for row, length in zip(ids, lengths, strict=True)
    ]
    for cache in CACHES:
        texts, states = greedy(
            model, ids * mask, 7, attention_mask=mask, mode=mode, cache_implementation=cache
        )
        for text, state, (tokens, expected) in zip(texts, states, answers, strict=True):
            assert text.tolist() == tokens
            assert (state - expected).abs().max() < 1e-4


@pytest.mark.parametrize("fusion", FUSIONS)
def test_teacher_forced_soft_decoding_is_a_pass_of_training(fusion: str) -> None:
    """Soft decoding after p prompt tokens is pass T-p+1 with positions t <= p plain."""
    model = tiny_model(fusion=fusion, initializer_range=0.05, **FBT)
    ids, prompt = prompts(1, 11), 4
    cache = LatentDynamicCache(config=model.config)
    states = [model.model(ids[:, :prompt], past_key_values=cache).last_hidden_state]
    for t in range(prompt, 11):
        step = model.model(ids[:, t : t + 1], past_key_values=cache, use_carried_state=True)
        states.append(step.last_hidden_state)
    fused = torch.arange(11)[None] >= prompt
    training = model(ids, num_passes=11 - prompt + 1, fused_mask=fused, output_pass_states=True)
    assert (torch.cat(states, 1) - training.pass_states[-1]).abs().max() < 1e-4


def test_after_an_end_of_document_token_decoding_starts_plain() -> None:
    """A prompt that ends with the token, as in unconditional generation."""
    ids = prompts(2, 4)
    ids[:, -1] = torch.tensor([3, 5])
    for cache in (None, "static"):
        texts, states = greedy(
            tiny_model(document_end_token_id=3), ids, 2, mode="soft", cache_implementation=cache
        )
        for row in range(2):
            reference = Reference(tiny_model())
            tokens, _ = reference.generate(ids[row], 1, "soft", 1)
            plain = row == 0
            inputs = reference.prompt_inputs(ids[row], 1)
            state = reference.stack(torch.stack(inputs))[-1]
            embedding = reference.embed(tokens[0])
            inputs.append(embedding if plain else reference.fuse(state, embedding))
            expected = reference.stack(torch.stack(inputs))[-1]
            assert texts[row, 0] == tokens[0]
            assert (states[row, 1] - expected).abs().max() < 1e-4


# -- beams, samples, stops, streams


@pytest.mark.parametrize(("mode", "passes"), [("standard", 1), ("soft", 1), ("fused", 2)])
def test_beam_search_is_brute_force_over_the_recurrence(mode: str, passes: int) -> None:
    model, ids = tiny_model(initializer_range=0.08, **FBT), prompts(2, 5)
    answers = [Reference(model).beam_search(row, 5, 3, mode, passes) for row in ids]
    for cache in CACHES:
        out = model.generate(
            ids,
            mode=mode,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=5,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
            cache_implementation=cache,
            **GREEDY,
        )
        assert out.sequences[:, 5:].tolist() == [text for texts, _ in answers for text in texts]
        scores = torch.tensor([score for _, scores in answers for score in scores])
        assert torch.allclose(out.sequences_scores, scores, atol=1e-4)


def test_beams_that_leave_the_state_behind_would_show(monkeypatch) -> None:
    """The check above can fail: without the state's part of the reordering it does."""
    model, ids = tiny_model(initializer_range=0.08, **FBT), prompts(2, 5)
    options = {"mode": "soft", "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 5}
    right = model.generate(ids, **options, **GREEDY)
    monkeypatch.setattr(LatentCacheMixin, "_map_state", lambda self, change: None)
    assert not torch.equal(model.generate(ids, **options, **GREEDY), right)


def test_samples_follow_the_distribution_of_the_recurrence() -> None:
    model, ids = tiny_model(initializer_range=0.3), prompts(1, 4)
    torch.manual_seed(0)
    out = model.generate(
        ids, mode="soft", do_sample=True, top_k=0, num_return_sequences=2000, max_new_tokens=2
    )[:, 4:]
    reference = Reference(model)
    inputs = reference.prompt_inputs(ids[0], 1)
    state = reference.stack(torch.stack(inputs))[-1]
    first = torch.softmax(reference.logits(state), -1)
    shares = out[:, 0].bincount(minlength=40) / 2000
    assert (shares - first).abs().max() < 0.05  # standard deviation at most 0.011
    token = int(first.argmax())
    inputs.append(reference.fuse(state, reference.embed(token)))
    second = torch.softmax(reference.logits(reference.stack(torch.stack(inputs))[-1]), -1)
    rows = out[out[:, 0] == token, 1]
    shares = rows.bincount(minlength=40) / len(rows)
    assert (shares - second).abs().max() < 4 * 0.5 / len(rows) ** 0.5  # four deviations
    plain = [*inputs[:-1], reference.embed(token)]
    other = torch.softmax(reference.logits(reference.stack(torch.stack(plain))[-1]), -1)
    assert (other - second).abs().max() > 8 * 0.5 / len(rows) ** 0.5  # and the test can tell


def test_rows_that_end_early_leave_the_others_alone() -> None:
    model, ids = tiny_model(**FBT), prompts(2, 5)
    full = greedy(model, ids, 8, mode="soft")[0]
    end = next(int(t) for t in full[0, 1:4] if t not in full[1])
    out = model.generate(
        ids, mode="soft", max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=0
    )[:, 5:]
    assert torch.equal(out[1], full[1])
    stop = full[0].tolist().index(end) + 1
    assert out[0, :stop].tolist() == full[0, :stop].tolist()
    assert not out[0, stop:].any()


def test_stopping_and_streaming() -> None:
    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 8)

    model, ids, stream = tiny_model(), prompts(1, 5), Collect()
    expected = greedy(model, ids, 3, mode="fused")[0][0].tolist()
    out = model.generate(
        ids,
        mode="fused",
        max_new_tokens=9,
        streamer=stream,
        stopping_criteria=StoppingCriteriaList([AfterThree()]),
        **GREEDY,
    )
    assert out[0, 5:].tolist() == expected
    assert stream.tokens == out[0].tolist()
    assert stream.ended


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_chunked_single_pass_prompt_gives_the_same_text(cache: str | None) -> None:
    model, ids = tiny_model(**FBT), prompts(1, 11)
    whole = greedy(model, ids, 5, mode="soft")[0]
    chunked = greedy(model, ids, 5, mode="soft", prefill_chunk_size=4, cache_implementation=cache)[
        0
    ]
    assert torch.equal(whole, chunked)


def test_embeddings_can_be_the_prompt() -> None:
    model, ids = tiny_model(), prompts(1, 5)
    whole = greedy(model, ids, 5, mode="fused")[0]
    embeds = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embeds, mode="fused", max_new_tokens=5, **GREEDY)
    assert torch.equal(whole, out)
