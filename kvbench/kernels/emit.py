"""LLVM IR of the memory operations, apart from numba so that tests can lower it for machines they do not run on.

Addresses are i64. A *line* is the vector <8 x i64> (64 bytes): LLVM splits it into whatever registers the CPU has
(one zmm, two ymm, four q), and asking for it by name keeps the width out of the hands of the loop vectoriser, which
prefers 256 bits on several CPUs. No instruction here is optimised away: see ``barrier``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

I8 = ir.IntType(8)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
LINE = ir.VectorType(I64, 8)
DOUBLES = ir.VectorType(ir.DoubleType(), 8)
FLOATS = ir.VectorType(ir.FloatType(), 16)
DOUBLE = ir.DoubleType()
VOID = ir.VoidType()


def _call(builder: Any, name: str, returns: Any, args: list[Any]) -> Any:
    signature = ir.FunctionType(returns, [a.type for a in args])
    module = builder.module
    known = module.globals.get(name)
    return builder.call(known if known is not None else ir.Function(module, signature, name), args)


def load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    """Load a value of LLVM type ``kind``. Alignment 1 costs nothing on aligned data and is right on any other."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: Any, address: Any, value: Any, align: int = 1) -> Any:
    """Store ``value`` through the caches."""
    instruction = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    instruction.align = align
    return instruction


def store_nt(builder: Any, address: Any, value: Any) -> Any:
    """Store a line past the caches (vmovntdq, stnp). The address must be a multiple of 64."""
    instruction = store(builder, address, value, align=64)
    instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
    return instruction


def splat(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector of type ``kind`` with ``value`` in every lane."""
    seed = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(seed, ir.Constant(kind, ir.Undefined), mask)


def lane_sum(builder: Any, line: Any) -> Any:
    """Return the sum of the eight lanes modulo 2^64."""
    total = builder.extract_element(line, ir.Constant(I32, 0))
    for lane in range(1, 8):
        total = builder.add(total, builder.extract_element(line, ir.Constant(I32, lane)))
    return total


def ramp(builder: Any, first: Any, step: Any) -> Any:
    """Return the line ``first + lane * step`` modulo 2^64."""
    lanes = ir.Constant(LINE, list(range(8)))
    return builder.add(splat(builder, first, LINE), builder.mul(splat(builder, step, LINE), lanes))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c`` with one rounding; the type is that of the operands."""
    kind = a.type
    suffix = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    width = "f32" if isinstance(scalar, ir.FloatType) else "f64"
    return _call(builder, f"llvm.fma.{suffix}{width}", kind, [a, b, c])


def prefetch(builder: Any, address: Any, locality: int) -> Any:
    """Prefetch for reading; locality 3 into every level, 2 into L2 and beyond, 0 non-temporal."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    flags = [ir.Constant(I32, v) for v in (0, locality, 1)]
    return _call(builder, "llvm.prefetch.p0", VOID, [pointer, *flags])


def barrier(builder: Any) -> Any:
    """Emit no instruction, but keep LLVM from moving memory accesses across this point or turning loops into memcpy."""
    return builder.asm(ir.FunctionType(VOID, []), "", "~{memory}", [], True)


def opaque(builder: Any, value: Any) -> Any:
    """Return ``value`` (i64) so that LLVM no longer knows what it is; emits no instruction."""
    return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], True)


def drain(builder: Any, machine: str) -> Any:
    """Order non-temporal stores before everything that follows: sfence on x86, a full fence elsewhere."""
    if machine == "x86_64":
        return _call(builder, "llvm.x86.sse.sfence", VOID, [])
    return builder.fence("seq_cst")


def pause(builder: Any, machine: str) -> Any:
    """Tell the core that this is a spin loop: pause, yield, or nothing but a barrier where neither is known."""
    if machine == "x86_64":
        return _call(builder, "llvm.x86.sse2.pause", VOID, [])
    if machine == "aarch64":
        return _call(builder, "llvm.aarch64.hint", VOID, [ir.Constant(I32, 1)])
    return barrier(builder)


def atomic_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "acquire", 8)


def atomic_store(builder: Any, address: Any, value: Any) -> Any:
    return builder.store_atomic(value, builder.inttoptr(address, I64.as_pointer()), "release", 8)


def atomic_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to an aligned 64-bit word and return what it held before."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")


def call(builder: Any, function: Any, args: list[Any], returns: Any) -> Any:
    """Call the C function at address ``function``. As an argument the address is not baked into cached code."""
    signature = ir.FunctionType(returns, [a.type for a in args])
    return builder.call(builder.inttoptr(function, signature.as_pointer()), args)
