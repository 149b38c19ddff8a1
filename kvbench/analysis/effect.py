"""What two sides of a comparison say: one number a run, nothing else (design 11).

Samples of one process share its luck with physical pages and placement, so fifty of them are one observation: tests on
raw samples call 47 to 94 % of identical pairs different once runs differ by 0.5 to 2 % (statistics.md 4b). Here a run
counts once, by its median, and the effect is a ratio of geometric means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvbench.contract.result import Better

Verdict = Literal["FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "NO_DATA", "TAINTED", "INCOMPARABLE"]

LEAST_RUNS = 4  # three a side cannot reach an exact one-sided p of 0.05 (tooling.md 3)
MARGIN = 0.02
FLOOR_HOST_S = 200e-9  # of the timed window: below it a difference is the clock's and the call's
FLOOR_EVENT_S = 1e-6
CONFIDENCE = 0.99  # of the interval shown, and of FASTER and SLOWER where nothing is re-run to confirm
SAME_LEVEL = 0.05  # of each of the two one-sided tests behind SAME


@dataclass(frozen=True, slots=True)
class Effect:
    """``b`` against ``a``, both geometric means of run medians in the metric's unit; ``ratio`` is b / a.

    ``low`` and ``high`` bound the ratio at 99 % (Welch's t on logarithms); None with fewer than two runs a side.
    ``worse`` and ``better`` are exact one-sided rank probabilities of seeing so much in that direction by chance.
    ``same_low`` and ``same_high`` bound the ratio at 90 %: inside the margin both one-sided tests at 5 % pass.
    """

    runs_a: int
    runs_b: int
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    same_low: float | None
    same_high: float | None
    worse: float
    better: float
    sign: int  # +1 when a larger ratio is worse

    @property
    def loss(self) -> float:
        """How much worse b is, as a fraction of time: 0.05 for 5 % more time or for a rate divided by 1.05."""
        return float(self.ratio**self.sign - 1.0)


def effect(a: Sequence[float], b: Sequence[float], better: Better) -> Effect:
    """Return the effect of the run medians ``b`` against ``a`` (positive, one a run; any unit, the same on both sides).

    Raises ValueError for an empty side and for values that are not positive and finite.
    """
    for side in (a, b):
        if not side:
            raise ValueError("a side without a run has no effect")
        for value in side:
            if not 0.0 < value < math.inf:
                raise ValueError(f"{value} is no run median: expected a positive finite number")
    logs_a, logs_b = [math.log(v) for v in a], [math.log(v) for v in b]
    centre = fmean(logs_b) - fmean(logs_a)
    wide, tight = welch(logs_a, logs_b, CONFIDENCE), welch(logs_a, logs_b, 1.0 - 2.0 * SAME_LEVEL)
    sign = 1 if better == "lower" else -1
    slower, faster = rank_probability(logs_b, logs_a), rank_probability(logs_a, logs_b)
    if sign < 0:
        slower, faster = faster, slower
    return Effect(
        runs_a=len(a), runs_b=len(b), a=math.exp(fmean(logs_a)), b=math.exp(fmean(logs_b)), ratio=math.exp(centre),
        low=None if wide is None else math.exp(wide[0]), high=None if wide is None else math.exp(wide[1]),
        same_low=None if tight is None else math.exp(tight[0]),
        same_high=None if tight is None else math.exp(tight[1]), worse=slower, better=faster, sign=sign,
    )  # fmt: skip


def welch(a: Sequence[float], b: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Return the interval of mean(b) - mean(a) by Welch's t; None with fewer than two values a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    parts = [stdev(side) ** 2 / len(side) for side in (a, b)]
    centre, error = fmean(b) - fmean(a), math.sqrt(sum(parts))
    if error == 0.0:
        return centre, centre
    freedom = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True) if part)
    reach = error * _student(round(1.0 - (1.0 - confidence) / 2.0, 6), freedom)
    return centre - reach, centre + reach


def _student(probability: float, freedom: float) -> float:
    from scipy.special import stdtrit  # alone, without scipy.stats: 0.1 s of a command that takes 0.4

    return float(stdtrit(freedom, probability))


def rank_probability(large: Sequence[float], small: Sequence[float]) -> float:
    """Return the exact chance, when both sides are alike, that ``large`` ranks at least so high against ``small``.

    Mann and Whitney's U over all arrangements; ties count half and are rounded against a finding.
    """
    wins = sum(2 if x > y else 1 if x == y else 0 for x in large for y in small)
    return _upper_tail(len(large), len(small), wins // 2)


@lru_cache(maxsize=4096)
def _upper_tail(m: int, n: int, least: int) -> float:
    """Return the share of arrangements of m and n values with U of at least ``least``."""
    # ways[k][u]: k values of the first kind placed with u wins; each step adds one value of the second kind below
    ways = [[1] + [0] * (m * n)] + [[0] * (m * n + 1) for _ in range(m)]
    for below in range(n + 1):
        for k in range(1, m + 1):
            previous, row = ways[k - 1], ways[k]
            for wins in range(below, m * n + 1):
                row[wins] += previous[wins - below]
    total = math.comb(m + n, m)
    return sum(ways[m][least:]) / total


def margin(window_seconds: float | None, *, events: bool) -> float:
    """Return the fraction of time below which a difference is nothing: 2 %, or the clock's floor on a short window.

    ``window_seconds``: one timed sample, all its passes together; None when the row does not say. ``events``: timed by
    device events, whose floor is five times that of the host clock.
    """
    if window_seconds is None or window_seconds <= 0.0:
        return MARGIN
    return max(MARGIN, (FLOOR_EVENT_S if events else FLOOR_HOST_S) / window_seconds)


def verdict(found: Effect, margin: float) -> Verdict:
    """Return what one look says when nothing is re-run: FASTER and SLOWER need the whole 99 % interval beyond the
    margin, SAME both one-sided tests inside it, and fewer than four runs a side decide nothing."""
    if min(found.runs_a, found.runs_b) < LEAST_RUNS or found.low is None or found.high is None:
        return "INCONCLUSIVE"
    low, high = sorted((found.low**found.sign, found.high**found.sign))
    if low > 1.0 + margin:
        return "SLOWER"
    if high < 1.0 / (1.0 + margin):
        return "FASTER"
    if is_same(found, margin):
        return "SAME"
    return "INCONCLUSIVE"


def is_same(found: Effect, margin: float) -> bool:
    """Return whether both one-sided tests at 5 % put the ratio inside the margin, whichever side is called a."""
    if found.same_low is None or found.same_high is None:
        return False
    return found.same_low >= 1.0 / (1.0 + margin) and found.same_high <= 1.0 + margin
