"""The reference core attention against torch's own attention on the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megalatent import platform

platform.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megalatent.model.attention import LocalAttention, ReferenceAttention, attend  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402

HEADS, GROUPS, DIM, BATCH = 4, 2, 8, 2
# Sums of at most 48 products in fp32, in another order than SDPA's.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def _config(**changes: Any) -> TransformerConfig:
    arguments: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**{**arguments, **changes})


def _inputs(length: int, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value `[s, b, heads, d]` and the gradient of the output `[s, b, heads * d]`."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    key, value = draw(length, batch, GROUPS, DIM), draw(length, batch, GROUPS, DIM)
    return draw(length, batch, HEADS, DIM), key, value, draw(length, batch, HEADS * DIM)


def _sdpa(seen: Tensor, length: int, batch: int = BATCH) -> list[Tensor]:
    """Output and gradients of query, key and value of torch's attention, `[s, b, …]`."""
    query, key, value, grad = _inputs(length, batch)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]


def _zigzag(length: int, cp: int, rank: int) -> list[int]:
    """Positions of a CP rank, written down independently of the package."""
    chunks = torch.arange(length).tensor_split(2 * cp)
    return (
        [*chunks[rank].tolist(), *chunks[2 * cp - 1 - rank].tolist()]
        if cp > 1
        else [*range(length)]
    )


def _run(
    rank: int,
    cp: int,
    positions: list[list[int]],
    config: dict[str, Any],
    layer: int,
    mask: Tensor | None,
    packing: list[int] | None,
) -> list[Tensor]:
    init(Layout(cp=cp))
    made = _config(context_parallel_size=cp, **config)
    kind = ReferenceAttention if cp > 1 else LocalAttention
    attention = kind(made, layer, AttnMaskType.causal, "self")
    own = torch.tensor(positions[rank])
    length = sum(len(p) for p in positions)
    batch = BATCH if packing is None else 1
    leaves = [x[own].requires_grad_() for x in _inputs(length, batch)[:3]]
    grad = _inputs(length, batch)[3][own]
    params = None
    inputs = leaves
    if packing is not None:
        boundaries = torch.tensor(packing, dtype=torch.int32)
        params = PackedSeqParams("thd", boundaries, boundaries)
        inputs, grad = [x.squeeze(1) for x in leaves], grad.squeeze(1)
    local_mask = None if mask is None else mask[:, :, own]
    out = attention(*inputs, local_mask, packed_seq_params=params)
    out.backward(grad)
    if packing is not None:
        out = out[:, None]
    return [out.detach(), *(x.grad for x in leaves)]


def _compare(
    cp: int,
    length: int,
    seen: Tensor,
    *,
    config: dict[str, Any] | None = None,
    layer: int = 1,
    mask: Tensor | None = None,
    packing: list[int] | None = None,
) -> None:
    if packing is None:
        positions = [_zigzag(length, cp, rank) for rank in range(cp)]
    else:
        positions = [
            [a + p for a, b in pairwise(packing) for p in _zigzag(b - a, cp, rank)]
            for rank in range(cp)
        ]
    args = (cp, positions, config or {}, layer, mask, packing)
    results = run_ranks(cp, _run, *args)
    order = torch.tensor(list(chain.from_iterable(positions)))
    wanted = _sdpa(seen, length, BATCH if packing is None else 1)
    for i, want in enumerate(wanted):
        got = torch.empty_like(want)
        got[order] = torch.cat([result[i] for result in results])
        torch.testing.assert_close(got, want, **CLOSE)


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("cp", [1, 2])
def test_causal(cp: int) -> None:
    _compare(cp, 24, _causal(24))


@pytest.mark.parametrize("cp", [1, 2])
def test_window_on_the_layers_that_have_one(cp: int) -> None:
    """Window (3, 0): the position itself and three before; every second layer is full."""
    config = {"window_size": (3, 0), "window_attn_skip_freq": 2}
    band = _causal(24) & ~_causal(24).tril(-4)
    _compare(cp, 24, band, config=config, layer=1)
    _compare(cp, 24, _causal(24), config=config, layer=2)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_explicit_mask(cp: int, window: tuple[int, int] | None) -> None:
    """A mask per row, with document starts at odd places; a window applies on top of it."""
    documents = torch.stack([torch.arange(24) >= 7, torch.arange(24) >= 13]).int()
    seen = _causal(24) & (documents[:, :, None] == documents[:, None, :])
    if window:
        seen = seen & ~_causal(24).tril(-4)
    full = documents[:, :, None] == documents[:, None, :]
    mask = ~(_causal(24) & full)[:, None]
    _compare(cp, 24, seen[:, None], config={"window_size": window}, mask=mask)


def _documents(boundaries: list[int]) -> Tensor:
    number = torch.zeros(boundaries[-1], dtype=torch.long)
    for start in boundaries[1:-1]:
        number[start:] += 1
    return _causal(boundaries[-1]) & (number[:, None] == number[None, :])


@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize(
    ("cp", "boundaries"), [(1, [0, 5, 6, 17, 24]), (2, [0, 4, 16, 24]), (1, [0, 24])]
)
def test_packed(cp: int, boundaries: list[int], window: tuple[int, int] | None) -> None:
    seen = _documents(boundaries)
    if window:
        seen = seen & ~_causal(24).tril(-4)
    _compare(cp, 24, seen, config={"window_size": window}, packing=boundaries)


def _padded(rank: int) -> list[Tensor]:
    """Two documents of 5 and 3 positions, padded to 8 and 4 so that CP 2 can split them."""
    init(Layout(cp=2))
    attention = ReferenceAttention(_config(context_parallel_size=2), 1, AttnMaskType.causal, "self")
    own = [a + p for a, n in ((0, 8), (8, 4)) for p in _zigzag(n, 2, rank)]
    query, key, value, _ = (x[own].squeeze(1) for x in _inputs(12, 1))
    boundaries, padded = torch.tensor([0, 5, 8]), torch.tensor([0, 8, 12])
    params = PackedSeqParams("thd", boundaries, boundaries, padded, padded)
    return [torch.tensor(own), attention(query, key, value, None, packed_seq_params=params)]


def test_padding_of_odd_documents_changes_no_real_position() -> None:
    real = [*range(5), *range(8, 11)]
    query, key, value, _ = (x[real] for x in _inputs(12, 1))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=_documents([0, 5, 8]), enable_gqa=True)
    got = torch.empty(12, HEADS * DIM)
    for own, out in run_ranks(2, _padded):
        got[own] = out
    torch.testing.assert_close(got[real], want.permute(2, 0, 1, 3).flatten(2)[:, 0], **CLOSE)


def test_a_row_that_sees_nothing_is_finite() -> None:
    query, key, value, grad = _inputs(6)
    query.requires_grad_()
    out = attend(query, key, value, torch.ones(6, 6, dtype=torch.bool), 1.0)
    out.backward(grad)
    mean = value.mean(0, keepdim=True).repeat_interleave(2, dim=2).flatten(2).expand(6, -1, -1)
    torch.testing.assert_close(out.detach(), mean, **CLOSE)
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_sixteen_bit_inputs_keep_their_type_and_gain_precision() -> None:
    """Scores in fp32: the error is the rounding of the output, 2^-9 relative for bf16."""
    query, key, value, _ = (x.double() for x in _inputs(24))
    masked = ~_causal(24)
    q, k, v = (x.bfloat16() for x in (query, key, value))
    out = attend(q, k, v, masked, 1 / math.sqrt(DIM))
    exact = attend(q.double(), k.double(), v.double(), masked, 1 / math.sqrt(DIM))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


def _equal_to_megatron(rank: int, changes: dict[str, Any], mask: Tensor | None) -> bool:
    init(Layout())
    found = []
    for kind in (DotProductAttention, LocalAttention):
        leaves = [x.requires_grad_() for x in _inputs(24)[:3]]
        attention = kind(_config(**changes), 1, AttnMaskType.causal, "self")
        out = attention(*leaves, mask)
        out.backward(_inputs(24)[3])
        found.append([out, *(x.grad for x in leaves)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_ordinary_batches_equal_megatron_bit_for_bit(
    window: tuple[int, int] | None, masked: bool
) -> None:
    mask = ~_causal(24).expand(BATCH, 1, -1, -1) if masked else None
    assert run_ranks(1, _equal_to_megatron, {"window_size": window}, mask) == [True]


def _error(rank: int, make: Callable[[], Any]) -> str:
    init(Layout(cp=2) if torch.distributed.get_world_size() == 2 else Layout())
    with pytest.raises(ValueError, match=r".") as caught:
        make()
    return str(caught.value)


def test_what_it_lacks_is_refused() -> None:
    def build(**changes: Any) -> Any:
        config = _config(context_parallel_size=2, **changes)
        return ReferenceAttention(config, 1, AttnMaskType.causal, "self")

    def packed(boundaries: list[int]) -> None:
        query, key, value, _ = (x.squeeze(1) for x in _inputs(6, 1))
        ends = torch.tensor(boundaries)
        params = PackedSeqParams("thd", ends, ends)
        build()(query, key, value, None, packed_seq_params=params)

    assert (
        "set attention_dropout: 0" in run_ranks(2, _error, lambda: build(attention_dropout=0.1))[0]
    )
    assert (
        "softmax_type: vanilla" in run_ranks(2, _error, lambda: build(softmax_type="off-by-one"))[0]
    )
    assert "multiple of 4" in run_ranks(2, _error, lambda: packed([0, 6, 12]))[0]
    assert "must be its length" in run_ranks(2, _error, lambda: packed([0, 8]))[0]
