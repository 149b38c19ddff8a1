"""How long a case is sampled and when it stops: one frozen budget per profile (design 4, statistics.md 4c)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvbench.errors import UsageError, nearest
from kvbench.timing.clock import quantum
from kvbench.timing.summary import Spread, spread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvbench.contract.result import Stop

FLOOR_SAMPLES = 3  # the cap wins after this many
PLATEAU_LOOKS = 3  # looks in a row whose spread agrees before more sampling is called useless
PLATEAU_CHANGE = 0.10  # relative change of the spread (MAD / median) that still counts as agreeing


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds and counts for one side of a case.

    ``fixed_samples``: stop at that many accepted samples (smoke); None: sample until the median has converged.
    ``cap_seconds`` bounds the time inside sampled calls, warm-up not included; :data:`FLOOR_SAMPLES` are always taken.
    ``block_seconds`` and ``quanta`` are the least length of one sample, absolute and in clock quanta.
    """

    name: str
    warm_seconds: float
    warm_calls: int
    cap_seconds: float
    min_samples: int
    min_seconds: float
    fixed_samples: int | None = None
    max_samples: int = 20_000
    half_width: float = 0.005
    drift: float = 0.005
    lag1: float = 0.3
    growth: float = 1.5
    # Below about 100 us a stray interrupt or a 1 us gate read is a percent of the sample and gating loses its meaning.
    block_seconds: float = 100e-6
    quanta: float = 1_000.0

    def __post_init__(self) -> None:
        if self.warm_calls < 1:
            raise ValueError("a budget needs at least one warm-up call: the first call compiles, faults pages in, ...")
        if not FLOOR_SAMPLES <= self.min_samples <= self.max_samples:
            raise ValueError(f"min_samples {self.min_samples} outside {FLOOR_SAMPLES}..{self.max_samples}")
        if self.fixed_samples is not None and self.fixed_samples < FLOOR_SAMPLES:
            raise ValueError(f"fixed_samples {self.fixed_samples} below {FLOOR_SAMPLES}")
        if self.growth <= 1.0:
            raise ValueError(f"growth {self.growth} would look for ever")

    def target_seconds(self) -> float:
        """Return the least length of one sample on this machine's clock, in seconds."""
        return max(self.block_seconds, self.quanta * quantum().seconds)


BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "smoke": Budget("smoke", 0.0, 1, cap_seconds=0.5, min_samples=6, min_seconds=0.0, fixed_samples=6),
        "quick": Budget("quick", 0.2, 3, cap_seconds=2.0, min_samples=30, min_seconds=0.5),
        "full": Budget("full", 0.2, 3, cap_seconds=15.0, min_samples=30, min_seconds=0.5),
    }
)


def budget(profile: str) -> Budget:
    """Return the budget of ``profile``. Raises UsageError for a name that is none."""
    try:
        return BUDGETS[profile]
    except KeyError:
        raise UsageError(
            "unknown profile",
            got=profile,
            expected="smoke, quick or full",
            mend=nearest(profile, BUDGETS),
        ) from None


class StopRule:
    """Decides at geometric sample counts whether a side is done. One instance per side and case; it keeps its looks."""

    def __init__(self, limits: Budget) -> None:
        self.limits = limits
        self.next_count = limits.fixed_samples or limits.min_samples
        self.verdict: Stop | None = None  # of the latest look at the values: converged, stabilised_noisy or not yet
        self.capped = False
        self._noise: list[float] = []

    def look(self, values: NDArray[np.float64], taken: int, seconds: float) -> None:
        """Judge ``values`` (accepted seconds per pass, in order of taking) after ``seconds`` inside ``taken`` calls.

        Sets :attr:`verdict` when a look is due, and :attr:`capped` once the budget is spent, whatever the values say.
        """
        limits, n = self.limits, len(values)
        if n >= self.next_count and seconds >= limits.min_seconds:
            found = spread(values, limits.lag1)
            if self._converged(found):
                self.verdict = "converged"
            elif limits.fixed_samples is not None:
                self.verdict = "stabilised_noisy"  # smoke stops at a count; only what meets the criterion is converged
            else:
                self.verdict = "stabilised_noisy" if self._plateau(found, n, seconds) else None
            if limits.fixed_samples is None:
                self.next_count = int(n * limits.growth) + 1
        enough = n >= FLOOR_SAMPLES or taken >= FLOOR_SAMPLES
        self.capped = (seconds >= limits.cap_seconds and enough) or taken >= limits.max_samples

    @property
    def stop(self) -> Stop:
        """The stop reason when sampling ends now."""
        return self.verdict or "timeout"

    def _converged(self, found: Spread) -> bool:
        # CI width alone is unsafe: coverage 0 under a 1 % warm-up drift, 0.5 under AR(0.8) (statistics.md 4b); the
        # halves catch the first, the block interval inside `spread` the second.
        return (
            found.half_width is not None
            and found.half_width <= self.limits.half_width
            and (found.drift is None or abs(found.drift) < self.limits.drift)
        )

    def _plateau(self, found: Spread, n: int, seconds: float) -> bool:
        """True when the noise is stationary and the samples still wanted would not fit into the budget."""
        self._noise.append(found.noise)
        if found.half_width is None or len(self._noise) < PLATEAU_LOOKS:
            return False
        recent = self._noise[-PLATEAU_LOOKS:]
        if max(recent) > (1.0 + PLATEAU_CHANGE) * min(recent):
            return False
        if found.drift is not None and abs(found.drift) > max(self.limits.drift, 2.0 * found.half_width):
            return False  # still moving: not noise
        wanted = (found.half_width / self.limits.half_width) ** 2  # the interval shrinks with the root of n
        return seconds * wanted > self.limits.cap_seconds or n * wanted > self.limits.max_samples
