"""What loading layer by layer beside the computation should take: the exact recurrence, also on a shared memory bus.

Strata, OSDI 2026, sections 3 and 4: layer l + 1 is loaded while layer l is computed, so only what the loads take longer
than the computation is left as a stall. The usual formula, max(0, T_load - T_compute), forgets that the first load is
never hidden, and on one memory bus neither side keeps the speed it has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvbench.errors import UsageError


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of one pass: all of it, of which the computing side waits ``stall``, ``first`` for the first layer."""

    total: float
    stall: float
    first: float

    @property
    def share(self) -> float:
        """The stall's share of the whole pass, 0..1."""
        return self.stall / self.total


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds a layer of each side: alone, and while the other side is busy all the time.

    Raises UsageError for values that are not positive.
    """

    load: float
    compute: float
    load_beside: float
    compute_beside: float

    def __post_init__(self) -> None:
        for name in ("load", "compute", "load_beside", "compute_beside"):
            if not getattr(self, name) > 0.0:
                raise UsageError("not a time", where=f"rates.{name}", got=getattr(self, name), expected="seconds > 0")

    @property
    def load_slowdown(self) -> float:
        """How many times as long a load takes beside the computation."""
        return self.load_beside / self.load

    @property
    def compute_slowdown(self) -> float:
        """How many times as long the computation takes beside a load."""
        return self.compute_beside / self.compute

    def undisturbed(self) -> Rates:
        """Return the same rates without contention: what two measurements apart from each other would suggest."""
        return Rates(self.load, self.compute, self.load, self.compute)


def pipeline(loads: Sequence[float], computes: Sequence[float]) -> Forecast:
    """Return the pass in which layer l is computed once it is loaded and layer l - 1 is computed; seconds a layer.

    loaded[l] = loaded[l - 1] + loads[l]; done[l] = max(loaded[l], done[l - 1]) + computes[l]. Raises UsageError unless
    both have the same number of layers, at least one, and no time is negative.
    """
    if len(loads) != len(computes) or not loads:
        raise UsageError("layers", where="overlap", got=f"{len(loads)} loads, {len(computes)} computations")
    if min(*loads, *computes) < 0.0:
        raise UsageError("a negative time", where="overlap", got=min(*loads, *computes))
    loaded = done = stall = 0.0
    for load, compute in zip(loads, computes, strict=True):
        loaded += load
        stall += max(0.0, loaded - done)
        done = max(loaded, done) + compute
    return Forecast(done, stall, loads[0])


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of single layers, in the order they were measured: each side alone, and beside the other.

    The sides may have different numbers of layers. Raises UsageError for a side without one.
    """

    load: tuple[float, ...]
    compute: tuple[float, ...]
    load_beside: tuple[float, ...]
    compute_beside: tuple[float, ...]

    @property
    def rates(self) -> Rates:
        """Return the mean of each."""
        sides = (self.load, self.compute, self.load_beside, self.compute_beside)
        if not all(sides):
            raise UsageError("no layer", where="overlap", got=tuple(map(len, sides)), expected="one or more a side")
        return Rates(*(fmean(side) for side in sides))


def shared(rates: Rates, layers: int) -> Forecast:
    """Return the pass over ``layers`` equal layers when each side runs at its speed beside the other while both are
    busy, and at its speed alone while the other waits or has ended. Without contention it is :func:`pipeline`.

    Raises UsageError below one layer.
    """
    if layers < 1:
        raise UsageError("a model has at least one layer", where="overlap", got=layers)
    alone, beside = (rates.load, rates.compute), (rates.load_beside, rates.compute_beside)
    return _walk(*([side] * layers for side in (*alone, *beside)))


def varied(times: LayerTimes, layers: int, starts: int = 8) -> Forecast:
    """Return the mean pass over ``layers`` layers that take as unequally long as the measured ones did.

    Where both sides take about as long, the mean rates leave no stall but the first load, while in fact every layer
    that takes longer than its neighbour stalls a little. The measured layers are walked through in their order from
    ``starts`` places spread over them. Raises UsageError below one layer or one start.
    """
    if layers < 1 or starts < 1:
        raise UsageError("a model has at least one layer", where="overlap", got=layers)
    times.rates  # noqa: B018 (refuses an empty side)
    sides = (times.load, times.compute, times.load_beside, times.compute_beside)
    found = [
        _walk(*([side[(len(side) * start // starts + at) % len(side)] for at in range(layers)] for side in sides))
        for start in range(starts)
    ]
    return Forecast(fmean(f.total for f in found), fmean(f.stall for f in found), fmean(f.first for f in found))


def _walk(
    load: Sequence[float], compute: Sequence[float], load_beside: Sequence[float], compute_beside: Sequence[float]
) -> Forecast:
    """Return the pass over layers of these seconds.

    The time between two events (a layer loaded, a layer computed) is spent at one speed a side, so the sum over the at
    most 2 x layers events is exact.
    """
    layers = len(load)
    now = stall = first = 0.0
    loaded = computed = 0
    to_load, to_compute = 1.0, 1.0  # of the layer under way
    while computed < layers:
        loading, computing = loaded < layers, computed < loaded
        load_time = (load_beside if computing else load)[loaded] if loading else 1.0
        compute_time = (compute_beside if loading else compute)[computed]
        step = min(
            to_load * load_time if loading else float("inf"), to_compute * compute_time if computing else float("inf")
        )
        ends_load = loading and to_load * load_time <= step
        ends_compute = computing and to_compute * compute_time <= step
        now += step
        if not computing:
            stall += step
        if loading:
            to_load = 1.0 if ends_load else to_load - step / load_time
        if computing:
            to_compute = 1.0 if ends_compute else to_compute - step / compute_time
        loaded, computed = loaded + ends_load, computed + ends_compute
        if not computed and loaded == 1 and ends_load:
            first = now
    return Forecast(now, stall, first)
