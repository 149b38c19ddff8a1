"""Result tables: case, value with its within-run interval, fraction of a named ceiling, basis, status."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Container, Iterable, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.contract.result import Result
from kvbench.errors import printable
from kvbench.report.text import unicode_ok
from kvbench.units import compact_bytes, format_interval

PIPE_WIDTH = 200  # off a terminal rich would cut cells at 80 columns; a log or a pager can scroll
BYTE_AXES = frozenset({"bytes", "fragment", "block"})


# Hints of the sampler and words for what disturbed single samples: counted below the table and kept in the JSON. Every
# other flag says what the number is and stands beside its status.
SAMPLE_WORDS = frozenset(
    [
        "tainted", "short_samples", "first_sample_dropped", "drifting", "autocorrelated", "bimodal", "unusable_windows",
        "steal", "cpu_pressure", "memory_pressure", "preempted", "migrated", "swapped", "throttled", "foreign_load",
        "clock_moved",
    ]
)  # fmt: skip


def axes_text(row: Result, leave_out: Container[str] = ()) -> str:
    """Return ``op=read bytes=256MiB threads=all(2)``: axes as typed, each word with its number, but ``leave_out``."""
    parts = []
    for name, value in row.axes.items():
        if name in leave_out:
            continue
        text = compact_bytes(value) if name in BYTE_AXES and isinstance(value, int) else str(value)
        if name in row.resolved and row.resolved[name] != value:
            number = row.resolved[name]
            text += f"({compact_bytes(number) if name in BYTE_AXES and isinstance(number, int) else number})"
        parts.append(f"{name}={text}")
    return " ".join(parts)


def shared_axes(rows: Sequence[Result]) -> frozenset[str]:
    """Return the axes that have one value in all of ``rows``: they stand once, in the heading of the bench."""
    if len(rows) < 2:
        return frozenset()
    return frozenset(name for name, value in rows[0].axes.items() if all(row.axes.get(name) == value for row in rows))


def ceiling_text(row: Result) -> str:
    """Return ``97 % of gather read (measured)``, or why there is no fraction."""
    if row.fraction is None or not row.ceilings:
        return "-"
    first = row.ceilings[0]
    return f"{100 * row.fraction:.0f} % of {first.name} ({first.kind})"


def results_table(rows: Sequence[Result], *, title: str = "") -> str:
    """Return the table of ``rows`` as text, as wide as the terminal (or ``PIPE_WIDTH`` elsewhere)."""
    plain = not unicode_ok(sys.stdout)
    table = Table(
        box=box.ASCII2 if plain else box.SIMPLE_HEAD, title=Text(title) if title else None, title_justify="left"
    )
    for name, justify in (("case", "left"), ("metric", "left"), ("value, 95 % within run", "right"),
                          ("ceiling", "left"), ("basis", "left"), ("status", "left")):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name, members in groupby(rows, key=lambda row: f"{row.suite}/{row.bench}"):
        group = list(members)
        shared = shared_axes(group)
        common = axes_text(group[0], set(group[0].axes) - shared)
        table.add_row(Text(_encodable(printable(f"{name}  {common}".rstrip(), 300), plain), style="bold"))
        for row in group:
            cells = (
                f"  {axes_text(row, shared)}", row.metric, _value(row), ceiling_text(row), row.basis, status_text(row)
            )  # fmt: skip
            table.add_row(*(Text(_encodable(printable(cell, 300), plain)) for cell in cells))
    return render(table)


def status_text(row: Result) -> str:
    """Return the status, why, and the flags that say what the number is."""
    text = row.status + (f": {row.reason}" if row.reason else "")
    shown = [flag for flag in row.flags if flag not in SAMPLE_WORDS]
    return text + (f" [{', '.join(shown)}]" if shown else "")


def _value(row: Result) -> str:
    return "-" if row.value is None else format_interval(row.low, row.value, row.high, row.unit)


def plain_table(headers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a small table of text cells."""
    plain = not unicode_ok(sys.stdout)
    table = Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD)
    for name in headers:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*(Text(_encodable(printable(cell, 300), plain)) for cell in line))
    return render(table)


def render(table: Table) -> str:
    """Return ``table`` as text without trailing blanks; colour only on a terminal."""
    tty = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if tty else PIPE_WIDTH
    buffer = io.StringIO()
    Console(file=buffer, width=max(60, width), force_terminal=tty, legacy_windows=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _encodable(text: str, ascii_only: bool) -> str:
    return text.replace("±", "+-").encode("ascii", "backslashreplace").decode() if ascii_only else text
