"""Paged decode attention of a whole batch on a team: split by pages, blocks run in place, cut sequences merged.

All pages of the batch, in the order of its sequences, are cut into equal contiguous parts, one a member, as NEO's CPU
kernel cuts blocks (arXiv 2411.01142) and Flash-Decoding splits a sequence. A sequence within one part is finished
there; the others leave sums that the members merge by their maxima, each a part of the heads. A page is visited over
all KV heads, keys first, so that what is read lies in one piece, and the running state stays near the core.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from kvbench.kernels.attention_emit import BF16, FP32, LOWEST, Form, define
from kvbench.kernels.attention_parts import (
    add_scaled,
    append_token,
    call_gather,
    call_weigh,
    clean_row,
    clear_state,
    finish_empty,
    finish_head,
    float_load,
    float_store,
    fold_head,
    int_load,
    weight_sum,
    widen_queries,
)
from kvbench.kernels.intrinsics import atomic_add, double_load, word_load, word_store
from kvbench.kernels.jit import kernel, numba, part
from kvbench.kernels.sync import enter, leave, share_start, wait_for

from numba.extending import intrinsic  # isort: skip
from numba.core import types  # isort: skip

float32 = numba.float32
# Words of the argument block.
(
    Q, K_CACHE, V_CACHE, K_NEW, V_NEW, TABLE, TABLE_ROW, LENGTHS, OUT, LSE, SCRATCH, SCRATCH_BYTES, FLAT, BATCH,
    KV_HEADS, GROUP, HEAD_DIM, PAGE_TOKENS, DTYPE, DOT, LANES, STATE_BYTES, WEIGHTS_OFFSET, MAXIMA_OFFSET, SCALE, WEIGH,
    GATHER, BY_SEQUENCE, AHEAD, AGAIN, HEAD_BYTES, ARRIVED,
) = range(32)  # fmt: skip
WORDS = 32
EARLY, SOON = 24 << 10, 4 << 10  # bytes a line is prefetched ahead, first and second time
FOLD_TOKENS = 512  # float32 sums longer than this lose digits: at 16k tokens an error of 3e-6, not 6e-7
# The states in a member's scratch: of a sequence begun by another, of one that ends elsewhere, of a whole one, and the
# sums not folded yet.
CONTINUED, BEGUN, WHOLE, RUNNING = range(4)


def prefetch_distances(head_bytes: int, interleaved: bool) -> tuple[int, int]:
    """Return how many bytes ahead prefetches go out, first and second; ``head_bytes``: keys of one head in a page.

    A core that runs faster than memory has prefetches dropped once its queue is full (Zen 4: of 64 in a row about 20
    never arrive), and a line that is not there when its turn comes costs its whole latency. So each is asked for twice,
    24 KiB and 4 KiB ahead: on a Zen 4 core bf16 at 4 query heads a KV head then reads at the speed of a gather, where
    once alone gives 0.77 of it. ``interleaved``: keys and values are visited in turns, so half of it in each. Whole
    heads where that is near enough: what lies beyond the end of a page is another page.
    """
    early, soon = (EARLY // 2, SOON // 2) if interleaved else (EARLY, SOON)
    if head_bytes > soon:
        return head_bytes * -(-early // head_bytes), soon
    again = -(-soon // head_bytes) * head_bytes
    return max(again + head_bytes, -(-early // head_bytes) * head_bytes), again


def scratch_bytes(kv_heads: int, form: Form) -> int:
    """Return the bytes of scratch a member needs: four states, weights of a block, scores, queries and a row."""
    heads = kv_heads * form.group
    words = heads * form.lanes + form.group * form.lanes + heads * form.head_dim + form.head_dim
    return -(-(4 * kv_heads * form.state_bytes + 4 * words) // 4096) * 4096 + 64


def _half(half: str, plain: tuple[Any, ...]) -> Any:
    """Return the typing of an intrinsic that runs ``half`` of a block: arguments ``plain``, then a Form's numbers."""

    def build(given: tuple[Any, ...]) -> Any:
        constants = given[len(plain) :]
        if not all(isinstance(c, types.IntegerLiteral) for c in constants):
            raise numba.TypingError(f"the form is constant, got {constants}")
        dtype, group, head_dim, lanes, dot, registers = (int(c.literal_value) for c in constants)
        form = Form(dtype, group, head_dim, lanes, bool(dot), registers)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.call(define(builder.module, half, form), list(args[: len(plain)]))
            return context.get_dummy_value()

        return types.void(*plain, *constants), codegen

    return build


_WEIGH_TYPES = (types.int64,) * 7 + (types.float32, types.int64)
_GATHER_TYPES = (types.int64,) * 6
_build_weigh, _build_gather = _half("weigh", _WEIGH_TYPES), _half("gather", _GATHER_TYPES)


def _typed_weigh(
    typingctx: Any, k: Any, ahead: Any, again: Any, q: Any, state: Any, weights: Any, raw: Any, scale: Any, valid: Any,
    dtype: Any, group: Any, head_dim: Any, lanes: Any, dot: Any, registers: Any,
) -> Any:  # fmt: skip
    return _build_weigh(
        (k, ahead, again, q, state, weights, raw, scale, valid, dtype, group, head_dim, lanes, dot, registers)
    )


def _typed_gather(
    typingctx: Any, v: Any, ahead: Any, again: Any, state: Any, weights: Any, rows: Any, dtype: Any, group: Any,
    head_dim: Any, lanes: Any, dot: Any, registers: Any,
) -> Any:  # fmt: skip
    return _build_gather((v, ahead, again, state, weights, rows, dtype, group, head_dim, lanes, dot, registers))


_weigh: Any = intrinsic(prefer_literal=True)(_typed_weigh)
_gather: Any = intrinsic(prefer_literal=True)(_typed_gather)


@functools.cache
def compiled(form: Form) -> tuple[Any, Any]:
    """Return both halves of ``form``, compiled or from the kernel cache: C functions with an ``address``."""
    dtype, group, head_dim, lanes, dot, registers = (
        form.dtype, form.group, form.head_dim, form.lanes, int(form.dot), form.registers,
    )  # fmt: skip

    def weigh_block(k, ahead, again, q, state, weights, raw, scale, valid):  # type: ignore[no-untyped-def]
        _weigh(k, ahead, again, q, state, weights, raw, scale, valid, dtype, group, head_dim, lanes, dot, registers)

    def gather_block(v, ahead, again, state, weights, rows):  # type: ignore[no-untyped-def]
        _gather(v, ahead, again, state, weights, rows, dtype, group, head_dim, lanes, dot, registers)

    return (
        numba.cfunc(types.void(*_WEIGH_TYPES), cache=True, error_model="numpy")(weigh_block),
        numba.cfunc(types.void(*_GATHER_TYPES), cache=True, error_model="numpy")(gather_block),
    )


@part
def _pages_of(a: int, b: int) -> int:
    tokens = word_load(a + 8 * PAGE_TOKENS)
    pages: int = (int_load(word_load(a + 8 * LENGTHS) + 4 * b) + tokens - 1) // tokens
    return pages


@part
def _pages_before(a: int, sequences: int) -> int:
    """Return the pages of the first ``sequences`` sequences."""
    total = 0
    for b in range(sequences):
        total += _pages_of(a, b)
    return total


@part
def _bound(a: int, total: int, member: int, members: int) -> int:
    """Return the page at which the part of ``member`` begins."""
    if word_load(a + 8 * BY_SEQUENCE) != 0:
        return _pages_before(a, share_start(word_load(a + 8 * BATCH), member, members))
    return share_start(total, member, members)


@part
def _ahead(flat: int, i: int, hi: int, place: int, half: int, k_cache: int, v_cache: int) -> int:
    """Return the address ``place`` bytes on from page ``i`` in the order keys, values, next page's keys...

    ``half``: bytes of a page's keys; pages end at ``hi``. What follows the address is in that order up to a page's end.
    """
    i += place // (2 * half)
    place %= 2 * half
    if i >= hi:
        i = hi - 1
    page = word_load(flat + 8 * i) * half
    address: int = k_cache + page + place if place < half else v_cache + page + place - half
    return address


@part
def _along(flat: int, i: int, hi: int, place: int, half: int) -> int:
    """Like :func:`_ahead` within keys or values alone: page ``i``, the next one, ...; an offset into either."""
    i += place // half
    place %= half
    offset: int = word_load(flat + 8 * min(i, hi - 1)) * half + place
    return offset


@part
def _whole_pages(a: int, i: int, hi: int, tokens: int, q: int, q_head: int, state: int, work: int) -> None:
    """Visit page ``i``, one block a head: keys of all heads, then values of all heads, each in one piece."""
    kv_heads = word_load(a + 8 * KV_HEADS)
    state_bytes = word_load(a + 8 * STATE_BYTES)
    k_cache = word_load(a + 8 * K_CACHE)
    v_cache = word_load(a + 8 * V_CACHE)
    flat = word_load(a + 8 * FLAT)
    weight_bytes = word_load(a + 8 * GROUP) * word_load(a + 8 * LANES) * 4
    raw = work + kv_heads * weight_bytes
    head_bytes = word_load(a + 8 * HEAD_BYTES)
    half = kv_heads * head_bytes
    ahead = word_load(a + 8 * AHEAD)
    again = word_load(a + 8 * AGAIN)
    scale = float32(double_load(a + 8 * SCALE))
    page = word_load(flat + 8 * i) * half
    for h in range(kv_heads):
        far = _ahead(flat, i, hi, h * head_bytes + ahead, half, k_cache, v_cache)
        near = _ahead(flat, i, hi, h * head_bytes + again, half, k_cache, v_cache)
        call_weigh(
            word_load(a + 8 * WEIGH), k_cache + page + h * head_bytes, far, near, q + h * q_head,
            state + h * state_bytes, work + h * weight_bytes, raw, scale, tokens,
        )  # fmt: skip
    for h in range(kv_heads):
        far = _ahead(flat, i, hi, half + h * head_bytes + ahead, half, k_cache, v_cache)
        near = _ahead(flat, i, hi, half + h * head_bytes + again, half, k_cache, v_cache)
        _add_values(
            a, v_cache + page + h * head_bytes, far, near, state + h * state_bytes, work + h * weight_bytes,
            raw + weight_bytes, tokens,
        )  # fmt: skip


@part
def _add_values(a: int, v: int, far: int, near: int, state: int, weights: int, row: int, tokens: int) -> None:
    """Add ``tokens`` weighted values; the last row of an odd number of bf16 tokens is cleaned at ``row`` first."""
    gather = word_load(a + 8 * GATHER)
    r = 2 if word_load(a + 8 * DTYPE) == BF16 else 1
    rows = tokens // r
    if rows > 0:
        call_gather(gather, v, far, near, state, weights, rows)
    if tokens % r != 0:
        head_dim = word_load(a + 8 * HEAD_DIM)
        clean_row(v + rows * head_dim * 4, row, head_dim)
        pair = 4 if word_load(a + 8 * DOT) != 0 else 8
        call_gather(gather, row, far, near, state, weights + rows * pair, 1)


@part
def _block_by_block(a: int, i: int, hi: int, tokens: int, q: int, q_head: int, state: int, work: int) -> None:
    """Visit page ``i`` of several blocks a head: keys and values of each block in turns, head by head."""
    kv_heads = word_load(a + 8 * KV_HEADS)
    lanes = word_load(a + 8 * LANES)
    state_bytes = word_load(a + 8 * STATE_BYTES)
    k_cache = word_load(a + 8 * K_CACHE)
    v_cache = word_load(a + 8 * V_CACHE)
    flat = word_load(a + 8 * FLAT)
    weight_bytes = word_load(a + 8 * GROUP) * lanes * 4
    raw = work + kv_heads * weight_bytes
    head_bytes = word_load(a + 8 * HEAD_BYTES)
    half = kv_heads * head_bytes
    block_bytes = head_bytes // word_load(a + 8 * PAGE_TOKENS) * lanes
    scale = float32(double_load(a + 8 * SCALE))
    page = word_load(flat + 8 * i) * half
    for h in range(kv_heads):
        here = page + h * head_bytes
        far = _along(flat, i, hi, h * head_bytes + word_load(a + 8 * AHEAD), half)
        near = _along(flat, i, hi, h * head_bytes + word_load(a + 8 * AGAIN), half)
        done = 0
        while done < tokens:
            valid = min(tokens - done, lanes)
            call_weigh(
                word_load(a + 8 * WEIGH), k_cache + here, k_cache + far, k_cache + near, q + h * q_head,
                state + h * state_bytes, work, raw, scale, valid,
            )  # fmt: skip
            _add_values(
                a, v_cache + here, v_cache + far, v_cache + near, state + h * state_bytes, work,
                raw + weight_bytes, valid,
            )  # fmt: skip
            here += block_bytes
            far += block_bytes
            near += block_bytes
            done += lanes


@part
def _fold(a: int, to: int, source: int) -> None:
    """Move the sums at ``source`` to those at ``to``, whose maxima are lower or the same, and go on from zero."""
    group = word_load(a + 8 * GROUP)
    head_dim = word_load(a + 8 * HEAD_DIM)
    lanes = word_load(a + 8 * LANES)
    state_bytes = word_load(a + 8 * STATE_BYTES)
    maxima = word_load(a + 8 * MAXIMA_OFFSET)
    row = word_load(a + 8 * WEIGHTS_OFFSET)
    for at in range(0, word_load(a + 8 * KV_HEADS) * state_bytes, state_bytes):
        for j in range(group):
            top = float_load(source + at + maxima + 4 * j)
            keep = float32(2.0 ** (float(float_load(to + at + maxima + 4 * j)) - float(top)))
            fold_head(
                to + at + j * head_dim * 4, source + at + j * head_dim * 4, keep, to + at + row + j * lanes * 4,
                source + at + row + j * lanes * 4, head_dim, lanes,
            )  # fmt: skip
            float_store(to + at + maxima + 4 * j, top)


@part
def _segment(a: int, own: int, b: int, begin: int, first: int, end: int, hi: int, state: int) -> None:
    """Run the blocks of pages ``first..end`` of sequence ``b``, whose page 0 is ``begin``, into ``state``."""
    kv_heads = word_load(a + 8 * KV_HEADS)
    heads = kv_heads * word_load(a + 8 * GROUP)
    head_dim = word_load(a + 8 * HEAD_DIM)
    page_tokens = word_load(a + 8 * PAGE_TOKENS)
    lanes = word_load(a + 8 * LANES)
    dtype = word_load(a + 8 * DTYPE)
    size = 4 if dtype == FP32 else 2
    half = kv_heads * word_load(a + 8 * HEAD_BYTES)
    work = own + 4 * kv_heads * word_load(a + 8 * STATE_BYTES)
    length = int_load(word_load(a + 8 * LENGTHS) + 4 * b)
    q = word_load(a + 8 * Q) + b * heads * head_dim * size
    if word_load(a + 8 * DOT) == 0:
        wide = work + (heads + heads // kv_heads) * lanes * 4 + head_dim * 4
        widen_queries(q, wide, heads * head_dim, dtype)
        q = wide
        size = 4
    q_head = heads // kv_heads * head_dim * size
    if word_load(a + 8 * K_NEW) != 0 and begin + (length + page_tokens - 1) // page_tokens == end:
        page = word_load(word_load(a + 8 * FLAT) + 8 * (end - 1)) * half
        new = b * half // page_tokens
        append_token(
            word_load(a + 8 * K_NEW) + new, word_load(a + 8 * V_NEW) + new, (length - 1) % page_tokens,
            word_load(a + 8 * K_CACHE) + page, word_load(a + 8 * V_CACHE) + page, kv_heads, head_dim, page_tokens,
            lanes, dtype,
        )  # fmt: skip
    state_bytes = word_load(a + 8 * STATE_BYTES)
    maxima = word_load(a + 8 * MAXIMA_OFFSET)
    clear_state(state, state_bytes, maxima, kv_heads, heads // kv_heads, float32(LOWEST))
    every = FOLD_TOKENS // page_tokens
    folds = word_load(a + 8 * DOT) == 0 and end - first > every  # weights of 8 bits lose more than sums do
    running = own + RUNNING * kv_heads * state_bytes if folds else state
    if folds:
        clear_state(running, state_bytes, maxima, kv_heads, heads // kv_heads, float32(LOWEST))
    for i in range(first, end):
        tokens = min(length - (i - begin) * page_tokens, page_tokens)
        if page_tokens == lanes:
            _whole_pages(a, i, hi, tokens, q, q_head, running, work)
        else:
            _block_by_block(a, i, hi, tokens, q, q_head, running, work)
        if folds and ((i - first) % every == every - 1 or i == end - 1):
            _fold(a, state, running)


@part
def _finish(a: int, b: int, state: int) -> None:
    kv_heads = word_load(a + 8 * KV_HEADS)
    group = word_load(a + 8 * GROUP)
    head_dim = word_load(a + 8 * HEAD_DIM)
    lanes = word_load(a + 8 * LANES)
    for h in range(kv_heads):
        own = state + h * word_load(a + 8 * STATE_BYTES)
        for j in range(group):
            n = (b * kv_heads + h) * group + j
            finish_head(
                own + j * head_dim * 4, weight_sum(own + word_load(a + 8 * WEIGHTS_OFFSET) + j * lanes * 4, lanes),
                float_load(own + word_load(a + 8 * MAXIMA_OFFSET) + 4 * j),
                word_load(a + 8 * OUT) + n * head_dim * 4, word_load(a + 8 * LSE) + n * 4, head_dim,
            )  # fmt: skip


@part
def _work(a: int, member: int, members: int, total: int) -> None:
    """Flatten the table of this member's part and run its segments."""
    own = word_load(a + 8 * SCRATCH) + member * word_load(a + 8 * SCRATCH_BYTES)
    areas = word_load(a + 8 * KV_HEADS) * word_load(a + 8 * STATE_BYTES)
    flat = word_load(a + 8 * FLAT)
    lo = _bound(a, total, member, members)
    hi = _bound(a, total, member + 1, members)
    begin = 0
    for b in range(word_load(a + 8 * BATCH)):
        end = begin + _pages_of(a, b)
        row = word_load(a + 8 * TABLE) + b * word_load(a + 8 * TABLE_ROW) * 4
        for i in range(max(begin, lo), min(end, hi)):
            word_store(flat + 8 * i, int_load(row + 4 * (i - begin)))
        begin = end
    begin = 0
    for b in range(word_load(a + 8 * BATCH)):
        end = begin + _pages_of(a, b)
        first = max(begin, lo)
        last = min(end, hi)
        if first < last:
            whole = first == begin and last == end
            which = WHOLE if whole else CONTINUED if first > begin else BEGUN
            state = own + which * areas
            _segment(a, own, b, begin, first, last, hi, state)
            if whole:
                _finish(a, b, state)
        elif begin == end and member == 0:
            heads = word_load(a + 8 * KV_HEADS) * word_load(a + 8 * GROUP)
            head_dim = word_load(a + 8 * HEAD_DIM)
            for n in range(b * heads, (b + 1) * heads):
                finish_empty(word_load(a + 8 * OUT) + n * head_dim * 4, word_load(a + 8 * LSE) + n * 4, head_dim)
        begin = end


@part
def _merge(a: int, member: int, members: int, total: int) -> None:
    """Merge the sums of cut sequences, this member's part of the heads, into the state of the first member of each."""
    kv_heads = word_load(a + 8 * KV_HEADS)
    group = word_load(a + 8 * GROUP)
    head_dim = word_load(a + 8 * HEAD_DIM)
    lanes = word_load(a + 8 * LANES)
    state_bytes = word_load(a + 8 * STATE_BYTES)
    each = word_load(a + 8 * SCRATCH_BYTES)
    scratch = word_load(a + 8 * SCRATCH)
    heads = kv_heads * group
    begin = 0
    for b in range(word_load(a + 8 * BATCH)):
        end = begin + _pages_of(a, b)
        m0 = ((begin + 1) * members - 1) // total
        m1 = (end * members - 1) // total
        if begin < end and m0 != m1:
            for n in range(share_start(heads, member, members), share_start(heads, member + 1, members)):
                place = n // group * state_bytes
                j = n % group
                base = scratch + m0 * each + BEGUN * kv_heads * state_bytes + place
                acc = base + j * head_dim * 4
                top = float_load(base + word_load(a + 8 * MAXIMA_OFFSET) + 4 * j)
                weight = weight_sum(base + word_load(a + 8 * WEIGHTS_OFFSET) + j * lanes * 4, lanes)
                for m in range(m0 + 1, m1 + 1):
                    if share_start(total, m, members) < share_start(total, m + 1, members):
                        other = scratch + m * each + CONTINUED * kv_heads * state_bytes + place
                        top2 = float_load(other + word_load(a + 8 * MAXIMA_OFFSET) + 4 * j)
                        highest = max(top, top2)
                        keep = float32(2.0 ** (float(top) - float(highest)))
                        factor = float32(2.0 ** (float(top2) - float(highest)))
                        add_scaled(acc, other + j * head_dim * 4, keep, factor, head_dim)
                        row = other + word_load(a + 8 * WEIGHTS_OFFSET) + j * lanes * 4
                        weight = weight * keep + weight_sum(row, lanes) * factor
                        top = highest
                index = b * heads + n
                finish_head(
                    acc, weight, top, word_load(a + 8 * OUT) + index * head_dim * 4,
                    word_load(a + 8 * LSE) + 4 * index, head_dim,
                )  # fmt: skip
        begin = end


@kernel("int64(int64, int64, int64, int64)")
def attend(ctl: int, member: int, members: int, a: int) -> int:
    """One decode step of the batch described by the argument block at ``a``; returns the team's nanoseconds."""
    total = _pages_before(a, word_load(a + 8 * BATCH))
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    _work(a, member, members, total)
    if members > 1 and total > 0 and word_load(a + 8 * BY_SEQUENCE) == 0:
        arrived = word_load(a + 8 * ARRIVED)
        atomic_add(arrived, 1)
        if not wait_for(ctl, arrived - ctl, members):
            return -1
        _merge(a, member, members, total)
    return leave(ctl, member, members, start)


def log2_scale(scale: float) -> float:
    """Return the factor that turns raw scores into exponents of two."""
    return scale / math.log(2.0)
