"""From bytes to seconds: bounds with and without overlap, break-evens, and which method should win.

DirectKV, OSDI 2026, section 4, as a roofline: a product takes between the longest of its computation, its link and its
near traffic (all overlapped) and their sum (none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UsageError
from kvbench.systems.directkv.shapes import Gemm, Method
from kvbench.systems.directkv.traffic import Traffic, cpu_aware, naive

Bound = Literal["compute", "link", "near"]
TIE = 0.05  # methods closer than this are not told apart by one machine's noise


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine delivers: ``flops`` operations a second, ``link`` and ``near`` bytes a second."""

    flops: float
    link: float
    near: float

    def __post_init__(self) -> None:
        for name in ("flops", "link", "near"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise UsageError("not a rate", where=f"rates {name}", got=getattr(self, name), expected="above 0")


@dataclass(frozen=True, slots=True)
class Seconds:
    """The three parts of a product in seconds, and the bounds they give."""

    compute: float
    link: float
    near: float

    @property
    def overlapped(self) -> float:
        """The least a product can take: its longest part."""
        return max(self.compute, self.link, self.near)

    @property
    def serial(self) -> float:
        """What it takes when nothing runs beside anything else."""
        return self.compute + self.link + self.near

    @property
    def bound(self) -> Bound:
        """The longest part."""
        parts: dict[Bound, float] = {"compute": self.compute, "link": self.link, "near": self.near}
        return max(parts, key=parts.__getitem__)


def seconds(flops: int, moved: Traffic, rates: Rates) -> Seconds:
    """Return the parts of a product of ``flops`` operations and these bytes."""
    return Seconds(flops / rates.flops, moved.link / rates.link, moved.near / rates.near)


def after_cache(demand: int, hits: float) -> float:
    """Return the bytes that cross the link when a share ``hits`` of ``demand`` is served by a cache before it."""
    if not 0.0 <= hits <= 1.0:
        raise UsageError("not a share of hits", where="cache", got=hits, expected="0 to 1")
    return demand * (1.0 - hits)


def hidden_from(flops: float, link: float, item: int) -> float:
    """Return the n from which a swap of B (n x n) hides behind 2 n^3 operations: n = flops x item / (2 x link)."""
    return flops * item / (2.0 * link)


def pays_over_naive(gemm: Gemm) -> float | None:
    """Return the near : link rate ratio above which B stationary beats C stationary; None where it never does.

    (rows - 1) B / link > 2 (steps - 1) C / near: what it saves on the link against what it adds in near memory.
    With one row of tiles there is nothing to save; with one step nothing is added (0).
    """
    saved = naive(gemm).link - cpu_aware(gemm).link
    added = cpu_aware(gemm).near - naive(gemm).near
    return added / saved if saved else None


def pays_against_swap(gemm: Gemm, near: float) -> float:
    """Return the FLOP/s up to which the near traffic of B stationary hides behind the computation.

    Beyond it a double-buffered swap, whose near traffic a cache serves, is ahead: the crossover of DirectKV and swap.
    """
    return gemm.flops * near / cpu_aware(gemm).near


def pipeline(loads: Sequence[float], products: Sequence[float], depth: int, handover: float = 0.0) -> float:
    """Return the seconds of ``products``, one on each load, with ``depth`` slots: exact, each side one at a time.

    A load begins when the one before is done and its slot is free; a product when the one before and its load are
    done. Depth 1 is the sum of both. Without loads it is the products alone. With two slots or more the two sides
    are two threads, which hand over a load every ``handover`` seconds at most. Raises UsageError for other counts and a
    negative hand-over.
    """
    if depth < 1 or (loads and len(loads) != len(products)) or not handover >= 0.0:
        raise UsageError("not a pipeline", where="pipeline", got=(len(loads), len(products), depth, handover))
    late = handover if loads and depth > 1 else 0.0
    loaded = done = 0.0
    ends: list[float] = []
    for index, product in enumerate(products):
        if loads:
            free = ends[index - depth] if index >= depth else 0.0
            loaded = max(loaded, free) + loads[index]
        done = max(done + max(product, late), loaded + product)
        ends.append(done)
    return done


def winner(times: Mapping[str, float]) -> str:
    """Return the method with the least seconds; the first of equals. Raises UsageError for none."""
    if not times:
        raise UsageError("no method to choose from", where="winner", got="{}")
    return min(times, key=times.__getitem__)


def regret(chosen: str, measured: Mapping[str, float]) -> float:
    """Return the measured seconds of ``chosen`` over those of the fastest: 1 is a perfect choice."""
    return measured[chosen] / min(measured.values())


def order_of(gemm: Gemm, rates: Rates, methods: Mapping[Method, Traffic]) -> dict[Method, float]:
    """Return the seconds of each method with everything overlapped, near traffic included."""
    return {method: seconds(gemm.flops, moved, rates).overlapped for method, moved in methods.items()}
