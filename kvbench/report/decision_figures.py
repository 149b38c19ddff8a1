"""Comparison bars around 1 and series over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.analysis.compare import Against, Row
from kvbench.analysis.trend import Trend
from kvbench.errors import printable
from kvbench.report.curve_figures import slug
from kvbench.report.figures import DOT, LIGHT, WIDTH, Figure, Spec, framed, unit_title, value_scale
from kvbench.report.pooled import showable
from kvbench.report.table import setting
from kvbench.units import counted, format_value

MOST_BARS = 30
COLOURS = {
    "FASTER": "good", "SLOWER": "bad", "SAME": "same", "INCONCLUSIVE": "unsure", "TAINTED": "taint",
    "INCOMPARABLE": "unsure", "NO_DATA": "unsure",
}  # fmt: skip
# span of the axis -> its ticks: few enough that none needs to be left out
RATIOS = (
    (1.6, (0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5)), (3.5, (0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)),
    (20.0, (0.05, 0.1, 0.2, 0.33, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)),
    (math.inf, tuple(float(f"1e{e}") for e in range(-150, 151))),
)  # fmt: skip


def case_text(row: Row) -> str:
    """Return ``suite/bench axis=value ... metric`` of a compared row."""
    axes = " ".join(f"{name}={setting(name, value)}" for name, value in row.axes.items())
    return " ".join(filter(None, (f"{row.suite}/{row.bench}", axes, row.metric)))


def gain(row: Row) -> tuple[float, float | None, float | None] | None:
    """Return how many times as good the side is as the first, with its interval; None without a ratio to show."""
    if row.ratio is None or not showable(row.ratio):
        return None
    if row.compares == "fraction" or row.better == "higher":
        return row.ratio, row.low, row.high
    return 1.0 / row.ratio, 1.0 / row.high if row.high else None, 1.0 / row.low if row.low else None


def bars(other: Against, name: str, base: str) -> Iterator[Figure]:
    """Yield one figure a suite: the rows that moved most, best first, as bars on a logarithmic axis around 1."""
    suites: dict[str, list[Row]] = {}
    for row in other.rows:
        suites.setdefault(row.suite, []).append(row)
    for suite, rows in suites.items():
        rated = [(row, found) for row in rows if (found := gain(row)) is not None]
        if not rated:
            continue
        most = sorted(rated, key=lambda pair: -abs(math.log(pair[1][0])))[:MOST_BARS]
        most.sort(key=lambda pair: -pair[1][0])
        notes = []
        if len(most) < len(rated):
            notes.append(f"the {len(most)} rows that moved most of {len(rated)}; the table has all")
        if len(rated) < len(rows):
            notes.append(f"{counted(len(rows) - len(rated), 'row')} without a ratio: see the table")
        yield _bars(suite, most, notes, name, base)


def _bars(
    suite: str, rated: Sequence[tuple[Row, tuple[float, float | None, float | None]]], notes: Sequence[str], name: str,
    base: str,
) -> Figure:  # fmt: skip
    data = []
    labels = _labels([row for row, _ in rated])
    for number, (row, (ratio, low, high)) in enumerate(rated):
        what = "fractions of the ceiling" if row.compares == "fraction" else "values"
        bound = f" [{low:.3f}, {high:.3f}] 99 %" if low is not None and high is not None else ""
        datum: dict[str, Any] = {
            "case": printable(labels[number], 110), "n": number, "one": 1.0, "gain": ratio,
            "verdict": row.verdict,
            "tip": DOT.join(printable(part, 400) for part in (
                case_text(row), f"{ratio:.3f} times as good{bound}, by {what}",
                f"a {_value(row.a, row)}, {name} {_value(row.b, row)}", f"{row.verdict}; {row.reason}".rstrip("; "),
            )),
        }  # fmt: skip
        if low is not None and high is not None and showable(low) and showable(high):
            datum |= {"low": low, "high": high}
        data.append(datum)
    reach = [v for d in data for v in (d["gain"], d.get("low", 1.0), d.get("high", 1.0))]
    # an interval of two runs a side may span anything: it ends at the border rather than squeezing the bars
    widest = max(max(d["gain"], 1.0 / d["gain"]) for d in data)
    span = max(1.25, min(max(max(v, 1.0 / v) for v in reach), max(widest * 1.6, 2.0)) * 1.05)
    for datum in data:
        if "low" in datum:
            datum |= {"low": max(datum["low"], 1.0 / span), "high": min(datum["high"], span)}
    steps = next(steps for most, steps in RATIOS if span <= most)
    ticks = [t for t in steps if 1.0 / span <= t <= span]
    scale: Spec = {"type": "log", "domain": [1.0 / span, span], "nice": False, "clamp": True}
    x: Spec = {"type": "quantitative", "scale": scale}
    axis: Spec = {
        "title": f"times as good as {base}: right of 1 is better", "values": ticks[:: math.ceil(len(ticks) / 11)],
        "labelExpr": "format(datum.value, '.3~g')",
    }  # fmt: skip
    words = list(dict.fromkeys(d["verdict"] for d in data))
    y: Spec = {"field": "n", "type": "ordinal", "sort": None, "axis": None}
    named: Spec = {
        "mark": {"type": "text", "align": "right", "baseline": "middle", "dx": -8, "limit": 380, "aria": False,
                 "color": LIGHT["ink"]},
        "encoding": {"x": {"value": 0}, "text": {"field": "case"}},
    }  # fmt: skip
    body: Spec = {
        "width": WIDTH - 40, "height": {"step": 17}, "data": {"values": data}, "encoding": {"y": y},
        "layer": [
            {
                "mark": {"type": "bar", "height": 10}, "encoding": {
                    "x": {**x, "field": "one", "axis": axis}, "x2": {"field": "gain"},
                    "color": {"field": "verdict", "type": "nominal", "legend": {"title": None, "symbolType": "square"},
                              "scale": {"domain": words, "range": [LIGHT[COLOURS[word]] for word in words]}},
                    "description": {"field": "tip"},
                },
            },
            {
                "mark": {"type": "rule", "color": LIGHT["ink"], "strokeWidth": 1.2, "aria": False},
                "transform": [{"filter": "isValid(datum.low)"}],
                "encoding": {"x": {**x, "field": "low", "axis": axis}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "rule", "color": LIGHT["ink"], "strokeWidth": 1, "aria": False},
                "data": {"values": [{"one": 1.0}]},
                "encoding": {"x": {**x, "field": "one", "axis": axis}, "y": {"value": 0}, "y2": {"value": "height"}},
            },
            named,
        ],
    }  # fmt: skip
    title = f"{suite}: {name} against {base}"
    found = " ".join(f"{case_text(row)} {row.verdict}" for row, _ in rated)
    return Figure(slug(f"compare {title}"), "compare", printable(title, 160), tuple(notes),
                  framed(title, "bars begin at 1; whiskers are 99 % intervals", body),
                  printable(f"{suite} {found}", 8_000))  # fmt: skip


def _labels(rows: Sequence[Row]) -> list[str]:
    """Return bench, the axes in which the rows of that bench differ, and the metric where it has several."""
    found = []
    for row in rows:
        same = [other for other in rows if other.bench == row.bench]
        axes = " ".join(
            f"{name}={setting(name, value)}" for name, value in row.axes.items()
            if any(other.axes.get(name) != value for other in same)
        )  # fmt: skip
        several = len({other.metric for other in same}) > 1
        found.append(" ".join(filter(None, (row.bench, axes, row.metric if several else ""))))
    return found


def _value(value: float | None, row: Row) -> str:
    return "-" if value is None or not (value == 0 or showable(value)) else format_value(value, row.unit)


def trend_figure(found: Trend) -> Figure | None:
    """Return one case over time: a dot a run, the level between changes; None where no point can be drawn."""
    data: list[dict[str, Any]] = []
    used: list[int] = []
    before: str | None = None
    turns: list[dict[str, Any]] = []
    for index, (point, counts) in enumerate(zip(found.points, found.counted, strict=True), 1):
        if counts:
            used.append(index)
        if before is not None and point.env_digest != before:
            turns.append({"x": index - 0.5})
        before = point.env_digest
        value = point.figure.value
        if value is None or not showable(value) or point.figure.status == "invalid" or point.figure.unit != found.unit:
            continue
        said = point.figure.status if counts else f"{point.figure.status}, does not count"
        parts = (f"{point.started_at[:16]}Z run {point.run[:8]}", format_value(value, found.unit),
                 f"{said}, profile {point.profile}", f"environment {point.env_digest}", point.label or "")  # fmt: skip
        datum: dict[str, Any] = {
            "x": index, "y": value, "counts": counts,
            "tip": DOT.join(printable(part, 200) for part in parts if part),
        }  # fmt: skip
        data.append(datum)
    if not data:
        return None
    scale, y_axis = value_scale(min(d["y"] for d in data), max(d["y"] for d in data), found.unit, least_span=1.2)
    y: Spec = {"field": "y", "type": "quantitative", "scale": scale}
    y["axis"] = {"title": unit_title(found.metric, found.unit), **y_axis}
    last = len(found.points)
    x: Spec = {"field": "x", "type": "quantitative", "scale": {"domain": [0.5, last + 0.5], "nice": False},
               "axis": {"title": "run, oldest first", "grid": False, "tickMinStep": 1, "format": "d"}}  # fmt: skip
    levels = _levels(found, used)
    changes = [{"x": used[c.index] - 0.5, "text": f"{c.verdict} x{c.ratio:.3f}"} for c in found.changes]
    layer: list[Spec] = [
        {"data": {"values": turns}, "mark": {"type": "rule", "color": LIGHT["unsure"], "strokeDash": [3, 3],
         "aria": False}, "encoding": {"x": x}} if turns else {},
        {"data": {"values": levels}, "mark": {"type": "rule", "color": LIGHT["good"], "strokeWidth": 2, "aria": False},
         "encoding": {"x": x, "x2": {"field": "x2"}, "y": y}} if levels else {},
        {"data": {"values": changes}, "mark": {"type": "rule", "color": LIGHT["bad"], "aria": False},
         "encoding": {"x": x}} if changes else {},
        {"data": {"values": changes}, "mark": {"type": "text", "color": LIGHT["bad"], "align": "left", "dx": 4,
         "aria": False}, "encoding": {"x": x, "y": {"value": 8}, "text": {"field": "text"}}} if changes else {},
        {
            "mark": {"type": "point", "filled": True, "size": 34, "opacity": 1, "stroke": "#1b62a5"}, "encoding": {
                "x": x, "y": y, "description": {"field": "tip"},
                "fill": {"condition": {"test": "!datum.counts", "value": LIGHT["paper"]}, "value": "#1b62a5"},
            },
        },
    ]  # fmt: skip
    case = found.case
    axes = " ".join(f"{name}={setting(name, value)}" for name, value in case.axes.items())
    body: Spec = {"width": WIDTH, "height": 170, "data": {"values": data}, "layer": [part for part in layer if part]}
    title = f"{case.suite}/{case.bench} {axes}".strip()
    notes = [found.reason] if found.reason else []
    notes += [f"note: {note.text}" for note in found.notes[:5]]
    if turns:
        notes.append("dashed: the environment changed")
    return Figure(slug(f"history {title} {found.metric}"), "history", printable(f"{title} {found.metric}", 160),
                  tuple(printable(note, 300) for note in notes),
                  framed(title, f"{found.metric} on {found.hw_class}", body),
                  printable(f"{title} {found.metric} {found.hw_class}", 2_000))  # fmt: skip


def _levels(found: Trend, used: Sequence[int]) -> list[dict[str, Any]]:
    """Return the median of every stretch between changes; the changes know both sides of theirs."""
    edges = [0, *(change.index for change in found.changes), len(used)]
    values = [found.changes[0].before, *(change.after for change in found.changes)] if found.changes else []
    return [
        {"x": used[first] - 0.5, "x2": used[last - 1] + 0.5, "y": value}
        for first, last, value in zip(edges, edges[1:], values, strict=False)
    ]
