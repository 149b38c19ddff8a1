"""The rule of the regression gate: two looks of five runs a side, an exact rank test and a margin on each (design 11).

Confirmation by fresh runs is the whole family control: at a between-run CV of 2 % one look flags 3 % of unchanged
cases, both flag 0.12 % (tooling.md 3; ``scripts/simulate`` prints it for the code below).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from kvbench.analysis.effect import LEAST_RUNS, Effect, effect, is_same

if TYPE_CHECKING:
    from kvbench.analysis.effect import Verdict
    from kvbench.contract.result import Better

Outcome = Literal["pass", "regression", "unknown"]
T = TypeVar("T")

RUNS = 5  # a side and look: the least with an exact p far below 0.05
LEVEL = 0.05
NOISY_SD = 0.025  # beyond it the case is judged by its own noise instead of the margin
NOISY_FACTOR = 3.0
BASELINE_SPLIT = 2 * RUNS  # a stored baseline of so many runs has a half for each look


@dataclass(frozen=True, slots=True)
class Rule:
    """What one case has to show: ``margin`` as a fraction; ``run_sd``, the A/A standard deviation of its log run
    medians, None when it was never calibrated."""

    margin: float
    run_sd: float | None

    @property
    def noisy(self) -> bool:
        """Whether runs of unchanged code differ too much for the margin."""
        return self.run_sd is not None and self.run_sd > NOISY_SD

    @property
    def threshold(self) -> float:
        """The loss, as a fraction, that counts."""
        if self.noisy and self.run_sd is not None:
            return max(self.margin, NOISY_FACTOR * self.run_sd)
        return self.margin


@dataclass(frozen=True, slots=True)
class Judged:
    """``verdict`` is what the runs say of the case, ``outcome`` what the gate makes of it; ``reason`` for the user."""

    verdict: Verdict
    outcome: Outcome
    reason: str
    effect: Effect


def flagged(found: Effect, rule: Rule) -> bool:
    """Return whether one look finds the case worse: exact one-sided p below 0.05 and a loss beyond the threshold."""
    return enough(found) and found.worse < LEVEL and found.loss > rule.threshold


def enough(found: Effect) -> bool:
    """Return whether both sides have the runs a rank test needs."""
    return min(found.runs_a, found.runs_b) >= LEAST_RUNS


def judge(first: Effect, rule: Rule, second: Effect | None = None, *, why_no_second: str = "") -> Judged:
    """Return the gate's judgement of a case from its first look and, where that showed a loss, the second one.

    ``why_no_second`` says why such a case could not be looked at again: then it is unknown, never a regression. A loss
    beyond the threshold in both looks that ranks do not both confirm is unknown too: passing it would be a guess.
    """
    if not enough(first):
        return _unknown(first, f"{first.runs_a} and {first.runs_b} runs, {LEAST_RUNS} a side are needed")
    if first.loss <= rule.threshold:
        return _settled(first, rule, "")
    if second is None:
        return _unknown(first, why_no_second or f"{first.loss:+.1%} time, and not looked at again")
    if second.loss <= rule.threshold:
        return _settled(second, rule, f"{first.loss:+.1%} once, not by fresh runs")
    if flagged(first, rule) and flagged(second, rule):
        return Judged("SLOWER", "regression", f"{second.loss:+.1%} time, confirmed by fresh runs", second)
    return _unknown(second, f"{first.loss:+.1%} and {second.loss:+.1%} time, too mixed between runs to tell")


def _settled(found: Effect, rule: Rule, reason: str) -> Judged:
    gain = 1.0 / (1.0 + found.loss) - 1.0  # of speed
    if found.better < LEVEL and gain > rule.threshold:
        return Judged("FASTER", "pass", reason, found)
    if rule.noisy:
        text = f"unchanged code differs by {rule.run_sd:.1%} from run to run: only {rule.threshold:.1%} would show"
        return Judged("INCONCLUSIVE", "unknown", "; ".join(filter(None, (reason, text))), found)
    return Judged("SAME" if is_same(found, rule.margin) else "INCONCLUSIVE", "pass", reason, found)


def _unknown(found: Effect, reason: str) -> Judged:
    return Judged("INCONCLUSIVE", "unknown", reason, found)


def halves(baseline: Sequence[T]) -> tuple[Sequence[T], Sequence[T] | None]:
    """Return the runs of a stored baseline for the first and for the second look.

    It cannot be run again. Both looks at the same runs would share their luck, so ten runs are dealt out in turns;
    fewer serve the first look only, and what that flags stays unconfirmed.
    """
    if len(baseline) >= BASELINE_SPLIT:
        return baseline[0::2], baseline[1::2]
    return baseline, None


def look(a: Sequence[float], b: Sequence[float], better: Better) -> Effect:
    """Return the effect of one look: ``a`` the baseline's run medians, ``b`` the candidate's."""
    return effect(a, b, better)
