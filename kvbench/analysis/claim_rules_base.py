"""What rules of claims work on: points, findings, and how numbers of rows are put together and shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.units import format_value

if TYPE_CHECKING:
    from kvbench.contract.result import Result, Scalar

MOST = 1e150  # rounding what is larger overflows
SLACK = 0.02  # what a step may go the other way, and what no difference is: run medians differ by so much (design 11)


class Undecided(Exception):
    """The points are there but say nothing; the text says why."""


@dataclass(frozen=True, slots=True)
class Point:
    """One case measured: ``value`` in ``row.unit`` is the median of its runs.

    ``low`` and ``high`` are the least and greatest run, or the interval within the only run, None where it has none.
    ``row`` is the newest of the rows; ``runs`` their run UUIDs.
    """

    row: Result
    value: float
    low: float | None
    high: float | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Points:
    """The points of a form by the name of its cases, in the order of their axes."""

    by_name: Mapping[str, Sequence[Point]]

    def all(self, name: str) -> Sequence[Point]:
        """Return the points called ``name``. Raises Undecided without one."""
        found = self.by_name.get(name, ())
        if not found:
            raise Undecided(f"no case is called {name}")
        return found

    def one(self, name: str) -> Point:
        """Return the only point called ``name``. Raises Undecided for none or several."""
        found = self.all(name)
        if len(found) != 1:
            raise Undecided(f"{len(found)} cases are called {name}, one is needed")
        return found[0]

    def along(self, name: str, axis: str) -> list[tuple[float, Point]]:
        """Return (axis value, point) of the points called ``name``, ascending. Raises Undecided below two."""
        found = [(axis_number(point.row.axes.get(axis), axis), point) for point in self.all(name)]
        if len({at for at, _ in found}) != len(found) or len(found) < 2:
            raise Undecided(f"{name}: at least two different values of {axis} are needed")
        return sorted(found, key=lambda each: each[0])


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: a ``value`` in ``unit`` with bounds where known, and for a shape whether it ``holds``.

    ``tends``: not that shape, but it goes the way the paper says. ``text``: the measured numbers behind it.
    """

    value: float
    unit: str
    text: str
    low: float | None = None
    high: float | None = None
    holds: bool | None = None
    tends: bool | None = None


def axis_number(value: Scalar, axis: str) -> float:
    """Return the number an axis value is. Raises Undecided for a word."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise Undecided(f"{axis}={value} is no number to sort by") from None


def text_of(value: float, unit: str) -> str:
    """Return ``value`` for reading; only a file can hold what no unit has a prefix for."""
    return format_value(value, unit) if abs(value) < MOST else f"{value!r} {unit}"


def shown(point: Point) -> str:
    """Return the point's value for reading."""
    return text_of(point.value, point.row.unit)


def same_unit(points: Sequence[Point]) -> str:
    """Return the unit of all ``points``. Raises Undecided where they differ."""
    units = sorted({point.row.unit for point in points})
    if len(units) != 1:
        raise Undecided(f"the rows have different units: {', '.join(units)}")
    return units[0]


def over(top: float | None, bottom: float | None) -> float | None:
    """Return top / bottom where it is a number."""
    if top is None or bottom is None or not bottom > 0.0:
        return None
    found = top / bottom
    return found if math.isfinite(found) else None


def quotient(top: Point, bottom: Point) -> float:
    """Return ``top`` over ``bottom``. Raises Undecided for different units and where it is no number."""
    same_unit([top, bottom])
    found = over(top.value, bottom.value)
    if found is None:
        raise Undecided(f"{shown(top)} over {shown(bottom)} is no ratio")
    return found
