"""What a trap leaves behind, and how its function says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Verdict = Literal["pass", "fail", "unknown", "not applicable"]


class NotApplicable(Exception):
    """Raised by a look where this machine has nothing that could go wrong in this way; the text says what is absent."""


@dataclass(frozen=True, slots=True)
class Number:
    """One of the two numbers a trap compared. ``value`` is SI in ``unit``, or a count of what ``unit`` names."""

    label: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found. ``found`` is held against ``expected`` by the rule ``threshold``.

    Everything but ``pass`` carries a ``reason``; only a look that could not be made has no numbers, and one that is
    ``not applicable`` (no GPU, one NUMA node) never has any. ``notes`` are
    further numbers a reader may want. ``mend`` replaces the trap's general advice where the look knows better.
    """

    verdict: Verdict
    found: Number | None
    expected: Number | None
    threshold: str
    reason: str = ""
    notes: tuple[str, ...] = ()
    mend: str = ""

    def __post_init__(self) -> None:
        if self.verdict == "pass" and (self.found is None or self.expected is None):
            raise ValueError("a trap that compared nothing cannot pass")
        if self.verdict == "not applicable" and (self.found is not None or self.expected is not None):
            raise ValueError("what is not applicable was not looked at and has no numbers")
        if self.verdict != "pass" and not self.reason:
            raise ValueError(f"verdict {self.verdict} needs a reason")

    def note(self, *lines: str) -> Finding:
        """Return a copy with further notes."""
        return replace(self, notes=(*self.notes, *lines))


@dataclass(frozen=True, slots=True)
class TrapResult:
    """A trap's finding with what it means for results and how to mend it. ``seconds``: how long the look took."""

    id: str
    title: str
    finding: Finding
    means: str
    mend: str
    seconds: float

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ``kvbench.traps/1``."""
        finding = self.finding

        def number(n: Number | None) -> dict[str, Any] | None:
            return None if n is None else {"label": n.label, "value": n.value, "unit": n.unit}

        return {
            "id": self.id, "title": self.title, "verdict": finding.verdict, "reason": finding.reason,
            "found": number(finding.found), "expected": number(finding.expected), "threshold": finding.threshold,
            "notes": list(finding.notes), "means": self.means, "mend": self.mend, "seconds": round(self.seconds, 3),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trap:
    """A self-test: ``look`` exercises the code that measures. ``means``: what a failure does to results."""

    id: str
    title: str
    means: str
    mend: str
    look: Callable[[], Finding]


def check(
    good: bool, found: Number, expected: Number, threshold: str, reason: str, *notes: str, mend: str = ""
) -> Finding:
    """Return pass, or fail with ``reason``, for two numbers that were compared."""
    return Finding("pass" if good else "fail", found, expected, threshold, "" if good else reason, notes, mend)


def unknown(
    reason: str, threshold: str, found: Number | None = None, expected: Number | None = None, *, mend: str = ""
) -> Finding:
    """Return the finding of a look that could not be made, or whose answer would not be worth believing."""
    return Finding("unknown", found, expected, threshold, reason, (), mend)


def not_applicable(reason: str) -> Finding:
    """Return the finding of a trap that this machine cannot fall into."""
    return Finding("not applicable", None, None, "not looked at", reason)
