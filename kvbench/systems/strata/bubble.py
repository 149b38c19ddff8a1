"""Bubble filling: while a loading-bound batch loads, a batch of decodes uses the memory it leaves idle.

After Strata (OSDI 2026, section 4.3.3): where the prepared prefill batch is still loading bound, its computation is
postponed and one decode batch issued while the load runs. Decoding saturates the near memory, loading the link.

Times follow the layer-wise overlap of section 4.2: layer l + 1 is loaded while layer l is computed, so the first load
hides behind nothing, and after the last load one layer is left to compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.systems.strata.batching import RATIO, loading_bound


@dataclass(frozen=True, slots=True)
class Bubble:
    """``ratio`` of loaded to computed tokens above which a batch leaves a bubble; ``enabled``: False never fills one.

    Raises UsageError for a ratio that is not above 0.
    """

    ratio: float = RATIO
    enabled: bool = True

    def __post_init__(self) -> None:
        if not self.ratio > 0.0:
            raise UsageError("load to compute ratio", where="strata bubble", got=self.ratio, expected="above 0")

    def fills(self, load: int, new: int, decoding: int) -> bool:
        """Return whether the computation of a batch of ``load`` and ``new`` tokens waits for one decode of others."""
        return self.enabled and decoding > 0 and loading_bound(load, new, self.ratio)


def overlapped(load: float, compute: float, layers: int) -> float:
    """Return the seconds of a prefill whose load and computation, all layers together, begin at once."""
    return load / layers + (layers - 1) / layers * max(load, compute) + compute / layers


def not_before(load_end: float, compute: float, layers: int) -> float:
    """Return the time before which a computation cannot end whose load ends at ``load_end``: its last layer is left."""
    return load_end + compute / layers


def filled(load: float, compute: float, decode: float, layers: int) -> float:
    """Return the seconds of a decode of ``decode`` seconds and then the prefill, the load beginning with the decode."""
    return max(decode + compute, not_before(load, compute, layers), load / layers + compute)
