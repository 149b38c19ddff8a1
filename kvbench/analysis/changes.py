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
    n = end - start
    tried = n - 2 * SEGMENT + 1
    if tried < 1:
        return
    part = data[start:end]
    ranks = _ranks(part)
    left = np.arange(SEGMENT, n - SEGMENT + 1)
    sums = np.cumsum(ranks)[left - 1]
    spread = np.sqrt(left * (n - left) / 12.0 * (n + 1 - _ties(part) / (n * (n - 1))))
    if not spread.all():
        return  # one value throughout
    distance = np.abs(sums - left * (n + 1) / 2.0)
    scores = (distance - 0.5) / spread
    if n <= EXACT:
        tails = [_tail(list(part[:size]), list(part[size:])) for size in left.tolist()]
        best = int(np.argmin(tails))
        p = min(1.0, 2.0 * tails[best] * tried)
    else:
        best = int(np.argmax(scores))
        p = min(1.0, math.erfc(scores[best] / math.sqrt(2.0)) * tried)
    at = start + int(left[best])
    low, high = sorted((float(np.median(data[start:at])), float(np.median(data[at:end]))))
    if p >= LEVEL or high / low - 1.0 < margin:
        return
    found.append((at, p))
    _split(data, start, at, margin, found)
    _split(data, at, end, margin, found)


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
