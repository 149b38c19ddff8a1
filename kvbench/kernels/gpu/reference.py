"""What each GPU kernel must leave behind, in numpy: the oracle of tests and of a run's payload check."""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Array = np.ndarray[Any, Any]


def read(src: Bytes) -> int:
    """Return the sum modulo 2^64 of the 64-bit little-endian words of ``src``, the last padded with zero bytes.

    The kernels leave one part a block: their sum modulo 2^64 is this number.
    """
    padded = np.concatenate([src, np.zeros(-len(src) % 8, np.uint8)])
    return int(padded.view("<u8").sum(dtype=np.uint64))


def write(nbytes: int, first: int, step: int) -> Bytes:
    """Return the ``nbytes`` bytes of a written buffer: 64-bit word k is first + k * step modulo 2^64."""
    k = np.arange((nbytes + 7) // 8, dtype=np.uint64)
    words = np.uint64(first) + k * np.uint64(step)
    return words.astype("<u8").view(np.uint8)[:nbytes]


def copy(src: Bytes) -> Bytes:
    """Return what the destination of a copy holds: the same bytes."""
    return src.copy()


def triad(b: Doubles, c: Doubles, scale: float) -> Doubles:
    """Return b + scale * c. The GPU rounds once: the bits agree for a ``scale`` that is a power of two."""
    return b + scale * c


def arithmetic(threads: int, steps: int) -> Words:
    """Return each thread's sum, uint64 [threads]: 8 chains that begin at 0 to 7 and are one larger after each step."""
    return np.full(threads, 8 * steps + 28, np.uint64)


def chain(base: int, nbytes: int, stride: int, seed: int) -> Words:
    """Return the ``nbytes`` of memory at address ``base`` for a chase: one random cycle over its nodes.

    Nodes stand ``stride`` bytes apart (a multiple of 8); word 0 of each holds the address of the next, the rest is 0.
    """
    nodes = nbytes // stride
    order = np.random.default_rng(seed).permutation(nodes)
    memory = np.zeros(nbytes // 8, np.uint64)
    memory[order * (stride // 8)] = np.uint64(base) + np.roll(order, -1).astype(np.uint64) * np.uint64(stride)
    return memory


def chase(memory: Words, base: int, head: int, loads: int) -> int:
    """Return the address ``loads`` steps after ``head`` in ``memory``, which stands at address ``base``."""
    address = head
    for _ in range(loads):
        address = int(memory[(address - base) // 8])
    return address


def copy_fragments(dst: Array, src: Array, dst_index: Array, src_index: Array, words: int) -> Array:
    """Return ``dst`` [slots, stride] after row dst_index[i] took the first ``words`` of row src_index[i] of ``src``.

    A negative index on either side skips the pair. K and V are two calls with the same indices. The same destination
    twice has no defined result on a GPU, so callers give each at most once.
    """
    out = dst.copy()
    for to, frm in zip(dst_index.tolist(), src_index.tolist(), strict=True):
        if to >= 0 and frm >= 0:
            out[to, :words] = src[frm, :words]
    return out


def copy_pages(
    dst: Array, src: Array, dst_pages: Array, src_pages: Array, shape: tuple[int, int, int], size: int,
    dst_steps: tuple[int, int, int, int], src_steps: tuple[int, int, int, int],
) -> Array:  # fmt: skip
    """Return the flat array ``dst`` after each page took its rows of ``size`` elements from the flat array ``src``.

    Row (o, m, i) of page p stands at p, o, m, i times the side's steps (page, outer, middle, inner), in elements. A
    negative page on either side skips the pair. One plane; K and V are two calls.
    """
    out = dst.copy()
    for to, frm in zip(dst_pages.tolist(), src_pages.tolist(), strict=True):
        if to < 0 or frm < 0:
            continue
        for at in np.ndindex(shape):
            here = int(np.dot((frm, *at), src_steps))
            there = int(np.dot((to, *at), dst_steps))
            out[there : there + size] = src[here : here + size]
    return out


def read_sum(src: Array) -> int | float:
    """Return the sum of ``src``: modulo 2^32 for int32 words, in float64 for floats (a tolerance is the caller's)."""
    if src.dtype.kind == "i":
        return int(src.astype(np.int64).sum()) & 0xFFFFFFFF
    return float(src.astype(np.float64).sum())
