"""``history`` for people: one bar a run, the changes of level between them, and what changed with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvbench.analysis.trend import Trend
from kvbench.errors import printable
from kvbench.report.table import setting
from kvbench.report.text import unicode_ok
from kvbench.units import counted, format_value

WIDTH = 30


def trend_text(found: Trend) -> str:
    """Return the lines of one series, oldest run first."""
    axes = " ".join(f"{name}={setting(name, value)}" for name, value in found.case.axes.items())
    title = f"{found.case.suite}/{found.case.bench} {axes} {found.metric} on {found.hw_class}"
    return "\n".join([printable(title, 400), *_points(found), *_summary(found)])


def _points(found: Trend) -> Iterator[str]:
    bar = "█" if unicode_ok(sys.stdout) else "#"
    most = max((p.figure.value for p in found.points if p.figure.value), default=1.0)
    at = {change.run: change for change in found.changes}
    notes = {note.run_uuid: note for note in found.notes if note.run_uuid}
    before = None
    for point, counts in zip(found.points, found.counted, strict=True):
        if point.run in at:
            change = at[point.run]
            cause = ", environment changed" if change.environment else ""
            yield (
                f"  -- {change.verdict} x{change.ratio:.3f}: {format_value(change.before, found.unit)} -> "
                f"{format_value(change.after, found.unit)}{cause}"
            )
        elif before is not None and point.env_digest != before:
            yield f"  -- environment {before} -> {point.env_digest}"
        before = point.env_digest
        if point.run in notes:
            note = notes[point.run]
            yield printable(f"  -- {'level accepted' if note.case_digest else 'note'}: {note.text}", 300)
        value = point.figure.value
        length = 0 if value is None else max(1, round(WIDTH * min(value / most, 1.0)))
        shown = "-" if value is None else format_value(value, found.unit)
        status = "" if point.figure.status == "ok" else f" {point.figure.status}"
        aside = "" if counts else " (not counted)"
        label = f" {point.label}" if point.label else ""
        yield printable(
            f"  {point.started_at[:16]}Z {point.run[:8]} {bar * length:<{WIDTH}} {shown}{status}{aside}{label}", 300
        )


def _summary(found: Trend) -> Iterator[str]:
    used = sum(found.counted)
    if found.reason:
        yield f"  {found.reason}"
    elif found.changes:
        yield f"  {counted(len(found.changes), 'change')} of level in {counted(used, 'run')}"
    else:
        yield f"  one level over {counted(used, 'run')}"
