"""Portable kernels in Triton: C = A B by matrix instructions (tf32, bf16), B in any memory the device reads.

The two loop orders of ``gemm.cu`` with the same units and tile orders. Under ``TRITON_INTERPRET=1`` they run on CPU
tensors, bf16 upcast first: the interpreter multiplies bf16 as the integers it keeps them in (checked with Triton 3.9).
"""
# Triton evaluates the annotations of a kernel, so its arguments have none.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import os

from kvbench.kernels.gpu.settings import triton_settings

for _name, _value in triton_settings().items():
    os.environ.setdefault(_name, _value)  # only now: Triton reads them when it is imported and when it compiles

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def gemm_naive(
    c,
    a,
    b,
    m,
    n,
    k,
    lda16,
    ldb16,
    ldc16,
    split,
    raster,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    PER16: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keep a tile of C, walk K: every tile row of C reads all of B. Any grid; ``split`` is not used.

    ``a`` [m, lda] by rows, ``b`` [n, ldb] by columns of B, as matrix instructions want it: K lies together in both.
    Rows lie ``lda16`` ... x 16 bytes apart, PER16 elements of A and B in 16 bytes, 4 of C (float32). Padding of K is
    read: finite in A, zero in B. ``raster``: 0 M fastest, 1 N fastest, 2 bands of 8 tile rows.
    """
    rows, columns = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    # Whole 16 bytes of a row are loaded or none of them: a mask by elements would make every access a narrow one.
    whole_k, whole_c = tl.cdiv(k, PER16) * PER16, tl.cdiv(n, 4) * 4
    for i in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
        if raster == 0:
            row, column = i % rows, i // rows
        elif raster == 1:
            row, column = i // columns, i % columns
        else:
            band = i // (8 * columns)
            high = tl.minimum(rows - 8 * band, 8)
            inside = i % (8 * columns)
            row, column = 8 * band + inside % high, inside // high
        ms = row * TILE_M + tl.arange(0, TILE_M)
        ns = column * TILE_N + tl.arange(0, TILE_N)
        left = a + ms.to(tl.int64)[:, None] * (lda16 * PER16)
        right = b + ns.to(tl.int64)[None, :] * (ldb16 * PER16)
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for at in tl.range(0, k, STEP, num_stages=STAGES):
            ks = at + tl.arange(0, STEP)
            x = tl.load(left + ks[None, :], mask=(ms < m)[:, None] & (ks < whole_k)[None, :], other=0.0)
            y = tl.load(right + ks[:, None], mask=(ks < whole_k)[:, None] & (ns < n)[None, :], other=0.0)
            if UPCAST:
                x, y = x.to(tl.float32), y.to(tl.float32)
            total = tl.dot(x, y, total, input_precision="ieee" if UPCAST else "tf32")
        to = c + ms.to(tl.int64)[:, None] * (ldc16 * 4) + ns[None, :]
        tl.store(to, total, mask=(ms < m)[:, None] & (ns < whole_c)[None, :])


@triton.jit
def gemm_aware(
    c,
    a,
    b,
    m,
    n,
    k,
    lda16,
    ldb16,
    ldc16,
    split,
    raster,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    PER16: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keep a tile of B (STEP x TILE_N), walk a run of tile rows: C is read and written once a step of K.

    Programs take contiguous ranges of columns x ``split`` units, a column's parts of M one after the other. Any grid;
    ``raster`` is not used. Otherwise like ``gemm_naive``.
    """
    rows, columns = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    whole_k, whole_c = tl.cdiv(k, PER16) * PER16, tl.cdiv(n, 4) * 4
    units = (columns * split).to(tl.int64)
    unit = tl.program_id(0).to(tl.int64) * units // tl.num_programs(0)
    end = (tl.program_id(0).to(tl.int64) + 1) * units // tl.num_programs(0)
    while unit < end:
        column = unit // split
        last = tl.minimum((column + 1) * split, end)
        begin = ((unit - column * split) * rows // split).to(tl.int32)
        stop = ((last - column * split) * rows // split).to(tl.int32)
        ns = (column * TILE_N).to(tl.int32) + tl.arange(0, TILE_N)
        for at in range(0, k, STEP):
            ks = at + tl.arange(0, STEP)
            y = tl.load(
                b + ns.to(tl.int64)[None, :] * (ldb16 * PER16) + ks[:, None],
                mask=(ks < whole_k)[:, None] & (ns < n)[None, :],
                other=0.0,
            )
            if UPCAST:
                y = y.to(tl.float32)
            for row in tl.range(begin, stop, num_stages=STAGES):
                ms = row * TILE_M + tl.arange(0, TILE_M)
                x = tl.load(
                    a + ms.to(tl.int64)[:, None] * (lda16 * PER16) + ks[None, :],
                    mask=(ms < m)[:, None] & (ks < whole_k)[None, :],
                    other=0.0,
                )
                if UPCAST:
                    x = x.to(tl.float32)
                to = c + ms.to(tl.int64)[:, None] * (ldc16 * 4) + ns[None, :]
                there = (ms < m)[:, None] & (ns < whole_c)[None, :]
                total = tl.load(to, mask=there & (at > 0), other=0.0)  # the first step reads nothing of C
                tl.store(to, tl.dot(x, y, total, input_precision="ieee" if UPCAST else "tf32"), mask=there)
            # Threads of this program read at the next step what others of it have stored.
            tl.debug_barrier()
        unit = last
