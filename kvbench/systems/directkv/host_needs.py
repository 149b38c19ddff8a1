"""What a host product needs before anything is written: scratch space, loads a pass, seconds to lay B out.

By the algebra alone, without numba: the plan of a run asks for it, and a case refuses what its time does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import KvbenchError, Unavailable
from kvbench.systems.directkv.host_plan import require_runnable
from kvbench.systems.directkv.shapes import Gemm, Method, ceil_div, staged_columns, stored_panels

BLOCK = 4096  # a tile in the far store is rounded up to it, in memory too, so that every pair moves the same bytes
PANEL = "panel"
PANEL_K = 384  # rank of a panel: from here on adding to C costs BLAS next to nothing
FILE_LOAD, MEMORY_LOAD = 1e-4, 1e-5  # seconds of a tiny load, of slow machines: a direct read, a copy
WRITE_BYTES, WRITE_TILE = 3e8, 2e-5  # bytes a second and seconds a tile of laying B out
HALF = 2  # of a case's limit is for its loads


def tiled(m: int, n: int, k: int, tile: str) -> Gemm:
    """Return the float32 product in square tiles of ``tile``, or in panels: all of n, 384 along k."""
    size = PANEL_K if tile == PANEL else int(tile)
    return Gemm(m, n, k, size, n if tile == PANEL else size, size, block=BLOCK)


@dataclass(frozen=True, slots=True)
class Want:
    """A method that a case makes: each one has its own layout of B in the far tier."""

    method: Method
    staging: int = 100
    double: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a case on ``gemm`` that makes ``wants`` and goes over their loads ``passes`` times at least.

    ``file``: B lies in a scratch file; else in memory. ``limit``: seconds the case may take.
    """

    gemm: Gemm
    wants: Sequence[Want]
    limit: float
    passes: int
    file: bool = True

    def loads(self, want: Want) -> int:
        """Return the loads of a pass. Raises UsageError for a staging buffer below a column of tiles."""
        gemm = self.gemm
        if want.method == "resident":
            return 0
        if want.method == "swap":
            return ceil_div(gemm.columns, staged_columns(gemm, want.staging, double=want.double))
        return gemm.columns * gemm.steps * (gemm.rows if want.method == "naive" else 1)

    def stored(self, want: Want) -> int:
        """Return the bytes of B as ``want`` stores it; 0 where B lies near. Raises as :meth:`loads`."""
        if want.method == "resident":
            return 0
        if want.method == "swap":
            return stored_panels(self.gemm, staged_columns(self.gemm, want.staging, double=want.double))
        return self.gemm.stored

    @property
    def most(self) -> int:
        """Loads a pass, of all wants together, that the limit allows."""
        return int(self.limit / HALF / self.passes / (FILE_LOAD if self.file else MEMORY_LOAD))

    def require(self) -> None:
        """Raise Unavailable or UsageError for what cannot run or would run into the case's limit."""
        require_runnable(self.gemm)
        count = sum(self.loads(want) for want in self.wants)
        if count > self.most:
            raise Unavailable(
                "too many loads a pass", where="gemm", got=f"{count} of up to {self.gemm.stored_tile(0, 0)} bytes",
                expected=f"at most {self.most} in the {self.limit:.0f} s of the case, {self.passes} passes at least",
                mend="choose larger tiles",
            )  # fmt: skip

    @property
    def runs(self) -> bool:
        """Whether nothing of :meth:`require` stands against it."""
        try:
            self.require()
        except KvbenchError:
            return False
        return True

    @property
    def scratch(self) -> int:
        """Bytes of the scratch files, padding included; 0 for what will not run."""
        return sum(self.stored(want) for want in self.wants) if self.file and self.runs else 0

    @property
    def setup(self) -> float:
        """Seconds to lay B out and to go over the loads at least as often as the case must; 0 for what will not run."""
        if not self.runs:
            return 0.0
        tiles = 0
        for want in self.wants:
            tiles += self.loads(want) // (self.gemm.rows if want.method == "naive" else 1)
        loads = sum(self.loads(want) for want in self.wants) * self.passes
        stored = sum(self.stored(want) for want in self.wants)
        return stored / WRITE_BYTES + tiles * WRITE_TILE + loads * (FILE_LOAD if self.file else MEMORY_LOAD) / 4


def contenders(gemm: Gemm) -> tuple[Want, ...]:
    """Return the methods that read B from the far tier; a double buffer only where a half holds a column of tiles."""
    double = Want("swap", double=True)
    try:
        staged_columns(gemm, double.staging, double=True)
    except KvbenchError:
        swaps: tuple[Want, ...] = (Want("swap"),)
    else:
        swaps = (Want("swap"), double)
    return (*swaps, Want("naive"), Want("cpu_aware"), Want("cpu_aware_pipelined"))
