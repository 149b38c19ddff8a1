"""Result tables: case, value with its within-run interval, fraction of a named ceiling, basis, status."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.analysis.curves import BYTE_AXES
from kvbench.contract.result import Result, Scalar
from kvbench.errors import printable
from kvbench.report.text import unicode_ok
from kvbench.units import compact_bytes, counted, format_interval

PIPE_WIDTH = 200  # off a terminal rich would cut cells at 80 columns; a log or a pager can scroll
SHOWABLE = 1e150  # beyond, rounding and squaring overflow; no machine gives such numbers, only a file can


# Hints of the sampler and words for what disturbed single samples: counted below the table and kept in the JSON. Every
# other flag says what the number is and stands beside its status.
SAMPLE_WORDS = frozenset(
    [
        "tainted", "short_samples", "first_sample_dropped", "drifting", "autocorrelated", "bimodal", "unusable_windows",
        "steal", "cpu_pressure", "memory_pressure", "preempted", "migrated", "swapped", "throttled", "foreign_load",
        "clock_moved", "power_capped", "pcie_downshift", "pcie_replay",
    ]
)  # fmt: skip


def axes_text(row: Result, leave_out: Container[str] = ()) -> str:
    """Return ``op=read bytes=256MiB threads=all(2)``: axes as typed, each word with its number, but ``leave_out``."""
    parts = []
    for name, value in row.axes.items():
        if name in leave_out:
            continue
        text = setting(name, value)
        if name in row.resolved and row.resolved[name] != value:
            text += f"({setting(name, row.resolved[name])})"
        parts.append(f"{name}={text}")
    return " ".join(parts)


def setting(axis: str, value: Scalar) -> str:
    """Return an axis value for reading: sizes in bytes as ``256MiB``."""
    return compact_bytes(value) if axis in BYTE_AXES and isinstance(value, int) and value >= 0 else str(value)


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
    """Return ``rows`` as text, one section a bench: shared axes in its heading, then one line a row.

    Columns: case, value with its 95 % interval within the run, fraction of a named ceiling, basis, status. What the
    terminal has no room for goes on below the case; off a terminal nothing is cut or folded before ``PIPE_WIDTH``.
    """
    plain, tty = not unicode_ok(sys.stdout), sys.stdout.isatty()
    width = max(60, shutil.get_terminal_size().columns if tty else PIPE_WIDTH)
    lines = [_clean(title, plain)] if title else []
    for name, members in groupby(rows, key=lambda row: f"{row.suite}/{row.bench}"):
        group = list(members)
        if {row.status for row in group} == {"skipped"} and len({row.reason for row in group}) == 1:
            lines += ["", _clean(f"{name}: {counted(len(group), 'case')} skipped: {group[0].reason}", plain)]
            continue
        shared = shared_axes(group)
        metrics = sorted({row.metric for row in group})
        common = axes_text(group[0], set(group[0].axes) - shared)
        heading = _clean(f"{name}: {metrics[0] if len(metrics) == 1 else ''}  {common}".replace(":   ", ": "), plain)
        lines += ["", f"\x1b[1m{heading.rstrip(' :')}\x1b[0m" if tty else heading.rstrip(" :")]
        cells = [_cells(row, shared, len(metrics) > 1, plain) for row in group]
        header = ("case", "value, 95 %", "of ceiling", "basis", "status")
        widths = [max(len(line[i]) for line in [header, *cells]) for i in range(4)]
        for line in [header, *cells]:
            lines += _fold(line, widths, width)
    return "\n".join(lines)


def _cells(row: Result, shared: Container[str], with_metric: bool, plain: bool) -> tuple[str, str, str, str, str]:
    case = axes_text(row, shared) or "-"
    value = value_text(row)
    if with_metric:
        case = f"{case} {row.metric}"
    texts = (case, value, ceiling_text(row), row.basis, status_text(row))
    first, second, third, fourth, fifth = (_clean(text, plain) for text in texts)
    return first, second, third, fourth, fifth


def value_text(row: Result) -> str:
    """Return ``row``'s value with its interval; the bare value where the interval does not hold it.

    Databases written before that was checked may have such rows, and numbers no unit has a prefix for.
    """
    low, value, high = row.low, row.value, row.high
    if value is None:
        return "-"
    if max(abs(number) for number in (value, low or 0.0, high or 0.0)) > SHOWABLE:
        return f"{value!r} {row.unit}"
    if low is None or high is None or not low <= value <= high:
        low = high = None
    return format_interval(low, value, high, row.unit)


def _fold(cells: Sequence[str], widths: Sequence[int], width: int) -> list[str]:
    """Return one line, or the case and value with the rest wrapped below them where ``width`` is too small."""
    head = f"  {cells[0]:<{widths[0]}}  {cells[1]:>{widths[1]}}"
    whole = f"{head}  {cells[2]:<{widths[2]}}  {cells[3]:<{widths[3]}}  {cells[4]}"
    if len(whole) <= width:
        return [whole.rstrip()]
    rest = "  ".join(cell for cell in cells[2:] if cell != "-")
    below = textwrap.wrap(rest, width - 6, break_on_hyphens=False)
    if len(f"{head}  {below[0]}") <= width and len(below) == 1:
        return [f"{head}  {rest}"]
    return [head.rstrip(), *(f"      {line}" for line in below)]


def _clean(text: str, plain: bool) -> str:
    return _encodable(printable(text, 400), plain)


def status_text(row: Result) -> str:
    """Return the status, why, and the flags that say what the number is."""
    text = row.status + (f": {row.reason}" if row.reason else "")
    shown = [flag for flag in row.flags if flag not in SAMPLE_WORDS]
    return text + (f" [{', '.join(shown)}]" if shown else "")


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
