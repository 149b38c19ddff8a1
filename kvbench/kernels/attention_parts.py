"""What surrounds the blocks of decode attention: appending a token, widening queries, cleaning a row, finishing."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from kvbench.kernels import emit
from kvbench.kernels.attention_emit import BF16, FP16, FP32
from kvbench.kernels.intrinsics import (
    INT,
    VOID,
    _define,
    line_fma32,
    line_load,
    line_splat32,
    line_store,
)
from kvbench.kernels.jit import numba, part

from numba.core import types  # isort: skip  jit.py has to be first
from numba.extending import intrinsic  # isort: skip

float32 = numba.float32
_F = types.float32
_HALF, _I16 = ir.HalfType(), ir.IntType(16)


def _small(b: Any, kind: Any, address: Any) -> Any:
    return emit.load(b, address, kind, kind.width // 8)


def _bfloat(b: Any, address: Any) -> Any:
    bits = b.shl(b.zext(_small(b, _I16, address), emit.I32), ir.Constant(emit.I32, 16))
    return b.bitcast(bits, ir.FloatType())


def _store_small(b: Any, kind: Any, address: Any, value: Any) -> Any:
    return emit.store(b, address, b.trunc(value, kind), kind.width // 8)


short_load = _define("short_load", INT, (INT,), lambda b, a: b.zext(_small(b, _I16, a), emit.I64), "Load 16 bits.")
int_load = _define("int_load", INT, (INT,), lambda b, a: b.sext(_small(b, emit.I32, a), emit.I64), "Load an int32.")
short_store = _define("short_store", VOID, (INT, INT), lambda b, a, v: _store_small(b, _I16, a, v), "Store 16 bits.")
int_store = _define("int_store", VOID, (INT, INT), lambda b, a, v: _store_small(b, emit.I32, a, v), "Store an int32.")
float_load = _define(
    "float_load", _F, (INT,), lambda b, a: emit.load(b, a, ir.FloatType(), 4), "Load an aligned float32."
)
float_store = _define("float_store", VOID, (INT, _F), lambda b, a, v: emit.store(b, a, v, 4), "Store a float32.")
half_load = _define(
    "half_load", _F, (INT,), lambda b, a: b.fpext(emit.load(b, a, _HALF, 2), ir.FloatType()), "Load a float16."
)
bfloat_load = _define("bfloat_load", _F, (INT,), _bfloat, "Load a bfloat16.")


def _call_weigh(
    typingctx: Any,
    f: Any,
    k: Any,
    ahead: Any,
    again: Any,
    q: Any,
    state: Any,
    weights: Any,
    raw: Any,
    scale: Any,
    valid: Any,
) -> Any:
    """Call the compiled ``weigh`` half at address ``f`` (:mod:`attention_emit`)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit.call(builder, args[0], list(args[1:]), emit.VOID)
        return context.get_dummy_value()

    return VOID(*(INT,) * 8, _F, INT), codegen


def _call_gather(typingctx: Any, f: Any, v: Any, ahead: Any, again: Any, state: Any, weights: Any, rows: Any) -> Any:
    """Call the compiled ``gather`` half at address ``f`` (:mod:`attention_emit`)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit.call(builder, args[0], list(args[1:]), emit.VOID)
        return context.get_dummy_value()

    return VOID(*(INT,) * 7), codegen


call_weigh: Any = intrinsic(_call_weigh)
call_gather: Any = intrinsic(_call_gather)


@part
def append_token(
    keys: int, values: int, token: int, k_page: int, v_page: int, kv_heads: int, head_dim: int, page_tokens: int,
    lanes: int, dtype: int,
) -> None:  # fmt: skip
    """Write one token's ``keys`` and ``values`` [kv_heads][head_dim] into slot ``token`` of its packed page."""
    size = 4 if dtype == FP32 else 2
    r = 2 if dtype == BF16 else 1
    sub = token // lanes
    lane = token % lanes
    for h in range(kv_heads):
        k_at = k_page + (h * page_tokens + sub * lanes) * head_dim * size
        v_at = v_page + (h * page_tokens + token // r * r) * head_dim * size
        for i in range(head_dim):
            source = (h * head_dim + i) * size
            k_to = k_at + (i // r * lanes * r + lane * r + i % r) * size
            v_to = v_at + (i * r + token % r) * size
            if size == 4:
                int_store(k_to, int_load(keys + source))
                int_store(v_to, int_load(values + source))
            else:
                short_store(k_to, short_load(keys + source))
                short_store(v_to, short_load(values + source))


@part
def widen_queries(q: int, out: int, count: int, dtype: int) -> None:
    """Convert ``count`` query elements to float32 at ``out``."""
    for i in range(count):
        if dtype == FP16:
            float_store(out + 4 * i, half_load(q + 2 * i))
        elif dtype == BF16:
            float_store(out + 4 * i, bfloat_load(q + 2 * i))
        else:
            float_store(out + 4 * i, float_load(q + 4 * i))


@part
def clean_row(v: int, out: int, head_dim: int) -> None:
    """Copy a row of pairs without their second token: what stands in its slot may be NaN, and 0 x NaN is NaN."""
    for i in range(head_dim):
        int_store(out + 4 * i, int_load(v + 4 * i) & 0xFFFF)


@part
def clear_state(state: int, state_bytes: int, maxima_offset: int, kv_heads: int, group: int, lowest: float) -> None:
    """Begin the running state of every KV head."""
    zero = line_splat32(float32(0.0))
    for at in range(0, kv_heads * state_bytes, 64):
        line_store(state + at, zero)
    for h in range(kv_heads):
        for j in range(group):
            float_store(state + h * state_bytes + maxima_offset + 4 * j, lowest)


@part
def fold_head(to: int, source: int, keep: float, row: int, from_row: int, head_dim: int, lanes: int) -> None:
    """Move one head's sums of values and of weights: to = to * keep + source, source = 0; rows of ``lanes`` weights."""
    kept = line_splat32(keep)
    zero = line_splat32(float32(0.0))
    for i in range(0, head_dim * 4, 64):
        line_store(to + i, line_fma32(line_load(to + i), kept, line_load(source + i)))
        line_store(source + i, zero)
    for i in range(0, lanes * 4, 4):
        float_store(row + i, float_load(row + i) * keep + float_load(from_row + i))
        float_store(from_row + i, float32(0.0))


@part
def weight_sum(row: int, lanes: int) -> float:
    """Return the sum of ``lanes`` floats."""
    total: float = float32(0.0)
    for lane in range(lanes):
        total += float_load(row + 4 * lane)
    return total


@part
def finish_head(acc: int, total: float, top: float, out: int, lse: int, head_dim: int) -> None:
    """Write one query head's output and the natural logarithm of the sum of its exponentials; it has tokens.

    The largest score weighs 1, so that no weight at all means scores below all float32: NaN, not an empty sequence.
    """
    if total != 0.0:  # NaN in a used slot goes on to the output
        factor = line_splat32(float32(1.0) / total)
        zero = line_splat32(float32(0.0))
        for i in range(0, head_dim * 4, 64):
            line_store(out + i, line_fma32(line_load(acc + i), factor, zero))
        float_store(lse, float32(math.log(float(total)) + float(top) * math.log(2.0)))
    else:
        lost = line_splat32(float32(math.nan))
        for i in range(0, head_dim * 4, 64):
            line_store(out + i, lost)
        float_store(lse, float32(math.nan))


@part
def finish_empty(out: int, lse: int, head_dim: int) -> None:
    """Write the attention over no token: zeros, and the logarithm of nothing."""
    zero = line_splat32(float32(0.0))
    for i in range(0, head_dim * 4, 64):
        line_store(out + i, zero)
    float_store(lse, float32(-math.inf))


@part
def add_scaled(to: int, source: int, keep: float, factor: float, head_dim: int) -> None:
    """to = to * keep + source * factor over ``head_dim`` floats."""
    kept = line_splat32(keep)
    taken = line_splat32(factor)
    zero = line_splat32(float32(0.0))
    for i in range(0, head_dim * 4, 64):
        scaled = line_fma32(line_load(source + i), taken, zero)
        line_store(to + i, line_fma32(line_load(to + i), kept, scaled))
