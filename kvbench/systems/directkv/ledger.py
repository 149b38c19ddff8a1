"""Near memory a method needs: what its buffers should hold, and what the kernel's page tables say they hold.

The paper's third axis beside time and link bytes: A, B and buffers in near memory, C not counted (section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.systems.directkv.shapes import HALVES, Gemm, Method, ceil_div


@dataclass(frozen=True, slots=True)
class NearMemory:
    """Bytes of near memory: ``operands`` that lie there in any case (A) and the ``buffer`` the method adds for B."""

    operands: int
    buffer: int

    @property
    def total(self) -> int:
        """A, B and its buffers, C not counted: the paper's memory column."""
        return self.operands + self.buffer

    def share(self, other: NearMemory) -> float:
        """Return this buffer over ``other``'s. Raises UsageError when that has none."""
        if not other.buffer:
            raise UsageError("no buffer to compare with", where="near memory", got=0)
        return self.buffer / other.buffer


def near_memory(
    gemm: Gemm, method: Method, *, staging: int = 100, double: bool = False, depth: int = 1, on_chip: bool = False
) -> NearMemory:
    """Return the near memory of ``method``.

    ``resident``: B. ``swap``: whole columns of tiles up to ``staging`` per cent of B, twice the half when ``double``:
    counted in bytes here and not by the plan's own helper, so that a plan that stages another share shows.
    The others: ``depth`` slots of the largest tile of B; none where tiles are ``on_chip`` (GPU).
    Raises UsageError for a staging buffer below a column of tiles and for a depth below 1.
    """
    if depth < 1:
        raise UsageError("not a depth", where="near memory", got=depth, expected="1 or more")
    if method == "resident":
        return NearMemory(gemm.a_bytes, gemm.b_bytes)
    if method == "swap":
        halves = HALVES if double else 1
        room, column = gemm.b_bytes * staging // (100 * halves), gemm.k * gemm.tile_n * gemm.item
        held = room if room == gemm.b_bytes else room // column * column
        if not held:
            raise UsageError(
                "the staging buffer is smaller than a tile column of B", where="near memory",
                got=f"{halves} x {room} B", expected=f"{halves} x {min(column, gemm.b_bytes)} B or more",
            )  # fmt: skip
        return NearMemory(gemm.a_bytes, halves * ceil_div(held, gemm.block) * gemm.block)
    return NearMemory(gemm.a_bytes, 0 if on_chip else depth * gemm.stored_tile(0, 0))


@dataclass(frozen=True, slots=True)
class Held:
    """Near buffer of a method: ``predicted`` bytes, ``measured`` ones (None: the kernel does not tell) and by what."""

    predicted: int
    measured: int | None
    source: str = "resident pages of the buffer, by the kernel's page tables; it is made once and never grows"

    @property
    def ratio(self) -> float | None:
        """Measured over predicted bytes; above 1 by the rounding to whole pages."""
        return None if self.measured is None else self.measured / self.predicted
