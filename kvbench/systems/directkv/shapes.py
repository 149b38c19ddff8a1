"""The tiled product C = A B of DirectKV's case study, in whole numbers: how many tiles, how large, how stored."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from kvbench.errors import UsageError

Method = Literal["resident", "swap", "naive", "cpu_aware", "cpu_aware_pipelined"]
METHODS: tuple[Method, ...] = get_args(Method)
FAR_METHODS: tuple[Method, ...] = METHODS[1:]
HALVES = 2  # of a double buffer: one is filled while the other is read


def ceil_div(amount: int, part: int) -> int:
    """Return how many parts of ``part`` cover ``amount``, exactly."""
    return -(-amount // part)


@dataclass(frozen=True, slots=True)
class Gemm:
    """C (m x n) = A (m x k) B (k x n), in tiles of ``tile_m`` x ``tile_n`` of C and ``tile_k`` steps; B lies far.

    ``item`` bytes an element of A and B, ``c_item`` one of C. A tile of B is stored compact (an edge tile has no empty
    rows or columns) and rounded up to ``block`` bytes. Sizes have no upper bound. Raises UsageError below 1.
    """

    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    tile_k: int
    item: int = 4
    c_item: int = 4
    block: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "tile_m", "tile_n", "tile_k", "item", "c_item", "block"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError("a product without elements", where=f"gemm {name}", got=value, expected="1 or more")

    @classmethod
    def square(cls, size: int, tile: int, *, item: int = 4, c_item: int = 4, block: int = 1) -> Gemm:
        """Return ``size`` and ``tile`` in every dimension: the case study is ``square(10240, 128)``."""
        return cls(size, size, size, tile, tile, tile, item, c_item, block)

    @property
    def rows(self) -> int:
        """Tiles along m."""
        return ceil_div(self.m, self.tile_m)

    @property
    def columns(self) -> int:
        """Tiles along n."""
        return ceil_div(self.n, self.tile_n)

    @property
    def steps(self) -> int:
        """Tiles along k."""
        return ceil_div(self.k, self.tile_k)

    @property
    def flops(self) -> int:
        """Operations, a multiplication and an addition each counted."""
        return 2 * self.m * self.n * self.k

    @property
    def a_bytes(self) -> int:
        return self.m * self.k * self.item

    @property
    def b_bytes(self) -> int:
        """Bytes of B once: the unique far bytes."""
        return self.k * self.n * self.item

    @property
    def c_bytes(self) -> int:
        return self.m * self.n * self.c_item

    def b_tile(self, step: int, column: int) -> tuple[int, int]:
        """Return (rows, columns) of the tile of B at ``step`` and ``column``; edge tiles are smaller."""
        return min(self.tile_k, self.k - step * self.tile_k), min(self.tile_n, self.n - column * self.tile_n)

    def stored_tile(self, step: int, column: int) -> int:
        """Return the bytes one tile of B takes where it is stored."""
        high, wide = self.b_tile(step, column)
        return ceil_div(high * wide * self.item, self.block) * self.block

    def stored_column(self, column: int) -> int:
        """Return the stored bytes of every tile of B in ``column``."""
        return (self.steps - 1) * self.stored_tile(0, column) + self.stored_tile(self.steps - 1, column)

    @property
    def stored(self) -> int:
        """Stored bytes of all of B: what crosses the link when each tile is read once, padding included."""
        return (self.columns - 1) * self.stored_column(0) + self.stored_column(self.columns - 1)


def stored_panel(gemm: Gemm, columns: int) -> int:
    """Return the stored bytes of a compact piece of ``columns`` columns of tiles, all of k; the last may be less."""
    wide = min(columns * gemm.tile_n, gemm.n)
    return ceil_div(gemm.k * wide * gemm.item, gemm.block) * gemm.block


def stored_panels(gemm: Gemm, columns: int) -> int:
    """Return the stored bytes of B in compact pieces of ``columns`` columns of tiles, each rounded up to the block."""
    if columns < 1:
        raise UsageError("a piece without columns", where="swap", got=columns, expected="1 or more")
    whole, rest = divmod(gemm.n, min(columns * gemm.tile_n, gemm.n))
    last = ceil_div(gemm.k * rest * gemm.item, gemm.block) * gemm.block
    return whole * stored_panel(gemm, columns) + last


def staged_share(gemm: Gemm, columns: int, *, double: bool) -> Fraction:
    """Return the part of B, as it is stored, that a staging buffer of such pieces holds: padding on both sides."""
    return Fraction((HALVES if double else 1) * stored_panel(gemm, columns), stored_panels(gemm, columns))


def staged_columns(gemm: Gemm, percent: int, *, double: bool) -> int:
    """Return how many columns of tiles one load of `swap` takes: ``percent`` of B at most, half of it when ``double``.

    What counts is the columns' elements over B's, and with padding :func:`staged_share`: a wide last column is not the
    share of its number. The whole buffer holds ``percent`` of B; a double buffer is two halves of it. Raises UsageError
    when the buffer, or its half, is smaller than one column of tiles: a tile is what a load is made of, and a column
    what C needs; it names the smallest share that works.
    """
    if not 1 <= percent <= 100:
        raise UsageError("not a share of B", where="staging", got=percent, expected="1 to 100 per cent")
    columns = _columns_within(gemm, percent, double)
    if columns:
        return columns
    least = next((more for more in range(percent + 1, 101) if _columns_within(gemm, more, double)), None)
    halves = HALVES if double else 1
    raise UsageError(
        "the staging buffer is smaller than a tile column of B", where="staging",
        got=f"{percent} % of {stored_panels(gemm, 1)} stored bytes{' in two halves' if double else ''}",
        expected=f"{halves} x {stored_panel(gemm, 1)} bytes or more",
        mend="choose smaller tiles or no double buffer" if least is None
        else f"stage at least {least} % or choose smaller tiles",
    )  # fmt: skip


def _columns_within(gemm: Gemm, percent: int, double: bool) -> int:
    """Return the most columns of tiles whose buffer stays within ``percent`` of B; 0 where one is too many."""
    wide = gemm.n * percent // (100 * (HALVES if double else 1))
    columns = gemm.columns if wide == gemm.n else wide // gemm.tile_n
    while columns and staged_share(gemm, columns, double=double) > Fraction(percent, 100):
        columns -= 1
    return columns
