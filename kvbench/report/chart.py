"""Text charts: one bar a point for every curve in a run, with the law that fits it or why none does."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from kvbench.analysis.curves import Curve, curves_of, size_of
from kvbench.contract.result import Result
from kvbench.report.table import axes_text
from kvbench.report.text import unicode_ok
from kvbench.units import compact_bytes, format_bytes, format_value

WIDTH = 40
MIN_FIT_POINTS = 4


def curves(rows: Sequence[Result]) -> list[str]:
    """Return a chart for each set of rows that differ only in one byte axis and have at least three values."""
    return [chart(curve) for curve in curves_of(rows)]


def chart(curve: Curve) -> str:
    """Return the lines of one curve: a bar per point, linear in the value (logarithmic for times), then the fit."""
    axis, rows = curve.axis, curve.rows
    title = f"{curve.suite}/{curve.bench} {curve.metric}, {axes_text(rows[0], (axis,))}".rstrip(", ")
    full, partial = ("█", "▏▎▍▌▋▊▉█") if unicode_ok(sys.stdout) else ("#", "#")
    values = [row.value for row in rows if row.value is not None]
    logarithmic = rows[0].better == "lower" and max(values) > 20 * min(values)
    scale = "log scale" if logarithmic else "from 0"
    lines = ["", f"{title} ({scale})"]
    low, high = min(values), max(values)
    for row in rows:
        assert row.value is not None
        share = row.value / high
        if logarithmic:
            share = (math.log(row.value / low) + 0.2) / (math.log(high / low) + 0.2)
        eighths = max(1, round(share * WIDTH * len(partial)))
        bar = full * (eighths // len(partial))
        if eighths % len(partial):
            bar += partial[eighths % len(partial) - 1]
        mark = "" if row.status == "ok" else f" {row.status}"
        mark += " in_llc" if "in_llc" in row.flags else ""
        lines.append(
            f"  {compact_bytes(size_of(row, axis) or 0):>8} {bar:<{WIDTH}} {format_value(row.value, row.unit)}{mark}"
        )
    lines.extend(fit_lines(curve))
    return "\n".join(lines)


def fit_lines(curve: Curve) -> list[str]:
    """Return the fitted law of a bandwidth curve, or the reason why it does not fit; nothing for other metrics."""
    if curve.rows[0].unit != "B/s" or len(curve.rows) < MIN_FIT_POINTS:
        return []
    points = curve.points()
    return [f"  fit over {curve.axis}: {describe_fit(points)}"] if len(points) >= MIN_FIT_POINTS else []


def describe_fit(points: Sequence[tuple[int, float]]) -> str:
    """Return the winning law's parameters in words, or why no law fits."""
    from kvbench.analysis.fits import fit

    both = fit([n for n, _ in points], [t for _, t in points])
    best = both.best
    if not best.fits or best.residual is None:
        return f"t = alpha + n/beta does not fit ({best.reason})"
    law = "t = alpha + n/beta" if best.law == "additive" else "t = max(alpha, n/beta)"
    if both.winner is None:
        law += " (max law fits as well)"
    parts = [
        f"alpha {'not identified' if best.alpha is None else format_value(best.alpha, 's')}",
        f"beta {'not identified' if best.beta is None else format_value(best.beta, 'B/s')}",
        f"n-half {'unknown' if best.n_half is None else format_bytes(round(best.n_half))}",
        f"residual {100 * best.residual:.1f} %",
    ]
    return f"{law}: {', '.join(parts)}"
