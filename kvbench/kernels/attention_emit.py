"""LLVM IR of one block of paged decode attention: 8 or 16 tokens of one KV head against the query heads that share it.

A block is scores, online softmax (Milakov and Gimelshein 2018) and the sum over values; every loop runs at run time, so
that the prefetches of the block to come stay spread between the arithmetic (unrolled, LLVM gathers them, and a third of
the bandwidth of memory is gone). It is apart from numba so that tests can lower it for machines they do not run on.

Layouts, per page and KV head, with r = 2 elements of a 32-bit pair for bf16 and r = 1 otherwise, L lanes:
keys [tokens / L][head_dim / r][L][r], so that one register holds L tokens and a score needs no horizontal sum; values
[tokens / r][head_dim][r]. Elements are converted once a load and used by all query heads of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from kvbench.kernels import emit

FLOAT = ir.FloatType()
I1 = ir.IntType(1)
I16 = ir.IntType(16)
I32, I64 = emit.I32, emit.I64
FP32, FP16, BF16 = range(3)
ITEM = (4, 2, 2)  # bytes of an element, by dtype
PAIR = (1, 1, 2)  # elements that lie side by side
WIDTH = 16  # floats of an accumulator over head_dim
LOWEST = -3.0e38  # the maximum before the first token: finite, so that no difference is a NaN
MASKED = -3.3e38  # the score of a slot without a token: never above a maximum
# 2^f, minimax in relative error: 2e-9 on [-1/2, 1/2], 8e-8 on [0, 1). The constant is exactly 1: 2^-127 must be 0.
EXP2 = (
    1.0, 0.6931472028550767, 0.24022647913502881, 0.05550332471015967, 0.009618437370264238, 0.001339887446095332,
    0.0001535335886199865,
)  # fmt: skip
EXP2_FLOOR = (
    1.0, 0.693151311823623, 0.2401644500108449, 0.055799913467748936, 0.009017029945856576, 0.0018671302076945782,
)  # fmt: skip
CHAINS = 8  # sums at a time: they hide the 6 cycles of a dot product, and more run slower
MAGIC = 12582912.0  # 1.5 x 2^23: adding it rounds to a whole number and leaves that in the low bits


@dataclass(frozen=True, slots=True)
class Form:
    """What is constant in a compiled block.

    ``dtype`` FP32 | FP16 | BF16 of keys and values; ``group`` query heads a KV head; ``lanes`` tokens a block, 8 or 16;
    ``dot``: the bf16 dot product of AVX512-BF16; ``registers``: accumulators of 16 floats that stay in registers.
    """

    dtype: int
    group: int
    head_dim: int
    lanes: int
    dot: bool
    registers: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the values are multiplied by it."""
        return 2 if self.dot else 4

    @property
    def state_bytes(self) -> int:
        """Bytes of the running state of one KV head: sums of values, sums of weights by lane, maxima."""
        return self.maxima_offset + -(-self.group * 4 // 64) * 64

    @property
    def weights_offset(self) -> int:
        return self.group * self.head_dim * 4

    @property
    def maxima_offset(self) -> int:
        return self.weights_offset + -(-self.group * self.lanes * 4 // 64) * 64


class _Bfloat(ir.Type):  # type: ignore[misc]
    """The LLVM type bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BFLOAT = _Bfloat()


def vector(element: Any, count: int) -> Any:
    return ir.VectorType(element, count)


def constant(kind: Any, value: float) -> Any:
    """Return ``value`` in every lane of the float vector type ``kind``."""
    return ir.Constant(kind, [value] * kind.count)


def at(b: Any, base: Any, offset: int) -> Any:
    return b.add(base, ir.Constant(I64, offset)) if offset else base


def splat_load(b: Any, address: Any, element: Any, kind: Any) -> Any:
    return emit.splat(b, emit.load(b, address, element, 2 if element == I16 else 4), kind)


def repeat(b: Any, count: Any, start: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """Emit ``body(i, values)`` ``count`` times as a loop; return the last values. ``i`` counts up from 0.

    The count is hidden from LLVM: it would unroll the loop completely.
    """
    trips = emit.opaque(b, ir.Constant(I64, count)) if isinstance(count, int) else count
    before, inside = b.block, b.append_basic_block("loop")
    b.branch(inside)
    b.position_at_end(inside)
    i = b.phi(I64)
    values = [b.phi(v.type) for v in start]
    i.add_incoming(ir.Constant(I64, 0), before)
    for value, first in zip(values, start, strict=True):
        value.add_incoming(first, before)
    done = list(body(i, values))
    following = b.add(i, ir.Constant(I64, 1))
    last, after = b.block, b.append_basic_block("after")
    i.add_incoming(following, last)
    for value, again in zip(values, done, strict=True):
        value.add_incoming(again, last)
    b.cbranch(b.icmp_signed("<", following, trips), inside, after)
    b.position_at_end(after)
    return done


def exp2(b: Any, x: Any) -> Any:
    """Return 2^x for a vector of floats up to about 1; below -127 exactly 0. Relative error about 1e-7."""
    kind = x.type
    x = maximum(b, x, constant(kind, -127.0))
    shifted = b.fadd(x, constant(kind, MAGIC))
    fraction = b.fsub(x, b.fsub(shifted, constant(kind, MAGIC)))
    value = constant(kind, EXP2[-1])
    for c in reversed(EXP2[:-1]):
        value = emit.fma(b, value, fraction, constant(kind, c))
    bits = vector(I32, kind.count)
    exponent = b.shl(b.bitcast(shifted, bits), ir.Constant(bits, [23] * kind.count))
    return b.bitcast(b.add(b.bitcast(value, bits), exponent), kind)


def exp2_avx512(b: Any, x: Any) -> Any:
    """Return 2^x with the two instructions AVX-512 has for it: x less its floor, and scaling by a power of two."""
    kind, n = x.type, x.type.count
    mask = ir.IntType(max(8, n))
    ends = [ir.Constant(mask, -1), ir.Constant(I32, 4)] if n == 16 else [ir.Constant(mask, -1)]
    floor = [x, ir.Constant(I32, 1), constant(kind, 0.0), *ends]
    fraction = emit._call(b, f"llvm.x86.avx512.mask.reduce.ps.{32 * n}", kind, floor)
    value = constant(kind, EXP2_FLOOR[-1])
    for c in reversed(EXP2_FLOOR[:-1]):
        value = emit.fma(b, value, fraction, constant(kind, c))
    scaled = [value, x, constant(kind, 0.0), *ends]
    return emit._call(b, f"llvm.x86.avx512.mask.scalef.ps.{32 * n}", kind, scaled)


def maximum(b: Any, x: Any, y: Any) -> Any:
    """Return the larger of ``x`` and ``y``; ``x`` where that is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), y, x)


def widen(b: Any, form: Form, address: Any, count: int) -> list[Any]:
    """Load ``count`` lanes; return one float vector, or for bf16 two: the even and the odd elements of the pairs."""
    floats = vector(FLOAT, count)
    if form.dtype == FP32:
        return [emit.load(b, address, floats, 4)]
    if form.dtype == FP16:
        return [b.fpext(emit.load(b, address, vector(ir.HalfType(), count), 2), floats)]
    bits = vector(I32, count)
    pairs = emit.load(b, address, bits, 4)
    even = b.shl(pairs, ir.Constant(bits, [16] * count))
    odd = b.and_(pairs, ir.Constant(bits, [0xFFFF0000] * count))
    return [b.bitcast(even, floats), b.bitcast(odd, floats)]


def dot(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """Return acc + x0 * y0 + x1 * y1 on the bf16 pairs of ``x`` and ``y`` (AVX512-BF16; subnormals count as 0)."""
    count = acc.type.count
    pairs = vector(BFLOAT, 2 * count)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * count}"
    return emit._call(b, name, acc.type, [acc, b.bitcast(x, pairs), b.bitcast(y, pairs)])


def scores(
    b: Any, form: Form, heads: range, k: Any, ahead: Any, again: Any, q: Any
) -> list[Any]:  # fmt: skip
    """Return the unscaled scores of ``heads``: one vector of ``lanes`` floats each.

    The first heads prefetch as many bytes at ``ahead`` and at ``again``.
    """
    floats, r = vector(FLOAT, form.lanes), PAIR[form.dtype]
    load_bytes = form.lanes * r * ITEM[form.dtype]
    chains = next((c for c in (1, 2, 4, 8) if len(heads) * c >= CHAINS), CHAINS)
    while len(heads) * chains > form.registers and chains > 1:
        chains //= 2
    unroll = max(4, chains)
    zero = constant(floats, 0.0)

    def body(i: Any, sums: Sequence[Any]) -> Sequence[Any]:
        sums = list(sums)
        place = b.mul(i, ir.Constant(I64, unroll * load_bytes))
        here, there, sooner = (b.add(base, place) for base in (k, ahead, again))
        part = b.add(q, b.mul(i, ir.Constant(I64, unroll * 4 * (1 if form.dot else r))))
        for u in range(unroll):
            offset = u * load_bytes
            if heads.start == 0 and offset % 64 == 0:
                emit.prefetch(b, at(b, there, offset), 2)
                emit.prefetch(b, at(b, sooner, offset), 2)
            if form.dot:
                keys = [emit.load(b, at(b, here, offset), vector(I32, form.lanes), 4)]
            else:
                keys = widen(b, form, at(b, here, offset), form.lanes)
            for n, j in enumerate(heads):
                slot = n * chains + u % chains
                for e, key in enumerate(keys):
                    row = j * form.head_dim * (2 if form.dot else 4) + 4 * (u * len(keys) + e)
                    if form.dot:
                        sums[slot] = dot(b, sums[slot], key, splat_load(b, at(b, part, row), I32, key.type))
                    else:
                        sums[slot] = emit.fma(b, key, splat_load(b, at(b, part, row), FLOAT, floats), sums[slot])
        return sums

    sums = repeat(b, form.head_dim // r // unroll, [zero] * (len(heads) * chains), body)
    found = []
    for n in range(len(heads)):
        parts = sums[n * chains : (n + 1) * chains]
        while len(parts) > 1:
            parts = [b.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        found.append(parts[0])
    return found


def weigh(b: Any, form: Form, args: Sequence[Any]) -> None:
    """Emit the first half of a block: weights of its tokens; where a maximum moves, rescale the state first.

    ``args``: k, ahead, again, q, state, weights, raw, scale, valid. Reads keys at ``k``, prefetches as many bytes at
    ``ahead`` and at ``again`` into L2; ``q``: the group's query heads, bf16 with ``dot`` else float, [group][head_dim];
    leaves [group][lanes] weights, bf16 with ``dot`` else float; ``raw``: scratch for [group][lanes] floats; ``scale``
    (float) is that of the scores times log2(e). Slots from ``valid`` on may hold anything and get weight 0.
    """
    k, ahead, again, q, state, weights, raw, scale, valid = args
    floats, bits, n = vector(FLOAT, form.lanes), vector(I32, form.lanes), form.lanes
    maxima = at(b, state, form.maxima_offset)
    factor = emit.splat(b, scale, floats)
    inside = b.icmp_signed("<", ir.Constant(bits, list(range(n))), emit.splat(b, b.trunc(valid, I32), bits))
    for heads in split(form.group, form.registers):
        plain = scores(b, form, heads, k, ahead, again, q)
        scaled = [b.select(inside, b.fmul(s, factor), constant(floats, MASKED)) for s in plain]
        above = None
        for j, s in zip(heads, scaled, strict=True):
            higher = b.fcmp_ordered(">", s, splat_load(b, at(b, maxima, 4 * j), FLOAT, floats))
            above = higher if above is None else b.or_(above, higher)
        moved = b.icmp_unsigned("!=", b.bitcast(above, ir.IntType(n)), ir.Constant(ir.IntType(n), 0))
        slow, rest = b.append_basic_block("rescale"), b.append_basic_block("weights")
        b.cbranch(moved, slow, rest)
        b.position_at_end(slow)
        for j, s in zip(heads, scaled, strict=True):
            emit.store(b, at(b, raw, j * n * 4), s, 4)
        rescale(b, form, heads, state, raw)
        b.branch(rest)
        b.position_at_end(rest)
        for j, s in zip(heads, scaled, strict=True):
            below = b.fsub(s, splat_load(b, at(b, maxima, 4 * j), FLOAT, floats))
            p = exp2_avx512(b, below) if form.dot else exp2(b, below)
            total = at(b, state, form.weights_offset + j * n * 4)
            emit.store(b, total, b.fadd(emit.load(b, total, floats, 4), p), 4)
            place = at(b, weights, j * n * form.weight_bytes)
            if form.dot:
                half = emit._call(b, f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * n}", vector(BFLOAT, n), [p])
                emit.store(b, place, b.bitcast(half, vector(I16, n)), 2)
            else:
                emit.store(b, place, p, 4)


def split(group: int, most: int) -> list[range]:
    """Return the query heads of a group in parts of at most ``most``."""
    return [range(start, min(start + most, group)) for start in range(0, group, most)]


def rescale(b: Any, form: Form, heads: range, state: Any, raw: Any) -> None:
    """Move the maxima of ``heads`` up to those of the scaled scores at ``raw``, and the sums with them."""
    floats, wide, n = vector(FLOAT, form.lanes), vector(FLOAT, WIDTH), form.lanes

    def head(i: Any, _: Sequence[Any]) -> Sequence[Any]:
        j = b.add(i, ir.Constant(I64, heads.start))
        row = emit.load(b, b.add(raw, b.mul(j, ir.Constant(I64, n * 4))), floats, 4)
        highest = emit._call(b, f"llvm.vector.reduce.fmax.v{n}f32", FLOAT, [row])
        place = b.add(at(b, state, form.maxima_offset), b.mul(j, ir.Constant(I64, 4)))
        old = emit.load(b, place, FLOAT, 4)
        new = b.select(b.fcmp_ordered(">", highest, old), highest, old)
        emit.store(b, place, new, 4)
        factor = exp2(b, emit.splat(b, b.fsub(old, new), wide))
        total = b.add(at(b, state, form.weights_offset), b.mul(j, ir.Constant(I64, n * 4)))
        some = emit.splat(b, b.extract_element(factor, ir.Constant(I32, 0)), floats)
        emit.store(b, total, b.fmul(emit.load(b, total, floats, 4), some), 4)
        first = b.add(state, b.mul(j, ir.Constant(I64, form.head_dim * 4)))

        def chunk(c: Any, _: Sequence[Any]) -> Sequence[Any]:
            where = b.add(first, b.mul(c, ir.Constant(I64, WIDTH * 4)))
            emit.store(b, where, b.fmul(emit.load(b, where, wide, 4), factor), 4)
            return []

        repeat(b, form.head_dim // WIDTH, [], chunk)
        return []

    repeat(b, len(heads), [], head)


def column(b: Any, form: Form, heads: range, first: Any, chunks: int, args: Sequence[Any]) -> None:
    """Add the weighted values of ``heads`` to the state, for ``chunks`` x 16 floats from float ``first`` (i64) on."""
    v, ahead, again, state, weights, rows = args
    wide, r = vector(FLOAT, WIDTH), PAIR[form.dtype]
    load_bytes = WIDTH * r * ITEM[form.dtype]
    row_bytes = form.head_dim * r * ITEM[form.dtype]
    spot = b.add(state, b.mul(first, ir.Constant(I64, 4)))
    places = [at(b, spot, (j * form.head_dim + c * WIDTH) * 4) for j in heads for c in range(chunks)]
    here = b.add(v, b.mul(first, ir.Constant(I64, r * ITEM[form.dtype])))
    # what is prefetched lies in one piece, whatever the order of the rows
    spread = b.mul(first, ir.Constant(I64, form.lanes * ITEM[form.dtype]))

    def body(t: Any, sums: Sequence[Any]) -> Sequence[Any]:
        sums = list(sums)
        row = b.add(here, b.mul(t, ir.Constant(I64, row_bytes)))
        place = b.add(spread, b.mul(t, ir.Constant(I64, chunks * load_bytes)))
        piece, sooner = b.add(ahead, place), b.add(again, place)
        weight = b.add(weights, b.mul(t, ir.Constant(I64, form.weight_bytes * r)))
        for c in range(chunks):
            if heads.start == 0 and c * load_bytes % 64 == 0:
                emit.prefetch(b, at(b, piece, c * load_bytes), 2)
                emit.prefetch(b, at(b, sooner, c * load_bytes), 2)
            if form.dot:
                parts = [emit.load(b, at(b, row, c * load_bytes), vector(I32, WIDTH), 4)]
            else:
                parts = widen(b, form, at(b, row, c * load_bytes), WIDTH)
            for n, j in enumerate(heads):
                slot, weight_row = n * chunks + c, at(b, weight, j * form.lanes * form.weight_bytes)
                for e, part in enumerate(parts):
                    if form.dot:
                        sums[slot] = dot(b, sums[slot], part, splat_load(b, weight_row, I32, part.type))
                    else:
                        p = splat_load(b, at(b, weight_row, 4 * e), FLOAT, wide)
                        sums[slot] = emit.fma(b, part, p, sums[slot])
        return sums

    sums = repeat(b, rows, [emit.load(b, place, wide, 4) for place in places], body)
    for place, total in zip(places, sums, strict=True):
        emit.store(b, place, total, 4)


def gather(b: Any, form: Form, args: Sequence[Any]) -> None:
    """Emit the second half of a block: add its values times their weights to the state.

    ``args``: v, ahead, again, state, weights, rows. Reads ``rows`` (i64, at least 1) rows of values, each
    of one token, of two for bf16; prefetches as many bytes at ``ahead``.
    """
    total = form.head_dim // WIDTH
    for heads in split(form.group, form.registers):
        chunks = max(1, min(total, min(form.registers, CHAINS) // len(heads)))
        even = max(c for c in range(1, chunks + 1) if total % c == 0)
        chunks = even if 2 * even > chunks else chunks
        whole, rest = divmod(total, chunks)

        def columns(i: Any, _: Sequence[Any], heads: range = heads, chunks: int = chunks) -> Sequence[Any]:
            column(b, form, heads, b.mul(i, ir.Constant(I64, chunks * WIDTH)), chunks, args)
            return []

        repeat(b, whole, [], columns)
        if rest:
            column(b, form, heads, ir.Constant(I64, whole * chunks * WIDTH), rest, args)


WEIGH = (I64,) * 7 + (FLOAT, I64)
GATHER = (I64,) * 6
HALVES = {"weigh": (weigh, WEIGH), "gather": (gather, GATHER)}


def define(module: Any, half: str, form: Form) -> Any:
    """Return the function of one half (``weigh`` | ``gather``) of a block in ``module``."""
    emitter, arguments = HALVES[half]
    name = f"kvbench_{half}_{form.dtype}_{form.group}_{form.head_dim}_{form.lanes}_{int(form.dot)}_{form.registers}"
    known = module.globals.get(name)
    if known is not None:
        return known
    function = ir.Function(module, ir.FunctionType(emit.VOID, arguments), name)
    function.linkage = "internal"
    b = ir.IRBuilder(function.append_basic_block("entry"))
    emitter(b, form, function.args)
    b.ret_void()
    return function
