"""Fixed loops do the work they count; intrinsics lower on machines this test does not run on; compilations are seen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.team import Team

CPU = min(os.sched_getaffinity(0))


@pytest.fixture(params=[1, 2])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team([CPU] * request.param) as made:
        yield made


def test_jump_is_the_generator_step_by_step() -> None:
    from kvbench.kernels.fixed import FIRST, INCREMENT, MULTIPLIER, jump

    state = FIRST
    for steps in range(20):
        assert jump(FIRST, steps) == state
        state = (state * MULTIPLIER + INCREMENT) % 2**64


@pytest.mark.parametrize("name", ["IntegerChain", "FmaChains"])
def test_the_loops_are_done_and_checked(name: str, team: Team) -> None:
    from kvbench.kernels import fixed

    work = getattr(fixed, name)(team)
    with pytest.raises(VerifyError):
        work.verify()
    for reps in (1, 5):
        assert work.run(reps) > 0
        work.verify()
    with pytest.raises(UsageError):
        work.run(0)


def test_fewer_integer_steps_are_found(team: Team) -> None:
    from kvbench.kernels.fixed import IntegerChain

    work = IntegerChain(team)
    work.run(2)
    work._steps += 1
    with pytest.raises(VerifyError):
        work.verify()


def test_a_wrong_fma_lane_is_found(team: Team) -> None:
    from kvbench.kernels.fixed import FmaChains

    work = FmaChains(team)
    assert work.flops == 1000 * 6 * 16 * 2 * len(team)
    work.run(1)
    work._results[-1, -1, -1] = np.nextafter(work._results[-1, -1, -1], np.float32(9))
    with pytest.raises(VerifyError):
        work.verify()


def test_a_compilation_is_counted_once_and_a_call_never() -> None:
    import numba

    from kvbench.kernels.compile_count import compile_count, watch

    watch()

    @numba.njit
    def double(x: int) -> int:
        return 2 * x

    before = compile_count()
    double(1)
    assert compile_count() == before + 1
    double(2)
    assert compile_count() == before + 1
    double(1.0)  # a new type is a new compilation: what T24 is about
    assert compile_count() == before + 2


def lower(triple: str, body: Callable[[Any, list[Any]], Any], arguments: int) -> str:
    """Return the assembly of a function of i64 arguments whose body ``body`` emits, for the machine ``triple``."""
    from llvmlite import binding, ir

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    body(builder, list(function.args))
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    machine = binding.Target.from_triple(triple).create_target_machine(opt=2)
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize(
    ("triple", "machine", "words"),
    [
        ("x86_64-unknown-linux-gnu", "x86_64", ("movnt", "prefetcht1", "sfence", "pause", "lock")),
        ("aarch64-unknown-linux-gnu", "aarch64", ("stnp", "prfm\tpldl2keep", "dmb", "yield", "ldaxr|ldadd|__aarch64")),
        ("riscv64-unknown-linux-gnu", "riscv64", ("fence", "amoadd|__atomic")),
    ],
)
def test_every_instruction_lowers_on_other_machines(triple: str, machine: str, words: tuple[str, ...]) -> None:
    from llvmlite import binding

    from kvbench.kernels import emit

    binding.initialize_all_targets()
    try:
        binding.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this LLVM has no back-end for {triple}")

    def body(b: Any, args: list[Any]) -> None:
        to, source, value = args
        line = emit.load(b, source, emit.LINE)
        emit.prefetch(b, source, 2)
        emit.barrier(b)
        emit.store_nt(b, to, b.add(line, emit.ramp(b, value, emit.opaque(b, value))))
        emit.store(b, to, emit.lane_sum(b, line), 8)
        emit.drain(b, machine)
        emit.pause(b, machine)
        emit.atomic_add(b, to, value)
        emit.atomic_store(b, to, emit.atomic_load(b, source))

    text = lower(triple, body, 3)
    for word in words:
        assert any(option in text for option in word.split("|")), (word, text)
