"""One pass over one member's bytes, per stream operation. Pieces of kernels; addresses and sizes in bytes.

Reads keep eight independent sums; writes and non-temporal stores go out in groups of four lines. Loads that feed stores
through the caches come one a stream and iteration: prefetchers that learn from the address of the load instruction
(Zen 4) then see one stride of a line. Four loads of stride four lines ran 4 % slower out of memory, eight 15 %, and up
to 7 % more or less with nothing but the length of the instructions around them. ``barrier`` in the store loops keeps
LLVM from recognising a memcpy or memset, which would make ``copy_plain`` another operation than its name.
"""

from __future__ import annotations

from kvbench.kernels.intrinsics import (
    barrier,
    byte_load,
    byte_store,
    double_fma,
    double_load,
    double_store,
    drain,
    line_add,
    line_load,
    line_ramp,
    line_splat,
    line_store,
    line_store_nt,
    line_sum,
    line_triad,
)
from kvbench.kernels.jit import numba, part

uint64 = numba.uint64
STEP = 0x9E3779B97F4A7C15  # odd: every word of a written buffer differs from every other


@part
def read_pass(src: int, nbytes: int) -> int:
    """Return the sum modulo 2^64 of all 64-bit words of the whole lines plus the bytes of the rest."""
    a = b = c = d = e = f = g = h = line_splat(uint64(0))
    p = src
    end = src + nbytes // 512 * 512
    while p < end:
        a = line_add(a, line_load(p))
        b = line_add(b, line_load(p + 64))
        c = line_add(c, line_load(p + 128))
        d = line_add(d, line_load(p + 192))
        e = line_add(e, line_load(p + 256))
        f = line_add(f, line_load(p + 320))
        g = line_add(g, line_load(p + 384))
        h = line_add(h, line_load(p + 448))
        p += 512
    end = src + nbytes // 64 * 64
    while p < end:
        a = line_add(a, line_load(p))
        p += 64
    total: int = line_sum(line_add(line_add(line_add(a, b), line_add(c, d)), line_add(line_add(e, f), line_add(g, h))))
    end = src + nbytes
    while p < end:
        total += byte_load(p)
        p += 1
    barrier()
    return total


@part
def write_pass(dst: int, nbytes: int, first: int) -> None:
    """Write word k of the whole lines as ``first + k * STEP`` modulo 2^64, and the rest as its leading bytes."""
    v = line_ramp(first, uint64(STEP))
    step = line_splat(uint64(8) * uint64(STEP))
    p = dst
    end = dst + nbytes // 256 * 256
    while p < end:
        line_store(p, v)
        v = line_add(v, step)
        line_store(p + 64, v)
        v = line_add(v, step)
        line_store(p + 128, v)
        v = line_add(v, step)
        line_store(p + 192, v)
        v = line_add(v, step)
        p += 256
        barrier()
    end = dst + nbytes // 64 * 64
    while p < end:
        line_store(p, v)
        v = line_add(v, step)
        p += 64
        barrier()
    k = p - dst
    while k < nbytes:
        word = first + uint64(k // 8) * uint64(STEP)
        byte_store(dst + k, word >> uint64(8 * (k % 8)))
        k += 1


@part
def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    for k in range(nbytes):
        byte_store(dst + k, byte_load(src + k))
        barrier()


@part
def copy_pass(dst: int, src: int, nbytes: int) -> None:
    """Copy with loads and stores through the caches, a line at a time."""
    k = 0
    end = nbytes // 64 * 64
    while k < end:
        line_store(dst + k, line_load(src + k))
        k += 64
        barrier()
    copy_bytes(dst + k, src + k, nbytes - k)


@part
def copy_nt_pass(dst: int, src: int, nbytes: int) -> None:
    """Copy with stores past the caches; plain bytes up to the first aligned destination line and after the last."""
    k = min((-dst) & 63, nbytes)
    copy_bytes(dst, src, k)
    end = k + (nbytes - k) // 256 * 256
    while k < end:
        a = line_load(src + k)
        b = line_load(src + k + 64)
        c = line_load(src + k + 128)
        d = line_load(src + k + 192)
        line_store_nt(dst + k, a)
        line_store_nt(dst + k + 64, b)
        line_store_nt(dst + k + 128, c)
        line_store_nt(dst + k + 192, d)
        k += 256
        barrier()
    end = k + (nbytes - k) // 64 * 64
    while k < end:
        line_store_nt(dst + k, line_load(src + k))
        k += 64
        barrier()
    copy_bytes(dst + k, src + k, nbytes - k)
    drain()


@part
def triad_pass(dst: int, x: int, y: int, nbytes: int, scalar: float) -> None:
    """Write ``x + scalar * y`` on float64, a line at a time; ``nbytes`` is a multiple of 8."""
    k = 0
    end = nbytes // 64 * 64
    while k < end:
        line_store(dst + k, line_triad(line_load(x + k), line_load(y + k), scalar))
        k += 64
        barrier()
    while k < nbytes:
        double_store(dst + k, double_fma(double_load(y + k), scalar, double_load(x + k)))
        k += 8
        barrier()
