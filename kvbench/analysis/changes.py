"""Where the level of a series changed: binary segmentation by ranks (design 11).

Means and t-tests follow outliers: with 5 % of them a detector built on those reports changes in 12 to 91 % of unchanged
series (tooling.md 3). Ranks do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvbench.analysis.effect import MARGIN, rank_probability

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEGMENT = 5  # points either side: a single spike is no level
EXACT = 24  # points; below, the normal law puts splits near the middle and is too timid for five runs that lie apart
LEVEL = 0.01  # of a whole segment, after Bonferroni over its split points


@dataclass(frozen=True, slots=True)
class Change:
    """The level changed before point ``index``. ``before`` and ``after`` are medians of the segments that meet there;
    ``p`` the corrected probability of so clean a split in an unchanged segment."""

    index: int
    before: float
    after: float
    p: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


def changes(
    values: Sequence[float] | NDArray[np.float64], *, margin: float = MARGIN, accepted: Sequence[int] = ()
) -> list[Change]:
    """Return the changes of level of ``values`` (positive, oldest first), by index.

    ``margin``: least relative difference of the medians either side. ``accepted``: indices at which somebody accepted
    a new level; the series is cut there beforehand and nothing is reported at a cut. Raises ValueError for a value that
    is not positive and finite.
    """
    data = np.asarray(values, np.float64)
    if data.size and not (np.isfinite(data).all() and (data > 0).all()):
        raise ValueError("a series holds positive finite numbers; leave runs without a value out")
    cuts = sorted({0, len(data), *(i for i in accepted if 0 < i < len(data))})
    found: list[tuple[int, float]] = []
    for start, end in pairwise(cuts):
        _split(data, start, end, margin, found)
    found.sort()
    edges = sorted({*cuts, *(index for index, _ in found)})
    return [_change(data, edges, index, p) for index, p in found]


def _change(data: NDArray[np.float64], edges: Sequence[int], index: int, p: float) -> Change:
    at = edges.index(index)
    before, after = data[edges[at - 1] : index], data[index : edges[at + 1]]
    return Change(index, float(np.median(before)), float(np.median(after)), p)


def _split(data: NDArray[np.float64], start: int, end: int, margin: float, found: list[tuple[int, float]]) -> None:
    """Find the split, or the stretch between two, that parts the ranks of ``data[start:end]`` most cleanly; recurse.

    A level that comes back is no split: 30 points, 10 slower ones and 30 more differ in no two halves clearly enough.
    """
    part = data[start:end]
    if len(part) < 2 * SEGMENT or part.min() == part.max():
        return
    best: tuple[float, tuple[int, ...]] | None = None
    for candidate in (_one_split(part), _stretch(part), _clean_stretch(part)):
        if candidate is not None and candidate[0] < LEVEL and _apart(part, candidate[1], margin):
            best = candidate if best is None or candidate[0] < best[0] else best
    if best is None:
        return
    edges = [0, *best[1], len(part)]
    found.extend((start + cut, best[0]) for cut in best[1])
    for low, high in pairwise(edges):
        _split(data, start + low, start + high, margin, found)


def _apart(part: NDArray[np.float64], cuts: tuple[int, ...], margin: float) -> bool:
    inside = part[cuts[0] : cuts[1]] if len(cuts) == 2 else part[cuts[0] :]
    outside = np.concatenate([part[: cuts[0]], part[cuts[1] :]]) if len(cuts) == 2 else part[: cuts[0]]
    low, high = sorted((float(np.median(inside)), float(np.median(outside))))
    return high / low - 1.0 >= margin


def _one_split(part: NDArray[np.float64]) -> tuple[float, tuple[int, ...]] | None:
    """Return the corrected probability and the index of the best single split."""
    n = len(part)
    left = np.arange(SEGMENT, n - SEGMENT + 1)
    if n <= EXACT:
        tails = [_tail(list(part[:size]), list(part[size:])) for size in left.tolist()]
        best = int(np.argmin(tails))
        return min(1.0, 2.0 * tails[best] * len(left)), (int(left[best]),)
    scores = _scores(part, np.cumsum(_ranks(part))[left - 1], left)
    best = int(np.argmax(scores))
    return min(1.0, math.erfc(scores[best] / math.sqrt(2.0)) * len(left)), (int(left[best]),)


def _stretch(part: NDArray[np.float64]) -> tuple[float, tuple[int, ...]] | None:
    """Return the same for the best stretch inside, at least five points long with five before and after it."""
    n = len(part)
    if n < 3 * SEGMENT:
        return None
    total = np.concatenate([[0.0], np.cumsum(_ranks(part))])
    first, last = np.triu_indices(n + 1, SEGMENT)
    inner = (first >= SEGMENT) & (last <= n - SEGMENT)
    first, last = first[inner], last[inner]
    scores = _scores(part, total[last] - total[first], last - first)
    best = int(np.argmax(scores))
    cuts = (int(first[best]), int(last[best]))
    return min(1.0, math.erfc(scores[best] / math.sqrt(2.0)) * len(first)), cuts


def _clean_stretch(part: NDArray[np.float64]) -> tuple[float, tuple[int, ...]] | None:
    """Return the same for a stretch that lies wholly above or below all the rest; its chance is exact: 2 / (n over m).

    The normal law knows nothing so unlikely: five points below 120 others are one case in 10^8, and 3.8 deviations.
    """
    n = len(part)
    windows = 0
    best: tuple[float, tuple[int, int]] | None = None
    least, most = np.minimum.accumulate(part), np.maximum.accumulate(part)
    least_after, most_after = np.minimum.accumulate(part[::-1])[::-1], np.maximum.accumulate(part[::-1])[::-1]
    low = high = part  # of every window, one point longer each round
    for size in range(2, SEGMENT):
        low, high = np.minimum(low[:-1], part[size - 1 :]), np.maximum(high[:-1], part[size - 1 :])
    for size in range(SEGMENT, n - 2 * SEGMENT + 1):
        low, high = np.minimum(low[:-1], part[size - 1 :]), np.maximum(high[:-1], part[size - 1 :])
        starts = np.arange(SEGMENT, n - SEGMENT - size + 1)
        windows += len(starts)
        under = high[starts] < np.minimum(least[starts - 1], least_after[starts + size])
        over = low[starts] > np.maximum(most[starts - 1], most_after[starts + size])
        if (clean := np.flatnonzero(under | over)).size:
            chance = 2.0 / math.comb(n, size)
            if best is None or chance < best[0]:
                best = chance, (int(starts[clean[0]]), int(starts[clean[0]]) + size)
    return None if best is None else (min(1.0, best[0] * windows), best[1])


def _scores(part: NDArray[np.float64], sums: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how many standard deviations rank sums of so many points lie from what chance gives."""
    n = len(part)
    spread = np.sqrt(sizes * (n - sizes) / 12.0 * (n + 1 - _ties(part) / (n * (n - 1))))
    found: NDArray[np.float64] = (np.abs(sums - sizes * (n + 1) / 2.0) - 0.5) / spread
    return found


def _tail(before: list[float], after: list[float]) -> float:
    return min(rank_probability(before, after), rank_probability(after, before))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1, ties sharing their mean."""
    order = np.sort(values)
    low = np.searchsorted(order, values, "left")
    high = np.searchsorted(order, values, "right")
    shared: NDArray[np.float64] = (low + high + 1) / 2.0
    return shared


def _ties(values: NDArray[np.float64]) -> float:
    _, counts = np.unique(values, return_counts=True)
    return float((counts.astype(np.float64) ** 3 - counts).sum())
