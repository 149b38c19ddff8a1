"""Rules that find whether something has a shape: an order, a slope, a plateau, a hump, a law, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvbench.analysis.claim_rules_base import (
    SLACK,
    Finding,
    Point,
    Points,
    Undecided,
    over,
    quotient,
    same_unit,
    shown,
    text_of,
)
from kvbench.analysis.claim_rules_numbers import ratio


def at_least(rows: Points, *, least: float) -> Finding:
    """Every case `it` is at least ``least``; the worst one is shown."""
    worst = min(rows.all("it"), key=lambda point: point.value)
    text = f"{shown(worst)}, at least {least:g} asked"
    return Finding(worst.value, worst.row.unit, text, worst.low, worst.high, worst.value >= least)


def of_ceiling(rows: Points, *, least: float) -> Finding:
    """Every case `it` reaches ``least`` of its measured ceiling, taken in turns with it."""
    found = []
    for point in rows.all("it"):
        row = point.row
        if row.fraction is None or not row.ceilings or row.ceilings[0].kind != "measured":
            raise Undecided(f"{shown(point)} has no measured ceiling")
        found.append((row.fraction, f"{shown(point)}, {100 * row.fraction:.0f} % of {row.ceilings[0].name}"))
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
    total = quotient(points[-1], points[0])
    same_unit(points)
    rises = all(b.value > a.value * (1.0 + SLACK) for a, b in pairwise(points))
    text = ", ".join(f"{name} {shown(point)}" for name, point in zip(names, points, strict=True))
    return Finding(total, "1", text, holds=rises, tends=total > 1.0 + SLACK)


def flat(rows: Points, *, axis: str, spread: float) -> Finding:
    """`it` changes by no more than ``spread`` over ``axis``: greatest over least, minus one."""
    along = rows.along("it", axis)
    same_unit([point for _, point in along])
    least, most = (pick((p for _, p in along), key=lambda point: point.value) for pick in (min, max))
    found = quotient(most, least) - 1.0
    text = f"{shown(least)} to {shown(most)} over {axis}={along[0][0]:g}..{along[-1][0]:g}"
    return Finding(found, "1", text, holds=found <= spread)


def rising(rows: Points, *, axis: str, times: float, slack: float = SLACK) -> Finding:
    """`it` never falls along ``axis`` by more than ``slack`` (relative) and ends ``times`` as large as it begins."""
    along = rows.along("it", axis)
    points = [point for _, point in along]
    same_unit(points)
    total = quotient(points[-1], points[0])
    steady = all(b.value >= a.value * (1.0 - slack) for a, b in pairwise(points))
    text = " ".join(f"{at:g}:{shown(point)}" for at, point in along)
    return Finding(total, "1", f"{axis} {text}", holds=steady and total >= times, tends=total > 1.0 + SLACK)


def climbs(rows: Points, *, axis: str, by: float, slack: float = SLACK) -> Finding:
    """`it`, a share, never falls along ``axis`` by more than ``slack`` and ends ``by`` higher (both absolute)."""
    along = rows.along("it", axis)
    values = [point.value for _, point in along]
    unit = same_unit([point for _, point in along])
    total = values[-1] - values[0]
    steady = all(b >= a - slack for a, b in pairwise(values))
    text = " ".join(f"{at:g}:{shown(point)}" for at, point in along)
    return Finding(total, unit, f"{axis} {text}", holds=steady and total >= by, tends=total > slack)


def proportional(rows: Points, *, axis: str, spread: float) -> Finding:
    """`it` over ``axis`` is one constant: its greatest over its least value, minus one, is no more than ``spread``."""
    along = rows.along("it", axis)
    same_unit([point for _, point in along])
    if not all(at > 0.0 and point.value > 0.0 for at, point in along):
        raise Undecided(f"a value at {axis}=0 or below, or no value above 0: nothing to be in proportion")
    each = [point.value / at for at, point in along]
    found = over(max(each), min(each))
    if found is None:
        raise Undecided("no ratio of the least and the greatest share")
    text = " ".join(f"{at:g}:{shown(point)}" for at, point in along)
    rises = along[-1][1].value > along[0][1].value
    return Finding(found - 1.0, "1", f"{axis} {text}", holds=found - 1.0 <= spread, tends=rises)


def saturates(rows: Points, *, axis: str, least: float) -> Finding:
    """The smallest value of ``axis`` already has ``least`` of the best rate there is along it."""
    along = rows.along("it", axis)
    same_unit([point for _, point in along])
    best = max((point for _, point in along), key=lambda point: point.value)
    found = quotient(along[0][1], best)
    text = f"{shown(along[0][1])} at {axis}={along[0][0]:g}, {shown(best)} at best"
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
        f"{shown(cost)} an operation ({cost.row.detail.get('law')} law), "
        f"{text_of(rates[0][1], 'B/s')} at page {rates[0][0]} to {text_of(rates[-1][1], 'B/s')} "
        f"at {rates[-1][0]}, residual {100 * residual.value:.0f} %"
    )
    holds = steady and grew and residual.value <= most
    return Finding(residual.value, "1", text, holds=holds, tends=grew)


def nothing(rows: Points) -> Finding:
    """Every case `it` is exactly zero."""
    worst = max(rows.all("it"), key=lambda point: abs(point.value))
    return Finding(worst.value, worst.row.unit, shown(worst), holds=worst.value == 0.0)


def falls(rows: Points, *, axis: str, by: float, slack: float = SLACK) -> Finding:
    """`it`, a share, never rises along ``axis`` by more than ``slack`` and ends ``by`` lower (both absolute)."""
    along = rows.along("it", axis)
    values = [point.value for _, point in along]
    unit = same_unit([point for _, point in along])
    total = values[0] - values[-1]
    steady = all(b <= a + slack for a, b in pairwise(values))
    return Finding(total, unit, _curve(along, axis), holds=steady and total >= by, tends=total > slack)


def fades(rows: Points, *, axis: str, to: float, within: float, slack: float = SLACK) -> Finding:
    """`it` begins more than ``within`` above ``to``, never rises along ``axis`` and ends within ``within`` of it.

    ``slack`` and ``within`` are absolute. Found is the last value.
    """
    along = rows.along("it", axis)
    values = [point.value for _, point in along]
    unit = same_unit([point for _, point in along])
    steady = all(b <= a + slack for a, b in pairwise(values))
    holds = steady and values[0] > to + within and abs(values[-1] - to) <= within
    return Finding(values[-1], unit, _curve(along, axis), holds=holds, tends=values[-1] < values[0] - slack)


def humped(rows: Points, *, axis: str, names: Sequence[str]) -> Finding:
    """Each curve of ``names`` peaks inside ``axis``, above both of its ends, and the peaks rise in that order.

    Found is the last peak. Peaks in order without an inside are only a tendency.
    """
    peaks, inside = [], True
    texts = []
    for name in names:
        along = rows.along(name, axis)
        same_unit([point for _, point in along])
        at, peak = max(along, key=lambda each: each[1].value)
        ends = max(along[0][1].value, along[-1][1].value)
        inside = inside and peak.value > ends + SLACK * abs(ends)
        peaks.append(peak)
        texts.append(f"{name} {shown(peak)} at {axis}={at:g}")
    unit = same_unit(peaks)
    order = all(b.value > a.value for a, b in pairwise(peaks))
    return Finding(peaks[-1].value, unit, ", ".join(texts), holds=inside and order, tends=order and len(peaks) > 1)


def all_rise(rows: Points, *, along: Mapping[str, str], times: float, slack: float = SLACK) -> Finding:
    """Every case of ``along`` rises along its axis there, as :func:`rising`; the one that rises least is shown."""
    found = [
        rising(Points({"it": rows.all(name)}), axis=axis, times=times, slack=slack) for name, axis in along.items()
    ]
    if not found:
        raise Undecided("no curve was named")
    worst = min(found, key=lambda each: (bool(each.holds), each.value))
    text = "; ".join(each.text for each in found)
    tends = all(each.tends for each in found)
    return Finding(worst.value, "1", text, holds=all(each.holds for each in found), tends=tends)


def all_ordered(rows: Points, *, orders: Sequence[Sequence[str]]) -> Finding:
    """Each list of case names in ``orders`` rises as :func:`ordered` has it; found is the first one's quotient."""
    found = [ordered(rows, names=names) for names in orders]
    if not found:
        raise Undecided("no order was named")
    held = [bool(each.holds) for each in found]
    return Finding(found[0].value, "1", "; ".join(each.text for each in found), holds=all(held), tends=any(held))


def _curve(along: Sequence[tuple[float, Point]], axis: str) -> str:
    return f"{axis} " + " ".join(f"{at:g}:{shown(point)}" for at, point in along)
