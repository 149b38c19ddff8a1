"""How a claim is measured from rows: small named functions, each tested on rows made for it.

A rule gets the points its form names and nothing else; all of them are there, clean and finite. It returns what it
found; whether that is the paper's number is not its business. A rule raises Undecided where the points have no such
number (a ratio with nothing below it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        found = [(_axis_number(point.row.axes.get(axis), axis), point) for point in self.all(name)]
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


def _axis_number(value: Scalar, axis: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise Undecided(f"{axis}={value} is no number to sort by") from None


def _text(value: float, unit: str) -> str:
    """Return ``value`` for reading; only a file can hold what no unit has a prefix for."""
    return format_value(value, unit) if abs(value) < MOST else f"{value!r} {unit}"


def _shown(point: Point) -> str:
    return _text(point.value, point.row.unit)


def _same_unit(points: Sequence[Point]) -> str:
    units = sorted({point.row.unit for point in points})
    if len(units) != 1:
        raise Undecided(f"the rows have different units: {', '.join(units)}")
    return units[0]


def _over(top: float | None, bottom: float | None) -> float | None:
    """Return top / bottom where it is a number."""
    if top is None or bottom is None or not bottom > 0.0:
        return None
    found = top / bottom
    return found if math.isfinite(found) else None


def _quotient(top: Point, bottom: Point) -> float:
    _same_unit([top, bottom])
    found = _over(top.value, bottom.value)
    if found is None:
        raise Undecided(f"{_shown(top)} over {_shown(bottom)} is no ratio")
    return found


# -- one number --------------------------------------------------------------------------------------------------------


def value(rows: Points) -> Finding:
    """The case `it` as it was measured."""
    point = rows.one("it")
    return Finding(point.value, point.row.unit, _shown(point), point.low, point.high)


def share(rows: Points, *, of: float) -> Finding:
    """The case `it` as a share of ``of``, a number the paper gives in the row's unit."""
    point = rows.one("it")
    text = f"{_shown(point)} of {_text(of, point.row.unit)}"
    found = _over(point.value, of)
    if found is None:
        raise Undecided(f"{text} is no share")
    return Finding(found, "1", text, _over(point.low, of), _over(point.high, of))


def ratio(rows: Points) -> Finding:
    """`top` over `bottom`; the bounds are those of the least and the greatest quotient."""
    top, bottom = rows.one("top"), rows.one("bottom")
    return Finding(
        _quotient(top, bottom), "1", f"{_shown(top)} over {_shown(bottom)}", _over(top.low, bottom.high),
        _over(top.high, bottom.low),
    )  # fmt: skip


def difference(rows: Points) -> Finding:
    """`top` minus `bottom`, in their unit."""
    top, bottom = rows.one("top"), rows.one("bottom")
    unit = _same_unit([top, bottom])
    return Finding(top.value - bottom.value, unit, f"{_shown(top)} minus {_shown(bottom)}")


# -- shapes ------------------------------------------------------------------------------------------------------------


def at_least(rows: Points, *, least: float) -> Finding:
    """Every case `it` is at least ``least``; the worst one is shown."""
    worst = min(rows.all("it"), key=lambda point: point.value)
    text = f"{_shown(worst)}, at least {least:g} asked"
    return Finding(worst.value, worst.row.unit, text, worst.low, worst.high, worst.value >= least)


def of_ceiling(rows: Points, *, least: float) -> Finding:
    """Every case `it` reaches ``least`` of its measured ceiling, taken in turns with it."""
    found = []
    for point in rows.all("it"):
        row = point.row
        if row.fraction is None or not row.ceilings or row.ceilings[0].kind != "measured":
            raise Undecided(f"{_shown(point)} has no measured ceiling")
        found.append((row.fraction, f"{_shown(point)}, {100 * row.fraction:.0f} % of {row.ceilings[0].name}"))
    worst, text = min(found)
    return Finding(worst, "1", text, holds=worst >= least)


def within(rows: Points, *, least: float, most: float) -> Finding:
    """`top` over `bottom` lies between ``least`` and ``most``."""
    found = ratio(rows)
    return Finding(found.value, "1", found.text, found.low, found.high, least <= found.value <= most)


def ordered(rows: Points, *, names: Sequence[str]) -> Finding:
    """The cases called ``names`` rise in that order, each by more than 2 %; found is the last over the first."""
    points = [rows.one(name) for name in names]
    if len(points) < 2:
        raise Undecided("one case has no order")
    total = _quotient(points[-1], points[0])
    _same_unit(points)
    rises = all(b.value > a.value * (1.0 + SLACK) for a, b in pairwise(points))
    text = ", ".join(f"{name} {_shown(point)}" for name, point in zip(names, points, strict=True))
    return Finding(total, "1", text, holds=rises, tends=total > 1.0 + SLACK)


def flat(rows: Points, *, axis: str, spread: float) -> Finding:
    """`it` changes by no more than ``spread`` over ``axis``: greatest over least, minus one."""
    along = rows.along("it", axis)
    _same_unit([point for _, point in along])
    least, most = (pick((p for _, p in along), key=lambda point: point.value) for pick in (min, max))
    found = _quotient(most, least) - 1.0
    text = f"{_shown(least)} to {_shown(most)} over {axis}={along[0][0]:g}..{along[-1][0]:g}"
    return Finding(found, "1", text, holds=found <= spread)


def rising(rows: Points, *, axis: str, times: float, slack: float = SLACK) -> Finding:
    """`it` never falls along ``axis`` by more than ``slack`` (relative) and ends ``times`` as large as it begins."""
    along = rows.along("it", axis)
    points = [point for _, point in along]
    _same_unit(points)
    total = _quotient(points[-1], points[0])
    steady = all(b.value >= a.value * (1.0 - slack) for a, b in pairwise(points))
    text = " ".join(f"{at:g}:{_shown(point)}" for at, point in along)
    return Finding(total, "1", f"{axis} {text}", holds=steady and total >= times, tends=total > 1.0 + SLACK)


def climbs(rows: Points, *, axis: str, by: float, slack: float = SLACK) -> Finding:
    """`it`, a share, never falls along ``axis`` by more than ``slack`` and ends ``by`` higher (both absolute)."""
    along = rows.along("it", axis)
    values = [point.value for _, point in along]
    unit = _same_unit([point for _, point in along])
    total = values[-1] - values[0]
    steady = all(b >= a - slack for a, b in pairwise(values))
    text = " ".join(f"{at:g}:{_shown(point)}" for at, point in along)
    return Finding(total, unit, f"{axis} {text}", holds=steady and total >= by, tends=total > slack)


def proportional(rows: Points, *, axis: str, spread: float) -> Finding:
    """`it` over ``axis`` is one constant: its greatest over its least value, minus one, is no more than ``spread``."""
    along = rows.along("it", axis)
    _same_unit([point for _, point in along])
    if not all(at > 0.0 and point.value > 0.0 for at, point in along):
        raise Undecided(f"a value at {axis}=0 or below, or no value above 0: nothing to be in proportion")
    each = [point.value / at for at, point in along]
    found = _over(max(each), min(each))
    if found is None:
        raise Undecided("no ratio of the least and the greatest share")
    text = " ".join(f"{at:g}:{_shown(point)}" for at, point in along)
    rises = along[-1][1].value > along[0][1].value
    return Finding(found - 1.0, "1", f"{axis} {text}", holds=found - 1.0 <= spread, tends=rises)


def saturates(rows: Points, *, axis: str, least: float) -> Finding:
    """The smallest value of ``axis`` already has ``least`` of the best rate there is along it."""
    along = rows.along("it", axis)
    _same_unit([point for _, point in along])
    best = max((point for _, point in along), key=lambda point: point.value)
    found = _quotient(along[0][1], best)
    text = f"{_shown(along[0][1])} at {axis}={along[0][0]:g}, {_shown(best)} at best"
    return Finding(found, "1", text, holds=found >= least)


def per_operation_law(rows: Points, *, most: float) -> Finding:
    """Rates of a page sweep rise, and one cost per operation explains them: `cost` with its sweep, `residual` <= most.

    Found is the rms residual. A sweep that has no such cost is Undecided by its rows: they carry no value then.
    """
    cost, residual = rows.one("cost"), rows.one("residual")
    rates = []
    for name, rate in cost.row.detail.items():
        digits = name.removeprefix("page_").removesuffix("_Bps")
        if name == f"page_{digits}_Bps" and digits.isdigit() and isinstance(rate, int | float) and rate > 0:
            rates.append((int(digits), float(rate)))
    rates.sort()
    if len(rates) < 4:
        raise Undecided(f"{len(rates)} page sizes in the detail, four are needed")
    steady = all(b >= a * (1.0 - 2.5 * SLACK) for (_, a), (_, b) in pairwise(rates))
    grew = rates[-1][1] > rates[0][1] * (1.0 + SLACK)
    text = (
        f"{_shown(cost)} an operation ({cost.row.detail.get('law')} law), "
        f"{_text(rates[0][1], 'B/s')} at page {rates[0][0]} to {_text(rates[-1][1], 'B/s')} "
        f"at {rates[-1][0]}, residual {100 * residual.value:.0f} %"
    )
    holds = steady and grew and residual.value <= most
    return Finding(residual.value, "1", text, holds=holds, tends=grew)


def nothing(rows: Points) -> Finding:
    """Every case `it` is exactly zero."""
    worst = max(rows.all("it"), key=lambda point: abs(point.value))
    return Finding(worst.value, worst.row.unit, _shown(worst), holds=worst.value == 0.0)


RULES: Mapping[str, Callable[..., Finding]] = {
    rule.__name__: rule for rule in (
        value, share, ratio, difference, at_least, of_ceiling, within, ordered, flat, rising, climbs, proportional,
        saturates, per_operation_law, nothing,
    )
}  # fmt: skip
