"""Budgets of the profiles and the rule that stops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvbench.errors import UsageError
from kvbench.timing.budget import BUDGETS, StopRule, budget
from kvbench.timing.clock import quantum


def test_profiles_are_those_of_the_design() -> None:
    smoke, quick, full = budget("smoke"), budget("quick"), budget("full")
    assert (smoke.warm_calls, smoke.fixed_samples, smoke.cap_seconds) == (1, 6, 0.5)
    for limits, cap in ((quick, 2.0), (full, 15.0)):
        assert (limits.warm_seconds, limits.warm_calls) == (0.2, 3)
        assert (limits.min_samples, limits.min_seconds, limits.cap_seconds) == (30, 0.5, cap)
        assert limits.max_samples == 20_000
        assert limits.target_seconds() >= 1_000 * quantum().seconds


def test_unknown_profile_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"unknown profile, got 'quik'.*did you mean 'quick'"):
        budget("quik")


@pytest.mark.parametrize(
    "wrong", [{"warm_calls": 0}, {"min_samples": 2}, {"fixed_samples": 2}, {"growth": 1.0}, {"max_samples": 10}]
)
def test_budgets_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        replace(BUDGETS["full"], **wrong)


def noisy(n: int, sd: float, seed: int = 0) -> np.ndarray:
    return 1e-3 * np.exp(sd * np.random.default_rng(seed).standard_normal(n))


def looked(values: np.ndarray, profile: str = "full", seconds: float = 1.0) -> StopRule:
    rule = StopRule(budget(profile))
    rule.look(values, len(values), seconds)
    return rule


def test_quiet_samples_converge() -> None:
    assert looked(noisy(60, 0.001)).stop == "converged"


def test_nothing_converges_before_its_time_or_count() -> None:
    assert looked(noisy(60, 0.001), seconds=0.4).verdict is None
    assert looked(noisy(29, 0.001)).verdict is None


def test_drift_does_not_converge_however_narrow() -> None:
    values = noisy(4000, 0.001) * np.where(np.arange(4000) < 2000, 1.0, 1.01)
    assert looked(values).verdict is None


def test_correlated_samples_need_the_block_interval() -> None:
    noise = np.random.default_rng(2).standard_normal(600)
    for i in range(1, 600):
        noise[i] += 0.95 * noise[i - 1]
    values = 1e-3 * np.exp(0.006 * noise)
    assert looked(values).verdict is None
    assert looked(np.random.default_rng(0).permutation(values)).verdict == "converged"


def test_next_look_grows_by_half() -> None:
    rule = looked(noisy(30, 0.1))
    assert rule.next_count == 46
    rule.look(noisy(40, 0.0001), 40, 1.0)
    assert rule.verdict is None  # not due yet


def test_plateau_of_noise_stops_early() -> None:
    rule = StopRule(budget("quick"))
    values = noisy(2000, 0.15, seed=4)
    stops = []
    for n in (400, 700, 1100, 1700):
        rule.look(values[:n], n, n * 1e-3)
        stops.append(rule.verdict)
    assert stops[:2] == [None, None]
    assert "stabilised_noisy" in stops
    assert not rule.capped


def test_growing_noise_is_no_plateau() -> None:
    rule = StopRule(budget("full"))
    for n, sd in ((400, 0.2), (700, 0.4), (1100, 0.8), (1700, 1.6)):
        rule.look(noisy(n, sd), n, n * 1e-3)
        assert rule.verdict is None


def test_cap_wins_after_three() -> None:
    assert not looked(noisy(2, 0.1), "quick", seconds=30.0).capped
    rule = looked(noisy(3, 0.1), "quick", seconds=30.0)
    assert rule.capped
    assert rule.stop == "timeout"


def test_cap_counts_disturbed_samples_too() -> None:
    rule = StopRule(budget("quick"))
    rule.look(noisy(1, 0.1), 3, 30.0)
    assert rule.capped


def test_smoke_stops_at_six_and_calls_only_quiet_ones_converged() -> None:
    assert looked(noisy(5, 0.0001), "smoke", 0.1).verdict is None
    assert looked(noisy(6, 0.0001), "smoke", 0.1).stop == "converged"
    assert looked(noisy(6, 0.1), "smoke", 0.1).stop == "stabilised_noisy"
    under = looked(noisy(5, 0.0001), "smoke", 0.6)
    assert under.capped
    assert under.stop == "timeout"
