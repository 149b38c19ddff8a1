"""Curves of replays: latency and goodput over the rate requests come at, a line a policy, and where time was waited."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.errors import printable
from kvbench.report.curve_figures import bench_figures, slug
from kvbench.report.figures import (
    LIGHT,
    MOST_SERIES,
    SERIES,
    WIDTH,
    Figure,
    Spec,
    described,
    framed,
    log_ticks,
    unit_title,
    value_scale,
)
from kvbench.report.pooled import Pooled
from kvbench.report.replay_rows import STALLS

CURVES = ("ttft_mean", "ttft_p99", "tpot_mean", "goodput", "request_rate", "hit_rate")
LINES = ("policy", "params")  # axes that tell the lines of a figure apart
RATE = "rate_milli"


def replay_figures(rows: Sequence[Pooled], sides: Sequence[str]) -> Iterator[Figure]:
    """Yield the figures of the rows of routes/replay: what was replayed at two rates and more as curves over the rate,
    the rest as one line a case; then the stalls of everything that waited."""
    groups: dict[tuple[object, ...], list[Pooled]] = {}
    for pooled in rows:
        key = (pooled.side, *((name, v) for name, v in pooled.row.axes.items() if name not in (*LINES, RATE)))
        groups.setdefault(key, []).append(pooled)
    single: list[Pooled] = []
    for members in groups.values():
        if len({rate for p in members if (rate := _rate(p))}) < 2:
            single += [p for p in members if p.row.metric in CURVES]
            continue
        for metric in CURVES:
            drawn = [p for p in members if p.row.metric == metric and p.drawable and _rate(p)]
            for part in _parts(drawn):
                yield _curve(part, metric, sides)
    if single:
        yield from bench_figures(single, sides)
    for members in groups.values():
        stalled = [p for p in members if p.row.metric in STALLS and p.drawable and (p.row.value or 0.0) > 0.0]
        if stalled:
            yield _stalls(stalled, sides)


def _rate(pooled: Pooled) -> float | None:
    found = pooled.row.axes.get(RATE)
    return found / 1e3 if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def _name(pooled: Pooled) -> str:
    policy, params = (pooled.row.axes.get(name) for name in LINES)
    return printable(f"{policy}" if params == "default" else f"{policy} {params}", 80)


def _parts(rows: Sequence[Pooled]) -> Iterator[list[Pooled]]:
    """Yield ``rows`` in parts of at most eight lines."""
    names = list(dict.fromkeys(map(_name, rows)))
    for start in range(0, len(names), MOST_SERIES):
        some = names[start : start + MOST_SERIES]
        yield [p for p in rows if _name(p) in some]


def _curve(rows: Sequence[Pooled], metric: str, sides: Sequence[str]) -> Figure:
    names = list(dict.fromkeys(map(_name, rows)))
    ordered = sorted(rows, key=lambda p: (names.index(_name(p)), _rate(p) or 0.0))
    data = [
        {"x": _rate(p), "y": p.row.value, "series": _name(p), "tip": described(p, sides)} for p in ordered
    ]  # fmt: skip
    rates = [rate for p in rows if (rate := _rate(p))]
    values = [p.row.value for p in rows if p.row.value is not None]
    row = rows[0].row
    scale, axis = value_scale(min(values), max(values), row.unit)
    x: Spec = {
        "field": "x", "type": "quantitative",
        "scale": {"type": "log", "domain": [min(rates) / 1.15, max(rates) * 1.15], "nice": False},
        "axis": {"title": "requests that arrive a second", "values": log_ticks(min(rates) / 1.15, max(rates) * 1.15),
                 "labelExpr": "format(datum.value, '.3~g')", "labelOverlap": True, "grid": False},
    }  # fmt: skip
    y: Spec = {"field": "y", "type": "quantitative", "scale": scale,
               "axis": {"title": unit_title(row.metric, row.unit), **axis}}  # fmt: skip
    colour: Spec = {
        "field": "series", "type": "nominal", "scale": {"domain": names, "range": list(SERIES)},
        "legend": {"title": None},
    }  # fmt: skip
    body: Spec = {
        "width": WIDTH, "height": 280, "data": {"values": data}, "encoding": {"x": x, "y": y, "color": colour},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 2, "aria": False}},
            {"mark": {"type": "point", "filled": True, "opacity": 1, "size": 45},
             "encoding": {"description": {"field": "tip"}}},
        ],
    }  # fmt: skip
    return _figure(rows, f"routes/replay: {metric}", body, sides, _equal(data))


def _equal(data: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note for lines that lie on each other: only the last one drawn can be seen."""
    lines: dict[str, list[tuple[Any, Any]]] = {}
    for datum in data:
        lines.setdefault(datum["series"], []).append((datum["x"], datum["y"]))
    same: dict[str, list[str]] = {}
    for name, points in lines.items():
        same.setdefault(repr(points), []).append(name)
    return [f"equal: {', '.join(names)}" for names in same.values() if len(names) > 1]


def _stalls(rows: Sequence[Pooled], sides: Sequence[str]) -> Figure:
    """Return bars a replay: the share of its busy time in which the near side waited, by what it waited for."""
    data: list[dict[str, Any]] = []
    for p in rows:
        rate = _rate(p)
        case = f"{_name(p)}{'' if rate is None else f' at {rate:g}/s'}"
        data.append({
            "case": case, "cause": p.row.metric.removeprefix("stall_"), "share": p.row.value,
            "tip": described(p, sides),
        })  # fmt: skip
    causes = [name.removeprefix("stall_") for name in STALLS]
    body: Spec = {
        "width": WIDTH - 100, "height": {"step": 18}, "data": {"values": data},
        "mark": {"type": "bar", "height": 12},
        "encoding": {
            "y": {"field": "case", "type": "nominal", "sort": None, "axis": {"title": None}},
            "x": {"field": "share", "type": "quantitative", "stack": "zero",
                  "axis": {"title": "share of busy time waited", "format": ".0%", "tickCount": 5}},
            "color": {"field": "cause", "type": "nominal", "scale": {"domain": causes, "range": list(SERIES)},
                      "legend": {"title": None, "symbolType": "square"}},
            "order": {"field": "cause", "sort": "ascending"},
            "description": {"field": "tip"}, "stroke": {"value": LIGHT["paper"]},
        },
    }  # fmt: skip
    return _figure(rows, "routes/replay: stalls", body, sides)


def _figure(
    rows: Sequence[Pooled], title: str, body: Spec, sides: Sequence[str], notes: Sequence[str] = ()
) -> Figure:  # fmt: skip
    row = rows[0].row
    shown = {name: value for name, value in row.axes.items() if name not in (*LINES, RATE) and value != 0}
    fixed = " ".join(f"{name}={value}" for name, value in shown.items())
    if len(sides) > 1:
        fixed = f"{sides[rows[0].side]}: {fixed}"
    basis = tuple(sorted({p.row.basis for p in rows}))
    words = " ".join([title, fixed, *dict.fromkeys(map(_name, rows))])
    return Figure(
        slug(f"{title} {row.axes.get('workload')}"), row.suite, printable(title, 160), tuple(notes),
        framed(title, f"{'+'.join(basis)}; {fixed}", body), printable(words, 8_000), basis,
    )  # fmt: skip
