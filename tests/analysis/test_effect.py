"""The effect of one set of runs against another: scipy as the oracle, and the words for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvbench.analysis.effect import effect, is_same, margin, rank_probability, verdict, welch

A = [100.0, 101.0, 99.5, 100.4, 100.9]
values = st.floats(0.5, 2.0)


@pytest.mark.parametrize(("m", "n"), [(5, 5), (4, 6), (3, 3), (10, 5), (1, 4)])
def test_the_rank_probability_is_scipys(m: int, n: int) -> None:
    rng = np.random.default_rng(m * 100 + n)
    for _ in range(10):
        large, small = rng.normal(0.5, 1.0, m), rng.normal(0.0, 1.0, n)
        oracle = stats.mannwhitneyu(large, small, alternative="greater", method="exact").pvalue
        assert rank_probability(list(large), list(small)) == pytest.approx(oracle, abs=1e-12)


def test_ties_are_never_read_as_a_finding() -> None:
    assert rank_probability([1.0] * 5, [1.0] * 5) >= 0.5
    apart = rank_probability([2.0] * 5, [1.0] * 5)
    assert apart == pytest.approx(1 / 252)
    assert rank_probability([2.0] * 4 + [1.0], [1.0] * 5) > apart


def test_three_runs_a_side_cannot_reach_the_level() -> None:
    assert rank_probability([2.0, 2.1, 2.2], [1.0, 1.1, 1.2]) == pytest.approx(0.05)


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_the_interval_is_welchs(confidence: float) -> None:
    rng = np.random.default_rng(3)
    for m, n in ((2, 5), (5, 5), (9, 4)):
        a, b = rng.normal(0, 1, m), rng.normal(0.3, 2, n)
        oracle = stats.ttest_ind(b, a, equal_var=False).confidence_interval(confidence)
        assert welch(list(a), list(b), confidence) == pytest.approx((oracle.low, oracle.high), abs=1e-6)
    assert welch([1.0], [1.0, 2.0], 0.9) is None
    assert welch([1.0, 1.0], [2.0, 2.0], 0.9) == (1.0, 1.0)


def test_the_direction_of_the_metric_decides_what_worse_is() -> None:
    rate = effect(A, [v * 0.95 for v in A], "higher")
    time = effect(A, [v / 0.95 for v in A], "lower")
    assert rate.ratio == pytest.approx(0.95)
    assert rate.loss == pytest.approx(1 / 0.95 - 1)
    assert time.loss == pytest.approx(rate.loss)
    assert (rate.worse, rate.better) == (pytest.approx(time.worse), pytest.approx(time.better))
    assert rate.worse < 0.05 < rate.better


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=2, max_size=8), st.lists(values, min_size=2, max_size=8))
def test_swapping_the_sides_inverts_everything(a: list[float], b: list[float]) -> None:
    one, two = effect(a, b, "higher"), effect(b, a, "higher")
    assert one.ratio * two.ratio == pytest.approx(1.0)
    assert one.worse == pytest.approx(two.better)
    assert one.low is not None
    assert two.high is not None
    assert one.low * two.high == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=6), st.lists(values, min_size=1, max_size=6), st.floats(1e-9, 1e9))
def test_the_unit_does_not_matter(a: list[float], b: list[float], scale: float) -> None:
    plain, scaled = effect(a, b, "lower"), effect([v * scale for v in a], [v * scale for v in b], "lower")
    assert scaled.ratio == pytest.approx(plain.ratio)
    # scaling rounds, and values that round together become ties
    assert scaled.worse == pytest.approx(plain.worse, abs=0.5)


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.nan], [math.inf]])
def test_what_is_no_median_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"run"):
        effect(A, bad, "higher")


@pytest.mark.parametrize(("factor", "word"), [(1.0, "SAME"), (1.10, "FASTER"), (0.9, "SLOWER"), (1.02, "INCONCLUSIVE")])
def test_the_words(factor: float, word: str) -> None:
    assert verdict(effect(A, [v * factor for v in A], "higher"), 0.02) == word


def test_fewer_than_four_runs_decide_nothing() -> None:
    assert verdict(effect(A[:3], [v * 2 for v in A[:3]], "higher"), 0.02) == "INCONCLUSIVE"
    assert verdict(effect(A[:1], [v * 2 for v in A[:1]], "higher"), 0.02) == "INCONCLUSIVE"


def test_same_is_shown_and_not_assumed() -> None:
    noisy = [90.0, 110.0, 100.0, 95.0, 105.0]
    assert not is_same(effect(noisy, noisy, "higher"), 0.02)
    assert verdict(effect(noisy, noisy, "higher"), 0.02) == "INCONCLUSIVE"
    assert is_same(effect(A, A, "higher"), 0.02)


def test_short_windows_widen_the_margin() -> None:
    assert margin(None, events=False) == 0.02
    assert margin(1e-3, events=False) == 0.02
    assert margin(2e-6, events=False) == pytest.approx(0.1)
    assert margin(2e-6, events=True) == pytest.approx(0.5)
