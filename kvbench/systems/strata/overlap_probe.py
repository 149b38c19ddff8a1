"""One sample of layer-wise overlap with everything that explains it: the pass, each side alone, both beside each other.

The rates come from the same moments as the pass: a prediction from rates of another minute tests the weather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol

from kvbench.errors import KvbenchError
from kvbench.systems.strata.overlap import Pass, Recorder, Schedule
from kvbench.systems.strata.overlap_model import Forecast, LayerTimes, Rates, varied

BESIDE_LAYERS = 6  # of the slower side, at least: five or six lie wholly inside the time both are busy
BESIDE_SECONDS = 0.010
BESIDE_TRIES = 20
ALONE_LAYERS = 8  # computed alone for a sample


class Overlapped(Protocol):
    """A layer-wise overlap on some pair of tiers; see :class:`overlap.HostOverlap` for what each member means."""

    layers: int
    layer_bytes: int
    link_bytes: int
    kernel: str

    def arithmetic(self, flops: float) -> float: ...
    def run(self, schedule: Schedule | None = None, recorder: Recorder | None = None) -> Pass: ...
    def load_alone(self) -> Pass: ...
    def compute_alone(self, computes: int | None = None) -> Pass: ...
    def beside(self, loads: int, computes: int) -> Pass: ...
    def verify(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """A pass as measured (seconds) and the rates around it; ``forecast`` is what they say the pass should take."""

    total: float
    stall: float
    first: float
    rates: Rates
    forecast: Forecast

    @property
    def exposed(self) -> float:
        """The pass over what it takes when nothing but the first load is exposed: 1 where all other loads hide."""
        return self.total / (self.total - self.stall + self.first)

    @property
    def forecast_exposed(self) -> float:
        """The same of the forecast."""
        return self.forecast.total / (self.forecast.total - self.forecast.stall + self.forecast.first)


def take(work: Overlapped) -> Taken:
    """Run one pass and measure the rates beside it. Raises VerifyError as the passes do, KvbenchError when the two
    sides could not be measured beside each other."""
    found = work.run()
    load, compute = work.load_alone().loads, work.compute_alone(ALONE_LAYERS).computes
    least = [max(BESIDE_LAYERS, math.ceil(BESIDE_SECONDS / fmean(side))) for side in (load, compute)]
    slower = min(least)  # the faster side goes on for as long as the slower one needs
    both = None
    for _ in range(BESIDE_TRIES):  # a thread that lost its CPU all the while leaves nothing to compare
        both = work.beside(slower, slower).beside()
        if both is not None:
            break
    if both is None:
        raise KvbenchError(
            "neither side was busy for a whole layer of the other", where="overlap", got=f"{BESIDE_TRIES} tries",
            mend="end other programs: the two sides need a CPU each",
        )  # fmt: skip
    times = LayerTimes(load, compute, *both)
    first = float(found.load[0, 1] - found.load[0, 0]) * 1e-9
    return Taken(found.total, found.stall, first, times.rates, varied(times, work.layers))


def typical(taken: list[Taken]) -> Rates:
    """Return the median of each rate."""
    return Rates(
        median(t.rates.load for t in taken), median(t.rates.compute for t in taken),
        median(t.rates.load_beside for t in taken), median(t.rates.compute_beside for t in taken),
    )  # fmt: skip
