"""Rules that find one number: as measured, as a share, ratio, difference, peak, or the load that is borne."""

from __future__ import annotations

from kvbench.analysis.claim_rules_base import Finding, Points, Undecided, over, quotient, same_unit, shown, text_of


def value(rows: Points) -> Finding:
    """The case `it` as it was measured."""
    point = rows.one("it")
    return Finding(point.value, point.row.unit, shown(point), point.low, point.high)


def share(rows: Points, *, of: float) -> Finding:
    """The case `it` as a share of ``of``, a number the paper gives in the row's unit."""
    point = rows.one("it")
    text = f"{shown(point)} of {text_of(of, point.row.unit)}"
    found = over(point.value, of)
    if found is None:
        raise Undecided(f"{text} is no share")
    return Finding(found, "1", text, over(point.low, of), over(point.high, of))


def ratio(rows: Points) -> Finding:
    """`top` over `bottom`; the bounds are those of the least and the greatest quotient."""
    top, bottom = rows.one("top"), rows.one("bottom")
    return Finding(
        quotient(top, bottom), "1", f"{shown(top)} over {shown(bottom)}", over(top.low, bottom.high),
        over(top.high, bottom.low),
    )  # fmt: skip


def difference(rows: Points) -> Finding:
    """`top` minus `bottom`, in their unit."""
    top, bottom = rows.one("top"), rows.one("bottom")
    unit = same_unit([top, bottom])
    return Finding(top.value - bottom.value, unit, f"{shown(top)} minus {shown(bottom)}")


def peak_ratio(rows: Points, *, axis: str) -> Finding:
    """The greatest quotient of `top` over `bottom` at one value of ``axis``: what a paper's "up to" says."""
    below = dict(rows.along("bottom", axis))
    both = [(at, point, below[at]) for at, point in rows.along("top", axis) if at in below]
    if not both:
        raise Undecided(f"top and bottom have no value of {axis} in common")
    at, top, bottom = max(both, key=lambda each: quotient(each[1], each[2]))
    text = f"{shown(top)} over {shown(bottom)} at {axis}={at:g}, the most of {len(both)}"
    return Finding(quotient(top, bottom), "1", text, over(top.low, bottom.high), over(top.high, bottom.low))


def sustained(rows: Points, *, axis: str, least: float | None = None, most: float | None = None) -> Finding:
    """The load `top` bears over the one `bottom` bears: the greatest value of ``axis`` up to which each is at least
    ``least`` (or at most ``most``), between the last that is and the first that is not, on a straight line.

    Undecided where one of them never fails, or always: its load lies outside what was measured.
    """
    if (least is None) == (most is None):
        raise Undecided("a load is sustained at least, or at most, one number")
    found = {}
    for name in ("top", "bottom"):
        along = rows.along(name, axis)
        same_unit([point for _, point in along])
        values = [(at, point.value if most is None else -point.value) for at, point in along]
        limit = -most if most is not None else float(least or 0.0)
        good = [index for index, (_, value) in enumerate(values) if value >= limit]
        if not good or good[-1] + 1 == len(values):
            always = "below" if not good else "above"
            raise Undecided(f"{name}: the load it bears lies {always} {axis}={values[0 if not good else -1][0]:g}")
        (begin, high), (end, low) = values[good[-1]], values[good[-1] + 1]
        found[name] = begin + (end - begin) * (high - limit) / (high - low)
    load = over(found["top"], found["bottom"])
    if load is None:
        raise Undecided(f"{found['top']:g} over {found['bottom']:g} is no ratio")
    bound = f"at least {least:g}" if least is not None else f"at most {most:g}"
    return Finding(load, "1", f"{axis} {found['top']:.4g} over {found['bottom']:.4g}, {bound} kept")


def scaled(rows: Points, *, by: float, unit: str) -> Finding:
    """The case `it`, a ratio, times ``by``, what it is a ratio of, in ``unit``."""
    point = rows.one("it")
    if point.row.unit != "1":
        raise Undecided(f"{shown(point)} is no ratio")
    low, high = (None if each is None else each * by for each in (point.low, point.high))
    return Finding(point.value * by, unit, f"{shown(point)} times {text_of(by, unit)}", low, high)


def rest(rows: Points, *, of: float) -> Finding:
    """One minus the case `it` over ``of``: the share of ``of`` that `it` does not have."""
    point = rows.one("it")
    taken = over(point.value, of)
    if taken is None:
        raise Undecided(f"{shown(point)} of {text_of(of, point.row.unit)} is no share")
    return Finding(1.0 - taken, "1", f"all but {shown(point)} of {text_of(of, point.row.unit)}")


def ratio_beside(rows: Points, *, plus: float) -> Finding:
    """`top` over `bottom` when ``plus``, in their unit, is added to both: what is there in either case."""
    top, bottom = rows.one("top"), rows.one("bottom")
    unit = same_unit([top, bottom])
    found = over(top.value + plus, bottom.value + plus)
    text = f"{shown(top)} over {shown(bottom)}, both beside {text_of(plus, unit)}"
    if found is None:
        raise Undecided(f"{text}: no ratio")
    return Finding(found, "1", text)


def largest(rows: Points, *, axis: str) -> Finding:
    """The greatest value of `it` along ``axis``: what a paper's "up to" says of one curve."""
    along = rows.along("it", axis)
    unit = same_unit([point for _, point in along])
    at, best = max(along, key=lambda each: each[1].value)
    text = f"{shown(best)} at {axis}={at:g}, the most of {len(along)}"
    return Finding(best.value, unit, text, best.low, best.high)
