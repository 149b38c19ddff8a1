"""Portable kernels in Triton: the copy of an index set of fragments, K and V together, and a read reduction.

Under ``TRITON_INTERPRET=1`` they run on CPU tensors. Arithmetic upcasts bf16 first, straight after the load: the
interpreter keeps bf16 as uint16 and adds it as such, silently (checked with Triton 3.9). Copies move 32-bit words.
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
def copy_fragments(
    k_dst,
    v_dst,
    k_src,
    v_src,
    dst_index,
    src_index,
    count,
    size16,
    dst_stride16,
    src_stride16,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    BOTH: tl.constexpr,
):
    """Copy ``count`` fragments of ``size16`` x 16 bytes from slot src_index[i] to slot dst_index[i]; negative: skip.

    K and V are int32 words; slots stand ``..._stride16`` x 16 bytes apart. Sizes and strides come in units of 16 bytes
    because Triton then knows that every address is a multiple of 16 and moves 128 bits at once; in words it would only
    know that of multiples of 16 words, and a fragment of 80 bytes would be copied by 32-bit accesses.
    A program takes tiles of ROWS fragments x WORDS words. All indices are 64-bit where they are multiplied by a stride.
    ``BOTH`` = 0 copies K alone. Any number of programs does.
    """
    words = size16 * 4
    across = tl.cdiv(words, WORDS)
    for unit in range(tl.program_id(0), tl.cdiv(count, ROWS) * across, tl.num_programs(0)):
        rows = unit // across * ROWS + tl.arange(0, ROWS)
        cols = unit % across * WORDS + tl.arange(0, WORDS)
        src = tl.load(src_index + rows, mask=rows < count, other=-1).to(tl.int64)
        dst = tl.load(dst_index + rows, mask=rows < count, other=-1).to(tl.int64)
        wanted = ((src >= 0) & (dst >= 0))[:, None] & (cols < words)[None, :]
        here = src[:, None] * (src_stride16 * 4) + cols[None, :]
        there = dst[:, None] * (dst_stride16 * 4) + cols[None, :]
        k = tl.load(k_src + here, mask=wanted, eviction_policy="evict_first")
        if BOTH:
            v = tl.load(v_src + here, mask=wanted, eviction_policy="evict_first")
            tl.store(k_dst + there, k, mask=wanted, eviction_policy="evict_first")
            tl.store(v_dst + there, v, mask=wanted, eviction_policy="evict_first")
        else:
            tl.store(k_dst + there, k, mask=wanted, eviction_policy="evict_first")


@triton.jit
def read_sum(out, src, size16, ROWS: tl.constexpr, COLS: tl.constexpr, PER16: tl.constexpr, ACC: tl.constexpr):
    """Leave in out[program] this program's part of the sum of ``size16`` x 16 bytes at ``src`` (PER16 elements each).

    Accumulates in ``ACC``: float32 for floats (bf16 upcast first), int32 (modulo 2^32) for int32 words. A tile is
    summed over its rows, which one thread holds, so that the accumulator leaves registers for loads in flight.
    """
    elements = tl.full((), PER16, tl.int64) * size16
    total = tl.zeros([COLS], dtype=ACC)
    inside = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(elements, ROWS * COLS), tl.num_programs(0)):
        at = tl.full((), ROWS * COLS, tl.int64) * tile + inside
        values = tl.load(src + at, mask=at < elements, other=0, eviction_policy="evict_first")
        total += tl.sum(values.to(ACC), 0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))
