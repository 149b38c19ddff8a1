"""Ordered statistics: properties, oracles (scipy), and seeded simulations of the interval."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvbench.timing.reservoir import KEEP_LIMIT, keep
from kvbench.timing.summary import (
    Summary,
    interval,
    lag1,
    median_interval,
    median_ranks,
    rate_interval,
    spread,
    summarise,
    time_interval,
)

seconds = st.lists(st.floats(1e-7, 1e2), min_size=1, max_size=60).map(np.array)
few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
ORDER_FREE = ("n", "median", "middle", "mad", "q1", "q3", "p5", "p95", "p99", "min", "max", "mild", "severe", "bimodal")


@few
@given(seconds, st.randoms(use_true_random=False))
def test_order_free(values: np.ndarray, random: object) -> None:
    shuffled = values.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = summarise(values), summarise(shuffled)
    for name in ORDER_FREE:
        assert getattr(one, name) == getattr(other, name), name


@few
@given(seconds, st.integers(-8, 8))
def test_scale_equivariant(values: np.ndarray, power: int) -> None:
    scale = 2.0**power  # exact in floating point
    one, other = summarise(values), summarise(values * scale)
    for name in ("median", "mad", "q1", "q3", "p5", "p95", "p99", "min", "max", "low", "high"):
        mine = getattr(one, name)
        assert getattr(other, name) == (None if mine is None else pytest.approx(mine * scale, rel=1e-12)), name
    assert (one.mild, one.severe, one.bimodal, one.ci) == (other.mild, other.severe, other.bimodal, other.ci)


@few
@given(seconds)
def test_ordered_and_nested(values: np.ndarray) -> None:
    s = summarise(values)
    assert s.min <= s.p5 <= s.q1 <= s.median <= s.q3 <= s.p95 <= s.p99 <= s.max
    assert s.middle[0] <= s.median * (1 + 1e-15)
    assert s.mild >= 0
    assert s.mild + s.severe <= s.n
    assert (s.low is None) == (s.high is None) == (s.n < 6)
    if s.low is not None and s.high is not None:
        assert s.min <= s.low <= s.median <= s.high <= s.max


@few
@given(seconds, st.floats(1.0, 1e12))
def test_rate_swaps_bounds_and_takes_quantiles_of_rates(values: np.ndarray, amount: float) -> None:
    s = summarise(values)
    rate = rate_interval(amount, s)
    assert rate.value == pytest.approx(float(np.median(amount / values)), rel=1e-12)
    if s.low is not None and s.high is not None:
        assert (rate.low, rate.high) == (amount / s.high, amount / s.low)
        assert rate.low is not None
        assert rate.high is not None
        assert rate.low <= rate.value * (1 + 1e-12)
        assert rate.value <= rate.high * (1 + 1e-12)


def test_rate_is_not_the_mean_of_rates() -> None:
    s = summarise(np.array([1.0, 1.0, 1.0, 1.0, 0.01]))
    assert rate_interval(100.0, s).value == 100.0
    assert rate_interval(100.0, s).low is None
    with pytest.raises(ValueError, match="no rate"):
        rate_interval(0.0, s)


def test_time_interval_divides_by_operations() -> None:
    s = summarise(np.arange(1.0, 10.0))
    found = time_interval(s, 5.0)
    assert (found.value, found.low, found.high) == (1.0, 2.0 / 5.0, 8.0 / 5.0)


@pytest.mark.parametrize("n", [*range(1, 130), 1000, 4999, 20_000])
def test_ranks_are_exact(n: int) -> None:
    ranks = median_ranks(n)
    if n < 6:
        assert ranks is None
        return
    assert ranks is not None
    low, high = ranks
    assert high == n - 1 - low
    assert stats.binom.cdf(low, n, 0.5) <= 0.025  # P(B < r) with r = low + 1
    assert stats.binom.cdf(low + 1, n, 0.5) > 0.025  # the next narrower interval would not do


@pytest.mark.parametrize("n", [6, 11, 30])
def test_coverage_of_the_median(n: int) -> None:
    random = np.random.default_rng(n)
    draws = np.sort(random.lognormal(size=(2000, n)), axis=1)
    hits = sum(low <= 1.0 <= high for row in draws if (found := median_interval(row)) for low, high in [found])
    assert 0.94 <= hits / 2000 <= 0.99


def test_block_interval_covers_where_the_plain_one_does_not() -> None:
    random = np.random.default_rng(3)
    plain = block = 0
    for _ in range(200):
        noise = random.standard_normal(400)
        for i in range(1, 400):
            noise[i] += 0.8 * noise[i - 1]
        values = np.exp(0.01 * noise[100:])
        narrow, wide = median_interval(np.sort(values)), interval(values)
        assert narrow is not None
        assert wide is not None
        assert wide[2] == "block"
        plain += narrow[0] <= 1.0 <= narrow[1]
        block += wide[0] <= 1.0 <= wide[1]
    assert plain / 200 < 0.75  # statistics.md 4b: 0.47 to 0.57
    assert block / 200 > 0.85


def test_moments_against_scipy() -> None:
    values = np.random.default_rng(1).lognormal(size=157)
    s = summarise(values)
    assert s.mad == pytest.approx(stats.median_abs_deviation(values))
    assert s.q3 - s.q1 == pytest.approx(stats.iqr(values))
    assert s.median == float(np.median(values))
    assert (s.p5, s.p99) == pytest.approx(tuple(np.percentile(values, (5, 99))))


def test_fences_are_counted_on_both_sides_and_once() -> None:
    base = np.linspace(100.0, 104.0, 41)  # quartiles 101 and 103 shift little with four more
    s = summarise(np.concatenate((base, [96.5, 108.0, 80.0, 130.0])))
    assert (s.mild, s.severe) == (2, 2)


def test_drift_and_lag_see_a_ramp() -> None:
    s = summarise(np.linspace(1.0, 1.1, 100))
    assert s.drift == pytest.approx(0.05 / 1.025, rel=0.02)
    assert s.lag1 is not None
    assert s.lag1 > 0.9
    assert s.ci == "block"


def test_lag_is_not_hidden_by_one_stall() -> None:
    values = np.tile([1.0, 1.02], 50)
    values[40] = 1000.0
    found = lag1(values)
    assert found is not None
    assert found < -0.9


def test_equal_samples_have_no_spread() -> None:
    s = summarise(np.full(50, 0.1))
    assert (s.lag1, s.drift, s.mad, s.low, s.high, s.mild, s.severe, s.bimodal) == (
        0.0,
        0.0,
        0.0,
        0.1,
        0.1,
        0,
        0,
        False,
    )
    found = spread(np.full(50, 0.1))
    assert (found.half_width, found.noise) == (0.0, 0.0)


def test_bimodal_needs_two_clusters() -> None:
    random = np.random.default_rng(5)
    one = np.exp(0.01 * random.standard_normal(200))
    assert not summarise(one).bimodal
    assert summarise(np.concatenate((one[:100], 1.3 * one[100:]))).bimodal
    assert not summarise(np.concatenate((one, [5.0, 5.1]))).bimodal  # two stalls are a tail
    assert not summarise(np.repeat([1.0, 1.0 + 1e-4], 50)).bimodal  # two ticks of a clock


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")], [[1.0]]])
def test_values_no_clock_gives_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="samples"):
        summarise(np.array(bad))


def test_reservoir_keeps_order_seed_and_limit() -> None:
    values = np.arange(5000, dtype=np.float64) + 1.0
    one, again, other = keep(values, 1), keep(values, 1), keep(values, 2)
    assert len(one) == KEEP_LIMIT == len(set(one))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.all(np.diff(one) > 0)
    assert np.array_equal(keep(values[:10]), values[:10])
    assert summarise(values).kept == KEEP_LIMIT
    assert abs(one.mean() - values.mean()) < 150  # 3 standard errors of the mean are 137


def test_summary_is_frozen() -> None:
    s = summarise(np.array([1.0]))
    assert isinstance(s, Summary)
    with pytest.raises(AttributeError):
        s.median = 2.0  # type: ignore[misc]
