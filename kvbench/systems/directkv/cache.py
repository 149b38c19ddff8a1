"""From demand to link bytes: the tile walk of a product through a cache that keeps the most recent bytes.

What the paper's counters show as "L2 hits" of reads that go to the far tier. The rasterisation order decides which
tiles run together and so share what they read (DirectKV, OSDI 2026, section 2.3; D3 varies it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from kvbench.errors import UsageError
from kvbench.systems.directkv.shapes import Gemm

Order = Literal["m_fastest", "n_fastest", "swizzle"]
ORDERS: tuple[Order, ...] = get_args(Order)
SWIZZLE = 8  # rows of tiles in a group


@dataclass(frozen=True, slots=True)
class Cached:
    """``demand`` bytes of B asked for and the ``link`` bytes of them that no cache held; ``near`` likewise of A."""

    demand: int
    link: int
    a_demand: int
    a_near: int

    @property
    def hits(self) -> float:
        """Share of the demand for B that the cache served."""
        return 1.0 - self.link / self.demand

    @property
    def all_hits(self) -> float:
        """Share of the demand for A and B together: what a hit-rate counter of the whole cache shows."""
        return 1.0 - (self.link + self.a_near) / (self.demand + self.a_demand)


class Lru:
    """``capacity`` bytes of the most recently touched blocks; a block larger than it is never kept."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise UsageError("not a cache", where="cache capacity", got=capacity, expected="0 or more bytes")
        self._capacity, self._held = capacity, 0
        self._blocks: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def touch(self, block: tuple[str, int, int], nbytes: int) -> bool:
        """Return whether ``block`` was held, and make it the most recent one."""
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return True
        if nbytes > self._capacity:
            return False
        self._blocks[block] = nbytes
        self._held += nbytes
        while self._held > self._capacity:
            self._held -= self._blocks.popitem(last=False)[1]
        return False


def raster(gemm: Gemm, order: Order) -> Iterator[tuple[int, int]]:
    """Yield (row, column) of the tiles of C in ``order``.

    ``m_fastest``: down a column of tiles first; ``n_fastest``: along a row; ``swizzle``: down groups of 8 rows.
    """
    if order == "m_fastest":
        yield from ((row, column) for column in range(gemm.columns) for row in range(gemm.rows))
    elif order == "n_fastest":
        yield from ((row, column) for row in range(gemm.rows) for column in range(gemm.columns))
    elif order == "swizzle":
        for top in range(0, gemm.rows, SWIZZLE):
            rows = range(top, min(top + SWIZZLE, gemm.rows))
            yield from ((row, column) for column in range(gemm.columns) for row in rows)
    else:
        raise UsageError("unknown order", where="raster", got=order, expected=" | ".join(ORDERS))


def naive_through(gemm: Gemm, capacity: int, *, order: Order = "n_fastest", workers: int = 1) -> Cached:
    """Walk the C-stationary product through a cache of ``capacity`` bytes and count what it lets through.

    ``workers`` tiles of C run at a time and step along k together (the blocks of a GPU, wave by wave). A and B pass the
    same cache. Bytes of B are stored ones, padding included. Raises UsageError below one worker.
    """
    if workers < 1:
        raise UsageError("a product without workers", where="cache", got=workers, expected="1 or more")
    cache = Lru(capacity)
    demand = link = a_demand = a_near = 0
    places = list(raster(gemm, order))
    for first in range(0, len(places), workers):
        wave = places[first : first + workers]
        for step in range(gemm.steps):
            deep = min(gemm.tile_k, gemm.k - step * gemm.tile_k)
            for row, column in wave:
                high = min(gemm.tile_m, gemm.m - row * gemm.tile_m)
                size = high * deep * gemm.item
                a_demand += size
                a_near += 0 if cache.touch(("a", row, step), size) else size
                size = gemm.stored_tile(step, column)
                demand += size
                link += 0 if cache.touch(("b", step, column), size) else size
    return Cached(demand, link, a_demand, a_near)


def cpu_aware_through(gemm: Gemm, capacity: int) -> Cached:
    """Walk the B-stationary product, column by column, through the same cache: B is read once whatever it holds.

    C passes the cache too, so that A meets the room C leaves.
    """
    cache = Lru(capacity)
    demand = link = a_demand = a_near = 0
    for column in range(gemm.columns):
        for step in range(gemm.steps):
            high, wide = gemm.b_tile(step, column)
            size = gemm.stored_tile(step, column)
            demand += size
            link += 0 if cache.touch(("b", step, column), size) else size
            for row in range(gemm.rows):
                tall = min(gemm.tile_m, gemm.m - row * gemm.tile_m)
                size = tall * high * gemm.item
                a_demand += size
                a_near += 0 if cache.touch(("a", row, step), size) else size
                cache.touch(("c", row, column), tall * wide * gemm.c_item)
    return Cached(demand, link, a_demand, a_near)
