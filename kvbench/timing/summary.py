"""Ordered statistics of one case within one run: medians, exact quantiles, an exact interval and hints of trouble.

Everything works on float64 seconds per pass. Timer noise is positive and heavy-tailed, so nothing here is a mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvbench.timing.reservoir import KEEP_LIMIT

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIDENCE = 0.95
MIN_LAG_SAMPLES = 10  # the standard error of a lag-1 correlation is 1/sqrt(n): below this it says nothing
BLOCKS = 20  # medians of about 20 blocks are close to independent where single samples are not
MIN_BLOCK = 3
LAG1_LIMIT = 0.3
BIMODAL_GAP_MADS = 3.0
BIMODAL_MIN_SHARE = 0.10  # a cluster smaller than this is a tail
BIMODAL_MIN_GAP = 0.01  # of the median: two neighbouring clock ticks are not two modes
BIMODAL_MIN_SAMPLES = 20

CiKind = Literal["order", "block"]


@dataclass(frozen=True, slots=True)
class Spread:
    """What a stop rule needs, relative to the median: CI half-width, drift of the halves, MAD; and which CI it is."""

    half_width: float | None
    drift: float | None
    noise: float
    ci: CiKind | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics over all ``n`` samples, in seconds per pass; ``kept`` of them are stored (reservoir).

    ``low``, ``high``: interval of the median at 95 % or a little above: exact binomial order statistics (``ci`` order)
    or those of ~20 block medians when neighbours correlate (block); None below 6 samples. ``middle``: the two middle
    samples (equal for odd n), so that a median rate is exact. ``mild``/``severe``: samples beyond 1.5 but within 3, and
    beyond 3, interquartile ranges outside the quartiles. ``drift``: median of the second half over that of the first,
    minus 1. ``lag1``: correlation of neighbours, tails clipped; None below 10 samples. ``bimodal`` is a hint only.
    """

    n: int
    kept: int
    median: float
    middle: tuple[float, float]
    mad: float
    low: float | None
    high: float | None
    ci: CiKind | None
    q1: float
    q3: float
    p5: float
    p95: float
    p99: float
    min: float
    max: float
    mild: int
    severe: int
    drift: float | None
    lag1: float | None
    bimodal: bool


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its interval; ``low`` and ``high`` are None when there are too few samples for one."""

    value: float
    low: float | None
    high: float | None


@lru_cache(maxsize=256)
def median_ranks(n: int) -> tuple[int, int] | None:
    """Return the 0-based indices of the order statistics that hold the median with at least 95 %, or None for n < 6.

    Exact: the largest r with P(Binomial(n, 1/2) < r) <= 2.5 %; the pair is the r-th smallest and r-th largest.
    """
    tail = (1.0 - CONFIDENCE) / 2.0
    # Below 12 standard deviations the mass is under 1e-30: starting there keeps n = 20,000 under a millisecond.
    start = max(0, n // 2 - int(6.0 * math.sqrt(n)) - 1)
    scale = math.lgamma(n + 1) - n * math.log(2.0)
    mass, r = 0.0, start
    while True:
        mass += math.exp(scale - math.lgamma(r + 1) - math.lgamma(n - r + 1))
        if mass > tail:
            break
        r += 1
    return (r - 1, n - r) if r >= 1 else None


def median_interval(ordered: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the 95 % order-statistic interval of the median of sorted values, or None below 6."""
    ranks = median_ranks(len(ordered))
    return None if ranks is None else (float(ordered[ranks[0]]), float(ordered[ranks[1]]))


def lag1(values: NDArray[np.float64]) -> float | None:
    """Return the correlation of neighbours in order of taking, or None below 10 values.

    Values are clipped to their 5th and 95th percentile first: one stall would otherwise hide any correlation.
    """
    if len(values) < MIN_LAG_SAMPLES:
        return None
    low, high = np.quantile(values, (0.05, 0.95))
    centred = np.clip(values, low, high)
    centred = centred - centred.mean()
    power = float(centred @ centred)
    # Equal values leave only rounding noise of the mean behind, whose correlation is a number without a meaning.
    if math.sqrt(power / len(values)) <= 1e-12 * float(abs(high)):
        return 0.0
    return float(centred[:-1] @ centred[1:]) / power


def drift(values: NDArray[np.float64]) -> float | None:
    """Return median(second half) / median(first half) - 1 in order of taking, or None below 6 values."""
    n = len(values)
    if n < 6:
        return None
    return float(np.median(values[(n + 1) // 2 :]) / np.median(values[: n // 2])) - 1.0


def interval(values: NDArray[np.float64], lag_limit: float = LAG1_LIMIT) -> tuple[float, float, CiKind] | None:
    """Return (low, high, kind) around the median of ``values`` in order of taking, or None below 6 values.

    When |lag-1| reaches ``lag_limit`` the interval is that of about 20 block medians, widened where needed to hold the
    plain one: correlated samples must not buy a narrower interval.
    """
    plain = median_interval(np.sort(values))
    if plain is None:
        return None
    r = lag1(values)
    blocks = min(BLOCKS, len(values) // MIN_BLOCK)
    if r is not None and abs(r) >= lag_limit and blocks >= 6:
        medians = np.sort([np.median(part) for part in np.array_split(values, blocks)])
        wide = median_interval(medians)
        if wide is not None:
            return min(wide[0], plain[0]), max(wide[1], plain[1]), "block"
    return plain[0], plain[1], "order"


def spread(values: NDArray[np.float64], lag_limit: float = LAG1_LIMIT) -> Spread:
    """Return the relative spread of ``values`` (positive, at least one, in order of taking)."""
    median = float(np.median(values))
    found = interval(values, lag_limit)
    return Spread(
        half_width=None if found is None else (found[1] - found[0]) / (2.0 * median),
        drift=drift(values),
        noise=float(np.median(np.abs(values - median))) / median,
        ci=None if found is None else found[2],
    )


def bimodal(ordered: NDArray[np.float64]) -> bool:
    """Hint whether sorted values fall into two clusters: widest central gap > 3 x the wider cluster's own MAD.

    The MAD of all values would not do: with two equal modes it is itself half their distance.
    """
    n = len(ordered)
    edge = max(1, math.ceil(n * BIMODAL_MIN_SHARE))
    if n < BIMODAL_MIN_SAMPLES:
        return False
    gaps = np.diff(ordered)[edge - 1 : n - edge]
    cut = int(np.argmax(gaps)) + edge
    gap = float(ordered[cut] - ordered[cut - 1])
    within = max(float(np.median(np.abs(part - np.median(part)))) for part in (ordered[:cut], ordered[cut:]))
    return gap > BIMODAL_GAP_MADS * within and gap > BIMODAL_MIN_GAP * float(np.median(ordered))


def summarise(values: NDArray[np.float64], kept: int | None = None, lag_limit: float = LAG1_LIMIT) -> Summary:
    """Summarise ``values``: seconds per pass, shape (n,), n >= 1, positive and finite, in order of taking.

    ``kept`` defaults to what the reservoir would keep. Raises ValueError for values that no clock can have given.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"samples of shape {values.shape}, expected (n,) with n >= 1")
    if not bool(np.all(np.isfinite(values) & (values > 0.0))):
        raise ValueError("samples must be positive, finite seconds")
    n = len(values)
    ordered = np.sort(values)
    p5, q1, median, q3, p95, p99 = (float(q) for q in np.quantile(ordered, (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)))
    reach = q3 - q1
    outside = np.maximum(q1 - ordered, ordered - q3)
    severe = int(np.count_nonzero(outside > 3.0 * reach))
    found = interval(values, lag_limit)
    return Summary(
        n=n,
        kept=min(n, KEEP_LIMIT) if kept is None else kept,
        median=median,
        middle=(float(ordered[(n - 1) // 2]), float(ordered[n // 2])),
        mad=float(np.median(np.abs(ordered - median))),
        low=None if found is None else found[0],
        high=None if found is None else found[1],
        ci=None if found is None else found[2],
        q1=q1,
        q3=q3,
        p5=p5,
        p95=p95,
        p99=p99,
        min=float(ordered[0]),
        max=float(ordered[-1]),
        mild=int(np.count_nonzero(outside > 1.5 * reach)) - severe,
        severe=severe,
        drift=drift(values),
        lag1=lag1(values),
        bimodal=bimodal(ordered),
    )


def rate_interval(amount: float, summary: Summary) -> Interval:
    """Return the median rate ``amount`` / seconds with its interval (B/s for bytes, FLOP/s for operations).

    The rate is taken per sample and the quantiles after it: a slow sample is a low rate, so the bounds swap, and the
    median is the mean of the two middle *rates*. A mean of rates would weigh fast samples by their speed.
    """
    if not amount > 0.0:
        raise ValueError(f"a rate of {amount} units per pass is no rate")
    fast, slow = summary.middle
    return Interval(
        value=0.5 * (amount / fast + amount / slow),
        low=None if summary.high is None else amount / summary.high,
        high=None if summary.low is None else amount / summary.low,
    )


def time_interval(summary: Summary, operations: float = 1.0) -> Interval:
    """Return the median seconds of one of ``operations`` per pass, with its interval (latency metrics)."""
    if not operations > 0.0:
        raise ValueError(f"{operations} operations per pass")
    return Interval(
        value=summary.median / operations,
        low=None if summary.low is None else summary.low / operations,
        high=None if summary.high is None else summary.high / operations,
    )
