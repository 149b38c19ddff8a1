"""The instructions kernels are written in, as numba intrinsics on raw addresses (int64).

``Line`` values are 64 bytes (see :mod:`kvbench.kernels.emit`). Sums are uint64 and wrap; addresses and counts int64.
Mixing the two makes numba compute in float64, so nothing here accepts one for the other.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from kvbench.kernels import emit
from kvbench.kernels.jit import numba

from numba.core import types  # isort: skip  jit.py has to be first
from numba.extending import intrinsic, models, register_model  # isort: skip

MACHINE = platform.machine()
INT = types.int64
SUM = types.uint64
VOID = types.void


class Line(types.Type):
    """64 bytes held in vector registers; exists inside kernels only."""

    def __init__(self) -> None:
        super().__init__(name="kvbench.Line")


LINE = Line()


@register_model(Line)
class _LineModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, emit.LINE)  # type: ignore[no-untyped-call]


def _matches(given: Any, wanted: Any) -> bool:
    if isinstance(given, types.IntegerLiteral):
        given = given.literal_type
    return bool(given == wanted)


def _define(name: str, returns: Any, wanted: tuple[Any, ...], body: Callable[..., Any], doc: str) -> Any:
    """Return an intrinsic with exactly these argument types; ``body(builder, *args)`` emits it.

    A wrong type is a typing error at compile time: an int64 passed for a sum would silently turn into float64.
    """

    def build(*given: Any) -> Any:
        if not all(_matches(g, w) for g, w in zip(given, wanted, strict=True)):
            raise numba.TypingError(f"{name} takes {wanted}, got {given}")
        signature = returns(*wanted)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = body(builder, *args)
            return context.get_dummy_value() if returns == VOID else value

        return signature, codegen

    # numba reads the arity from the function itself, so each arity needs a function of its own
    def f0(typingctx: Any) -> Any:
        return build()

    def f1(typingctx: Any, a: Any) -> Any:
        return build(a)

    def f2(typingctx: Any, a: Any, b: Any) -> Any:
        return build(a, b)

    def f3(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        return build(a, b, c)

    def f4(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return build(a, b, c, d)

    function = (f0, f1, f2, f3, f4)[len(wanted)]
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return intrinsic(function)


def _triad(b: Any, x: Any, y: Any, scalar: Any) -> Any:
    doubles = emit.fma(b, b.bitcast(y, emit.DOUBLES), emit.splat(b, scalar, emit.DOUBLES), b.bitcast(x, emit.DOUBLES))
    return b.bitcast(doubles, emit.LINE)


def _fma32(b: Any, acc: Any, factor: Any, addend: Any) -> Any:
    return b.bitcast(emit.fma(b, *(b.bitcast(v, emit.FLOATS) for v in (acc, factor, addend))), emit.LINE)


def _splat32(b: Any, value: Any) -> Any:
    return b.bitcast(emit.splat(b, value, emit.FLOATS), emit.LINE)


def _byte_store(b: Any, address: Any, value: Any) -> Any:
    return emit.store(b, address, b.trunc(value, emit.I8))


def _memcpy(b: Any, function: Any, dst: Any, src: Any, count: Any) -> Any:
    pointer = emit.I8.as_pointer()
    return emit.call(b, function, [b.inttoptr(dst, pointer), b.inttoptr(src, pointer), count], pointer)


def _clock(b: Any, function: Any, clock: Any, timespec: Any) -> Any:
    return emit.call(b, function, [b.trunc(clock, emit.I32), b.inttoptr(timespec, emit.I8.as_pointer())], emit.I32)


_D, _F = types.float64, types.float32

line_load = _define("line_load", LINE, (INT,), lambda b, a: emit.load(b, a, emit.LINE), "Load 64 bytes.")
line_store = _define("line_store", VOID, (INT, LINE), emit.store, "Store 64 bytes through the caches.")
line_store_nt = _define(
    "line_store_nt", VOID, (INT, LINE), emit.store_nt, "Store 64 bytes past the caches; address % 64 == 0."
)
line_add = _define("line_add", LINE, (LINE, LINE), lambda b, x, y: b.add(x, y), "Add lanes modulo 2^64.")
line_sum = _define("line_sum", SUM, (LINE,), emit.lane_sum, "Sum of the lanes modulo 2^64.")
line_splat = _define(
    "line_splat", LINE, (SUM,), lambda b, v: emit.splat(b, v, emit.LINE), "The value in all eight lanes."
)
line_ramp = _define("line_ramp", LINE, (SUM, SUM), emit.ramp, "first + lane * step modulo 2^64.")
line_triad = _define("line_triad", LINE, (LINE, LINE, _D), _triad, "x + scalar * y on eight doubles, one rounding.")
line_fma32 = _define("line_fma32", LINE, (LINE, LINE, LINE), _fma32, "acc * factor + addend on sixteen floats.")
line_splat32 = _define("line_splat32", LINE, (_F,), _splat32, "The float in all sixteen lanes.")
byte_load = _define(
    "byte_load", SUM, (INT,), lambda b, a: b.zext(emit.load(b, a, emit.I8), emit.I64), "Load a byte as uint64."
)
byte_store = _define("byte_store", VOID, (INT, SUM), _byte_store, "Store the low byte.")
word_load = _define("word_load", INT, (INT,), lambda b, a: emit.load(b, a, emit.I64, 8), "Load an aligned int64.")
word_store = _define("word_store", VOID, (INT, INT), lambda b, a, v: emit.store(b, a, v, 8), "Store an aligned int64.")
sum_load = _define("sum_load", SUM, (INT,), lambda b, a: emit.load(b, a, emit.I64, 8), "Load an aligned uint64.")
sum_store = _define("sum_store", VOID, (INT, SUM), lambda b, a, v: emit.store(b, a, v, 8), "Store an aligned uint64.")
double_load = _define(
    "double_load", _D, (INT,), lambda b, a: emit.load(b, a, emit.DOUBLE), "Load a double, any alignment."
)
double_store = _define("double_store", VOID, (INT, _D), emit.store, "Store a double, any alignment.")
double_fma = _define("double_fma", _D, (_D, _D, _D), emit.fma, "a * b + c with one rounding.")
prefetch_all = _define(
    "prefetch_all", VOID, (INT,), lambda b, a: emit.prefetch(b, a, 3), "Prefetch into L1 (prefetcht0)."
)
prefetch_l2 = _define(
    "prefetch_l2", VOID, (INT,), lambda b, a: emit.prefetch(b, a, 2), "Prefetch into L2 (prefetcht1)."
)
barrier = _define("barrier", VOID, (), emit.barrier, "Keep LLVM from moving memory accesses across this point.")
opaque = _define("opaque", INT, (INT,), emit.opaque, "The same value, unknown to the optimiser.")
drain = _define("drain", VOID, (), lambda b: emit.drain(b, MACHINE), "Order non-temporal stores before what follows.")
pause = _define("pause", VOID, (), lambda b: emit.pause(b, MACHINE), "Spin-loop hint.")
atomic_load = _define("atomic_load", INT, (INT,), emit.atomic_load, "Acquire load of an aligned int64.")
atomic_store = _define("atomic_store", VOID, (INT, INT), emit.atomic_store, "Release store of an aligned int64.")
atomic_add = _define("atomic_add", INT, (INT, INT), emit.atomic_add, "Fetch and add on an aligned int64.")
call_memcpy = _define(
    "call_memcpy",
    INT,
    (INT, INT, INT, INT),
    lambda b, f, d, s, n: b.ptrtoint(_memcpy(b, f, d, s, n), emit.I64),
    "memcpy at address f: (f, dst, src, bytes).",
)
call_clock = _define(
    "call_clock",
    types.int32,
    (INT, INT, INT),
    _clock,
    "clock_gettime at address f: (f, clock id, address of a timespec of two int64).",
)
call_yield = _define(
    "call_yield", types.int32, (INT,), lambda b, f: emit.call(b, f, [], emit.I32), "sched_yield at address f."
)
