"""Bytes of a tiled product whose B lies far: what is needed once, asked for, crosses the link, touches near memory.

DirectKV, OSDI 2026, sections 2.3 and 4. C stationary ("naive", the unchanged kernel) reads a tile of B again for each
row of tiles of C; B stationary ("CPU-aware") reads it once and pays with partial sums of C in near memory; `swap`
copies B into a near buffer first. Whole numbers throughout, so a matrix of any size is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.systems.directkv.shapes import METHODS, Gemm, Method, stored_panels


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one product.

    ``unique`` far bytes needed once and ``demand`` asked for, both without padding; ``link`` bytes that cross when no
    cache lies between, padding included; the rest is near memory: reads of A, writes and reads of B where a copy of it
    is kept there, reads and writes of C.
    """

    unique: int
    demand: int
    link: int
    a_read: int
    b_write: int
    b_read: int
    c_read: int
    c_write: int

    @property
    def near(self) -> int:
        """All bytes touched in near memory."""
        return self.near_read + self.near_write

    @property
    def near_read(self) -> int:
        return self.a_read + self.b_read + self.c_read

    @property
    def near_write(self) -> int:
        return self.b_write + self.c_write

    @property
    def amplification(self) -> float:
        """Link bytes over unique bytes; 0 where nothing crosses."""
        return self.link / self.unique


def resident(gemm: Gemm) -> Traffic:
    """Return the bytes with B in near memory: nothing crosses; C stationary."""
    return Traffic(
        unique=gemm.b_bytes, demand=0, link=0, a_read=gemm.columns * gemm.a_bytes, b_write=0,
        b_read=gemm.rows * gemm.b_bytes, c_read=0, c_write=gemm.c_bytes,
    )  # fmt: skip


def swap(gemm: Gemm, *, columns: int | None = None) -> Traffic:
    """Return the bytes of a copy of B into a near buffer and the C-stationary product from there.

    B is stored in tiles; or, with ``columns``, as one compact piece of so many columns of tiles for each load. Without
    padding the bytes are the same for every size of the buffer: only the time differs.
    """
    link = gemm.stored if columns is None else stored_panels(gemm, columns)
    return Traffic(
        unique=gemm.b_bytes, demand=gemm.b_bytes, link=link, a_read=gemm.columns * gemm.a_bytes,
        b_write=link, b_read=gemm.rows * gemm.b_bytes, c_read=0, c_write=gemm.c_bytes,
    )  # fmt: skip


def naive(gemm: Gemm, *, buffered: bool = False) -> Traffic:
    """Return the bytes of the unchanged C-stationary product reading B in place.

    ``buffered``: a tile of B passes through near memory (host forms), not through on-chip memory (GPU).
    """
    demand, link = gemm.rows * gemm.b_bytes, gemm.rows * gemm.stored
    return Traffic(
        unique=gemm.b_bytes, demand=demand, link=link, a_read=gemm.columns * gemm.a_bytes,
        b_write=link if buffered else 0, b_read=demand if buffered else 0, c_read=0, c_write=gemm.c_bytes,
    )  # fmt: skip


def cpu_aware(gemm: Gemm, *, bounds: Sequence[int] | None = None, buffered: bool = False) -> Traffic:
    """Return the bytes of the B-stationary product: each tile of B crosses once, C is read and written a step.

    C is read in all steps but the first and written in every one. ``bounds`` are those of :func:`unit_bounds` where
    several workers share a column: each reads the column's tiles of B itself. ``buffered`` as for :func:`naive`; the
    tile is then written once and read once for each row of tiles.
    """
    demand, link = gemm.b_bytes, gemm.stored
    if bounds is not None:
        parts = column_loads(gemm, bounds)
        wide = [gemm.b_tile(0, column)[1] for column in range(gemm.columns)]
        demand = sum(part * gemm.k * width * gemm.item for part, width in zip(parts, wide, strict=True))
        link = sum(part * gemm.stored_column(column) for column, part in enumerate(parts))
    return Traffic(
        unique=gemm.b_bytes, demand=demand, link=link, a_read=gemm.columns * gemm.a_bytes,
        b_write=link if buffered else 0, b_read=gemm.rows * gemm.b_bytes if buffered else 0,
        c_read=(gemm.steps - 1) * gemm.c_bytes, c_write=gemm.steps * gemm.c_bytes,
    )  # fmt: skip


def unit_bounds(gemm: Gemm, workers: int) -> tuple[int, ...]:
    """Return where the contiguous unit ranges of ``workers`` begin, and the end: worker w has [bounds[w], bounds[w+1]).

    A unit is one tile of C, counted down the columns: unit = column x rows + row. Ranges differ by one unit at most.
    """
    if workers < 1:
        raise UsageError("a product without workers", where="gemm", got=workers, expected="1 or more")
    units = gemm.rows * gemm.columns
    return tuple(worker * units // workers for worker in range(workers + 1))


def column_loads(gemm: Gemm, bounds: Sequence[int]) -> tuple[int, ...]:
    """Return for each column of tiles how many workers of ``bounds`` have units in it: the times its B is read.

    Raises UsageError unless the bounds cover every unit in order.
    """
    units = gemm.rows * gemm.columns
    edges = list(bounds)
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != units or any(a > b for a, b in itertools.pairwise(edges)):
        raise UsageError("not ranges of units", where="gemm", got=edges[:8], expected=f"0 to {units}, rising")
    loads = [0] * gemm.columns
    for first, end in itertools.pairwise(edges):
        if first < end:
            for column in range(first // gemm.rows, (end - 1) // gemm.rows + 1):
                loads[column] += 1
    return tuple(loads)


def traffic(gemm: Gemm, method: Method, *, buffered: bool = False, columns: int | None = None) -> Traffic:
    """Return the bytes of ``method``; ``columns`` as for :func:`swap`.

    The pipelined order moves the same bytes as the one it pipelines. Raises UsageError for another word.
    """
    if method == "resident":
        return resident(gemm)
    if method == "swap":
        return swap(gemm, columns=columns)
    if method == "naive":
        return naive(gemm, buffered=buffered)
    if method in ("cpu_aware", "cpu_aware_pipelined"):
        return cpu_aware(gemm, buffered=buffered)
    raise UsageError("unknown method", where="gemm", got=method, expected=" | ".join(METHODS))
