"""Can this number be true, and is it what a healthy machine gives? (design 6.8)"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.contract.result import Better, Ceiling, Status

PHYSICAL_SLACK = 1.02  # spec sheets and clocks are rounded; beyond this the count or the clock is wrong
MEASURED_SLACK = 1.05  # a ceiling is itself a median with noise
HEALTHY_SHARE = 0.7  # of the lowest value seen on healthy machines of the kind (implementations.md 6, I2)

# Known reasons for a low number, the costliest first: factors are those of traps.md and public reports.
CAUSES = MappingProxyType(
    {
        "remote_node": "memory on another NUMA node (3x to 5x)",
        "swapped": "pages swapped or reclaimed",
        "throttled": "clock, power or cgroup throttling",
        "quota": "a CPU quota below the threads used",
        "link_width": "the link runs narrower or at a lower generation than it can",
        "thp_off": "4 KiB pages where huge pages were expected (up to 2.5x)",
        "foreign_load": "other work on the measured cores",
        "steal": "the hypervisor took the cores away",
        "smt_busy": "sibling hardware threads share a core",
        "governor": "a frequency governor other than performance",
        "migrated": "pages moved during the run (numa_balancing)",
        "write_combined": "write-combined memory read by a CPU",
        "ecc": "ECC that takes bandwidth from the data path",
        "virtualised": "a virtual machine without huge pages or pinning on its host",
    }
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Status, flags and reason of a value, its ``fraction`` of the first ceiling, and whether to retake the pair."""

    status: Status
    flags: tuple[str, ...]
    reason: str
    fraction: float | None
    retake: bool


def judge(
    value: float,
    better: Better,
    ceilings: Sequence[Ceiling],
    *,
    flags: Sequence[str] = (),
    reason: str = "",
    retaken: bool = False,
    healthy: float | None = None,
    causes: Collection[str] = (),
) -> Judgement:
    """Hold ``value`` against its ceilings and against a healthy machine.

    For ``better`` "lower" (a latency) a ceiling is a floor and every ratio is inverted. ``flags`` and ``reason`` are
    the sampler's; "tainted" among them becomes the status. Beyond 1.02 x a physical ceiling the value is ``invalid``.
    Beyond 1.05 x a measured one the caller retakes the pair once (``retake``) and calls again with ``retaken``; then
    the row is flagged ``above_ceiling``. ``healthy``: lowest (for "lower": highest) value of healthy machines of this
    kind, None when unknown; far from it the row is ``suspect``. ``causes``: what was found on this machine, keys of
    :data:`CAUSES` or free text (ranked last); the reason lists them by rank.

    Status by rank: invalid, tainted, suspect, ok. Raises ValueError for a value, ceiling or healthy value that is not a
    positive finite number.
    """
    fractions = [None if c.value is None else _fraction(value, c.value, better) for c in ceilings]
    found, reasons = list(flags), [reason] if reason else []
    status: Status = "tainted" if "tainted" in flags else "ok"
    retake = False
    if healthy is not None and (share := _fraction(value, healthy, better)) < HEALTHY_SHARE:
        status = "suspect" if status == "ok" else status
        found.append("below_healthy")
        reasons.append(f"{share:.2f} of the least a healthy machine gives; {_ranked(causes)}")
    for ceiling, fraction in zip(ceilings, fractions, strict=True):
        if fraction is None:
            continue
        if ceiling.kind == "physical" and fraction > PHYSICAL_SLACK:
            status = "invalid"
            reasons.insert(0, f"{fraction:.2f} x the physical ceiling {ceiling.name} ({ceiling.source})")
        elif ceiling.kind == "measured" and fraction > MEASURED_SLACK:
            retake = not retaken
            found.append("above_ceiling")
            reasons.append(f"{fraction:.2f} x the measured ceiling {ceiling.name}")
    return Judgement(
        status=status,
        flags=tuple(dict.fromkeys(found)),
        reason="; ".join(reasons),
        fraction=fractions[0] if fractions else None,
        retake=retake and status != "invalid",
    )


def _fraction(value: float, ceiling: float, better: Better) -> float:
    for number in (value, ceiling):
        if not (number > 0.0 and math.isfinite(number)):
            raise ValueError(f"{number} cannot be judged: expected a positive finite value and ceiling")
    return value / ceiling if better == "higher" else ceiling / value


def _ranked(causes: Collection[str]) -> str:
    known = [text for code, text in CAUSES.items() if code in causes]
    texts = known + sorted(c for c in causes if c not in CAUSES)
    if not texts:
        return "no known cause was found on this machine"
    return "likely causes: " + ", ".join(f"{i}. {text}" for i, text in enumerate(texts, 1))
