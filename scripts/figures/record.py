"""A figure: what was measured, its target, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvbench.errors import EXIT_NO_DATA, EXIT_OK
from kvbench.units import format_value

Verdict = Literal["met", "missed", "disturbed", "no target"]
Scalar = str | int | float | bool | None

SCHEMA = "kvbench.crosscheck/1"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number beside its target; ``low`` and ``high`` are inclusive, None where that side is open.

    ``value`` is in ``unit``: ``s``, ``ratio`` (C's seconds / ours, or what the name says), ``share`` (of 1, shown in
    percent) or ``count`` (then ``of`` says of how many). It is None where nothing could be measured, and ``note`` then
    says why. ``detail`` holds what the number was made from.
    """

    group: str
    name: str
    unit: str
    value: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    note: str = ""
    of: int | None = None
    detail: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def value_text(self) -> str:
        if self.value is None:
            return "-"
        if self.unit == "ratio":
            return f"{self.value:.3f}"
        if self.unit == "share":
            return f"{self.value:.2%}"
        if self.unit == "count":
            return f"{self.value:.0f}" if self.of is None else f"{self.value:.0f} of {self.of}"
        return format_value(self.value, self.unit)

    @property
    def target_text(self) -> str:
        def text(bound: float) -> str:
            if self.unit == "ratio":
                return f"{bound:.2f}"
            if self.unit == "share":
                return f"{bound:.3g}" if bound in (0.0, 1.0) else f"{bound:.1%}"
            return f"{bound:.0f}" if self.unit == "count" else format_value(bound, self.unit)

        if self.low is not None and self.high is not None:
            return text(self.low) if self.low == self.high else f"{text(self.low)}..{text(self.high)}"
        if self.high is not None:
            return f"<= {text(self.high)}"
        return f">= {text(self.low)}" if self.low is not None else "none"


def judge(value: float | None, low: float | None, high: float | None, *, disturbed: bool) -> Verdict:
    """Return the verdict on ``value``. ``disturbed``: other programs had a part in it.

    They can only spoil a figure, so one within its target is met all the same; one outside is then not known. Without
    a value it is missed, or disturbed when that is why there is none.
    """
    if low is None and high is None:
        return "no target"
    inside = value is not None and (low is None or low <= value) and (high is None or value <= high)
    if inside:
        return "met"
    return "disturbed" if disturbed else "missed"


def lost(group: str, name: str, unit: str, high: float | None, note: str, *, low: float | None = None) -> Figure:
    """Return the figure of a measurement that failed: no value, missed, and why."""
    return Figure(group, name, unit, None, low, high, judge(None, low, high, disturbed=False), note)


def exit_code(figures: list[Figure]) -> int:
    """Return 0 when every figure with a target is met and there is one, else 3."""
    aimed = [f.verdict for f in figures if f.verdict != "no target"]
    return EXIT_OK if aimed and set(aimed) == {"met"} else EXIT_NO_DATA


def document(figures: list[Figure]) -> dict[str, Any]:
    """Return the ``--json`` document."""
    return {"schema": SCHEMA, "exit_code": exit_code(figures), "figures": [asdict(f) for f in figures]}


NAME, VALUE, TARGET, VERDICT = 50, 11, 11, 9


def heading() -> str:
    return f"{'figure':<{NAME}} {'value':>{VALUE}}  {'target':<{TARGET}} {'verdict':<{VERDICT}}  from"


def line(figure: Figure) -> str:
    """Return one line of the table."""
    name = f"{figure.group} {figure.name}"
    return (
        f"{name:<{NAME}} {figure.value_text:>{VALUE}}  {figure.target_text:<{TARGET}} {figure.verdict:<{VERDICT}}"
        f"  {figure.note}"
    ).rstrip()
