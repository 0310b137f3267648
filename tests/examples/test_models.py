"""The examples' models have the parameters that they are said to have, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.built import build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["recycler-moe-1b", "recycler-third-pass"])
def test_recyclers_mixture_of_experts(name: str) -> None:
    """About 1B, of which a token meets about 151M (Recycler); experts on 8 ranks."""
    vocabulary, hidden, layers = 49_152, 768, 12
    heads, head = 12, 64
    experts, chosen, width = 64, 6, 512
    attention = 4 * hidden * hidden + 2 * head  # Q, K, V, output; norms of Q and K
    router, norms = experts * hidden, 2 * hidden
    expert = 3 * hidden * width
    fusion = hidden * hidden + hidden
    assert heads * head == hidden
    shared = vocabulary * hidden + layers * (attention + router + norms) + hidden + fusion
    # Every rank has what is shared, and an eighth of the experts.
    for rank in (0, 7):
        built = build(EXAMPLES / f"{name}.yaml", 8, rank=rank, moe_grouped_gemm=False)
        assert (built.layers, built.fusion) == (layers, fusion)
        assert built.shared == shared
        assert built.experts == layers * experts * expert // 8
    total = shared + layers * experts * expert
    active = shared + layers * chosen * expert
    assert (total, active) == (973_231_104, 152_196_096)
    assert active == pytest.approx(151e6, rel=0.01)
    said = (EXAMPLES / "recycler-moe-1b.yaml").read_text()
    assert f"{total / 1e6:.1f}M parameters, of which a token meets {active / 1e6:.1f}M" in said


def test_long_context_is_the_full_bandwidth_1b() -> None:
    """FBT appendix A, with the gated fusion."""
    vocabulary, hidden, layers, width = 100_352, 1536, 24, 6656
    heads, groups, head = 16, 8, 96
    attention = hidden * head * (2 * heads + 2 * groups) + 2 * head + hidden * heads  # and a gate
    layer = attention + 3 * hidden * width + 4 * hidden  # a norm before and after each branch
    fusion = 2 * hidden * hidden + 2 * hidden
    total = vocabulary * hidden + layers * layer + hidden + fusion
    assert total == 1_065_575_424
    built = build(EXAMPLES / "long-context.yaml", 16, rank=5)
    assert (built.shared, built.experts, built.fusion) == (total, 0, fusion)


def test_continued_model_is_qwen3() -> None:
    """Qwen3-0.6B has 596,049,920 parameters; the additive fusion comes on top."""
    built = build(EXAMPLES / "continue-from-plain.yaml", 8, rank=3)
    assert built.fusion == 1024 * 1024 + 1024
    assert built.shared - built.fusion == 596_049_920
