"""The product of DirectKV's case study on a host: B far, a near buffer of tiles, BLAS on one core, loads on another.

The producer of the paper's warp groups is the thread that loads, the consumer the one that multiplies. BLAS adds to C
in place (beta = 1), so that the storer's work is part of the product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.memory.host import HostBuffer, preflight
from kvbench.systems.directkv.host_plan import Plan
from kvbench.systems.directkv.host_store import Array, FarStore, Keeper, near_buffer
from kvbench.systems.directkv.shapes import ceil_div

if TYPE_CHECKING:
    from kvbench.kernels.team import Team
    from kvbench.kernels.tile_passes import Products

Stamps = np.ndarray[Any, np.dtype[np.int64]]
SAMPLED = 8  # rows of C computed again in float64
LARGEST_STEP = 512  # of k at once in float64
ERROR = 1e-6  # of the Frobenius norm, times the root of k: rounding of a float32 sum grows like that of its length
RELAYS, RELAYS_LEAST = 256, 8  # loads and products of a probe of the hand-over
RELAY_MOST, RELAY_BYTES = 1 << 20, 4 << 20  # a larger slot leaves the core's own cache anyway; all relays together
PROBE_SHARE, PROBE_LEAST = 16, 8  # a probe makes a 16th of the loads and products, and 8 of them at least


class Operands:
    """A (m x k) and C (m x n) near, B (k x n) to be stored, float32, column-major; ``reference`` rows in float64.

    Raises Unavailable where they do not fit into memory.
    """

    def __init__(self, m: int, n: int, k: int, enter: Keeper, node: int | None, seed: int) -> None:
        self.m, self.n, self.k = m, n, k
        preflight(4 * (m * k + 2 * k * n + m * n))
        rng = np.random.default_rng(seed)
        shapes = ((m, k), (k, n), (m, n))
        buffers = [enter(near_buffer(4 * rows * columns, node)) for rows, columns in shapes]
        self.a, self.b, self.c = (self._matrix(it, *shape) for it, shape in zip(buffers, shapes, strict=True))
        self.b_buffer: HostBuffer = buffers[1]
        for matrix in (self.a, self.b):
            flat = matrix.reshape(-1, order="F")
            for start in range(0, flat.size, 1 << 22):
                piece = flat[start : start + (1 << 22)]
                rng.random(piece.size, np.float32, out=piece)
                piece *= 2.0
                piece -= 1.0
        self._rows = np.sort(rng.permutation(m)[:SAMPLED])
        self._wanted = self._reference()

    @staticmethod
    def _matrix(buffer: HostBuffer, rows: int, columns: int) -> Array:
        made: Array = buffer.array(np.float32)[: rows * columns].reshape((rows, columns), order="F")
        return made

    def _reference(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        total = np.zeros((len(self._rows), self.n))
        for k0 in range(0, self.k, LARGEST_STEP):
            part = slice(k0, min(k0 + LARGEST_STEP, self.k))
            total += self.a[self._rows, part].astype(np.float64) @ self.b[part].astype(np.float64)
        return total

    def error(self) -> float:
        """Return the Frobenius norm of C - reference over that of the reference, on the sampled rows."""
        off = np.linalg.norm(self.c[self._rows].astype(np.float64) - self._wanted)
        size = np.linalg.norm(self._wanted)
        return float(off / size) if size else float(off)

    def spoil(self) -> None:
        """Make every element of C wrong."""
        self.c[:] = np.nan


class HostGemm:
    """A plan made runnable: ``run(reps)`` multiplies, ``loads_alone`` and ``products_alone`` do one side of it.

    All return the seconds of the team's own clock. ``store`` is the far operand, laid out for ``plan`` (None where B is
    near). The first member of ``team`` multiplies inside :func:`kernels.blas.one_thread`, the second loads; with one
    slot the first does both.
    """

    def __init__(
        self, plan: Plan, operands: Operands, store: FarStore | None, team: Team, enter: Keeper, node: int | None = None
    ) -> None:
        from kvbench.kernels.tile_passes import TilePass

        gemm = plan.gemm
        if (gemm.m, gemm.n, gemm.k) != (operands.m, operands.n, operands.k) or bool(plan.pieces) != (store is not None):
            raise UsageError("operands of another product", where="gemm", got=(operands.m, operands.n, operands.k))
        self.plan, self.operands, self.store = plan, operands, store
        self._slots: HostBuffer | None = None
        self.error: float | None = None
        if plan.pieces:
            preflight(plan.near_buffer)
            self._slots = enter(near_buffer(plan.near_buffer, node))
        loads = np.array(
            [store.row(plan.pieces[piece], self._slot(load)) for load, piece in enumerate(plan.loads)] if store else [],
            np.int64,
        ).reshape(-1, 6)  # fmt: skip
        self._pass = TilePass(loads, self._products(), plan.depth, team)
        self._sums = np.zeros(operands.n, np.float32)
        self._between = TilePass(*self._relay(), plan.depth, team)
        self.kernel = f"sgemm on one core, {store.kernel if store else 'B near'}, {plan.depth} slots of {plan.slot} B"

    def _slot(self, load: int) -> int:
        assert self._slots is not None
        return self._slots.address + load % self.plan.depth * self.plan.slot

    def _products(self) -> Products:
        from kvbench.kernels.tile_passes import Products

        plan, operands = self.plan, self.operands
        made = Products(len(plan.products))
        a, b, c = (int(matrix.ctypes.data) for matrix in (operands.a, operands.b, operands.c))
        for product in plan.products:
            piece = plan.piece_of(product)
            needs = 0 if product.load is None else product.load + 1
            made.add(
                needs, needs, (product.m1 - product.m0, piece.n1 - piece.n0, piece.k1 - piece.k0),
                (a + 4 * (product.m0 + piece.k0 * operands.m), operands.m),
                (b if product.load is None else self._slot(product.load), piece.k1 - piece.k0),
                (c + 4 * (product.m0 + piece.n0 * operands.m), operands.m), first=product.first,
            )  # fmt: skip
        return made

    def _relay(self) -> tuple[Stamps, Products]:
        """Return copies of near bytes into the slots and a product of one row on each; large slots get no bytes."""
        from kvbench.kernels.io_calls import call_row
        from kvbench.kernels.tile_passes import Products

        piece = max(self.plan.pieces, key=lambda one: one.stored, default=None)
        nbytes = 0 if piece is None or piece.stored > RELAY_MOST else 4 * piece.elements
        wide, high = (piece.n1 - piece.n0, piece.k1 - piece.k0) if piece is not None and nbytes else (1, 1)
        count = max(RELAYS_LEAST, min(RELAYS, RELAY_BYTES // max(1, nbytes)))
        made, source = Products(count), int(self.operands.b.ctypes.data)
        rows = []
        for load in range(count):
            slot = self._slot(load) if nbytes else source
            size = (int(nbytes > 0), wide, high)
            made.add(
                load + 1, load + 1, size, (source, 1), (slot, high), (int(self._sums.ctypes.data), 1), first=True
            )  # fmt: skip
            rows.append(call_row("memcpy", slot, source, nbytes, returns=slot))
        return np.array(rows, np.int64), made

    # -- runs ----------------------------------------------------------------------------------------------------

    def run(self, reps: int = 1) -> float:
        """Multiply ``reps`` times; what the link delivered is counted around each."""
        seconds = 0.0
        for _ in range(reps):
            if self.store is not None:
                self.store.begin()
            seconds += self._pass.run()
            if self.store is not None:
                self.store.end()
        return seconds

    def loads_alone(self, reps: int = 1, count: int | None = None) -> float:
        """Make the loads only (the first ``count``): the same blocks by the same calls."""
        return sum(self._pass.run(count, 0, apart=True) for _ in range(reps))

    def products_alone(self, reps: int = 1, count: int | None = None) -> float:
        """Make the products only, on whatever the slots hold."""
        return sum(self._pass.run(0, count, apart=True) for _ in range(reps))

    @property
    def probe_count(self) -> int:
        """How many loads and products a probe makes."""
        total = len(self.plan.products)
        return min(total, max(PROBE_LEAST, ceil_div(total, PROBE_SHARE)))

    def probe(self) -> tuple[float, float]:
        """Return seconds a stored byte of loads and an operation of products, over some of both.

        With two slots or more each side runs alone. With one they take turns on one core, and so they do here: a read
        after a product finds caches and device colder than one after a read, by a quarter at tiles of 64 KiB.
        """
        count = self.probe_count
        flops = sum(self._flops(index) for index in range(count))
        if not self.plan.loads:
            return 0.0, self.products_alone(count=count) / flops
        made = min(count, len(self.plan.loads))
        moved = sum(self.plan.pieces[piece].stored for piece in self.plan.loads[:made])
        if self.plan.depth > 1:
            products = self.products_alone(count=count)
            return self.loads_alone(count=count) / moved, products / flops
        self._pass.run(made, count)
        loads, products = (
            float(np.diff(stamps[:size]).sum()) * 1e-9
            for stamps, size in ((self._pass.load_stamps, made), (self._pass.product_stamps, count))
        )
        return loads / moved, products / flops

    def handover(self) -> float:
        """Return the seconds after which two threads can hand over the next load; 0 where one thread does both sides.

        Telling each other, and the bytes of a slot moving from one core's cache to the other's: copies of near memory
        into the slots beside products of one row on them.
        """
        if self.plan.depth == 1 or not self.plan.loads:
            return 0.0
        return self._between.run() / len(self._between.loads)

    def _flops(self, index: int) -> int:
        product = self.plan.products[index]
        return 2 * (product.m1 - product.m0) * self.plan.piece_of(product).elements

    def costs(self, byte_seconds: float, flop_seconds: float) -> tuple[list[float], list[float]]:
        """Return the seconds of each load and each product at these rates."""
        loads = [self.plan.pieces[piece].stored * byte_seconds for piece in self.plan.loads]
        return loads, [self._flops(index) * flop_seconds for index in range(len(self.plan.products))]

    @property
    def stamps(self) -> tuple[Stamps, Stamps]:
        """Begin and end of each load and each product of the last run, nanoseconds."""
        return self._pass.load_stamps, self._pass.product_stamps

    # -- proof and ledger ----------------------------------------------------------------------------------------

    @property
    def asked_bytes(self) -> int:
        """Bytes the loads of one pass ask for, padding included: the kernel's own count."""
        return int(sum(self.plan.pieces[piece].stored for piece in self.plan.loads))

    @property
    def near_bytes(self) -> int | None:
        """Bytes of the near buffer that are in memory, by the kernel's page tables; None where it does not tell.

        The buffer is the slots, or where B lies near as a whole that of B.
        """
        return (self.operands.b_buffer if self._slots is None else self._slots).placement.resident

    def spoil(self) -> None:
        """Make C and every slot wrong."""
        self.operands.spoil()
        if self._slots is not None:
            self._slots.array()[:] = 0xFF

    def verify(self) -> None:
        """Spoil everything, multiply once, compare rows with float64 and keep the ``error``. Raises VerifyError."""
        self.spoil()
        self._pass.run()
        self.error = found = self.operands.error()
        bound = ERROR * self.plan.gemm.k**0.5
        if not found <= bound:
            raise VerifyError("the product is wrong", where=self.kernel, got=f"{found:.3g}", expected=f"<= {bound:.3g}")
