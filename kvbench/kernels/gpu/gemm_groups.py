"""The CPU-aware product on Hopper with a group of warps each for loading, multiplying and storing (Gluon).

DirectKV, OSDI 2026, section 4: a producer asks the copy engine of the multiprocessor (TMA) for tiles of the far matrix
and of A, consumers multiply, a storer takes finished tiles to memory. They meet at pairs of barriers, full and empty, a
pair a buffer; :mod:`kvbench.systems.directkv.barriers` checks that protocol. Needs Triton 3.8 or later.
"""
# Triton evaluates the annotations of a kernel, so its arguments have none.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import os

from kvbench.kernels.gpu.settings import triton_settings

for _name, _value in triton_settings().items():
    os.environ.setdefault(_name, _value)  # only now: Triton reads them when it is imported and when it compiles

from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: E402
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)


@gluon.jit
def _run(unit, end, rows, split):
    """Return (column, first tile row, tile row after the last, next unit) of the units [unit, end) in one column."""
    column = unit // split
    last = gl.minimum((column + 1) * split, end)
    return column, (unit - column * split) * rows // split, (last - column * split) * rows // split, last


@gluon.jit
def _produce(
    a,
    b,
    b_tiles,
    a_tiles,
    b_full,
    b_empty,
    a_full,
    a_empty,
    unit,
    end,
    rows,
    split,
    steps,
    TILE: gl.constexpr,
    STEP: gl.constexpr,
    DEPTH: gl.constexpr,
    A_DEPTH: gl.constexpr,
):
    far, near = 0, 0
    while unit < end:
        column, begin, stop, unit = _run(unit, end, rows, split)
        for step in range(steps):
            slot = far % DEPTH
            mbarrier.wait(b_empty.index(slot), (far // DEPTH & 1) ^ 1)
            mbarrier.expect(b_full.index(slot), b.nbytes_per_cta)
            tma.async_load(b, [column * TILE, step * STEP], b_full.index(slot), b_tiles.index(slot))
            far += 1
            for row in range(begin, stop):
                place = near % A_DEPTH
                mbarrier.wait(a_empty.index(place), (near // A_DEPTH & 1) ^ 1)
                mbarrier.expect(a_full.index(place), a.nbytes_per_cta)
                tma.async_load(a, [row * TILE, step * STEP], a_full.index(place), a_tiles.index(place))
                near += 1


@gluon.jit
def _consume(
    b_tiles,
    a_tiles,
    c_tile,
    b_full,
    b_empty,
    a_full,
    a_empty,
    c_full,
    c_empty,
    unit,
    end,
    rows,
    split,
    steps,
    TILE: gl.constexpr,
    DEPTH: gl.constexpr,
    A_DEPTH: gl.constexpr,
    WARPS: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TILE, 16]
    )
    far, near = 0, 0
    while unit < end:
        _, begin, stop, unit = _run(unit, end, rows, split)
        for _step in range(steps):
            slot = far % DEPTH
            mbarrier.wait(b_full.index(slot), far // DEPTH & 1)
            for _row in range(begin, stop):
                place = near % A_DEPTH
                mbarrier.wait(a_full.index(place), near // A_DEPTH & 1)
                total = gl.zeros([TILE, TILE], gl.float32, layout)
                total = warpgroup_mma(
                    a_tiles.index(place), b_tiles.index(slot).permute((1, 0)), total, use_acc=False, is_async=False
                )
                mbarrier.arrive(a_empty.index(place), count=1)
                mbarrier.wait(c_empty, (near & 1) ^ 1)
                c_tile.store(total)
                fence_async_shared()
                mbarrier.arrive(c_full, count=1)
                near += 1
            mbarrier.arrive(b_empty.index(slot), count=1)
            far += 1


@gluon.jit
def _store(
    c,
    c_tile,
    c_full,
    c_empty,
    unit,
    end,
    rows,
    split,
    steps,
    TILE: gl.constexpr,
):
    done = 0
    while unit < end:
        column, begin, stop, unit = _run(unit, end, rows, split)
        for step in range(steps):
            for row in range(begin, stop):
                mbarrier.wait(c_full, done & 1)
                # The first step writes, later ones add in the L2: no tile of C is read into the multiprocessor.
                if step == 0:
                    tma.async_store(c, [row * TILE, column * TILE], c_tile)
                else:
                    tma.async_atomic_add(c, [row * TILE, column * TILE], c_tile)
                # Not only read but written: the next step adds to what this one left.
                tma.store_wait(0, read_only=False)
                mbarrier.arrive(c_empty, count=1)
                done += 1


@gluon.jit
def gemm_groups(
    c,
    a,
    b,
    rows,
    columns,
    steps,
    split,
    TILE: gl.constexpr,
    STEP: gl.constexpr,
    DEPTH: gl.constexpr,
    A_DEPTH: gl.constexpr,
    WARPS: gl.constexpr,
):
    """C = A B, CPU-aware: tiles of B (TILE x STEP, stored by columns) cross the link once a run of tile rows.

    ``a`` [m, k], ``b`` [n, k] (bf16) and ``c`` [m, n] (float32) are tensor maps with boxes of a tile; what lies outside
    is zero. ``rows``, ``columns``, ``steps``: tiles of each dimension. Units as in ``gemm_aware``. Any grid.
    """
    units = columns * split
    unit = gl.program_id(0).to(gl.int64) * units // gl.num_programs(0)
    end = (gl.program_id(0).to(gl.int64) + 1) * units // gl.num_programs(0)
    unit, end = unit.to(gl.int32), end.to(gl.int32)
    b_tiles = gl.allocate_shared_memory(b.dtype, [DEPTH, TILE, STEP], b.layout)
    a_tiles = gl.allocate_shared_memory(a.dtype, [A_DEPTH, TILE, STEP], a.layout)
    c_tile = gl.allocate_shared_memory(c.dtype, [TILE, TILE], c.layout)
    b_full = mbarrier.allocate_mbarrier(batch=DEPTH)
    b_empty = mbarrier.allocate_mbarrier(batch=DEPTH)
    a_full = mbarrier.allocate_mbarrier(batch=A_DEPTH)
    a_empty = mbarrier.allocate_mbarrier(batch=A_DEPTH)
    c_full = mbarrier.allocate_mbarrier()
    c_empty = mbarrier.allocate_mbarrier()
    for i in gl.static_range(DEPTH):
        mbarrier.init(b_full.index(i), count=1)
        mbarrier.init(b_empty.index(i), count=1)
    for i in gl.static_range(A_DEPTH):
        mbarrier.init(a_full.index(i), count=1)
        mbarrier.init(a_empty.index(i), count=1)
    mbarrier.init(c_full, count=1)
    mbarrier.init(c_empty, count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    b_tiles, a_tiles, c_tile, b_full, b_empty, a_full, a_empty, c_full, c_empty, unit, end, rows, split,
                    steps, TILE, DEPTH, A_DEPTH, WARPS,
                ),
            ),
            (
                _produce,
                (
                    a, b, b_tiles, a_tiles, b_full, b_empty, a_full, a_empty, unit, end, rows, split, steps, TILE, STEP,
                    DEPTH, A_DEPTH,
                ),
            ),
            (_store, (c, c_tile, c_full, c_empty, unit, end, rows, split, steps, TILE)),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip
