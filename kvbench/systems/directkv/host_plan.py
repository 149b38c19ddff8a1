"""What a host product does in which order: the pieces B is stored in, the loads of them, the products on each load.

Pure lists; the machine is in :mod:`host_gemm`. Every method is the same kind of list, so that all of them run by the
same loop and the same calls, and differ only in what the paper says they differ in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvbench.errors import Unavailable, UsageError
from kvbench.systems.directkv.shapes import HALVES, Gemm, Method, ceil_div, staged_columns, stored_panel
from kvbench.systems.directkv.traffic import Traffic, traffic

MOST_PRODUCTS = 1 << 20  # rows of a plan: 128 MiB of descriptors
BLAS_MOST = (1 << 31) - 1  # sizes and leading dimensions are 32-bit integers


@dataclass(frozen=True, slots=True)
class Piece:
    """B[k0:k1, n0:n1], column-major and compact, at ``offset`` of the store, ``stored`` bytes with padding."""

    k0: int
    k1: int
    n0: int
    n1: int
    offset: int
    stored: int

    @property
    def elements(self) -> int:
        return (self.k1 - self.k0) * (self.n1 - self.n0)


@dataclass(frozen=True, slots=True)
class Product:
    """C[m0:m1, columns of the piece] += A[m0:m1, rows of the piece] times the piece of load ``load``.

    ``first``: the first along k, which overwrites C. ``load`` is None where B lies near as a whole.
    """

    load: int | None
    m0: int
    m1: int
    first: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """``loads[l]`` is the piece load l brings into slot l mod ``depth``; ``products`` run in order."""

    gemm: Gemm
    method: Method
    depth: int
    pieces: tuple[Piece, ...]
    loads: tuple[int, ...]
    products: tuple[Product, ...]
    traffic: Traffic

    @property
    def slot(self) -> int:
        """Bytes of a slot: the largest piece."""
        return max((piece.stored for piece in self.pieces), default=0)

    @property
    def near_buffer(self) -> int:
        """Bytes of near memory the method needs beside A and C: its slots, or all of B."""
        return self.depth * self.slot if self.pieces else self.gemm.b_bytes

    @property
    def store(self) -> int:
        """Bytes of the far store."""
        return sum(piece.stored for piece in self.pieces)

    def piece_of(self, product: Product) -> Piece:
        """Return the piece of B a product reads: all of B where it lies near."""
        if product.load is None:
            return Piece(0, self.gemm.k, 0, self.gemm.n, 0, self.gemm.b_bytes)
        return self.pieces[self.loads[product.load]]


def tiles(gemm: Gemm) -> tuple[Piece, ...]:
    """Return B in tiles, down the columns of tiles; edge tiles are compact."""
    return tuple(_pieces(gemm, gemm.tile_k, gemm.tile_n))


def panels(gemm: Gemm, columns: int) -> tuple[Piece, ...]:
    """Return B in pieces of ``columns`` columns of tiles, all of k each."""
    return tuple(_pieces(gemm, gemm.k, columns * gemm.tile_n))


def _pieces(gemm: Gemm, high: int, wide: int) -> Iterator[Piece]:
    offset = 0
    for n0 in range(0, gemm.n, wide):
        for k0 in range(0, gemm.k, high):
            k1, n1 = min(k0 + high, gemm.k), min(n0 + wide, gemm.n)
            stored = ceil_div((k1 - k0) * (n1 - n0) * gemm.item, gemm.block) * gemm.block
            yield Piece(k0, k1, n0, n1, offset, stored)
            offset += stored


def require_runnable(gemm: Gemm) -> None:
    """Raise Unavailable for a product that the algebra knows but this machine's BLAS or descriptors cannot hold."""
    for name in ("m", "n", "k"):
        if getattr(gemm, name) > BLAS_MOST:
            total = gemm.a_bytes + gemm.b_bytes + gemm.c_bytes
            raise Unavailable(
                f"{name} does not fit 32-bit BLAS", where="gemm", got=f"{gemm.m} x {gemm.n} x {gemm.k}, {total} bytes",
                expected=f"at most {BLAS_MOST}", mend="the traffic bench counts its bytes without running it",
            )  # fmt: skip
    count = gemm.rows * gemm.columns * gemm.steps
    if count > MOST_PRODUCTS:
        raise Unavailable(
            "too many tiles", where="gemm", got=f"{gemm.rows} x {gemm.columns} x {gemm.steps} = {count}",
            expected=f"at most {MOST_PRODUCTS}", mend="choose larger tiles",
        )  # fmt: skip


def require_near(plan: Plan, budget: int) -> None:
    """Raise UsageError unless the method's near buffer fits ``budget`` bytes; says what would, found by trying."""
    if plan.near_buffer <= budget:
        return
    if plan.method == "resident":
        mend = f"it needs {plan.near_buffer} bytes"
    elif plan.method == "swap":
        mend = _less_staged(plan, budget)
    else:
        fits = _tile_within(plan, budget)
        mend = f"choose tiles of {fits} x {fits} or smaller" if fits else "allow a larger near buffer"
    raise UsageError(
        "the tiles do not fit the near buffer", where=f"gemm {plan.method}",
        got=f"{plan.depth} x {plan.slot} bytes", expected=f"at most {budget} bytes", mend=mend,
    )  # fmt: skip


def _less_staged(plan: Plan, budget: int) -> str:
    """Return the most per cent of B that a swap can stage within ``budget``, or the bytes the least of them needs."""
    gemm, double, needed = plan.gemm, plan.depth > 1, plan.near_buffer
    for percent in range(100, 0, -1):
        try:
            columns = staged_columns(gemm, percent, double=double)
        except UsageError:
            break
        needed = min(needed, plan.depth * stored_panel(gemm, columns))
        if needed <= budget:
            return f"stage less: {percent} % or below"
    return f"one column of tiles needs {needed} bytes; choose smaller tiles"


def _tile_within(plan: Plan, budget: int) -> int | None:
    """Return the largest square tile, a multiple of 16 or a power of two below, whose slots fit; None without any."""
    sizes: list[int] = [
        *(1 << power for power in range(4)),
        *range(16, max(16, min(plan.gemm.tile_k, BLAS_MOST)) + 1, 16),
    ]

    def square(size: int) -> Gemm:
        return replace(plan.gemm, tile_m=size, tile_n=size, tile_k=size)

    at = bisect_right(sizes, budget, key=lambda size: plan.depth * square(size).stored_tile(0, 0))
    if not at:
        return None
    try:
        require_runnable(square(sizes[at - 1]))
    except Unavailable:
        return None
    return sizes[at - 1]


def plan(gemm: Gemm, method: Method, *, staging: int = 100, double: bool = False, depth: int | None = None) -> Plan:
    """Return the plan of ``method``.

    ``swap``: a buffer of ``staging`` per cent of B, or two halves of it. ``depth``: slots of tiles; by default one for
    `naive` and `cpu_aware`, whose load and product take turns, and two for `cpu_aware_pipelined`.
    Raises UsageError for a staging buffer below a column of tiles, Unavailable for sizes that cannot run here.
    """
    if gemm.item != 4 or gemm.c_item != 4:
        raise UsageError("the host multiplies in float32", where="gemm", got=f"{gemm.item} and {gemm.c_item} bytes")
    require_runnable(gemm)
    if method == "resident":
        return Plan(gemm, method, 1, (), (), (Product(None, 0, gemm.m, True),), traffic(gemm, method))
    if method == "swap":
        columns = staged_columns(gemm, staging, double=double)
        pieces = panels(gemm, columns)
        products = tuple(Product(load, 0, gemm.m, True) for load in range(len(pieces)))
        moved = traffic(gemm, method, columns=columns)
        return Plan(gemm, method, HALVES if double else 1, pieces, tuple(range(len(pieces))), products, moved)
    pieces, moved = tiles(gemm), traffic(gemm, method, buffered=True)
    if method == "naive":
        loads: list[int] = []
        made: list[Product] = []
        for m0 in range(0, gemm.m, gemm.tile_m):
            m1 = min(m0 + gemm.tile_m, gemm.m)
            for index, piece in enumerate(pieces):
                made.append(Product(len(loads), m0, m1, piece.k0 == 0))
                loads.append(index)
        return Plan(gemm, method, depth or 1, pieces, tuple(loads), tuple(made), moved)
    if method not in ("cpu_aware", "cpu_aware_pipelined"):
        raise UsageError("unknown method", where="gemm", got=method)
    products = tuple(Product(index, 0, gemm.m, piece.k0 == 0) for index, piece in enumerate(pieces))
    slots = depth or (HALVES if method == "cpu_aware_pipelined" else 1)
    return Plan(gemm, method, slots, pieces, tuple(range(len(pieces))), products, moved)
