"""Cost tables of NEO's scheduler, rebuilt from the rows of a run: linr, pref, gdec, cdec and lnch.

NEO (MLSys 2025), section 3.2: linear interpolation between measured points, 0 for nothing. Unlike there, a point
outside the grid is answered with a flag, a hole is never filled, and what interpolation costs is stated: each inner
point left out in turn and interpolated from its neighbours.

- ``linr(S)``: projections and MLP of a layer over S tokens; ``pref(S)``: attention of a prompt of S tokens;
- ``gdec(N)``, ``cdec(S, N)``: decode attention over N tokens of KV on the near side, and on the CPU for S requests;
- ``lnch``: what the submitting thread takes per CPU stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from kvbench.errors import NoData, UsageError

SCHEMA = "kvbench.costs/1"
BENCH, BENCH_VERSION, METRIC = "cost_tables", 1, "stage_time"
Name = Literal["linr", "pref", "gdec", "cdec", "lnch"]
LINES = ("linr", "pref", "gdec")


@dataclass(frozen=True, slots=True)
class Estimate:
    """``seconds``, None with the ``reason``; ``extrapolated``: the question lies outside the measured grid."""

    seconds: float | None
    extrapolated: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Relative errors of ``n`` points interpolated from their neighbours; None where no point has two."""

    n: int
    median: float | None
    worst: float | None


def _left_out(errors: Sequence[float]) -> LeftOut:
    return LeftOut(len(errors), median(errors), max(errors)) if errors else LeftOut(0, None, None)


def _inner_errors(points: Sequence[tuple[int, float]]) -> list[float]:
    triples = zip(points, points[1:], points[2:], strict=False)
    return [abs(a[1] + (c[1] - a[1]) * (x - a[0]) / (c[0] - a[0]) - y) / y for a, (x, y), c in triples]


def _segment(grid: Sequence[int], x: int) -> int:
    """Return the number of the segment that answers for ``x``: the first or last one beyond the grid."""
    return min(max(bisect_right(grid, x) - 1, 0), len(grid) - 2)


def _check_grid(name: str, grid: Sequence[int]) -> None:
    if not grid or grid[0] < 1 or any(a >= b for a, b in pairwise(grid)):
        raise UsageError("not a grid", where=name, got=list(grid)[:8], expected="rising whole numbers from 1 on")


def _check_seconds(name: str, values: Iterable[float | None]) -> None:
    for value in values:
        if value is not None and not 0.0 < value < float("inf"):
            raise UsageError("not a time", where=name, got=value, expected="seconds > 0, or None for a hole")


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds at rising ``x``. Raises UsageError for another order, or a time that is not positive."""

    name: str
    x: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_grid(self.name, self.x)
        _check_seconds(self.name, self.seconds)
        if len(self.x) != len(self.seconds):
            raise UsageError("points", where=self.name, got=f"{len(self.x)} x, {len(self.seconds)} times")

    def at(self, x: int) -> Estimate:
        """Return the seconds at ``x``: 0 at 0. Beyond either end the nearest segment goes on, never below 0."""
        if x < 0:
            raise UsageError("below nothing", where=self.name, got=x, expected="0 or more")
        if x == 0:
            return Estimate(0.0)
        if x in self.x:
            return Estimate(self.seconds[self.x.index(x)])
        if len(self.x) < 2:
            return Estimate(None, reason=f"{self.name} has one point, {self.x[0]}")
        i = _segment(self.x, x)
        (a, b), (u, v) = self.x[i : i + 2], self.seconds[i : i + 2]
        outside = not self.x[0] <= x <= self.x[-1]
        return Estimate(max(0.0, u + (v - u) * (x - a) / (b - a)), outside, self._outside(x) if outside else "")

    def _outside(self, x: int) -> str:
        return f"{self.name} was measured from {self.x[0]} to {self.x[-1]}, asked for {x}"

    def error(self) -> LeftOut:
        """Return what interpolation costs on this grid."""
        return _left_out(_inner_errors(list(zip(self.x, self.seconds, strict=True))))


@dataclass(frozen=True, slots=True)
class Plane:
    """Seconds at ``requests`` x ``tokens``; ``cells[i][j]`` is None where nothing was measured (fewer tokens than
    requests have no cell). Raises UsageError for grids that do not rise and for a time that is not positive."""

    name: str
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    cells: tuple[tuple[float | None, ...], ...]

    def __post_init__(self) -> None:
        _check_grid(f"{self.name} requests", self.requests)
        _check_grid(f"{self.name} tokens", self.tokens)
        if [len(row) for row in self.cells] != [len(self.tokens)] * len(self.requests):
            raise UsageError(
                "cells", where=self.name, got=[len(row) for row in self.cells], expected="one a grid point"
            )
        for row in self.cells:
            _check_seconds(self.name, row)

    def at(self, requests: int, tokens: int) -> Estimate:
        """Return the bilinear seconds at a point: 0 where either is 0, None beside a hole, flagged outside the grid."""
        if min(requests, tokens) < 0:
            raise UsageError("below nothing", where=self.name, got=(requests, tokens), expected="0 or more")
        if not requests or not tokens:
            return Estimate(0.0)
        sides = [self._weights(grid, x) for grid, x in ((self.requests, requests), (self.tokens, tokens))]
        total = 0.0
        for i, wi in sides[0]:
            for j, wj in sides[1]:
                cell = self.cells[i][j]
                if cell is None:
                    hole = f"{self.requests[i]} requests of {self.tokens[j]} tokens"
                    return Estimate(None, reason=f"{self.name} has a hole at {hole}")
                total += wi * wj * cell
        inside = self.requests[0] <= requests <= self.requests[-1] and self.tokens[0] <= tokens <= self.tokens[-1]
        grid = f"{self.requests[0]}..{self.requests[-1]} requests, {self.tokens[0]}..{self.tokens[-1]} tokens"
        reason = "" if inside else f"{self.name} was measured at {grid}, asked for {requests} and {tokens}"
        return Estimate(max(0.0, total), not inside, reason)

    @staticmethod
    def _weights(grid: Sequence[int], x: int) -> list[tuple[int, float]]:
        if x in grid:
            return [(grid.index(x), 1.0)]
        if len(grid) < 2:
            return [(0, 1.0)]
        i = _segment(grid, x)
        share = (x - grid[i]) / (grid[i + 1] - grid[i])
        return [(i, 1.0 - share), (i + 1, share)]

    def error(self) -> LeftOut:
        """Return what interpolation costs on this grid, along rows and along columns."""
        errors: list[float] = []
        for row in self.cells:
            errors += self._along(self.tokens, row)
        for column in zip(*self.cells, strict=True):
            errors += self._along(self.requests, column)
        return _left_out(errors)

    @staticmethod
    def _along(grid: Sequence[int], cells: Sequence[float | None]) -> list[float]:
        triples = zip(*(list(zip(grid, cells, strict=True))[k:] for k in range(3)), strict=False)
        known = [[(x, y) for x, y in triple if y is not None] for triple in triples]
        return [error for points in known if len(points) == 3 for error in _inner_errors(points)]


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of one model, near side and thread count. ``basis`` of the rows by table; ``missing``: cells of the
    run without a usable value, in words."""

    model: str
    near: str
    threads: str
    linr: Line
    pref: Line
    gdec: Line
    cdec: Plane
    lnch: float
    basis: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def errors(self) -> dict[str, LeftOut]:
        """Return what interpolation costs in each table."""
        return {table.name: table.error() for table in (self.linr, self.pref, self.gdec, self.cdec)}

    def to_json(self) -> dict[str, Any]:
        """Return the ``kvbench.costs/1`` document; seconds, None for a hole."""
        lines = {name: {"x": list(line.x), "seconds": list(line.seconds)} for name, line in self._lines()}
        errors = {n: {"n": e.n, "median": e.median, "worst": e.worst} for n, e in self.errors().items()}
        return {
            "schema": SCHEMA, "model": self.model, "near": self.near, "threads": self.threads, **lines,
            "cdec": {
                "requests": list(self.cdec.requests), "tokens": list(self.cdec.tokens),
                "seconds": [list(row) for row in self.cdec.cells],
            },
            "lnch": self.lnch, "basis": dict(self.basis), "missing": list(self.missing), "interpolation_error": errors,
        }  # fmt: skip

    def _lines(self) -> list[tuple[str, Line]]:
        return [("linr", self.linr), ("pref", self.pref), ("gdec", self.gdec)]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tables:
        """Rebuild tables from :meth:`to_json`. Raises UsageError for another schema and for a malformed document."""
        if data.get("schema") != SCHEMA:
            raise UsageError("not cost tables", where="costs", got=data.get("schema"), expected=SCHEMA)
        try:
            lines = {n: Line(n, tuple(data[n]["x"]), tuple(data[n]["seconds"])) for n in LINES}
            plane = data["cdec"]
            return cls(
                data["model"], data["near"], data["threads"], lines["linr"], lines["pref"], lines["gdec"],
                Plane(
                    "cdec", tuple(plane["requests"]), tuple(plane["tokens"]),
                    tuple(tuple(row) for row in plane["seconds"]),
                ),
                float(data["lnch"]), dict(data["basis"]), tuple(data["missing"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                "malformed cost tables", where="costs", got=f"{type(error).__name__}: {error}", expected=SCHEMA
            ) from error


def tables_from_rows(
    rows: Iterable[Mapping[str, Any]], *, near: str, model: str = "llama-3-8b", threads: int | str = "all"
) -> Tables:
    """Rebuild the tables of ``near`` and ``model`` from ``kvbench.results/1`` rows of ``neo/cost_tables``.

    A cell is the median of its ``ok`` rows (one a run); cells with only other rows are holes, named in ``missing``.
    Raises NoData when a table has no cell, UsageError for rows of another version of the bench.
    """
    cells: dict[tuple[str, int, int], list[float]] = {}
    seen: dict[tuple[str, int, int], str] = {}
    basis: dict[str, set[str]] = {}
    for row in rows:
        axes = row["axes"]
        if row["suite"] != "neo" or row["bench"] != BENCH or row["metric"] != METRIC or axes["model"] != model:
            continue
        cpu = axes["table"] == "cdec"
        if axes["near"] != ("cpu" if cpu else near) or (cpu and str(axes["threads"]) != str(threads)):
            continue
        if row["bench_version"] != BENCH_VERSION:
            raise UsageError(
                "rows of another version", where=f"neo/{BENCH}", got=row["bench_version"], expected=str(BENCH_VERSION)
            )
        key = (str(axes["table"]), int(axes["requests"]), int(axes["tokens"]))
        if row["status"] == "ok" and row["value"] is not None:
            cells.setdefault(key, []).append(float(row["value"]))
            basis.setdefault(key[0], set()).add(str(row["basis"]))
        else:
            seen[key] = f"{key[0]} at {key[1]} requests, {key[2]} tokens: {row['status']}"
    value = {key: median(values) for key, values in cells.items()}
    absent = [name for name in (*LINES, "cdec", "lnch") if not any(key[0] == name for key in value)]
    if absent:
        raise NoData(
            "no usable rows for " + ", ".join(absent), where="costs", got="; ".join(seen.values()) or "no such rows",
            expected=f"ok rows of neo/{BENCH} for near={near}, model={model}, threads={threads}",
            mend=f"kvbench run neo/{BENCH} -a near=cpu,{near}",
        )  # fmt: skip

    def line(name: str) -> Line:
        points = sorted((tokens, seconds) for (n, _, tokens), seconds in value.items() if n == name)
        return Line(name, tuple(x for x, _ in points), tuple(y for _, y in points))

    grid = [key for key in (*value, *seen) if key[0] == "cdec"]
    requests, tokens = tuple(sorted({r for _, r, _ in grid})), tuple(sorted({t for _, _, t in grid}))
    plane = Plane("cdec", requests, tokens, tuple(tuple(value.get(("cdec", r, t)) for t in tokens) for r in requests))
    return Tables(
        model, near, str(threads), line("linr"), line("pref"), line("gdec"), plane,
        median(seconds for (n, _, _), seconds in value.items() if n == "lnch"),
        {name: "+".join(sorted(words)) for name, words in sorted(basis.items())},
        tuple(text for key, text in sorted(seen.items()) if key not in value),
    )  # fmt: skip
