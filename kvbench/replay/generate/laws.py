"""Seeded laws requests are drawn from: arrivals, and lengths with a published mean.

All draws come from numpy's PCG64 with seeds made of the user's seed and the purpose of the stream, so that one law does
not move another. Times are rounded to 1 us and lengths to tokens:
what comes out is the same on every Python this runs on (numpy promises the stream of PCG64, and in practice its
transformations).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from kvbench.errors import UsageError
from kvbench.replay.request import seconds

CHUNK = 4096
MOST_RATE = 1e6  # requests a second: the grid of times is 1 us
_NORMAL = NormalDist()


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return the generator of ``purpose`` under ``seed`` (0 or more; UsageError otherwise)."""
    if seed < 0:
        raise UsageError("seed", got=seed, expected="0 or more")
    return np.random.Generator(np.random.PCG64([seed, *purpose.encode("ascii")]))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come: ``rate`` a second on average; gaps exponential (``cv`` 1, Poisson) or Gamma with that
    coefficient of variation. Raises UsageError for a rate or cv that is not a positive number."""

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= MOST_RATE:
            raise UsageError("rate", got=self.rate, expected=f"requests a second, more than 0, at most {MOST_RATE:.0e}")
        if not 0.0 < self.cv <= 10.0:
            raise UsageError("cv of arrivals", got=self.cv, expected="more than 0, at most 10")

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds, without end, on the grid of 1 us; the first gap counts from 0."""
        shape = 1.0 / (self.cv * self.cv)
        now = 0.0
        while True:
            gaps = rng.exponential(size=CHUNK) if self.cv == 1.0 else rng.standard_gamma(shape, size=CHUNK) / shape
            for gap in gaps.tolist():
                now += gap / self.rate
                yield seconds(now)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths clipped to ``low``..``high`` tokens whose mean after clipping is ``mean``.

    ``sigma`` is that of the logarithm; 0 makes all of them ``mean``. Raises UsageError for a mean outside the bounds.
    """

    mean: float
    sigma: float
    low: int = 1
    high: int = 1 << 24

    def __post_init__(self) -> None:
        if not 1 <= self.low < self.high or not self.low <= self.mean <= self.high:
            raise UsageError("mean length", got=self.mean, expected=f"{max(1, self.low)}..{self.high} tokens")
        if not 0.0 <= self.sigma <= 4.0:
            raise UsageError("sigma of lengths", got=self.sigma, expected="0..4")

    @classmethod
    def of(cls, mean: float, median: float, low: int = 1, high: int = 1 << 24) -> Lengths:
        """Return the law of a published mean and median: sigma = sqrt(2 ln(mean / median)) of the unclipped one."""
        if not 0.0 < median <= mean:
            raise UsageError("median length", got=median, expected=f"more than 0, at most the mean {mean}")
        return cls(mean, math.sqrt(2.0 * math.log(mean / median)), low, high)

    def mu(self) -> float:
        """Return the logarithm of the median that gives ``mean`` after clipping, by bisection."""
        least, most = math.log(self.low) - 10.0, math.log(self.high) + 10.0
        for _ in range(80):
            middle = 0.5 * (least + most)
            if self._mean(middle) < self.mean:
                least = middle
            else:
                most = middle
        return 0.5 * (least + most)

    def _mean(self, mu: float) -> float:
        s = self.sigma
        a, b = (math.log(self.low) - mu) / s, (math.log(self.high) - mu) / s
        inside = math.exp(mu + 0.5 * s * s) * (_NORMAL.cdf(b - s) - _NORMAL.cdf(a - s))
        return self.low * _NORMAL.cdf(a) + inside + self.high * (1.0 - _NORMAL.cdf(b))

    def draws(self, rng: np.random.Generator) -> Iterator[int]:
        """Yield lengths in tokens, without end."""
        if self.sigma == 0.0:
            while True:
                yield round(self.mean)
        mu = self.mu()
        while True:
            found = np.clip(np.exp(mu + self.sigma * rng.standard_normal(CHUNK)), self.low, self.high)
            yield from np.rint(found).astype(np.int64).tolist()

    def spread(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return ``count`` lengths, one from the middle of each of as many equally likely strata, in random order.

        A handful of documents has the law's mean this way; drawn one by one their mean would be anybody's.
        """
        if self.sigma == 0.0:
            return [round(self.mean)] * count
        mu = self.mu()
        quantiles = [_NORMAL.inv_cdf((i + 0.5) / count) for i in range(count)]
        found = [min(max(math.exp(mu + self.sigma * z), self.low), self.high) for z in quantiles]
        # the outermost strata stand for tails their middle does not reach
        scale = self.mean * count / math.fsum(found)
        whole = [max(self.low, min(self.high, round(each * scale))) for each in found]
        return [whole[i] for i in rng.permutation(count).tolist()]


@dataclass(frozen=True, slots=True)
class Uniform:
    """Lengths uniform in ``mean`` x [1 - spread, 1 + spread] (NEO's synthetic workload: 0.1)."""

    mean: int
    spread: float = 0.1

    def __post_init__(self) -> None:
        if self.mean < 1 or not 0.0 <= self.spread < 1.0:
            raise UsageError("uniform lengths", got=f"{self.mean} ±{self.spread}", expected="a mean of 1 or more")

    def draws(self, rng: np.random.Generator) -> Iterator[int]:
        """Yield lengths in tokens, without end."""
        low, high = max(1, math.ceil(self.mean * (1 - self.spread))), math.floor(self.mean * (1 + self.spread))
        while True:
            yield from rng.integers(low, max(low, high), size=CHUNK, endpoint=True).tolist()


def geometric(mean: float, rng: np.random.Generator) -> Iterator[int]:
    """Yield counts of 1 or more with this mean, without end: each further turn comes with the same chance."""
    if not mean >= 1.0:
        raise UsageError("mean number of turns", got=mean, expected="1 or more")
    while True:
        yield from rng.geometric(1.0 / mean, size=CHUNK).tolist()


def shares(total: int, parts: int, rng: np.random.Generator) -> Sequence[int]:
    """Return ``total`` cut into ``parts`` that differ by at most one, in random order."""
    whole, rest = divmod(total, parts)
    order = rng.permutation(parts).tolist()
    return [whole + (order[i] < rest) for i in range(parts)]
