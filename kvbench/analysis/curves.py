"""Which rows of a run are points of one curve, and what transfer each point is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvbench.contract.result import Result, Scalar

BYTE_AXES = frozenset({"bytes", "fragment", "block"})
MIN_POINTS = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured rows that differ in the byte axis ``axis`` only, in its order; ``fixed`` are the other axes."""

    suite: str
    bench: str
    metric: str
    axis: str
    fixed: Mapping[str, Scalar]
    rows: tuple[Result, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same curve in another run: values as typed, 1 and "1" are two."""
        fixed = tuple(sorted((name, type(value).__name__, value) for name, value in self.fixed.items()))
        return self.suite, self.bench, self.rows[0].bench_version, self.metric, self.axis, fixed

    def points(self) -> list[tuple[int, float]]:
        """Return (bytes, seconds) of one transfer a point: the whole pass where the axis is the size, else a piece."""
        return [point for row in self.rows if (point := _point(self.axis, row)) is not None]


def size_of(row: Result, axis: str) -> int | None:
    """Return the bytes of ``axis``: the resolved number behind a word."""
    value = row.resolved.get(axis, row.axes[axis])
    return value if isinstance(value, int) else None


def curves_of(rows: Iterable[Result], byte_axes: Iterable[str] = BYTE_AXES) -> Iterator[Curve]:
    """Yield the curves among ``rows`` of one run: at least three sizes with a measured value."""
    names = frozenset(byte_axes)
    found: dict[tuple[object, ...], list[Result]] = {}
    for row in rows:
        if row.value is None or row.basis != "measured":
            continue
        for axis in row.axes:
            if axis in names and isinstance(size_of(row, axis), int):
                rest = tuple(
                    (name, type(value).__name__, value, row.resolved.get(name))
                    for name, value in sorted(row.axes.items()) if name != axis
                )  # fmt: skip
                key: tuple[object, ...] = (row.suite, row.bench, row.bench_version, row.metric, row.unit, axis, rest)
                found.setdefault(key, []).append(row)
    for key, members in found.items():
        axis = str(key[5])
        ordered = sorted(members, key=lambda row: size_of(row, axis) or 0)
        if len({size_of(row, axis) for row in ordered}) >= MIN_POINTS:
            first = ordered[0]
            fixed = {name: value for name, value in first.axes.items() if name != axis}
            yield Curve(first.suite, first.bench, first.metric, axis, fixed, tuple(ordered))


def _point(axis: str, row: Result) -> tuple[int, float] | None:
    counted = getattr(row.bytes, row.rate_of) if row.rate_of else None
    size = size_of(row, axis)
    if not counted or not row.seconds or not size:
        return None
    return (counted, row.seconds) if axis == "bytes" else (size, row.seconds * size / counted)
