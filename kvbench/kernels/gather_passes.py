"""The loops of a gather: one member's fragments once, with a second cursor that prefetches ahead of the first."""

from __future__ import annotations

from kvbench.kernels.intrinsics import (
    barrier,
    call_memcpy,
    drain,
    line_add,
    line_load,
    line_splat,
    line_store,
    line_store_nt,
    line_sum,
    prefetch_all,
    prefetch_l2,
    sum_load,
    word_load,
)
from kvbench.kernels.jit import inlined, numba, part

READ, PLAIN, NT, MEMCPY = range(4)
uint64 = numba.uint64


@inlined
def ahead(p: int, locality: int) -> None:
    """Prefetch the line at ``p``; ``locality`` is a constant where this is used."""
    if locality == 1:
        prefetch_all(p)
    elif locality == 2:
        prefetch_l2(p)


@inlined
def ahead512(p: int, locality: int) -> None:
    ahead(p, locality)
    ahead(p + 64, locality)
    ahead(p + 128, locality)
    ahead(p + 192, locality)
    ahead(p + 256, locality)
    ahead(p + 320, locality)
    ahead(p + 384, locality)
    ahead(p + 448, locality)


@inlined
def cursor(src: int, index: int, place: int, hi: int, fragment: int) -> int:
    """Return the address of the fragment at ``place`` of the order, 0 past the end."""
    if place >= hi:
        return 0
    address: int = src + word_load(index + 8 * place) * fragment
    return address


@part
def read_fragments(
    src: int, index: int, lo: int, hi: int, fragment: int, locality: int, distance: int
) -> tuple[int, int]:
    """Read fragments ``lo..hi`` of the order; return the sum of their words and of (place + 1) * first word."""
    if locality == 1:
        return _read(src, index, lo, hi, fragment, 1, distance)
    if locality == 2:
        return _read(src, index, lo, hi, fragment, 2, distance)
    return _read(src, index, lo, hi, fragment, 0, distance)


@inlined
def _read(src: int, index: int, lo: int, hi: int, fragment: int, locality: int, distance: int) -> tuple[int, int]:
    a = b = c = d = e = f = g = h = line_splat(uint64(0))
    mixed = uint64(0)
    unit = 512 if fragment % 512 == 0 else 64
    place = lo + distance // fragment
    skip = distance % fragment // unit * unit
    q = cursor(src, index, place, hi, fragment) if locality != 0 else 0
    q_end = q + fragment
    if q != 0:
        q += skip
    for i in range(lo, hi):
        p = src + word_load(index + 8 * i) * fragment
        end = p + fragment
        mixed += uint64(i + 1) * sum_load(p)
        while p < end:
            if unit == 512:
                if q != 0:
                    ahead512(q, locality)
                a = line_add(a, line_load(p))
                barrier()  # or LLVM loads the first line last, 3 to 5 % slower at fragments of 4 and 32 KiB
                b = line_add(b, line_load(p + 64))
                c = line_add(c, line_load(p + 128))
                d = line_add(d, line_load(p + 192))
                e = line_add(e, line_load(p + 256))
                f = line_add(f, line_load(p + 320))
                g = line_add(g, line_load(p + 384))
                h = line_add(h, line_load(p + 448))
            else:
                if q != 0:
                    ahead(q, locality)
                a = line_add(a, line_load(p))
            p += unit
            if q != 0:
                q += unit
                if q == q_end:
                    place += 1
                    q = cursor(src, index, place, hi, fragment)
                    q_end = q + fragment
    barrier()
    both = line_add(line_add(line_add(a, b), line_add(c, d)), line_add(line_add(e, f), line_add(g, h)))
    return line_sum(both), mixed


@part
def copy_fragments(
    kind: int,
    dst: int,
    src: int,
    index: int,
    lo: int,
    hi: int,
    fragment: int,
    locality: int,
    distance: int,
    memcpy: int,
) -> None:
    """Copy fragments ``lo..hi`` of the order to ``dst + place * fragment``."""
    if kind == MEMCPY:
        for i in range(lo, hi):
            call_memcpy(memcpy, dst + i * fragment, src + word_load(index + 8 * i) * fragment, fragment)
    elif kind == NT:
        if locality == 1:
            _copy(NT, dst, src, index, lo, hi, fragment, 1, distance)
        elif locality == 2:
            _copy(NT, dst, src, index, lo, hi, fragment, 2, distance)
        else:
            _copy(NT, dst, src, index, lo, hi, fragment, 0, distance)
        drain()
    elif locality == 2:
        _copy(PLAIN, dst, src, index, lo, hi, fragment, 2, distance)
    else:
        _copy(PLAIN, dst, src, index, lo, hi, fragment, 0, distance)


@inlined
def _copy(
    kind: int, dst: int, src: int, index: int, lo: int, hi: int, fragment: int, locality: int, distance: int
) -> None:
    unit = 512 if fragment % 512 == 0 else 64
    place = lo + distance // fragment
    skip = distance % fragment // unit * unit
    q = cursor(src, index, place, hi, fragment) if locality != 0 else 0
    q_end = q + fragment
    if q != 0:
        q += skip
    for i in range(lo, hi):
        p = src + word_load(index + 8 * i) * fragment
        end = p + fragment
        t = dst + i * fragment
        while p < end:
            if unit == 512:
                if q != 0:
                    ahead512(q, locality)
                a = line_load(p)
                b = line_load(p + 64)
                c = line_load(p + 128)
                d = line_load(p + 192)
                e = line_load(p + 256)
                f = line_load(p + 320)
                g = line_load(p + 384)
                h = line_load(p + 448)
                if kind == NT:
                    line_store_nt(t, a)
                    line_store_nt(t + 64, b)
                    line_store_nt(t + 128, c)
                    line_store_nt(t + 192, d)
                    line_store_nt(t + 256, e)
                    line_store_nt(t + 320, f)
                    line_store_nt(t + 384, g)
                    line_store_nt(t + 448, h)
                else:
                    line_store(t, a)
                    line_store(t + 64, b)
                    line_store(t + 128, c)
                    line_store(t + 192, d)
                    line_store(t + 256, e)
                    line_store(t + 320, f)
                    line_store(t + 384, g)
                    line_store(t + 448, h)
            else:
                if q != 0:
                    ahead(q, locality)
                a = line_load(p)
                if kind == NT:
                    line_store_nt(t, a)
                else:
                    line_store(t, a)
            barrier()
            p += unit
            t += unit
            if q != 0:
                q += unit
                if q == q_end:
                    place += 1
                    q = cursor(src, index, place, hi, fragment)
                    q_end = q + fragment
