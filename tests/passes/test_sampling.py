"""Draws of K: shares, phases, keys. The reference draws are `tests.oracle.draws`."""

from __future__ import annotations

from collections import Counter

import pytest

from megalatent.passes.sampling import PassSampler, pass_weight
from tests.oracle.draws import drawn_passes

MIXTURES = [
    {1: 0.75, 2: 0.22, 3: 0.03},
    {2: 0.934, 3: 0.066},
    {1: 0.5, 4: 0.5},
    {1: 0.34, 2: 0.33, 3: 0.33},
]
SEED = (7 << 32) + 11


def _sampler(mixture: dict[int, float], **options: object) -> PassSampler:
    given: dict = {"train_iters": 1000, "seed": SEED, **options}
    return PassSampler([(0, mixture)], **given)


def _assert_shares(counted: Counter[int], mixture: dict[int, float]) -> None:
    """Within four standard deviations of a binomial draw."""
    total = counted.total()
    assert counted.keys() <= mixture.keys()
    for passes, share in mixture.items():
        deviation = (total * share * (1 - share)) ** 0.5
        assert abs(counted[passes] - total * share) < 4 * deviation, passes


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_shares_over_10_000_batches(mixture: dict[int, float]) -> None:
    sampler = _sampler(mixture)
    draws = [sampler.passes(iteration, 3) for iteration in range(10_000)]
    assert all(len(set(drawn)) == 1 for drawn in draws)  # one K for the whole batch
    _assert_shares(Counter(drawn[0] for drawn in draws), mixture)
    # Neighbours are independent: the pair (K, K) is as frequent as the product says.
    pairs = Counter(int(a[0] == b[0]) for a, b in zip(draws[::2], draws[1::2], strict=True))
    same = sum(share**2 for share in mixture.values())
    _assert_shares(pairs, {1: same, 0: 1 - same})


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_shares_over_10_000_micro_batches(mixture: dict[int, float]) -> None:
    sampler = _sampler(mixture, draw="micro_batch")
    draws = [sampler.passes(iteration, 10) for iteration in range(1000)]
    _assert_shares(Counter(k for drawn in draws for k in drawn), mixture)
    assert len({len(set(drawn)) for drawn in draws}) > 1


def test_draws_are_the_oracles() -> None:
    mixture = MIXTURES[0]
    batch, each = _sampler(mixture), _sampler(mixture, draw="micro_batch")
    for iteration in [*range(200), (1 << 32) + 3]:
        assert batch.passes(iteration, 2) == (drawn_passes(SEED, iteration, 0, mixture),) * 2
        assert each.passes(iteration, 4) == tuple(
            drawn_passes(SEED, iteration, index, mixture) for index in range(4)
        )


def test_draws_depend_on_seed_iteration_and_index_alone() -> None:
    """So every rank of every layout draws the same, and so does a run that has been restarted."""
    mixture = MIXTURES[3]
    whole = [_sampler(mixture, draw="micro_batch").passes(i, 8) for i in range(100)]
    late = _sampler(mixture, draw="micro_batch")
    assert [late.passes(i, 8) for i in range(99, 49, -1)] == whole[:49:-1]
    # A replayed iteration and another number of micro-batches change nothing.
    assert late.passes(60, 8) == late.passes(60, 8) == whole[60]
    assert late.passes(60, 3) == whole[60][:3]
    other = _sampler(mixture, draw="micro_batch", seed=SEED + 1)
    high = _sampler(mixture, draw="micro_batch", seed=SEED + (1 << 32))
    for sampler in (other, high):
        assert [sampler.passes(i, 8) for i in range(100)] != whole


def test_shares_do_not_depend_on_their_order() -> None:
    up, down = {1: 0.5, 2: 0.5}, {2: 0.5, 1: 0.5}
    for iteration in range(50):
        assert _sampler(up).passes(iteration, 1) == _sampler(down).passes(iteration, 1)


@pytest.mark.parametrize(
    ("starts", "boundaries"),
    [
        pytest.param([0, 3, 7], [3, 7], id="iterations"),
        pytest.param([0, 0.3, 0.7], [3, 7], id="fractions"),
        pytest.param([0.0, 3, 0.7], [3, 7], id="both"),
        pytest.param([0, 0.25, 0.96], [2, 10], id="rounded"),  # 2.5 -> 2, 9.6 -> 10: never reached
    ],
)
def test_phases(starts: list[int | float], boundaries: list[int]) -> None:
    schedule = [(start, {passes: 1.0}) for passes, start in enumerate(starts, 1)]
    sampler = PassSampler(schedule, train_iters=10, seed=1)
    drawn = [sampler.passes(iteration, 1)[0] for iteration in range(10)]
    assert drawn == [1 + sum(i >= boundary for boundary in boundaries) for i in range(10)]


def test_zero_share_is_never_drawn() -> None:
    sampler = _sampler({1: 0.0, 2: 1.0, 3: 0.0})
    assert {sampler.passes(iteration, 1)[0] for iteration in range(1000)} == {2}


@pytest.mark.parametrize(
    ("weighting", "lambda_", "passes", "expected"),
    [
        ("mean", 1.0, 1, [1]),
        ("mean", 1.0, 2, [1, 1]),
        ("mean", 0.5, 3, [1, 0.25, 0.25]),  # FBT eq. 12
        ("mean", 0.0, 2, [1, 0]),
        ("sum", 1.0, 4, [1, 1, 1, 1]),  # Recycler eq. 4
    ],
)
def test_weights(weighting, lambda_: float, passes: int, expected: list[float]) -> None:
    weights = [
        pass_weight(k, passes, weighting=weighting, lambda_=lambda_) for k in range(1, passes + 1)
    ]
    assert weights == expected
