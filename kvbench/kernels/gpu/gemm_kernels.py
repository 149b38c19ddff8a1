"""The product with B far among the GPU kernels: loop order, tile and depth of each form, and what fits on a chip.

DirectKV, OSDI 2026, 2.3: `naive` keeps a tile of C and reads B once a tile row of C, `aware` keeps a tile of B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels.gpu.arch import ARCHS, Arch
from kvbench.kernels.gpu.catalogue import FOLDER, Argument, Demand, GpuKernel

Order = Literal["naive", "aware"]
Compute = Literal["simt", "tf32", "bf16"]
ORDERS: tuple[Order, ...] = get_args(Order)
COMPUTES: tuple[Compute, ...] = get_args(Compute)
DEPTHS = (1, 2, 3, 4)
RASTERS = {"m_fastest": 0, "n_fastest": 1, "swizzle": 2}
CHUNK, PITCH = 16, 20  # gemm.cu
ITEM = {"simt": 4, "tf32": 4, "bf16": 2}  # bytes of an element of A and B; C is float32
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows and columns of a tile of C, the rows of a tile of B, and what one thread has of C (rows, columns / 4)."""

    m: int
    n: int
    k: int
    per_m: int
    per_n4: int

    @property
    def threads(self) -> int:
        return self.n // (4 * self.per_n4) * (self.m // self.per_m)


# 256 rows and 128 columns: sums of 256 x 256 would take every register of a multiprocessor. How often B is read again
# depends on the rows alone.
SHAPES = {64: Shape(64, 64, 64, 4, 1), 128: Shape(128, 128, 128, 8, 2), 256: Shape(256, 128, 128, 16, 2)}


def shape_of(tile: int) -> Shape:
    """Return the tile shapes of ``tile``, its rows. Raises UsageError for one there is no kernel for."""
    if tile not in SHAPES:
        raise UsageError("no kernel of that tile", where="gemm tile", got=tile, expected=", ".join(map(str, SHAPES)))
    return SHAPES[tile]


def shared_bytes(order: Order, tile: int, depth: int) -> int:
    """Return the dynamic shared memory of one block of ``gemm.cu``: ``depth`` stages of B and what A needs beside."""
    shape = shape_of(tile)
    if order == "naive":
        return 4 * depth * (shape.m * PITCH + CHUNK * shape.n)
    return 4 * (depth * shape.k * shape.n + 2 * shape.m * PITCH)


def simt_kernel(order: Order, tile: int, depth: int = 1) -> GpuKernel:
    """Return ``gemm.cu`` compiled for a loop order, a tile and ``depth`` stages of B under way.

    Arguments: c, a, b row-major float32 with rows of ldc, lda, ldb elements, multiples of 4, padding finite. ``split``
    parts of a column of tiles and ``raster`` are used by ``aware`` and ``naive`` alone. Raises UsageError for an order,
    tile or depth there is no kernel for.
    """
    _check(order, depth)
    shape = shape_of(tile)
    name = f"gemm_simt_{order}_{tile}_d{depth}"
    return GpuKernel(
        name,
        "cuda",
        FOLDER / "gemm.cu",
        f"kvbench_gemm_{order}_{tile}_d{depth}",
        shape.threads,
        f"product with B far, float32 by FFMA, {order} order, tiles of {tile}, {depth} stages",
        ARGUMENTS,
        Demand(loads=True, stores=True, every=True, math="ffma"),
        reference,
        constants=(
            ("TILE_M", shape.m), ("TILE_N", shape.n), ("TILE_K", shape.k), ("PER_M", shape.per_m),
            ("PER_N4", shape.per_n4), ("DEPTH", depth), ("AWARE", int(order == "aware")),
        ),
        shared=shared_bytes(order, tile, depth),
        archs=tuple(a.name for a in ARCHS.values() if a.backend == "cuda" and not _refused(order, tile, depth, a)),
    )  # fmt: skip


def _check(order: str, depth: int) -> None:
    if order not in ORDERS:
        raise UsageError("unknown loop order", where="gemm", got=order, expected=" or ".join(ORDERS))
    if depth not in DEPTHS:
        raise UsageError("depth of the pipeline", where="gemm", got=depth, expected="1 to 4 stages")


def _pointer(name: str, meaning: str) -> Argument:
    return Argument(name, "pointer", meaning, 16)


ARGUMENTS = (
    _pointer("c", "float32 [m, ldc]"),
    _pointer("a", "[m, lda]"),
    _pointer("b", "[k, ldb], near or an alias of host memory"),
    Argument("m", "i32", "rows of C"),
    Argument("n", "i32", "columns of C"),
    Argument("k", "i32", "columns of A, rows of B"),
    Argument("lda", "u64", "elements from row to row of A"),
    Argument("ldb", "u64", "elements from row to row of B"),
    Argument("ldc", "u64", "elements from row to row of C"),
    Argument("split", "i32", "parts a column of tiles is cut into (aware)"),
    Argument("raster", "i32", "order of the tiles (naive): 0 M fastest, 1 N fastest, 2 bands of 8 rows"),
)


def reference(a: Array, b: Array) -> Array:
    """Return A B in float64 from the values as they are stored, rounded inputs included: float64 [m, n]."""
    product: Array = a.astype(np.float64) @ b.astype(np.float64)
    return product


def error_bound(compute: str, k: int) -> float:
    """Return the largest Frobenius norm of C - ref over that of ref: 1e-6 x sqrt(K), tf32 1e-3, bf16 1e-2."""
    return {"simt": 1e-6 * float(np.sqrt(k)), "tf32": 1e-3, "bf16": 1e-2}[compute]


def _refused(order: Order, tile: int, depth: int, arch: Arch) -> str:
    """Return why a block of that form does not fit ``arch``, nothing where it does."""
    if depth > 1 and isinstance(arch.number, int) and arch.number < 80:
        return "no asynchronous copies"
    need = shared_bytes(order, tile, depth)
    return f"{need} bytes of {arch.shared_limit}" if need > arch.shared_limit else ""


def require_fit(order: Order, tile: int, depth: int, arch: Arch) -> None:
    """Raise Unavailable, with how much is needed and what fits, where a block has not that much shared memory.

    Also before sm_80 for more than one stage: it has no asynchronous copies, and a pipeline of none is none.
    """
    why = _refused(order, tile, depth, arch)
    if not why:
        return
    fits = [f"tile {t} depth {d}" for t in SHAPES for d in DEPTHS if not _refused(order, t, d, arch)]
    raise Unavailable(
        "the tiles do not fit on the chip", where=f"gemm {order}, tile {tile}, depth {depth} on {arch.name}",
        got=why if "bytes" not in why else f"{shared_bytes(order, tile, depth)} bytes of shared memory a block",
        expected=f"at most {arch.shared_limit} bytes" if "bytes" in why else "one stage",
        mend="what fits: " + ", ".join(fits),
    )  # fmt: skip


# Of tensor forms, by (order, tile): the rows of B in one step and the depths whose code keeps all in registers. A
# pipelined C-reading loop of 128 x 128 spills on every architecture (Triton 3.9); Hopper has the groups of
# gemm_groups.py for it.
_TENSOR_STEP = {"tf32": 32, "bf16": 64}
TENSOR_DEPTHS: dict[tuple[Order, int], tuple[int, ...]] = {
    ("naive", 64): DEPTHS, ("naive", 128): DEPTHS, ("aware", 64): (1, 2), ("aware", 128): (1,),
}  # fmt: skip
TENSOR_ARCHS = tuple(a.name for a in ARCHS.values() if isinstance(a.number, int) and a.number >= 80)
_SMALL_CHIPS_LEFT_OUT = tuple(name for name in TENSOR_ARCHS if ARCHS[name].shared_limit >= 144 * 1024)


def tensor_kernel(compute: Compute, order: Order, tile: int, depth: int = 1, *, upcast: bool = False) -> GpuKernel:
    """Return ``gemm.py`` compiled for tf32 or bf16, a loop order, a tile and ``depth`` stages.

    Arguments as for :func:`simt_kernel`, but ``b`` is stored by columns (K together) with zeros as padding, and rows
    are counted in 16 bytes. ``upcast``: multiply in float32, for the interpreter alone. Raises UsageError for what
    there is no kernel for.
    """
    _check(order, depth)
    if compute not in ("tf32", "bf16"):
        raise UsageError("not a matrix instruction", where="gemm", got=compute, expected="tf32 or bf16")
    depths = TENSOR_DEPTHS.get((order, tile))
    if depths is None or depth not in depths:
        known = ", ".join(f"{o} {t} depth {'/'.join(map(str, d))}" for (o, t), d in TENSOR_DEPTHS.items())
        raise UsageError(
            "no kernel of that form: its code would spill", where=f"gemm {compute}",
            got=f"{order}, tile {tile}, depth {depth}", expected=known,
        )  # fmt: skip
    step = tile if order == "aware" else _TENSOR_STEP[compute]
    element = "fp32" if compute == "tf32" else "bf16"
    return GpuKernel(
        f"gemm_{compute}_{order}_{tile}_d{depth}{'_upcast' if upcast else ''}",
        "triton",
        FOLDER / "gemm.py",
        f"gemm_{order}",
        256 if tile == 128 else 128,
        f"product with B far, {compute} by matrix instructions, {order} order, tiles of {tile}, {depth} stages",
        TENSOR_ARGUMENTS,
        Demand(loads=True, stores=True, every=True, math="tensor"),
        reference,
        ("*fp32", f"*{element}", f"*{element}", *["i32"] * 3, *["i64"] * 3, "i32", "i32"),
        (
            ("TILE_M", tile), ("TILE_N", tile), ("STEP", step), ("PER16", 16 // ITEM[compute]), ("UPCAST", int(upcast)),
            ("STAGES", depth),
        ),
        # Left to itself ptxas spills at 128 on sm_86, to fit a second block.
        registers=255 if (order, tile) == ("aware", 128) else 0,
        archs=_SMALL_CHIPS_LEFT_OUT if (compute, order, tile) == ("tf32", "aware", 128) else TENSOR_ARCHS,
    )  # fmt: skip


TENSOR_ARGUMENTS = (
    _pointer("c", "float32 [m, ldc]"),
    _pointer("a", "[m, lda]"),
    _pointer("b", "[n, ldb], B by columns, near or an alias of host memory"),
    *ARGUMENTS[3:6],
    Argument("lda16", "i64", "bytes from row to row of A / 16"),
    Argument("ldb16", "i64", "bytes from column to column of B / 16"),
    Argument("ldc16", "i64", "bytes from row to row of C / 16"),
    *ARGUMENTS[9:],
)

A_STAGES, GROUP_WARPS, GROUP_THREADS = 2, 4, 256  # of the groups: four warps multiply, four hold the other two groups
GROUPS_TRITON = (3, 8)  # tma.async_load: earlier ones have only async_copy_global_to_shared


def groups_kernel(tile: int = 128, depth: int = 2) -> GpuKernel:
    """Return ``gemm_groups.py`` (bf16, Hopper) compiled for a tile and ``depth`` tiles of the far matrix under way.

    Maps of c [m, n] float32, a [m, k] and b [n, k] bf16, then the tiles of m, n and k and the split. Raises
    Unavailable for a tile or depth whose buffers do not fit.
    """
    _check("aware", depth)
    need = 2 * tile * tile * (depth + A_STAGES) + 4 * tile * tile
    limit = ARCHS["sm_90a"].shared_limit
    if tile not in (64, 128) or need > limit - 1024:
        raise Unavailable("the tiles do not fit on the chip", where=f"gemm groups, tile {tile}, depth {depth}",
                         got=f"{need} bytes of shared memory a block",
                         expected=f"tile 64, or tile 128 with depth 1 to 3, at most {limit} bytes")  # fmt: skip
    box = f"[{tile},{tile}]"
    return GpuKernel(
        f"gemm_groups_{tile}_d{depth}",
        "gluon",
        FOLDER / "gemm_groups.py",
        "gemm_groups",
        GROUP_THREADS,
        f"product with B far, bf16, producer, consumer and storer groups, tiles of {tile}, {depth} far tiles under way",
        (
            Argument("c", "map", "float32 [m, n], boxes of a tile"),
            Argument("a", "map", "bf16 [m, k]"),
            Argument("b", "map", "bf16 [n, k], B by columns, near or an alias of host memory"),
            Argument("rows", "i32", "tiles of m"),
            Argument("columns", "i32", "tiles of n"),
            Argument("steps", "i32", "tiles of k"),
            Argument("split", "i32", "parts a column of tiles is cut into"),
        ),
        Demand(math="tensor"),
        reference,
        (f"tensordesc<fp32{box}>", f"tensordesc<bf16{box}>", f"tensordesc<bf16{box}>", *["i32"] * 4),
        (("TILE", tile), ("STEP", tile), ("DEPTH", depth), ("A_DEPTH", A_STAGES), ("WARPS", GROUP_WARPS)),
        archs=("sm_90a",),
    )  # fmt: skip


def require_arch(kernel: GpuKernel, arch: Arch) -> None:
    """Raise Unavailable unless ``kernel`` is one for ``arch``: its gates have passed there, or nobody has looked."""
    if kernel.archs and arch.name not in kernel.archs:
        raise Unavailable(
            "no kernel of that form for this GPU", where=kernel.name, got=arch.name, expected=", ".join(kernel.archs)
        )


GATED = (
    *(simt_kernel(order, tile, depth) for order in ORDERS for tile in SHAPES for depth in DEPTHS
      if tile == 64 or depth <= (3 if tile == 128 else 2)),
    *(tensor_kernel(compute, order, tile, depth) for compute in ("tf32", "bf16")
      for (order, tile), depths in TENSOR_DEPTHS.items() for depth in depths),
    *(groups_kernel(128, depth) for depth in (1, 2, 3)),
    groups_kernel(64, 4),
)  # fmt: skip
