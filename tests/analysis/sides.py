"""Runs made for comparisons: rows as the sampler leaves them, values chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.analysis.compare import Side
from kvbench.contract.result import Ceiling, Result, RunInfo
from tests.store.factories import make_row, make_run

SAMPLED = {"reps": 10, "sampled_seconds": 0.6, "window_share": 0.99, "gated": 0}


@dataclass(frozen=True, slots=True)
class Run:
    info: RunInfo
    results: tuple[Result, ...]


def row(number: int, value: float | None, **changes: Any) -> Result:
    changes.setdefault("detail", dict(SAMPLED))
    return make_row(number, value=value, low=None, high=None, **changes)


def side(name: str, runs: Sequence[Sequence[Result]], **info: Any) -> Side:
    return Side(name, tuple(Run(make_run(**info), tuple(rows)) for rows in runs))


def around(factor: float, cases: int = 1, runs: int = 5, **changes: Any) -> list[list[Result]]:
    """``runs`` runs of ``cases`` rows near 1e10 * ``factor``, half a percent apart."""
    return [[row(i, 1e10 * factor * (1 + 0.001 * run), **changes) for i in range(cases)] for run in range(runs)]


def ceiling(value: float, name: str = "read") -> tuple[Ceiling, ...]:
    return (Ceiling(name, value, "measured", "interleaved"),)


def each(runs: Sequence[Sequence[Result]], change: Callable[[Result], Result]) -> list[list[Result]]:
    return [[change(found) for found in rows] for rows in runs]
