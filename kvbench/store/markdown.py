"""Runs as Markdown tables: what people paste into an issue. A row never breaks its line or becomes markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from kvbench.contract.result import Result, RunInfo, Scalar
from kvbench.errors import printable
from kvbench.units import format_interval

if TYPE_CHECKING:
    from kvbench.store.query import LoadedRun

_COLUMNS = ("case", "metric", "value, 95 % within the run", "n", "of ceiling", "basis", "status")
_RIGHT = (2, 3)
# marks of CommonMark that work inside a line, and what GitHub makes tables, links, formulas, people and issues of
_MARKUP = re.compile(r"[\\`*_\[\]<>#|~@&$:]|(?<=www)\.", re.IGNORECASE)
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "@": "&#64;", "#": "&#35;", ":": "&#58;", ".": "&#46;"}
_SHOWABLE = 1e150  # no unit has a prefix for more, and rounding it overflows
_MAX_CELL = 300


def write_markdown(loaded: Sequence[LoadedRun], stream: TextIO) -> None:
    """Write a heading and a table a run and bench, canaries in tables of their own. Text is UTF-8 without escapes."""
    for run in loaded:
        stream.write(_heading(run.info))
        for (suite, bench), members in groupby(run.results, key=lambda row: (row.suite, row.bench)):
            stream.write(f"\n### {escaped(f'{suite}/{bench}')}\n\n")
            stream.write(_line(_COLUMNS))
            stream.write(_line(["--:" if column in _RIGHT else "---" for column in range(len(_COLUMNS))]))
            for row in members:
                stream.write(_line([escaped(cell) for cell in _cells(row)]))
        stream.write("\n")


def escaped(text: str) -> str:
    """Return ``text`` on one line, as itself wherever Markdown or HTML would take it for something else."""
    safe = printable(text, _MAX_CELL).encode("utf-8", "backslashreplace").decode("utf-8")
    return _MARKUP.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), safe) or "-"


def _heading(info: RunInfo) -> str:
    facts = [f"run {info.uuid[:8]}", *([info.label] if info.label else []), info.hw_class, info.profile, info.status]
    began = [] if "time_unknown" in info.flags else [info.started_at[:19] + "Z"]
    return f"## {', '.join(escaped(fact) for fact in [*facts, *began])}\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cells(row: Result) -> tuple[str, ...]:
    axes = " ".join(f"{name}={setting(value)}" for name, value in row.axes.items())
    of = f"{100 * row.fraction:.0f} % of {row.ceilings[0].name}" if row.fraction is not None and row.ceilings else "-"
    status = row.status + (f": {row.reason}" if row.reason else "")
    status += f" [{', '.join(row.flags)}]" if row.flags else ""
    return axes, row.metric, _value(row), str(row.n), of, row.basis, status


def setting(value: Scalar) -> str:
    """Return an axis value such that the word "1" and the number 1 differ."""
    return f'"{value}"' if isinstance(value, str) and re.fullmatch(r"-?[0-9][0-9.eE+-]*", value) else str(value)


def _value(row: Result) -> str:
    if row.value is None:
        return "-"
    low, high = row.low, row.high
    if max(abs(number) for number in (row.value, low or 0.0, high or 0.0)) > _SHOWABLE:
        return f"{row.value!r} {row.unit}"
    if low is None or high is None or not low <= row.value <= high:
        low = high = None
    return format_interval(low, row.value, high, row.unit)
