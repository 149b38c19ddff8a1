"""Portable kernels in Triton: decode attention over a paged KV cache, split along the tokens, and the parts' merge.

Flash-Decoding (Dao et al., 2023) over block tables. Under ``TRITON_INTERPRET=1`` they run on CPU tensors, bf16 upcast
first: the interpreter multiplies bf16 as the integers it keeps them in (checked with Triton 3.9).
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
def decode_split(
    part,
    part_lse,
    q,
    k_cache,
    v_cache,
    table,
    lengths,
    scale,
    kv_heads,
    splits,
    chunk,
    table_row,
    block16,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PER16: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to tokens split x ``chunk`` to (split + 1) x ``chunk`` of one sequence by the GROUP heads of a KV head.

    Programs: batch x splits x kv_heads, heads innermost, exactly. ``part`` [batch, kv_heads, splits, GROUP, DIM] and
    ``part_lse`` [batch, kv_heads, splits, GROUP] (natural logarithm) are float32; a split without tokens leaves zeros
    and -inf. Caches are [block, kv_heads, PAGE, DIM], blocks ``block16`` x 16 bytes apart, PER16 elements in 16 bytes.
    ``scale`` multiplies scores and includes log2(e). ROWS and COLS are GROUP and DIM padded to what a dot takes;
    ``chunk`` is a multiple of TILE tokens. Slots beyond a sequence's end are never read.
    """
    head = tl.program_id(0) % kv_heads
    rest = tl.program_id(0) // kv_heads
    split = rest % splits
    sequence = (rest // splits).to(tl.int64)
    begin = split * chunk
    end = tl.minimum(begin + chunk, tl.load(lengths + sequence))
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    first = (sequence * kv_heads + head) * GROUP
    own = (rows < GROUP)[:, None] & (cols < DIM)[None, :]
    queries = tl.load(q + (first + rows)[:, None] * DIM + cols[None, :], mask=own, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    factor = (tl.full((), 1.0, tl.float64) * scale).to(tl.float32)  # under the interpreter it is a Python float
    entries = table + sequence * table_row
    inside_block = head * (PAGE * DIM)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = start + tl.arange(0, TILE)
        held = tokens < end
        if PAGE % TILE == 0:
            block = tl.load(entries + start // PAGE).to(tl.int64)
            at = block * (block16 * PER16) + (inside_block + start % PAGE * DIM) + tl.arange(0, TILE) * DIM
        else:
            blocks = tl.load(entries + tokens // PAGE, mask=held, other=0).to(tl.int64)
            at = blocks * (block16 * PER16) + inside_block + tokens % PAGE * DIM
        places = at[:, None] + cols[None, :]
        there = held[:, None] & (cols < DIM)[None, :]
        keys = tl.load(k_cache + places, mask=there, other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor
        scores = tl.where(held[None, :], scores, float("-inf"))
        above = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - above)
        weights = tl.exp2(scores - above[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v_cache + places, mask=there, other=0.0)
        if UPCAST:
            values = values.to(tl.float32)
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = above
    empty = total == 0.0
    outputs = sums / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    to = ((sequence * kv_heads + head) * splits + split) * GROUP + rows
    tl.store(part + to[:, None] * DIM + cols[None, :], outputs, mask=own)
    tl.store(part_lse + to, lse, mask=rows < GROUP)


@triton.jit
def decode_merge(
    out,
    lse,
    part,
    part_lse,
    splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Merge ``splits`` parts of each query head, as ``decode_split`` leaves them, into ``out`` and ``lse``, float32.

    One program a query head of the batch, exactly. A part with log-sum-exp -inf weighs nothing, whatever it holds; if
    all do, the result is zeros and -inf. A log-sum-exp of 0 is a value like any other.
    """
    row = tl.program_id(0).to(tl.int64)
    first = row // GROUP * splits * GROUP + row % GROUP
    cols = tl.arange(0, COLS)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    sums = tl.zeros([COLS], tl.float32)
    for start in range(0, splits, STEP):
        numbers = start + tl.arange(0, STEP)
        at = first + numbers.to(tl.int64) * GROUP
        logs = tl.load(part_lse + at, mask=numbers < splits, other=float("-inf"))
        weighs = logs > float("-inf")
        above = tl.maximum(top, tl.max(logs, 0))
        finite = tl.where(above > float("-inf"), above, 0.0)
        shrink = tl.exp2((top - finite) * 1.4426950408889634)
        weights = tl.exp2((logs - finite) * 1.4426950408889634)
        wanted = weighs[:, None] & (cols < DIM)[None, :]
        parts = tl.load(part + at[:, None] * DIM + cols[None, :], mask=wanted, other=0.0)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * parts, 0)
        top = above
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    tl.store(out + row * DIM + cols, sums / divisor, mask=cols < DIM)
    tl.store(lse + row, tl.where(empty, float("-inf"), top + tl.log(divisor)))
