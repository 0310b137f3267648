"""Going on from a returned cache (chat turns), and what moves, selects or shortens a cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from megalatent.hf import LatentDynamicCache, LatentStaticCache
from tests.hf.reference import FBT, Reference, prompts, tiny_model

GREEDY = {"do_sample": False, "eos_token_id": None}


def first_turn(model, ids, mode="soft", count=4, **options):
    return model.generate(
        ids, mode=mode, max_new_tokens=count, return_dict_in_generate=True, **GREEDY, **options
    )


def two_turns_by_reference(model, ids, answer: int, turn, count: int, prefill: int = 1):
    """The last generated token is fused, the new turn's tokens are plain, then fused again."""
    reference = Reference(model)
    tokens, _ = reference.generate(ids, answer, "soft", prefill)
    inputs = reference.prompt_inputs(ids, prefill)
    for token in tokens:
        state = reference.stack(torch.stack(inputs))[-1]
        inputs.append(reference.fuse(state, reference.embed(token)))
    inputs += [reference.plain(reference.embed(token)) for token in turn]
    said = []
    for _ in range(count):
        state = reference.stack(torch.stack(inputs))[-1]
        said.append(int(reference.logits(state).argmax()))
        inputs.append(reference.fuse(state, reference.embed(said[-1])))
    return tokens, said


@pytest.mark.parametrize("only_new", [False, True], ids=["whole-text", "new-tokens-only"])
@pytest.mark.parametrize(("mode", "prefill"), [("soft", 1), ("fused", 2)])
def test_a_chat_goes_on_from_the_returned_cache(mode: str, prefill: int, only_new: bool) -> None:
    model, ids, turn = tiny_model(**FBT), prompts(1, 6), prompts(1, 3, seed=9)
    first = first_turn(model, ids, mode=mode)
    text = torch.cat([first.sequences, turn], 1)
    new = text[:, first.past_key_values.get_seq_length() :] if only_new else text
    second = model.generate(
        new,
        attention_mask=torch.ones_like(text),
        past_key_values=first.past_key_values,
        mode=mode,
        prefill_passes=1,
        max_new_tokens=5,
        **GREEDY,
    )
    tokens, said = two_turns_by_reference(model, ids[0], 4, turn[0], 5, prefill)
    assert first.sequences[0, 6:].tolist() == tokens
    assert second[0, new.shape[1] :].tolist() == said


def test_a_chat_with_a_static_cache_and_left_padding() -> None:
    model, turn = tiny_model(**FBT), prompts(2, 3, seed=9)
    ids = prompts(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    cache = StaticCache(config=model.config, max_cache_len=24)
    first = first_turn(model, ids, attention_mask=mask, past_key_values=cache)
    assert type(cache) is LatentStaticCache
    text = torch.cat([first.sequences, turn], 1)
    second = model.generate(
        text,
        attention_mask=torch.cat([mask, torch.ones(2, 7, dtype=mask.dtype)], 1),
        past_key_values=cache,
        mode="soft",
        max_new_tokens=5,
        **GREEDY,
    )
    for row, start in enumerate([0, 3]):
        _, said = two_turns_by_reference(model, ids[row, start:], 4, turn[row], 5)
        assert second[row, text.shape[1] :].tolist() == said


def test_a_chat_may_change_its_mode() -> None:
    model, ids, turn = tiny_model(), prompts(1, 6), prompts(1, 3, seed=9)
    first = first_turn(model, ids, mode="standard")
    text = torch.cat([first.sequences, turn], 1)
    cache = copy.deepcopy(first.past_key_values)
    second = model.generate(
        text, past_key_values=cache, mode="standard", **GREEDY, max_new_tokens=4
    )
    tokens, _ = Reference(model).generate(text[0], 4, "standard", 1)
    assert second[0, text.shape[1] :].tolist() == tokens
    # From standard to soft: the pending token is a generated one, fused with the carried state.
    soft = model.generate(
        text, past_key_values=first.past_key_values, mode="soft", max_new_tokens=3, **GREEDY
    )
    reference = Reference(model)
    inputs = reference.prompt_inputs(text[0, :9], 1)
    state = reference.stack(torch.stack(inputs))[-1]
    inputs.append(reference.fuse(state, reference.embed(text[0, 9])))
    inputs += list(reference.embed(turn[0]))
    for token in soft[0, text.shape[1] :].tolist():
        state = reference.stack(torch.stack(inputs))[-1]
        assert token == int(reference.logits(state).argmax())
        inputs.append(reference.fuse(state, reference.embed(token)))


def test_a_prompt_read_beforehand_is_a_prompt() -> None:
    """A prefix cached by a forward has no generated token: what follows it stays plain."""
    model, ids = tiny_model(**FBT), prompts(1, 9)
    prefix = model(ids[:, :5], use_cache=True).past_key_values
    out = model.generate(ids, past_key_values=prefix, mode="soft", max_new_tokens=5, **GREEDY)
    tokens, _ = Reference(model).generate(ids[0], 5, "soft", 1)
    assert out[0, 9:].tolist() == tokens


def test_both_turns_can_be_read_in_chunks() -> None:
    """Only the very first token of the second turn is fused, not the first of each chunk."""
    model, ids, turn = tiny_model(), prompts(1, 6), prompts(1, 5, seed=9)
    first = first_turn(model, ids, prefill_chunk_size=4)
    text = torch.cat([first.sequences, turn], 1)
    _, said = two_turns_by_reference(model, ids[0], 4, turn[0], 4)
    caches = [copy.deepcopy(first.past_key_values), first.past_key_values]
    states = []
    for cache, size in zip(caches, (None, 4), strict=True):
        second = model.generate(
            text,
            past_key_values=cache,
            mode="soft",
            prefill_chunk_size=size,
            max_new_tokens=4,
            **GREEDY,
        )
        assert second[0, text.shape[1] :].tolist() == said
        states.append(cache.state)
    assert (states[0] - states[1]).abs().max() < 1e-4


def test_selected_and_repeated_rows_keep_their_states() -> None:
    model, ids, turn = tiny_model(**FBT), prompts(3, 6), prompts(1, 3, seed=9)
    first = first_turn(model, ids)
    cache, state = first.past_key_values, first.past_key_values.state.clone()
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    order = [2, 2, 0, 0]
    assert torch.equal(cache.state, state[order])
    text = torch.cat([first.sequences[order], turn.expand(4, -1)], 1)
    out = model.generate(text, past_key_values=cache, mode="soft", max_new_tokens=4, **GREEDY)
    for row, source in enumerate(order):
        _, said = two_turns_by_reference(model, ids[source], 4, turn[0], 4)
        assert out[row, text.shape[1] :].tolist() == said


def test_a_copied_cache_is_independent() -> None:
    model, ids = tiny_model(), prompts(1, 6)
    for options in ({}, {"cache_implementation": "static", "max_cache_len": 16}):
        cache = first_turn(model, ids, **options).past_key_values
        other, state = copy.deepcopy(cache), cache.state.clone()
        model(prompts(1, 1), past_key_values=other, use_carried_state=True)
        assert torch.equal(cache.state, state)
        assert not torch.equal(other.state, state)


def test_a_reset_cache_starts_over() -> None:
    model, ids = tiny_model(), prompts(1, 6)
    cache = LatentStaticCache(config=model.config, max_cache_len=16)
    first = first_turn(model, ids, past_key_values=cache).sequences
    cache.reset()
    assert cache.state is None
    assert torch.equal(first_turn(model, ids, past_key_values=cache).sequences, first)


# -- what cannot go on says why


def test_a_cropped_cache_has_lost_its_state_and_says_so() -> None:
    model, ids = tiny_model(), prompts(1, 6)
    first = first_turn(model, ids)
    cache = first.past_key_values
    cache.crop(0)
    assert cache.state is not None
    cache.crop(-2)
    assert cache.get_seq_length() == 7
    step = {"past_key_values": cache, "use_carried_state": True}
    with pytest.raises(ValueError, match="cropped by 2 positions"):
        model(first.sequences[:, 7:8], **step)
    # Nothing was generated after position 7 as far as the cache knows: its tokens are a prompt.
    out = model.generate(
        first.sequences, past_key_values=cache, mode="soft", max_new_tokens=3, **GREEDY
    )
    inputs = Reference(model).prompt_inputs(ids[0], 1)
    reference = Reference(model)
    state = reference.stack(torch.stack(inputs))[-1]
    inputs.append(reference.fuse(state, reference.embed(first.sequences[0, 6])))
    inputs += list(reference.embed(first.sequences[0, 7:]))
    state = reference.stack(torch.stack(inputs))[-1]
    assert out[0, 10] == reference.logits(state).argmax()


def test_static_caches_refuse_what_they_cannot_do() -> None:
    cache = LatentStaticCache(config=tiny_model().config, max_cache_len=8)
    for change in (
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(NotImplementedError, match="use a dynamic cache"):
            change()


@pytest.mark.parametrize(
    ("turn_options", "options", "message"),
    [
        ({"mode": "fused"}, {"mode": "fused"}, "need the whole text again"),
        ({"num_beams": 2}, {"mode": "soft"}, "comes from beam search"),
        ({}, {"mode": "soft", "num_beams": 2}, r"holds 1 sequences, and this call decodes 2"),
    ],
)
def test_impossible_continuations_are_refused(turn_options, options, message) -> None:
    model, ids = tiny_model(), prompts(1, 6)
    first = first_turn(model, ids, **turn_options)
    text = torch.cat([first.sequences, prompts(1, 2)], 1)
    cache = first.past_key_values
    with pytest.raises(ValueError, match=message):
        model.generate(text, past_key_values=cache, max_new_tokens=2, **options, **GREEDY)


def test_a_text_without_anything_new_is_refused() -> None:
    model, ids = tiny_model(), prompts(1, 6)
    cache = first_turn(model, ids).past_key_values
    with pytest.raises(ValueError, match="already holds 9 positions and input_ids only 6"):
        model.generate(ids, past_key_values=cache, mode="soft", max_new_tokens=2, **GREEDY)


def test_a_filled_cache_without_a_state_is_refused() -> None:
    model, ids = tiny_model(), prompts(1, 4)
    foreign = DynamicCache(config=model.config)
    keys = torch.zeros(1, 2, 3, 8)
    for layer in range(3):
        foreign.update(keys, keys, layer)
    with pytest.raises(ValueError, match="no latent state to continue from: nothing was read"):
        model(ids[:, :1], past_key_values=foreign, use_carried_state=True)
    with pytest.raises(ValueError, match="num_passes=2 over tokens after cached ones"):
        model(ids[:, :1], past_key_values=foreign, num_passes=2)


def test_a_forward_after_cached_tokens_has_one_pass_unless_told() -> None:
    model, ids = tiny_model(num_passes=2), prompts(1, 5)
    cache = LatentDynamicCache(config=model.config)
    prompt = model(ids, past_key_values=cache, output_pass_states=True)
    assert len(prompt.pass_states) == 2
    step = model(ids[:, :1], past_key_values=cache, output_pass_states=True)
    assert len(step.pass_states) == 1
