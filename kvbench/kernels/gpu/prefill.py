"""Portable kernel in Triton: prefill attention over dense keys and values that may lie far, in both loop orders.

DirectKV, OSDI 2026, algorithms 2 and 3. Under ``TRITON_INTERPRET=1`` it runs on CPU tensors, bf16 upcast first: the
interpreter multiplies bf16 as the integers it keeps them in (checked with Triton 3.9).
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
def _load(base, rows, count, cols, DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Load rows of a dense [count, DIM] array; zeros beyond it."""
    tile = tl.load(base + rows[:, None] * DIM + cols[None, :], (rows < count)[:, None] & (cols < DIM)[None, :], 0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _meet(queries, keys, values, sums, top, total, seen, factor):
    """Return sums, top and total of a tile of queries once it has met a tile of keys and values (online softmax)."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor
    scores = tl.where(seen, scores, float("-inf"))
    above = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(above > float("-inf"), above, 0.0)
    shrink = tl.exp2(top - finite)
    weights = tl.exp2(scores - finite[:, None])
    total = total * shrink + tl.sum(weights, 1)
    sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return sums, above, total


@triton.jit
def prefill(
    out,
    top_at,
    total_at,
    q,
    k,
    v,
    scale,
    queries,
    keys,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    KV_OUTER: tl.constexpr,
    CAUSAL: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend ``queries`` rows of each query head to the ``keys`` tokens of its KV head.

    ``q`` [kv_heads x GROUP, queries, DIM], ``k`` and ``v`` [kv_heads, keys, DIM], dense; batches are further heads.
    ``out`` [kv_heads x GROUP, queries, DIM], ``top_at`` and ``total_at`` [kv_heads x GROUP, queries] are float32 and
    near: maximum and sum of the softmax, powers of two. ``scale`` includes log2(e). CAUSAL: queries are the last of the
    keys. Programs, exactly: queries outside, kv_heads x GROUP x ceil(queries / ROWS), and KV is read again by each;
    KV outside, kv_heads, and each tile of KV is read once by the one program that owns its head.
    """
    factor = (tl.full((), 1.0, tl.float64) * scale).to(tl.float32)  # under the interpreter it is a Python float
    cols = tl.arange(0, COLS)
    tiles = tl.cdiv(queries, ROWS)
    before = keys - queries
    if KV_OUTER:
        head = tl.program_id(0).to(tl.int64)
        for start in range(0, keys, TOKENS):
            tokens = start + tl.arange(0, TOKENS)
            key = _load(k + head * keys * DIM, tokens, keys, cols, DIM, UPCAST)
            value = _load(v + head * keys * DIM, tokens, keys, cols, DIM, UPCAST)
            for pair in range(GROUP * tiles):
                own = head * GROUP + pair // tiles
                tile = pair % tiles
                rows = tile * ROWS + tl.arange(0, ROWS)
                last = before + tl.minimum(queries, (tile + 1) * ROWS) - 1 if CAUSAL else keys - 1
                if start <= last:
                    held = rows < queries
                    began = held & (start > 0)
                    query = _load(q + own * queries * DIM, rows, queries, cols, DIM, UPCAST)
                    at = out + own * queries * DIM + rows[:, None] * DIM + cols[None, :]
                    here = (cols < DIM)[None, :]
                    sums = tl.load(at, began[:, None] & here, 0.0)
                    top = tl.load(top_at + own * queries + rows, began, float("-inf"))
                    total = tl.load(total_at + own * queries + rows, began, 0.0)
                    seen = (tokens < keys)[None, :]
                    if CAUSAL:
                        seen = seen & (tokens[None, :] <= (before + rows)[:, None])
                    sums, top, total = _meet(query, key, value, sums, top, total, seen, factor)
                    divisor = tl.where((start + TOKENS > last) & held, total, 1.0)
                    tl.store(at, sums / divisor[:, None], held[:, None] & here)
                    tl.store(top_at + own * queries + rows, top, held)
                    tl.store(total_at + own * queries + rows, total, held)
                    tl.debug_barrier()  # another thread may read them for the next tile
    else:
        own = (tl.program_id(0) // tiles).to(tl.int64)
        tile = tl.program_id(0) % tiles
        head = own // GROUP
        rows = tile * ROWS + tl.arange(0, ROWS)
        held = rows < queries
        query = _load(q + own * queries * DIM, rows, queries, cols, DIM, UPCAST)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, COLS], tl.float32)
        end = tl.minimum(keys, before + (tile + 1) * ROWS) if CAUSAL else keys
        for start in tl.range(0, end, TOKENS, num_stages=STAGES):
            tokens = start + tl.arange(0, TOKENS)
            key = _load(k + head * keys * DIM, tokens, keys, cols, DIM, UPCAST)
            value = _load(v + head * keys * DIM, tokens, keys, cols, DIM, UPCAST)
            seen = (tokens < keys)[None, :]
            if CAUSAL:
                seen = seen & (tokens[None, :] <= (before + rows)[:, None])
            sums, top, total = _meet(query, key, value, sums, top, total, seen, factor)
        divisor = tl.where(held, total, 1.0)
        at = out + own * queries * DIM + rows[:, None] * DIM + cols[None, :]
        tl.store(at, sums / divisor[:, None], held[:, None] & (cols < DIM)[None, :])
        tl.store(top_at + own * queries + rows, top, held)
        tl.store(total_at + own * queries + rows, total, held)
