"""Change points: found where they were put, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvbench.analysis.changes import _ranks, _ties, changes


def noise(n: int, seed: int = 0, cv: float = 0.01) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.exp(np.random.default_rng(seed).normal(0.0, cv, n))


def test_a_step_is_found_with_its_levels() -> None:
    series = noise(100)
    series[60:] *= 1.1
    (found,) = changes(series)
    assert abs(found.index - 60) <= 1
    assert found.ratio == pytest.approx(1.1, rel=0.02)
    assert found.p < 1e-6


def test_two_steps_up_and_down() -> None:
    series = noise(120, 1)
    series[40:80] *= 0.9
    found = changes(series)
    assert [abs(c.index - at) <= 1 for c, at in zip(found, (40, 80), strict=True)] == [True, True]
    assert found[0].after == pytest.approx(found[1].before)


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11])
def test_short_series_have_no_levels_to_tell_apart(length: int) -> None:
    assert changes(noise(length)) == []


def test_single_spikes_are_no_change() -> None:
    series = noise(100, 2)
    series[[20, 21, 50, 90]] *= 3.0
    assert changes(series) == []


def test_a_step_below_the_margin_is_none() -> None:
    series = noise(100, 3, cv=0.0005)
    series[50:] *= 1.015
    assert changes(series) == []
    assert len(changes(series, margin=0.01)) == 1


def test_a_constant_series_has_no_change() -> None:
    assert changes([5.0] * 50) == []


def test_an_accepted_level_is_not_reported_and_hides_no_other_change() -> None:
    series = noise(120, 4)
    series[40:] *= 1.1
    series[80:] *= 1.1
    assert len(changes(series)) == 2
    (left,) = changes(series, accepted=[40])
    assert abs(left.index - 80) <= 1


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_value_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive finite"):
        changes([1.0, bad, 1.0])


def test_ranks_and_ties_are_scipys() -> None:
    values = np.array([3.0, 1.0, 2.0, 2.0, 3.0, 3.0])
    assert _ranks(values).tolist() == stats.rankdata(values).tolist()
    counts = np.array([1, 2, 3])
    assert _ties(values) == float((counts**3 - counts).sum())


def test_five_runs_that_all_lie_apart_are_a_new_level() -> None:
    series = [*noise(13, 5), *(noise(5, 6) * 0.77)]
    (found,) = changes(series)
    assert found.index == 13
    assert changes([*noise(13, 5), *(noise(2, 6) * 0.77)]) == []


@pytest.mark.parametrize(("before", "low", "after"), [(30, 10, 30), (10, 8, 10), (20, 8, 20), (30, 6, 5), (60, 5, 60)])
def test_a_drop_that_comes_back_is_two_changes(before: int, low: int, after: int) -> None:
    series = noise(before + low + after, 7, cv=0.003)
    series[before : before + low] *= 0.7
    assert [change.index for change in changes(series)] == [before, before + low]


def test_a_drop_that_comes_back_is_found_among_outliers() -> None:
    series = noise(100, 8)
    series[40:60] *= 0.9
    series[[5, 25, 75]] *= 2.0
    assert len(changes(series)) == 2
