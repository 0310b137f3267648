"""The oracle checked against itself written twice, closed forms and torch's own operators."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.draws import (
    drawn_passes,
    jitter_noise,
    jitter_rows,
    philox_scalar,
    prefix_length,
    prefix_rows,
)
from tests.oracle.model import MultiPass, Shape, multi_pass, sequential

D, FFN = 16, 24
SHAPE = Shape(layers=2, heads=4, groups=2, head_dim=6, vocab=29)
FUSIONS = ("gated", "additive", "concat")


def random_weights(
    fusion: str, shape: Shape = SHAPE, seed: int = 0, branches: bool = False
) -> dict[str, Tensor]:
    """fp64 weights large enough that every part of the model matters.

    `branches`: with gates per head, and norms after the branches.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (shape.vocab, D),
        "decoder.final_layernorm.weight": (D,),
    }
    for i in range(shape.layers):
        layer = f"decoder.layers.{i}"
        rows = (shape.heads + 2 * shape.groups) * shape.head_dim
        shapes |= {
            f"{layer}.input_layernorm.weight": (D,),
            f"{layer}.self_attention.linear_qkv.weight": (rows, D),
            f"{layer}.self_attention.q_layernorm.weight": (shape.head_dim,),
            f"{layer}.self_attention.k_layernorm.weight": (shape.head_dim,),
            f"{layer}.self_attention.linear_proj.weight": (D, shape.heads * shape.head_dim),
            f"{layer}.pre_mlp_layernorm.weight": (D,),
            f"{layer}.mlp.linear_fc1.weight": (2 * FFN, D),
            f"{layer}.mlp.linear_fc2.weight": (D, FFN),
        }
        if branches:
            shapes |= {
                f"{layer}.self_attention.linear_gate.weight": (shape.heads, D),
                f"{layer}.self_attn_bda.norm.weight": (D,),
                f"{layer}.mlp_bda.norm.weight": (D,),
            }
    parts: dict[str, dict[str, tuple[int, ...]]] = {
        "gated": {"state_proj": (D, D), "gate_proj": (D, D), "gate_norm": (D,), "fused_norm": (D,)},
        "additive": {"adapter_proj": (D, D), "adapter_norm": (D,)},
        "concat": {
            "concat_proj": (D, 2 * D),
            "state_norm": (D,),
            "gate_norm": (D,),
            "fused_norm": (D,),
        },
    }
    shapes |= {f"fusion.{name}.weight": dims for name, dims in parts[fusion].items()}
    weights = {}
    for name, dims in shapes.items():
        noise = torch.randn(dims, generator=generator, dtype=torch.float64)
        weights[name] = 1 + 0.3 * noise if len(dims) == 1 else 0.3 * noise
    return weights


def random_batch(b: int, s: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and a loss mask with holes, each `[b, s]`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SHAPE.vocab, (b, s), generator=generator)
    labels = torch.randint(0, SHAPE.vocab, (b, s), generator=generator)
    loss_mask = (torch.rand(b, s, generator=generator) > 0.3).double()
    return tokens, labels, loss_mask


def run(weights, tokens, passes, fusion, shape=SHAPE, starts=None, **options) -> MultiPass:
    _, labels, loss_mask = random_batch(*tokens.shape)
    starts = torch.zeros_like(tokens, dtype=torch.bool) if starts is None else starts
    return multi_pass(shape, weights, tokens, labels, loss_mask, starts, passes, fusion, **options)


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize(
    ("fusion", "branches"), [*((fusion, False) for fusion in FUSIONS), ("gated", True)]
)
def test_one_pass_per_position_is_the_sequential_recurrence(fusion, branches):
    shape = replace(SHAPE, window=5, full_every=2, multiplier=0.7 if branches else 1.0)
    weights = random_weights(fusion, branches=branches)
    tokens, _, _ = random_batch(2, 12)
    states = run(weights, tokens, 12, fusion, shape).states
    recurrence = sequential(shape, weights, tokens, fusion)
    assert distance(states[-1], recurrence) < 1e-9
    for k in range(1, 12):  # pass k has settled positions 1 … k, and no further
        assert distance(states[k - 1][:, :k], recurrence[:, :k]) < 1e-9
        assert distance(states[k - 1][:, k], recurrence[:, k]) > 1e-6


@pytest.mark.parametrize("fusion", ["gated", "concat"])
def test_recurrence_with_every_input_normed(fusion):
    weights = random_weights(fusion)
    tokens, _, _ = random_batch(1, 6)
    states = run(weights, tokens, 6, fusion, input_norm="all").states
    recurrence = sequential(SHAPE, weights, tokens, fusion, input_norm="all")
    assert distance(states[-1], recurrence) < 1e-9
    # A plain position sees what an ordinary model with a normed embedding table would see.
    table = weights["embedding.word_embeddings.weight"]
    normed = F.rms_norm(table, (D,), weights["fusion.fused_norm.weight"], SHAPE.eps)
    ordinary = run(weights | {"embedding.word_embeddings.weight": normed}, tokens, 1, fusion)
    assert distance(states[0], ordinary.states[0]) < 1e-12


@pytest.mark.parametrize("fusion", FUSIONS)
def test_soft_decoding_is_multi_pass_with_a_plain_prompt(fusion):
    weights = random_weights(fusion)
    tokens, _, _ = random_batch(2, 9)
    prompt, passes = 4, 9 - 4 + 1
    prefix = {k: [[prompt], [prompt]] for k in range(2, passes + 1)}
    mask = torch.arange(9).expand(2, 9) >= prompt
    recurrence = sequential(SHAPE, weights, tokens, fusion, prompt=prompt)
    by_prefix = run(weights, tokens, passes, fusion, prefix_lengths=prefix).states
    by_mask = run(weights, tokens, passes, fusion, fused_masks=dict.fromkeys(prefix, mask)).states
    assert distance(by_prefix[-1], recurrence) < 1e-9
    assert torch.equal(by_prefix[-1], by_mask[-1])
    assert distance(by_prefix[-2], recurrence) > 1e-6


@pytest.mark.parametrize("fusion", FUSIONS)
def test_documents_are_isolated(fusion):
    weights = random_weights(fusion)
    tokens, _, _ = random_batch(1, 11)
    starts = torch.zeros(1, 11, dtype=torch.bool)
    bounds = [0, 4, 5, 11]  # one document of a single position
    starts[0, [4, 5]] = True
    prefix = {2: [[2, 1, 3]], 3: [[1, 1, 5]]}
    packed = run(weights, tokens, 3, fusion, starts=starts, prefix_lengths=prefix).states
    for i, (start, end) in enumerate(pairwise(bounds)):
        own = {k: [[prefix[k][0][i]]] for k in prefix}
        alone = run(weights, tokens[:, start:end], 3, fusion, prefix_lengths=own).states
        for k in range(3):
            assert distance(packed[k][:, start:end], alone[k]) < 1e-9
    changed = tokens.clone()
    changed[0, :4] = (tokens[0, :4] + 1) % SHAPE.vocab
    other = run(weights, changed, 3, fusion, starts=starts, prefix_lengths=prefix).states
    for k in range(3):
        assert torch.equal(packed[k][:, 4:], other[k][:, 4:])
        assert distance(packed[k][:, :4], other[k][:, :4]) > 1e-3


def test_additive_with_zero_weight_repeats_pass_one():
    weights = random_weights("additive")
    tokens, _, _ = random_batch(2, 8)
    weights["fusion.adapter_proj.weight"] = torch.zeros(D, D, dtype=torch.float64)
    result = run(weights, tokens, 2, "additive")
    assert torch.equal(result.states[0], result.states[1])
    assert torch.equal(result.losses[0], result.losses[1])


def reference_decoder(weights: dict[str, Tensor], x: Tensor, shape: Shape) -> Tensor:
    """`x [b, s, D]` to states with torch's attention and complex-number RoPE."""
    b, s, _ = x.shape
    half = shape.head_dim // 2
    rates = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(s).double(), rates)
    turns = torch.polar(torch.ones_like(angles), angles)

    def rotate(y: Tensor) -> Tensor:
        turned = torch.complex(y[..., :half], y[..., half:]) * turns
        return torch.cat([turned.real, turned.imag], -1)

    for i in range(shape.layers):
        w = {
            n.split(".", 3)[3]: v
            for n, v in weights.items()
            if n.startswith(f"decoder.layers.{i}.")
        }
        before = F.rms_norm(x, (D,), w["input_layernorm.weight"], shape.eps)
        packed = before @ w["self_attention.linear_qkv.weight"].T
        packed = packed.view(b, s, shape.groups, -1, shape.head_dim)
        q = packed[..., :-2, :].reshape(b, s, shape.heads, shape.head_dim).transpose(1, 2)
        k, v = packed[..., -2, :].transpose(1, 2), packed[..., -1, :].transpose(1, 2)
        q_norm, k_norm = (
            w["self_attention.q_layernorm.weight"],
            w["self_attention.k_layernorm.weight"],
        )
        q = rotate(F.rms_norm(q, (shape.head_dim,), q_norm, shape.eps))
        k = rotate(F.rms_norm(k, (shape.head_dim,), k_norm, shape.eps))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if "self_attention.linear_gate.weight" in w:
            gate = torch.sigmoid(before @ w["self_attention.linear_gate.weight"].T)
            out = torch.einsum("bhsd,bsh->bhsd", out, gate)
        out = out.transpose(1, 2).reshape(b, s, -1)
        out = out @ w["self_attention.linear_proj.weight"].T
        if "self_attn_bda.norm.weight" in w:
            out = F.rms_norm(out, (D,), w["self_attn_bda.norm.weight"], shape.eps)
        x = torch.add(x, out, alpha=shape.multiplier)
        normed = F.rms_norm(x, (D,), w["pre_mlp_layernorm.weight"], shape.eps)
        gate, up = torch.split(normed @ w["mlp.linear_fc1.weight"].T, FFN, -1)
        out = (F.silu(gate) * up) @ w["mlp.linear_fc2.weight"].T
        if "mlp_bda.norm.weight" in w:
            out = F.rms_norm(out, (D,), w["mlp_bda.norm.weight"], shape.eps)
        x = torch.add(x, out, alpha=shape.multiplier)
    return F.rms_norm(x, (D,), weights["decoder.final_layernorm.weight"], shape.eps)


@pytest.mark.parametrize(
    ("fusion", "branches"), [*((fusion, False) for fusion in FUSIONS), ("gated", True)]
)
def test_two_passes_in_whole_tensors(fusion, branches):
    """Fusion, jitter, prefix and loss as formulas over whole tensors."""
    weights = random_weights(fusion, branches=branches)
    shape = replace(SHAPE, multiplier=0.4) if branches else SHAPE
    tokens, labels, loss_mask = random_batch(2, 7)
    noise = jitter_rows(3, [10, 11], 2, 7, D, 0.5).double()
    prefix = [[2], [4]]
    result = run(weights, tokens, 2, fusion, shape, prefix_lengths={2: prefix}, jitter={2: noise})

    table = weights["embedding.word_embeddings.weight"]
    w = {n.split(".")[1]: v for n, v in weights.items() if n.startswith("fusion.")}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (D,), w[name], SHAPE.eps)

    e = table[tokens]
    first = reference_decoder(weights, e, shape)
    previous = torch.roll(first + noise, 1, dims=1)
    if fusion == "gated":
        gate = torch.sigmoid(norm(e, "gate_norm") @ w["gate_proj"].T)
        fused = norm((previous @ w["state_proj"].T) * gate, "fused_norm")
    elif fusion == "additive":
        fused = e + norm(previous, "adapter_norm") @ w["adapter_proj"].T
    else:
        both = torch.cat([norm(previous, "state_norm"), norm(e, "gate_norm")], -1)
        fused = norm(both @ w["concat_proj"].T, "fused_norm")
    is_plain = torch.arange(7)[None] < torch.tensor(prefix)
    second = reference_decoder(weights, torch.where(is_plain[..., None], e, fused), shape)
    for k, states in enumerate([first, second]):
        assert distance(result.states[k], states) < 1e-9
        nll = F.cross_entropy((states @ table.T).transpose(1, 2), labels, reduction="none")
        assert distance(result.losses[k], (nll * loss_mask).sum() / loss_mask.sum()) < 1e-9


def test_objective_weights():
    weights = random_weights("gated")
    tokens, _, _ = random_batch(2, 6)
    mean = run(weights, tokens, 3, "gated", lam=0.5)
    l1, l2, l3 = mean.losses
    assert distance(mean.objective, l1 + 0.5 * (l2 + l3) / 2) < 1e-12
    total = run(weights, tokens, 3, "gated", loss_weighting="sum", lam=0.5)
    assert distance(total.objective, l1 + l2 + l3) < 1e-12
    assert len({round(loss.item(), 6) for loss in mean.losses}) == 3
    one = run(weights, tokens, 1, "gated")
    assert torch.equal(one.objective, l1)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_gradient_through_all_passes_is_the_slope(fusion):
    shape = replace(SHAPE, layers=1)
    weights = random_weights(fusion, shape)
    tokens, _, _ = random_batch(1, 4)
    direction = random_weights(fusion, shape, seed=7)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    objective = run(leaves, tokens, 3, fusion, shape).objective
    gradients = torch.autograd.grad(objective, list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        step = 1e-5 * direction[name]
        up = run(weights | {name: weights[name] + step}, tokens, 3, fusion, shape).objective
        down = run(weights | {name: weights[name] - step}, tokens, 3, fusion, shape).objective
        slope = (up - down).item() / 2e-5
        # Central differences: 1e-10 of truncation times the third derivative, 1e-11 of rounding.
        assert (gradient * direction[name]).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_window_counts_the_position_itself():
    shape = replace(SHAPE, layers=1, window=3)
    weights = random_weights("gated", shape)
    tokens, _, _ = random_batch(1, 8)
    changed = tokens.clone()
    changed[0, 2] = (tokens[0, 2] + 1) % SHAPE.vocab
    moved = (
        run(weights, tokens, 1, "gated", shape).states[0]
        != run(weights, changed, 1, "gated", shape).states[0]
    )
    assert moved.any(-1)[0].tolist() == [2 <= t <= 4 for t in range(8)]
    full = replace(shape, full_every=1)  # the one layer is then a full layer
    states, other = (run(weights, x, 1, "gated", full).states[0] for x in (tokens, changed))
    assert (states != other).any(-1)[0].tolist() == [t >= 2 for t in range(8)]
    every_third = replace(shape, layers=7, full_every=3)  # full: the third and the sixth layer
    assert [every_third.window_of(i) for i in range(7)] == [3, 3, None, 3, 3, None, 3]


def test_padded_vocabulary_rows_do_not_count():
    weights = random_weights("gated")
    tokens, _, _ = random_batch(2, 6)
    name = "embedding.word_embeddings.weight"
    padding = torch.full((3, D), 2.0, dtype=torch.float64)
    padded = weights | {name: torch.cat([weights[name], padding]).requires_grad_()}
    result = run(padded, tokens, 2, "gated")
    assert torch.equal(result.objective, run(weights, tokens, 2, "gated").objective)
    result.objective.backward()
    gradient = padded[name].grad
    assert gradient is not None
    assert gradient[-3:].abs().max() == 0
    assert gradient[:-3].abs().max() > 0


def test_draws_for_passes_that_do_not_exist_are_refused():
    weights = random_weights("gated")
    tokens, _, _ = random_batch(1, 4)
    for k in (1, 3):
        with pytest.raises(AssertionError):
            run(weights, tokens, 2, "gated", prefix_lengths={k: [[1]]})


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the lines "philox4x32 10" of Random123's kat_vectors
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter, key, words):
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    assert philox_scalar((k0, k1), (c0, c1, c2, c3)) == [int(word, 16) for word in words.split()]


def test_jitter_words_and_keys():
    seed, sample, k, position = (5 << 32) + 7, (3 << 32) + 9, 2, 4
    noise = jitter_noise(seed, sample, k, position, 6, 0.02)
    key, rest = (7, 5 ^ 0x6A697474), (9, (2 << 16) | 3)
    words = philox_scalar(key, (4, 0, *rest)) + philox_scalar(key, (4, 1, *rest))
    # One fp32 product: its relative error is at most 2 ** -24, as is that of sigma * 2 ** -23.
    expected = [0.02 * ((word >> 8) / 2**23 - 1) for word in words[:6]]
    assert noise.dtype == torch.float32
    assert noise.tolist() == pytest.approx(expected, rel=2.0**-22)
    high = 1 << 32
    for other in (
        (seed + 1, sample, k, position),
        (seed + high, sample, k, position),
        (seed, sample + 1, k, position),
        (seed, sample + high, k, position),
        (seed, sample, k + 1, position),
        (seed, sample, k, position + 1),
    ):
        assert not torch.isclose(noise, jitter_noise(*other, 6, 0.02)).any()


def test_jitter_is_uniform():
    noise = jitter_rows(1, [0, 1], 2, 64, 16, 0.02) / 0.02
    assert noise.shape == (2, 64, 16)
    assert noise.min() >= -1
    assert noise.max() <= 1
    # 2,048 draws of variance 1/3: the mean's deviation is 0.0128, that of the square's mean 0.0066.
    assert abs(noise.mean()) < 4 * 0.0128
    assert abs(noise.square().mean() - 1 / 3) < 4 * 0.0066


def test_prefix_lengths():
    draws = [prefix_length(11, sample, 2, 0, 5) for sample in range(2000)]
    for p in range(1, 6):  # 400 expected each, deviation 17.9
        assert abs(draws.count(p) - 400) < 4 * 18
    assert set(draws) == {1, 2, 3, 4, 5}
    word = philox_scalar((11, 0x70726566), (4, 0, 8, 3 << 16))[0]
    assert prefix_length(11, 8, 3, 4, 7) == 1 + word * 7 // 2**32
    starts = torch.tensor([[False, False, True, True, False], [True, False, False, False, False]])
    assert prefix_rows(11, [8, 9], 3, starts) == [
        [prefix_length(11, 8, 3, 0, 2), 1, prefix_length(11, 8, 3, 3, 2)],
        [prefix_length(11, 9, 3, 0, 5)],
    ]


def test_drawn_passes_follow_the_mixture():
    mixture = {3: 0.03, 1: 0.75, 2: 0.22}
    draws = [drawn_passes(5, iteration, 0, mixture) for iteration in range(10_000)]
    for passes, share in mixture.items():  # binomial deviation, four of them
        assert abs(draws.count(passes) - 10_000 * share) < 4 * (10_000 * share * (1 - share)) ** 0.5
    ascending = dict(sorted(mixture.items()))
    assert [drawn_passes(5, i, 0, ascending) for i in range(100)] == draws[:100]
    assert {drawn_passes(5, i, 0, {1: 0.0, 2: 1.0}) for i in range(100)} == {2}
    assert [drawn_passes(5, i, 1, mixture) for i in range(100)] != draws[:100]
    u = philox_scalar((5, 0x70617373), (1, 0, 6, 2))[0] / 2**32
    assert drawn_passes(5, (2 << 32) + 6, 1, {1: u, 2: 1 - u}) == 2  # must exceed u, not reach it
    assert drawn_passes(5, (2 << 32) + 6, 1, {1: u + 2**-32, 2: 1 - u}) == 1
