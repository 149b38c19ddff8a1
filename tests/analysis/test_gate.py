"""The gate's rule: two looks, a margin, and what it says when it cannot know."""

from __future__ import annotations

import pytest

from kvbench.analysis.gate import Judged, Rule, flagged, halves, judge, look

BASE = [100.0, 101.0, 99.5, 100.4, 100.9]
RULE = Rule(0.02, 0.005)


def slower(factor: float) -> list[float]:
    return [value * factor for value in BASE]


def judged(first: float, second: float | None, rule: Rule = RULE) -> Judged:
    again = None if second is None else look(BASE, slower(second), "higher")
    return judge(look(BASE, slower(first), "higher"), rule, again)


def test_a_loss_shown_twice_is_a_regression() -> None:
    found = judged(0.95, 0.95)
    assert (found.verdict, found.outcome) == ("SLOWER", "regression")
    assert "confirmed" in found.reason


def test_a_loss_shown_once_is_none() -> None:
    found = judged(0.95, 1.0)
    assert (found.verdict, found.outcome) == ("SAME", "pass")
    assert "not by fresh runs" in found.reason


def test_a_flag_nobody_could_confirm_is_unknown() -> None:
    found = judged(0.95, None)
    assert (found.verdict, found.outcome) == ("INCONCLUSIVE", "unknown")
    told = judge(look(BASE, slower(0.9), "higher"), RULE, why_no_second="the baseline has 5 runs")
    assert told.reason == "the baseline has 5 runs"


def test_below_the_margin_nothing_is_flagged_however_clear_the_ranks() -> None:
    tight = [100.0, 100.01, 100.02, 100.03, 100.04]
    first = look(tight, [v * 0.985 for v in tight], "higher")
    assert first.worse < 0.05
    assert not flagged(first, RULE)
    assert judge(first, RULE).outcome == "pass"


def test_a_large_loss_with_mixed_ranks_is_not_flagged() -> None:
    first = look(BASE, [100.5, 100.6, 60.0, 100.7, 100.8], "higher")
    assert first.loss > 0.02
    assert not flagged(first, RULE)


def test_a_gain_is_said_to_be_one() -> None:
    found = judged(1.1, None)
    assert (found.verdict, found.outcome) == ("FASTER", "pass")


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_too_few_runs_are_unknown(runs: int) -> None:
    found = judge(look(BASE[:runs], slower(0.5)[:runs], "higher"), RULE)
    assert (found.verdict, found.outcome) == ("INCONCLUSIVE", "unknown")
    assert "4 a side" in found.reason


def test_a_noisy_case_gates_beyond_three_times_its_noise_only() -> None:
    noisy = Rule(0.02, 0.04)
    assert noisy.threshold == pytest.approx(0.12)
    small = judged(0.93, 0.93, noisy)
    assert (small.verdict, small.outcome) == ("INCONCLUSIVE", "unknown")
    assert "4.0%" in small.reason
    assert judged(0.8, 0.8, noisy).outcome == "regression"


def test_a_case_at_the_limit_of_noise_gates_by_the_margin() -> None:
    assert Rule(0.02, 0.025).threshold == 0.02
    assert Rule(0.02, None).threshold == 0.02


def test_a_baseline_of_ten_serves_two_looks_and_one_of_nine_only_one() -> None:
    ten = [float(i) for i in range(10)]
    first, second = halves(ten)
    assert second is not None
    assert sorted([*first, *second]) == ten
    assert len(first) == len(second) == 5
    assert halves(ten[:9]) == (ten[:9], None)


def test_a_loss_whose_runs_are_mixed_is_looked_at_again_and_never_passed_on_a_guess() -> None:
    mixed = look([1.0] * 5, [1.5, 1.6, 0.99, 1.7, 1.5], "lower")
    assert mixed.loss > 0.02
    assert not flagged(mixed, RULE)
    assert judge(mixed, RULE).outcome == "unknown"
    assert judge(mixed, RULE, mixed).outcome == "unknown"
    assert "too mixed" in judge(mixed, RULE, mixed).reason
    assert judge(mixed, RULE, look(BASE, BASE, "lower")).outcome == "pass"
    clear = look(BASE, slower(0.9), "higher")
    assert judge(mixed, RULE, clear).outcome == "unknown"
    assert judge(clear, RULE, mixed).outcome == "unknown"
