"""What NEO's pipeline hides: both inequalities with their slack, the iteration's cost, how many KV tokens fit under it.

NEO (MLSys 2025, arXiv 2411.01142), section 3.2: T = L (max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0)), T_l = T_po + T_pr.
The CPU is hidden while T_l0 >= T_ca1 and T_l1 + T_ga0 >= T_ca0. Where batch 1 has near attention too (symmetric
pipelining), T_ga1 stands beside T_l0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.systems.neo import schedule
from kvbench.systems.neo.schedule import Batch, Schedule


@dataclass(frozen=True, slots=True)
class Half:
    """One of a layer's two half-stages: seconds of the near side and of the CPU beside it."""

    near: float
    cpu: float

    @property
    def slack(self) -> float:
        """Seconds the CPU could have worked longer; negative: the near side waits for it."""
        return self.near - self.cpu

    @property
    def holds(self) -> bool:
        return self.slack >= 0.0

    @property
    def stalls(self) -> str:
        """The side that waits: ``cpu`` where the inequality holds, else ``near``."""
        return "cpu" if self.holds else "near"

    @property
    def seconds(self) -> float:
        return max(self.near, self.cpu)


@dataclass(frozen=True, slots=True)
class Hiding:
    """``long``: T_l0 (+ T_ga1) beside T_ca1. ``short``: T_l1 + T_ga0 beside T_ca0."""

    long: Half
    short: Half

    @property
    def holds(self) -> bool:
        """Whether both inequalities hold."""
        return self.long.holds and self.short.holds

    @property
    def layer_seconds(self) -> float:
        """Seconds of a layer by the paper's formula."""
        return self.long.seconds + self.short.seconds


def hiding(seconds: Mapping[str, float], launch: float = 0.0) -> Hiding:
    """Return both half-stages of ``seconds`` of a layer's stages (``pr0``, ``po0``, ``ga0``, ``ca0``, ``pr1``, ...).

    A stage that is not there counts as 0. ``launch``: what a CPU half-stage takes beyond its attention (NEO's lnch).
    """

    def of(*names: str) -> float:
        return sum(seconds.get(name, 0.0) for name in names)

    def cpu(name: str) -> float:
        return seconds[name] + launch if seconds.get(name, 0.0) > 0.0 else 0.0

    return Hiding(Half(of("po0", "pr0", "ga1"), cpu("ca1")), Half(of("po1", "pr1", "ga0"), cpu("ca0")))


def hidden_tokens(bandwidth: float, near_seconds: float, token_bytes: int) -> float:
    """Return the capacity rule: KV tokens of a layer the CPU reads while the near side works ``near_seconds``.

    bandwidth x T_l0 / bytes of a token's KV in a layer. Raises UsageError for values that are not positive.
    """
    if not (bandwidth > 0.0 and near_seconds > 0.0 and token_bytes > 0):
        raise UsageError(
            "capacity rule", where="hide", got=(bandwidth, near_seconds, token_bytes), expected="three positive numbers"
        )
    return bandwidth * near_seconds / token_bytes


# Seconds a layer of a stage ("pr", "po", "ga", "ca") over a batch.
Cost = Callable[[str, Batch], float]


def divide(batch: Batch, cost: Cost) -> int:
    """Return how many of the CPU decodes of ``batch`` batch 0 takes so that both slacks are alike.

    Step 4 of NEO's scheduler, for work that has to be done in this iteration: the first decode goes to batch 1, each
    further one to the batch with the larger slack; none is left for later. Ties go to batch 1.
    """
    few = bulk = 0
    for _ in range(batch.cpu):
        first, second = Batch(batch.prefill, batch.gpu, few), Batch(cpu=bulk)
        long = cost("pr", first) + cost("po", first) - cost("ca", second)
        short = cost("pr", second) + cost("po", second) + cost("ga", first) - cost("ca", first)
        if bulk and short > long:
            few += 1
        else:
            bulk += 1
    return few


def plan(mode: str, layers: int, batch: Batch, cost: Cost) -> Schedule:
    """Return the schedule of ``batch`` in ``mode``; for ``asymmetric`` cut by :func:`divide`.

    Raises UsageError for an unknown mode and for one that leaves nothing to do.
    """
    if mode == "asymmetric":
        return schedule.asymmetric(layers, batch, divide(batch, cost))
    if mode not in schedule.MODES:
        raise UsageError("unknown mode", where="neo", got=mode, expected=", ".join(schedule.MODES))
    builders = {"gpu_only": schedule.gpu_only, "simple": schedule.simple, "symmetric": schedule.symmetric}
    return builders[mode](layers, batch)
