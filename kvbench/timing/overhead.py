"""``python -m kvbench.timing.overhead``: what the sampler itself costs per sample on this machine."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace

from kvbench.timing.budget import BUDGETS, Budget
from kvbench.timing.clock import check_monotonic, now_ns, quantum
from kvbench.timing.gate import GateKind
from kvbench.timing.sampler import sample

SAMPLES = 8_000
BATCHES = 9  # their median: one preempted batch must not speak for the sampler
EXTRA_THREADS = 3


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds per sample beyond the timed call, over ``samples`` samples with ``threads`` gated threads.

    ``gate_reason`` is not empty when the gate could not work: then ``seconds`` is not the cost of gating.
    """

    gate: GateKind | None
    threads: int
    samples: int
    seconds: float
    gate_reason: str


def measure(
    gate: GateKind | None, tids: tuple[int, ...] = (), samples: int = SAMPLES, batches: int = BATCHES
) -> Overhead:
    """Sample an empty call ``samples`` times, subtract what the same calls cost bare; median of ``batches``.

    The looks at the stop rule are part of it, as many as a quick case of this length makes (none before its 0.5 s); the
    summary afterwards is once per case and is not.
    """
    limits = replace(
        BUDGETS["full"],
        warm_seconds=0.0,
        min_seconds=0.0,
        min_samples=samples // 4,  # with growth 1.5 that is four looks
        block_seconds=0.0,
        quanta=0.0,
        max_samples=samples,
        cap_seconds=3600.0,
        half_width=-1.0,  # never converges: every sample is taken
    )
    costs = sorted((_batch(limits, gate, tids) for _ in range(batches)), key=lambda cost: cost.seconds)
    return costs[len(costs) // 2]


def _batch(limits: Budget, gate: GateKind | None, tids: tuple[int, ...]) -> Overhead:
    asked: list[int] = []

    def stamp() -> tuple[str, ...]:
        asked.append(now_ns())  # first when sampling begins, last when it has ended
        return ()

    def empty(reps: int) -> None:
        return None

    found = sample(empty, limits, gate=gate, tids=tids, marker=stamp)
    began = now_ns()
    for _ in range(found.taken):
        empty(1)
    bare = now_ns() - began
    spent = asked[-1] - asked[0] - bare
    return Overhead(gate, max(1, len(tids)), found.taken, spent * 1e-9 / found.taken, found.gate_reason)


def main() -> int:
    """Print the clock's quantum and the cost per sample: ungated, gated, and gated with more threads."""
    clock, steady = quantum(), check_monotonic()
    print(f"clock   step {clock.step_ns} ns, back to back {clock.cost_ns:.0f} ns, {steady.backward} steps backwards")
    done = threading.Event()
    idle = [threading.Thread(target=done.wait, daemon=True) for _ in range(EXTRA_THREADS)]
    for thread in idle:
        thread.start()
    own = threading.get_native_id()
    many = (own, *(t.native_id for t in idle if t.native_id is not None))
    cases: tuple[tuple[GateKind | None, tuple[int, ...]], ...] = (
        (None, (own,)), ("delay", (own,)), ("delay", many), ("cpu", (own,)), ("cpu", many),
    )  # fmt: skip
    for kind, tids in cases:
        cost = measure(kind, tids)
        threads = "" if kind is None else f", {cost.threads} thread{'s' if cost.threads > 1 else ''}"
        note = f"  (gate off: {cost.gate_reason})" if cost.gate_reason else ""
        print(f"{kind or 'ungated':7} {cost.seconds * 1e6:.2f} us per sample beyond the timed call{threads}{note}")
    done.set()
    return 0


if __name__ == "__main__":
    sys.exit(main())
