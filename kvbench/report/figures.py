"""What a figure of a report is: a plain Vega-Lite spec with the words around it, and the parts all specs share.

A spec holds text of the user as data values only, never as field names or expressions, so nothing in it can be read as
anything but text. Colours are those of ``LIGHT``; the page replaces each by a variable of its style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import printable
from kvbench.report.pooled import Pooled
from kvbench.report.table import axes_text, ceiling_text, status_text, value_text
from kvbench.units import format_value

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, never fetched
WIDTH = 460  # two figures stand side by side in the page
MOST_SERIES = 8
PADDING = {"left": 26, "top": 8, "right": 26, "bottom": 8}  # a viewer's font may be wider than the one measured with
SERIES = ("#1b62a5", "#c2500f", "#23803f", "#7d4aa8", "#a3740b", "#b02a5b", "#13838f", "#6b5b4e")
LIGHT = {
    "ink": "#1c2126", "soft": "#5b646e", "grid": "#e2e5e9", "paper": "#fefefe", "good": "#1d7a46", "bad": "#bb3a1d",
    "same": "#7b858f", "unsure": "#b9c0c7", "taint": "#d3a94b", "gauge": "#eceff2",
}  # fmt: skip
DOT = " \N{MIDDLE DOT} "  # between the parts of a description; the page breaks the line there


@dataclass(frozen=True, slots=True)
class Figure:
    """``name``: file name without suffix; ``group``: the section or suite it belongs to; ``notes``: lines below it.

    ``words`` is everything a filter should find it by. ``basis``: the bases of what is drawn, ``measured`` or others.
    """

    name: str
    group: str
    title: str
    notes: tuple[str, ...]
    spec: Spec
    words: str
    basis: tuple[str, ...] = ("measured",)


def config() -> Spec:
    """Return the look all figures share."""
    axis = {
        "labelColor": LIGHT["soft"], "titleColor": LIGHT["soft"], "domainColor": LIGHT["soft"],
        "tickColor": LIGHT["soft"], "gridColor": LIGHT["grid"], "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal", "labelLimit": 420, "titleLimit": 600,
    }  # fmt: skip
    legend = {
        "labelColor": LIGHT["ink"], "titleColor": LIGHT["soft"], "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal", "labelLimit": 620, "orient": "top", "direction": "vertical",
        "symbolType": "stroke", "columns": 2, "rowPadding": 2, "symbolOpacity": 1, "symbolStrokeWidth": 2.5,
    }  # fmt: skip
    return {
        "font": "sans-serif", "background": LIGHT["paper"], "axis": axis, "legend": legend,
        "view": {"stroke": None}, "text": {"color": LIGHT["ink"], "fontSize": 11},
        "title": {"color": LIGHT["ink"], "fontSize": 13, "subtitleColor": LIGHT["soft"], "subtitleFontSize": 11,
                  "anchor": "start", "limit": WIDTH + 280, "subtitleLimit": WIDTH + 280},
    }  # fmt: skip


def framed(title: str, subtitle: str, body: Spec) -> Spec:
    """Return a whole spec: ``body`` under a title, which a figure on its own needs and the page shows as well."""
    heading: Spec = {"text": printable(title, 160)}
    if subtitle:
        heading["subtitle"] = printable(subtitle, 200)
    return {"$schema": SCHEMA, "title": heading, "config": config(), "padding": PADDING, **body}


def described(pooled: Pooled, sides: Sequence[str]) -> str:
    """Return all there is to say about one point, in parts the page shows as lines."""
    row = pooled.row
    parts = [f"{row.suite}/{row.bench} {axes_text(row)}".strip(), f"{row.metric} {spread_text(pooled)}"]
    if ceiling_text(row) != "-":
        parts.append(ceiling_text(row))
    parts.append(f"{row.basis}, {status_text(row)}")
    if row.kernel:
        parts.append(row.kernel)
    if len(sides) > 1:
        parts.insert(0, f"{sides[pooled.side]}")
    return DOT.join(printable(part, 400) for part in parts)


def spread_text(pooled: Pooled) -> str:
    """Return the value with its interval: within the run of one run, lowest to highest run median of several."""
    row = pooled.row
    if pooled.runs < 2 or row.value is None or row.low is None or row.high is None:
        return value_text(row)
    if not all(value == 0 or 1e-150 < abs(value) < 1e150 for value in (row.value, row.low, row.high)):
        return f"{row.value!r} {row.unit}"
    low, high = format_value(row.low, row.unit), format_value(row.high, row.unit)
    return f"{format_value(row.value, row.unit)} ({low} to {high}, {pooled.runs} runs)"


def value_scale(low: float, high: float, unit: str, *, least_span: float = 1.6) -> tuple[Spec, Spec]:
    """Return (scale, axis) for values from ``low`` to ``high``: logarithmic with labelled ticks, linear from 0 or below
    where a value is not positive. ``least_span``: a narrower range is widened, or noise would fill the picture."""
    labels = {"labelExpr": label_expression(unit)}
    if low <= 0.0:
        return {"type": "linear", "zero": True, "nice": True}, labels | {"tickCount": 5}
    low, high = low / 1.06, high * 1.06
    if high / low < least_span:
        grow = math.sqrt(least_span / (high / low))
        low, high = low / grow, high * grow
    return (
        {"type": "log", "domain": [low, high], "nice": False, "zero": False},
        {**labels, "values": log_ticks(low, high), "labelOverlap": True},
    )


def log_ticks(low: float, high: float) -> list[float]:
    """Return 3 to 12 round numbers between two positive numbers, spread evenly on a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        # through text: 3 * 10 ** -9 is not 3e-9, and a label would show it
        found = [t for e in decades for s in steps if low <= (t := float(f"{s}e{e}")) <= high]
        if len(found) >= 4:
            return found if len(found) <= 12 else found[:: math.ceil(len(found) / 12)]
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next((s for s in (5, 2) if (high - low) / (s * step) >= 3), 1)
    first = math.ceil(low / step)
    return [float(f"{i * step:.9g}") for i in range(first, math.floor(high / step) + 1)]


def size_ticks(sizes: Sequence[int]) -> list[int]:
    """Return at most eight of ``sizes``, the ends among them where that is possible."""
    known = sorted(set(sizes))
    return known[:: max(1, math.ceil((len(known) - 1) / 7))] if len(known) > 8 else known


_UP = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_DOWN = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_RATES = ("B/s", "FLOP/s", "FLOP", "Hz", "op/s")


def label_expression(unit: str) -> str:
    """Return the Vega expression that labels a tick in ``unit``; units we do not know stay out of it."""
    number = "format({}, '.3~g')"
    if unit in _RATES:
        steps = [(scale, f"{prefix}{unit}") for scale, prefix in _UP]
        text = f"{number.format('datum.value')} + ' {unit}'"
    elif unit == "B":
        steps, text = [(float(scale), name) for scale, name in _BINARY], f"{number.format('datum.value')} + ' B'"
    elif unit == "s":
        steps, text = list(_DOWN), f"{number.format('datum.value * 1e12')} + ' ps'"
    else:
        return number.format("datum.value").replace(".3~g", ".4~g")
    for scale, name in reversed(steps):  # the smallest innermost
        shown = number.format(f"datum.value / {scale!r}")
        text = f"datum.value >= {scale * 0.9999999!r} ? {shown} + ' {name}' : ({text})"
    return text


def unit_title(metric: str, unit: str) -> str:
    """Return the title of a value axis; the unit stands in it where the ticks do not carry one."""
    carried = unit in (*_RATES, "B", "s")
    return printable(metric if carried or unit == "1" else f"{metric}, {unit}", 80)
