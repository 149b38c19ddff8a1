"""The blocks of decode attention as machine code, here and on machines that are not here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvbench.kernels.attention_emit import BF16, FP16, FP32, HALVES, Form, define, exp2, exp2_avx512, vector

AARCH64 = "aarch64-unknown-linux-gnu"


def machine(triple: str, cpu: str = "", features: str = "") -> Any:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this LLVM has no back-end for {triple}")
    return target.create_target_machine(cpu=cpu, features=features, opt=3)


def module(half: str, form: Form, triple: str) -> Any:
    from llvmlite import binding, ir

    made = ir.Module()
    made.triple = triple
    define(made, half, form).linkage = "external"
    parsed = binding.parse_assembly(str(made))
    parsed.verify()
    return parsed


@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_blocks_compile_for_aarch64(half: str, dtype: int) -> None:
    to = machine(AARCH64, "neoverse-n1")
    code = module(half, Form(dtype, 4, 128, 16, False, 6), AARCH64)
    assert "llvm.x86" not in str(code)
    text = to.emit_assembly(code)
    for word in ("fmla", "prfm\tpldl2keep", {FP32: "ldp\tq", FP16: "fcvtl", BF16: "shl"}[dtype]):
        assert word in text, word
    blob = to.emit_object(code)
    assert blob[:4] == b"\x7fELF"
    assert int.from_bytes(blob[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize("half", sorted(HALVES))
def test_blocks_use_the_dot_product_where_there_is_one(half: str) -> None:
    triple = "x86_64-unknown-linux-gnu"
    to = machine(triple, "znver4")
    text = to.emit_assembly(module(half, Form(BF16, 4, 128, 16, True, 24), triple))
    loops = text.count("vdpbf16ps")
    assert loops >= 8
    assert loops <= 64  # a loop at run time: unrolled, the prefetches cluster and bandwidth is lost
    assert text.count("prefetcht1") == {"weigh": 8, "gather": 4}[half]  # each line of a turn twice
    plain = to.emit_assembly(module(half, Form(BF16, 4, 128, 16, False, 24), triple))
    assert "vdpbf16ps" not in plain
    assert "vfmadd" in plain


def test_a_form_knows_its_state() -> None:
    form = Form(BF16, 3, 80, 8, False, 6)
    assert form.weights_offset == 3 * 80 * 4
    assert form.maxima_offset == 960 + 128
    assert form.state_bytes % 64 == 0


def compiled(emitter: Callable[[Any, Any], Any], lanes: int) -> Any:
    """Return (function, engine) of void f(float* values, n): each group of lanes through ``emitter``, in place."""
    from llvmlite import binding, ir

    from kvbench.kernels import emit
    from kvbench.kernels.attention_emit import FLOAT, I64, repeat

    made = ir.Module()
    made.triple = binding.get_default_triple()
    function = ir.Function(made, ir.FunctionType(emit.VOID, (I64, I64)), "f")
    b = ir.IRBuilder(function.append_basic_block())

    def body(i: Any, _: Any) -> list[Any]:
        place = b.add(function.args[0], b.mul(i, ir.Constant(I64, 4 * lanes)))
        emit.store(b, place, emitter(b, emit.load(b, place, vector(FLOAT, lanes), 4)), 4)
        return []

    repeat(b, function.args[1], [], body)
    b.ret_void()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()  # the loop hides its count behind empty inline assembly
    to = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten()
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(made)), to)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(engine.get_function_address("f"))
    return call, engine


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("emitter", [exp2, exp2_avx512])
def test_powers_of_two(emitter: Callable[[Any, Any], Any], lanes: int) -> None:
    from llvmlite import binding

    if emitter is exp2_avx512 and not binding.get_host_cpu_features().get("avx512dq"):
        pytest.skip("this CPU has no AVX-512")
    x = np.concatenate(
        [-np.random.default_rng(0).uniform(0, 125, 4096), np.linspace(-8, 0.5, 4096), np.arange(-120, 1, dtype=float)]
    ).astype(np.float32)
    x = x[: len(x) // lanes * lanes]
    ends = np.array([-127.0, -150.0, -1e4, -3.3e38, -127.0, -200.0, -np.inf, -1e30] * 2, np.float32)
    values = np.concatenate([x, ends])
    call, _engine = compiled(emitter, lanes)
    call(values.ctypes.data, len(values) // lanes)
    want = np.exp2(x.astype(np.float64))
    assert np.abs(values[: len(x)] / want - 1.0).max() < 3e-7
    rest = values[len(x) :]
    assert (rest >= 0.0).all()
    assert rest.max() <= 2.0**-126
    assert (rest[[1, 2, 3, 5, 6, 7]] == 0.0).all()
