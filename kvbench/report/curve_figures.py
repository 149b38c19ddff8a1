"""Curves and dots of the benches: values over the axis that has sizes, or one line a case where none has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvbench.analysis.curves import BYTE_AXES, curves_of, size_of
from kvbench.contract.result import Scalar
from kvbench.errors import printable
from kvbench.report.chart import MIN_FIT_POINTS, describe_fit
from kvbench.report.figures import (
    LIGHT,
    MOST_SERIES,
    SERIES,
    WIDTH,
    Figure,
    Spec,
    described,
    framed,
    label_expression,
    size_ticks,
    unit_title,
    value_scale,
)
from kvbench.report.pooled import Pooled, showable
from kvbench.report.table import setting
from kvbench.units import counted

MIN_POINTS = 3
MOST_DOTS = 30
MOST_SIZE = 1 << 63  # more is no size of anything
Setting = tuple[str, Scalar, Scalar]  # axis, value as typed, number behind it


def bench_figures(rows: Sequence[Pooled], sides: Sequence[str]) -> Iterator[Figure]:
    """Yield the figures of one bench's rows of all sides: a set of them for each metric, the primary one first."""
    metrics: dict[tuple[object, ...], list[Pooled]] = {}
    for pooled in sorted(rows, key=lambda p: not p.primary):
        row = pooled.row
        metrics.setdefault((row.bench_version, row.metric, row.unit, row.better), []).append(pooled)
    for members in metrics.values():
        drawn = [p for p in members if p.drawable]
        if not drawn:
            continue
        axis = size_axis(drawn)
        parts = (
            list(_parts(drawn, axis)) if axis else [drawn[i : i + MOST_DOTS] for i in range(0, len(drawn), MOST_DOTS)]
        )
        left = _left_out([p for p in members if not p.drawable])
        for number, part in enumerate(parts, 1):
            title = f"{part[0].row.suite}/{part[0].row.bench}: {part[0].row.metric}"
            title += f" ({number} of {len(parts)})" if len(parts) > 1 else ""
            notes = (left,) if left and number == len(parts) else ()
            yield _curves(part, axis, sides, title, notes) if axis else _dots(part, sides, title, notes)


def size_axis(rows: Sequence[Pooled]) -> str | None:
    """Return the axis with the most numbers, byte axes before others, None where none has three."""
    counts: dict[str, set[int]] = {}
    for pooled in rows:
        for name in pooled.row.axes:
            size = size_of(pooled.row, name)
            if size is None or isinstance(size, bool) or not 1 <= size < MOST_SIZE:
                counts[name] = set()
                continue
            counts.setdefault(name, set()).add(size)
    able = {name: len(sizes) for name, sizes in counts.items() if len(sizes) >= MIN_POINTS}
    return max(able, key=lambda name: (name in BYTE_AXES, able[name])) if able else None


def _settings(pooled: Pooled, axis: str | None) -> tuple[Setting, ...]:
    row = pooled.row
    return tuple((n, v, row.resolved.get(n, v)) for n, v in sorted(row.axes.items()) if n != axis)


def _parts(rows: Sequence[Pooled], axis: str) -> Iterator[list[Pooled]]:
    """Yield ``rows`` in parts of at most eight series, cut along the axis that needs the fewest parts."""

    def series(members: Iterable[Pooled]) -> int:
        return len({(p.side, repr(_settings(p, axis))) for p in members})

    def cut(name: str) -> list[list[Pooled]]:
        found: dict[str, list[Pooled]] = {}
        for pooled in rows:
            found.setdefault(repr((pooled.row.axes.get(name), pooled.row.resolved.get(name))), []).append(pooled)
        return list(found.values())

    if series(rows) <= MOST_SERIES:
        yield list(rows)
        return
    cuts = [c for name in sorted({n for p in rows for n in p.row.axes} - {axis}) if len(c := cut(name)) > 1]
    if not cuts:  # series of one setting: as many sides as that
        yield list(rows)
        return
    fit = [c for c in cuts if max(map(series, c)) <= MOST_SERIES]
    for part in min(fit, key=len) if fit else max(cuts, key=len):
        yield from _parts(part, axis)


def _label(pooled: Pooled, axis: str | None, varying: Sequence[str], sides: Sequence[str]) -> str:
    parts = []
    for name, value, number in _settings(pooled, axis):
        if name in varying:
            behind = f"({setting(name, number)})" if number != value else ""
            parts.append(f"{name}={setting(name, value)}{behind}")
    if len(sides) > 1:
        parts.insert(0, sides[pooled.side])
    if pooled.row.basis != "measured":
        parts.append(f"[{pooled.row.basis}]")
    return printable(" ".join(parts) or pooled.row.metric, 120)


def _varying(rows: Sequence[Pooled], axis: str | None) -> tuple[list[str], str]:
    """Return the axes that tell series apart, and the text of the others."""
    first = {name: (value, number) for name, value, number in _settings(rows[0], axis)}
    every = sorted({name for p in rows for name in p.row.axes} - {axis})
    varying = [
        name for name in every
        if any((p.row.axes.get(name), p.row.resolved.get(name, p.row.axes.get(name))) != first.get(name) for p in rows)
    ]  # fmt: skip
    fixed = [
        f"{name}={setting(name, value)}" + (f"({setting(name, number)})" if number != value else "")
        for name, (value, number) in first.items() if name not in varying
    ]  # fmt: skip
    return varying, " ".join(fixed)


def _values(rows: Sequence[Pooled]) -> list[float]:
    """Return every number a value axis must have room for."""
    found = [p.row.value for p in rows] + [v for p in rows for v in interval(p)]
    found += [p.row.ceilings[0].value for p in rows if p.row.ceilings]
    return [value for value in found if value is not None and (value == 0 or showable(value))]


def interval(pooled: Pooled) -> tuple[float | None, float | None]:
    """Return the bounds to draw; none where they do not hold the value, as a file may have it."""
    row = pooled.row
    if row.value is None or row.low is None or row.high is None or not row.low <= row.value <= row.high:
        return None, None
    return row.low, row.high


def _datum(pooled: Pooled, label: str, sides: Sequence[str]) -> dict[str, Any]:
    row = pooled.row
    low, high = interval(pooled)
    found: dict[str, Any] = {
        "series": label, "y": row.value, "tip": described(pooled, sides),
        "state": "clean" if not pooled.marked else "marked",
    }  # fmt: skip
    if low is not None and high is not None and (low > 0.0 or (row.value or 0.0) <= 0.0):
        found |= {"low": low, "high": high}
    if row.ceilings and row.ceilings[0].value is not None and showable(row.ceilings[0].value):
        found["ceiling"] = row.ceilings[0].value
    return found


def _curves(
    rows: Sequence[Pooled], axis: str, sides: Sequence[str], title: str, notes: tuple[str, ...]
) -> Figure:  # fmt: skip
    varying, fixed = _varying(rows, axis)
    data: list[dict[str, Any]] = []
    labels: dict[str, None] = {}
    for pooled in sorted(rows, key=lambda p: (p.side, size_of(p.row, axis) or 0)):
        label = _label(pooled, axis, varying, sides)
        labels.setdefault(label)
        data.append({"x": size_of(pooled.row, axis), **_datum(pooled, label, sides)})
    fits, fitted = _fits(rows, axis, varying, sides)
    sizes = [datum["x"] for datum in data]
    x_axis: Spec = {"title": printable(axis, 40), "values": size_ticks(sizes), "labelOverlap": True, "grid": False}
    x_axis["labelExpr"] = label_expression("B") if axis in BYTE_AXES else "format(datum.value, ',d')"
    scale, y_axis = value_scale(min(_values(rows)), max(_values(rows)), rows[0].row.unit)
    first = rows[0].row
    common: Spec = {
        "x": {"field": "x", "type": "quantitative", "axis": x_axis,
              "scale": {"type": "log", "domain": [min(sizes) / 1.15, max(sizes) * 1.15], "nice": False}},
        "color": {"field": "series", "type": "nominal", "scale": {"domain": list(labels), "range": list(SERIES)},
                  "legend": {"title": None} if len(labels) > 1 else None},
    }  # fmt: skip
    y: Spec = {"field": "y", "type": "quantitative", "scale": scale}
    y["axis"] = {"title": unit_title(first.metric, first.unit), **y_axis}
    body: Spec = {
        "width": WIDTH, "height": 280, "data": {"values": data}, "encoding": common,
        "layer": [*_marks(y, "y", ("series", list(labels))), *_fit_layer(fitted, y)],
    }  # fmt: skip
    return _figure(rows, title, fixed, body, (*fits, *notes), axis)


def _marks(value: Spec, channel: str, colour: tuple[str, list[str]]) -> list[Spec]:
    """Return ceiling, interval and value marks; ``channel`` is the one the value lies on, ``colour`` the field that
    tells colours apart and its values."""
    lines = channel == "y"
    ceiling: Spec = (
        {"mark": {"type": "line", "strokeDash": [2, 3], "strokeWidth": 1, "opacity": 0.75, "aria": False}}
        if lines else {"mark": {"type": "tick", "thickness": 2, "size": 13, "opacity": 0.6, "aria": False}}
    )  # fmt: skip
    found = [
        {
            **ceiling,
            "transform": [{"filter": "isValid(datum.ceiling)"}],
            "encoding": {channel: {**value, "field": "ceiling"}},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 1.5, "aria": False},
            "transform": [{"filter": "isValid(datum.low)"}],
            "encoding": {channel: {**value, "field": "low"}, f"{channel}2": {"field": "high"}},
        },
    ]
    if lines:
        found.append({"mark": {"type": "line", "strokeWidth": 2, "aria": False}, "encoding": {channel: value}})
    field, names = colour
    own: Spec = {"field": field, "type": "nominal", "legend": None, "scale": {"domain": names, "range": list(SERIES)}}
    points: Spec = {
        "mark": {"type": "point", "filled": True, "opacity": 1, "size": 45, "strokeWidth": 1.8},
        "encoding": {
            channel: value, "description": {"field": "tip"}, "stroke": own,
            # a disturbed value is hollow
            "fill": {"condition": {"test": "datum.state == 'marked'", "value": LIGHT["paper"]}, **own},
        },
    }  # fmt: skip
    return [*found, points]


def _dots(rows: Sequence[Pooled], sides: Sequence[str], title: str, notes: tuple[str, ...]) -> Figure:
    varying, fixed = _varying(rows, None)
    data: list[dict[str, Any]] = []
    for pooled in rows:
        label = _label(pooled, None, varying, ("",))
        side = printable(sides[pooled.side], 60)
        data.append({"case": label.strip() or pooled.row.metric, "side": side, **_datum(pooled, label, sides)})
    first = rows[0].row
    scale, x_axis = value_scale(min(_values(rows)), max(_values(rows)), first.unit, least_span=3.0)
    x: Spec = {"field": "y", "type": "quantitative", "scale": scale}
    x["axis"] = {"title": unit_title(first.metric, first.unit), **x_axis}
    shown = [printable(side, 60) for side in sides]
    common: Spec = {
        "y": {"field": "case", "type": "nominal", "sort": None, "axis": {"title": None, "grid": True}},
        "color": {"field": "side", "type": "nominal", "scale": {"domain": shown, "range": list(SERIES)},
                  "legend": {"title": None} if len(sides) > 1 else None},
    }  # fmt: skip
    if len(sides) > 1:
        common["yOffset"] = {"field": "side", "scale": {"domain": shown}}
    body: Spec = {
        "width": WIDTH - 100, "height": {"step": 18 if len(sides) == 1 else 11 * len(sides)},
        "data": {"values": data}, "encoding": common, "layer": _marks(x, "x", ("side", shown)),
    }  # fmt: skip
    return _figure(rows, title, fixed, body, notes, None)


def _fit_layer(fitted: Sequence[dict[str, Any]], y: Spec) -> list[Spec]:
    if not fitted:
        return []
    mark = {"type": "line", "strokeDash": [7, 4], "strokeWidth": 1.2, "opacity": 0.9, "aria": False}
    return [{"data": {"values": list(fitted)}, "mark": mark, "encoding": {"y": y}}]


def _fits(
    rows: Sequence[Pooled], axis: str, varying: Sequence[str], sides: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the law of each bandwidth curve in words, and the points of those laws that fit."""
    from kvbench.analysis.fits import fit

    notes: list[str] = []
    without: list[str] = []
    points: list[dict[str, Any]] = []
    if rows[0].row.unit != "B/s" or axis not in BYTE_AXES:
        return notes, points
    for side in sorted({p.side for p in rows}):
        mine = {id(p.row): p for p in rows if p.side == side and not p.marked and (p.row.value or 0.0) > 0.0}
        for curve in curves_of([p.row for p in mine.values() if _timed(p)], (axis,)):
            known = curve.points()
            if len(known) < MIN_FIT_POINTS:
                continue
            label = _label(mine[id(curve.rows[0])], axis, varying, sides)
            best = fit([n for n, _ in known], [t for _, t in known]).best
            if not best.fits:
                without.append(label)
            else:
                notes.append(printable(f"fit, dashed: {label}: {describe_fit(known)}", 400))
                points += [
                    {"x": size_of(row, axis), "y": n / seconds, "series": label}
                    for row, (n, _) in zip(curve.rows, known, strict=False)
                    if len(known) == len(curve.rows) and (seconds := best.predict(n))
                ]
    if without:
        notes.append(
            f"no law t = alpha + n/beta or max(alpha, n/beta) fits {', '.join(without)}: kvbench show says why"
        )
    return notes, points


def _timed(pooled: Pooled) -> bool:
    row = pooled.row
    return (row.seconds is None or (row.seconds > 0.0 and showable(row.seconds))) and row.rate_of in (
        None, "unique", "link", "demand", "near"
    )  # fmt: skip


def _figure(
    rows: Sequence[Pooled], title: str, fixed: str, body: Spec, notes: Sequence[str], axis: str | None
) -> Figure:  # fmt: skip
    basis = tuple(sorted({p.row.basis for p in rows}))
    subtitle = fixed if basis == ("measured",) else f"{'+'.join(basis)}; {fixed}".rstrip("; ")
    marked = sum(p.marked for p in rows)
    lines = [note for note in notes if note]
    if marked:
        lines.append(f"{counted(marked, 'value')} of disturbed runs, hollow")
    if any(p.row.ceilings and p.row.ceilings[0].value is not None for p in rows):
        names = sorted({f"{p.row.ceilings[0].name} ({p.row.ceilings[0].kind})" for p in rows if p.row.ceilings})
        mark = "dotted" if axis else "ticks"
        lines.append(
            printable(f"ceiling, {mark}: {', '.join(names[:4])}{' and others' if len(names) > 4 else ''}", 300)
        )
    first = rows[0].row
    words = " ".join([title, fixed, *sorted({_label(p, None, list(p.row.axes), ("",)) for p in rows})])
    return Figure(slug(f"{first.suite} {title}"), first.suite, printable(title, 160), tuple(lines),
                  framed(title, subtitle, body), printable(words, 8_000), basis)  # fmt: skip


def slug(text: str) -> str:
    """Return a file name made of ``text``: plain letters, digits and dashes."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")[:80] or "figure"


def _left_out(rows: Sequence[Pooled]) -> str:
    """Return which rows have no place in a picture, so that nobody takes their absence for an omission."""
    counts: dict[str, int] = {}
    for pooled in rows:
        counts[pooled.row.status] = counts.get(pooled.row.status, 0) + 1
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    return f"not drawn: {text} (see the table)" if text else ""
