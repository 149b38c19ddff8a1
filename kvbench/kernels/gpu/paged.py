"""Portable kernels in Triton: pages of a KV cache between two pools of any layouts, K and V together.

In a KV layout every address is a sum of index x stride, so one kernel serves every pair of layouts: a page is a box of
rows, a row what is contiguous on both sides, and each side has strides of its own. Under ``TRITON_INTERPRET=1`` it runs
on CPU tensors.
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
def copy_pages(
    k_dst,
    v_dst,
    k_src,
    v_src,
    dst_pages,
    src_pages,
    count,
    page_rows,
    size,
    inner,
    innermost,
    dst_page,
    dst_outer,
    dst_middle,
    dst_inner,
    src_page,
    src_outer,
    src_middle,
    src_inner,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PER: tl.constexpr,
    BOTH: tl.constexpr,
):
    """Copy page src_pages[i] of one pool to page dst_pages[i] of the other for ``count`` pairs; negative: skip.

    A page has ``page_rows`` rows of ``size`` accesses, a box of outer x middle x inner with ``inner`` rows in one
    outer step and ``innermost`` in one middle step; strides count accesses. An access is PER elements: 4 x int32 = 16
    bytes, or 1 x an integer of 8, 4, 2 or 1 bytes where sizes or strides leave no more. Counting in accesses lets the
    compiler see that every address is a multiple of 16. A program takes tiles of ROWS rows x WORDS elements; row
    numbers are 32-bit, as a division of 64 bits is a call, and offsets 64-bit. ``BOTH`` = 0 copies K alone.
    """
    words = size * PER
    across = tl.cdiv(words, WORDS)
    total = count * page_rows
    for unit in range(tl.program_id(0), tl.cdiv(total, ROWS) * across, tl.num_programs(0)):
        rows = unit // across * ROWS + tl.arange(0, ROWS)
        cols = unit % across * WORDS + tl.arange(0, WORDS)
        pair, inside = rows // page_rows, rows % page_rows
        outer, inside = (inside // inner).to(tl.int64), inside % inner
        middle, last = (inside // innermost).to(tl.int64), (inside % innermost).to(tl.int64)
        src = tl.load(src_pages + pair, mask=rows < total, other=-1).to(tl.int64)
        dst = tl.load(dst_pages + pair, mask=rows < total, other=-1).to(tl.int64)
        wanted = ((src >= 0) & (dst >= 0))[:, None] & (cols < words)[None, :]
        here = (src * src_page + outer * src_outer + middle * src_middle + last * src_inner) * PER
        there = (dst * dst_page + outer * dst_outer + middle * dst_middle + last * dst_inner) * PER
        take, give = here[:, None] + cols[None, :], there[:, None] + cols[None, :]
        k = tl.load(k_src + take, mask=wanted, eviction_policy="evict_first")
        if BOTH:
            v = tl.load(v_src + take, mask=wanted, eviction_policy="evict_first")
            tl.store(k_dst + give, k, mask=wanted, eviction_policy="evict_first")
            tl.store(v_dst + give, v, mask=wanted, eviction_policy="evict_first")
        else:
            tl.store(k_dst + give, k, mask=wanted, eviction_policy="evict_first")
