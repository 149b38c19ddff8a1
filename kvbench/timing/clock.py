"""The host clock, what it can resolve, and whether it can be trusted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

now_ns = time.perf_counter_ns
thread_cpu_ns = time.thread_time_ns

QUANTUM_READS = 4_000


@dataclass(frozen=True, slots=True)
class Quantum:
    """What the host clock resolves.

    ``step_ns``: smallest nonzero difference of two reads; ``cost_ns``: median difference of reads back to back.
    They differ where the clock source is coarse (step large, reads cheap) or a system call (step 1 ns, reads 100 ns and
    more): a sample has to be long against both, so :attr:`ns` is the larger.
    """

    step_ns: int
    cost_ns: float
    reads: int

    @property
    def ns(self) -> float:
        return max(float(self.step_ns), self.cost_ns)

    @property
    def seconds(self) -> float:
        return self.ns * 1e-9


@dataclass(frozen=True, slots=True)
class Monotonicity:
    """Outcome of reading the clock ``reads`` times: how often it ran backwards, how far, and the longest silence."""

    reads: int
    backward: int
    worst_back_ns: int
    longest_gap_ns: int

    @property
    def ok(self) -> bool:
        return self.backward == 0


def measure_quantum(reads: int = QUANTUM_READS) -> Quantum:
    """Measure the clock now. Where no two of ``reads`` reads differ, waits for the next step."""
    steps = _differences(reads)
    positive = [s for s in steps if s > 0]
    if not positive:
        first = now_ns()
        while (later := now_ns()) <= first:
            pass
        positive = [later - first]
    forward = sorted(s for s in steps if s >= 0)
    cost = float(forward[len(forward) // 2]) if forward else float(min(positive))
    return Quantum(step_ns=min(positive), cost_ns=cost, reads=reads)


@lru_cache(maxsize=1)
def quantum() -> Quantum:
    """Return the host clock's quantum, measured once per process (under 1 ms)."""
    return measure_quantum()


def check_monotonic(reads: int = QUANTUM_READS) -> Monotonicity:
    """Read the clock ``reads`` times and count steps backwards (traps.md T53: unstable TSC in virtual machines)."""
    steps = _differences(reads)
    back = [s for s in steps if s < 0]
    return Monotonicity(
        reads=reads, backward=len(back), worst_back_ns=-min(back, default=0), longest_gap_ns=max(steps, default=0)
    )


def _differences(reads: int) -> list[int]:
    stamps = [0] * max(reads, 2)
    for i in range(len(stamps)):
        stamps[i] = now_ns()
    return [b - a for a, b in pairwise(stamps)]
