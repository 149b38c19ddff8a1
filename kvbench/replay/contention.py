"""How long a phase takes when its resources get in each other's way, and which of them it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvbench.errors import UsageError
from kvbench.replay.protocol import Cause, Phase

FACTORS = ("compute_link", "hbm_link", "link_duplex", "cpu_link", "near_cpu", "cpu_near")
NO_SOURCE = "1.0: no measured factor, taken as not disturbed"


@dataclass(frozen=True, slots=True)
class Contention:
    """Factors of 1 and more by which work takes longer while another resource is busy.

    ``compute_link``, ``hbm_link``: near-side work while the link moves data (either way); ``link_duplex``: each
    direction while the other one is busy too; ``cpu_link``: CPU attention while the link moves data. ``near_cpu``,
    ``cpu_near``: near-side work while the CPU attends, and the other way round, where both are cores of one host.
    ``sources`` names where each comes from. Raises UsageError for a factor below 1.
    """

    compute_link: float = 1.0
    hbm_link: float = 1.0
    link_duplex: float = 1.0
    cpu_link: float = 1.0
    near_cpu: float = 1.0
    cpu_near: float = 1.0
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name in FACTORS:
            if not 1.0 <= getattr(self, name) < float("inf"):
                raise UsageError("not a slowdown", where=f"contention {name}", got=getattr(self, name), expected=">= 1")

    @property
    def none(self) -> bool:
        """Whether nothing disturbs anything."""
        return all(getattr(self, name) == 1.0 for name in FACTORS)

    def disturbed(self, phase: Phase) -> tuple[float, float, float, float, float]:
        """Return the seconds of compute, hbm, link_in, link_out and cpu of one repeat of ``phase``.

        Work of ``t`` seconds beside ``b`` seconds of another resource runs at 1/f of its rate until that is over:
        f x t if it ends before, else t + b (1 - 1/f). The link's own duration is taken first (its directions disturb
        each other) and is not made longer by what it disturbs. Near-side work and CPU attention disturb each other
        last, with what both then take.
        """
        into, out = phase.link_in, phase.link_out
        if into > 0.0 and out > 0.0 and self.link_duplex > 1.0:
            into, out = _beside(into, out, self.link_duplex), _beside(out, into, self.link_duplex)
        busy = into if into > out else out
        compute, hbm, cpu = phase.compute, phase.hbm, phase.cpu
        if busy > 0.0:
            compute, hbm = _slowed(compute, busy, self.compute_link), _slowed(hbm, busy, self.hbm_link)
            cpu = _slowed(cpu, busy, self.cpu_link)
        near = max(compute, hbm)
        if near > 0.0 and cpu > 0.0 and (self.near_cpu > 1.0 or self.cpu_near > 1.0):
            longer, cpu = _together(near, cpu, self.near_cpu, self.cpu_near)
            compute, hbm = compute * longer / near, hbm * longer / near
        return compute, hbm, into, out, cpu


def _slowed(work: float, busy: float, factor: float) -> float:
    return work * factor if work * factor <= busy else work + busy * (1.0 - 1.0 / factor)


def _together(a: float, b: float, slow_a: float, slow_b: float) -> tuple[float, float]:
    """Return what ``a`` and ``b`` take when each runs at 1/slow of its rate while both run."""
    if a * slow_a <= b * slow_b:
        end = a * slow_a
        return end, b + end * (1.0 - 1.0 / slow_b)
    end = b * slow_b
    return a + end * (1.0 - 1.0 / slow_a), end


def _beside(work: float, other: float, factor: float) -> float:
    """Return what ``work`` takes when both slow each other while both run."""
    return work * factor if work <= other else work + other * (factor - 1.0)


def bound(times: tuple[float, float, float, float, float]) -> tuple[float, float, Cause]:
    """Return the near side's seconds, the phase's seconds and what it waits for when they differ."""
    compute, hbm, into, out, cpu = times
    near = compute if compute > hbm else hbm
    longest = near
    cause: Cause = "link_in"
    if into > longest:
        longest = into
    if out > longest:
        longest, cause = out, "link_out"
    if cpu > longest:
        longest, cause = cpu, "cpu"
    return near, longest, cause
