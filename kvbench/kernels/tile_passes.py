"""Products over operand tiles that are fetched meanwhile: a producer that loads tiles and a consumer that multiplies.

Member 1 of the team makes the loads (pread or memcpy by address, no Python between two of them) into a ring of slots,
member 0 calls BLAS on each. A load waits until its slot is free, a product until its tile is there; both publish how
far they are in a word of their own. With one slot nothing can run ahead: then member 0 loads and multiplies in turns.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels import emit, libc
from kvbench.kernels.intrinsics import (
    atomic_load,
    atomic_store,
    call_yield,
    pause,
    word_load,
    word_store,
)
from kvbench.kernels.io_calls import call_io, errno_at
from kvbench.kernels.jit import kernel, part
from kvbench.kernels.sync import ABORT, OUTPUT, YIELD, enter, leave, stamp
from kvbench.kernels.team import Team

from numba.core import types  # isort: skip  jit.py has to be first
from numba.extending import intrinsic  # isort: skip

Rows = np.ndarray[Any, np.dtype[np.int64]]

LOAD_WORDS = 6  # function, four arguments, result
PRODUCT_WORDS = 16  # load it needs, loads done with after it, BLAS, its 13 pointers
PRODUCED, CONSUMED, FAILED, SPECS = 0, 64, 128, 192  # byte offsets in the shared lines, then a timespec line a member
PLAN = 12
PATIENCE = 4_000_000  # pauses, about 0.1 s: a yield gives a whole slice away to whoever else wants the CPU
APART, BESIDE, IN_TURNS = 0, 1, 2  # how the sides run: unaware of each other, at once, or both on member 0
_INT = types.int64
_called: Callable[[Any], Any] = intrinsic


def _emit_gemm(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    at = args[0]

    def word(index: int) -> Any:
        return emit.load(builder, builder.add(at, emit.I64(8 * index)), emit.I64, 8)

    emit.call(builder, word(2), [word(3 + index) for index in range(13)], emit.VOID)
    return emit.I64(0)


@_called
def call_gemm(typingctx: Any, row: Any) -> Any:
    """Call BLAS's gemm as the product row at address ``row`` says."""
    return _INT(_INT), _emit_gemm


@part
def reached(ctl: int, lines: int, word: int, target: int) -> bool:
    """Wait until the word at offset ``word`` of ``lines`` reaches ``target``; False when a side failed."""
    spins = 0
    while atomic_load(lines + word) < target:
        if atomic_load(lines + FAILED) != 0 or atomic_load(ctl + ABORT) != 0:
            return False
        pause()
        spins += 1
        if spins > PATIENCE:
            call_yield(word_load(ctl + YIELD))
    return True


@part
def load(ctl: int, plan: int, i: int, out: int, spec: int) -> bool:
    """Make load ``i``; False, and both sides told, when it failed."""
    at = word_load(plan + 24) + 8 * LOAD_WORDS * i
    lines, stamps, pread = word_load(plan + 40), word_load(plan + 48) + 16 * i, word_load(plan + 72)
    function, a, b = word_load(at), word_load(at + 8), word_load(at + 16)
    c, d, wanted = word_load(at + 24), word_load(at + 32), word_load(at + 40)
    word_store(stamps, stamp(ctl, spec))
    done = call_io(function, a, b, c, d)
    while 0 < done < wanted and function == pread:
        more = call_io(function, a, b + done, c - done, d + done)
        if more <= 0:
            if more < 0:
                done = more
            break
        done += more
    if done != wanted:
        word_store(out + 8, errno_at(word_load(plan + 80)))
        word_store(out + 16, done)
        word_store(out, i + 1)
        atomic_store(lines + FAILED, 1)
        return False
    word_store(stamps + 8, stamp(ctl, spec))
    atomic_store(lines + PRODUCED, i + 1)
    return True


@part
def produce(ctl: int, plan: int, first: int, out: int, spec: int) -> None:
    """Make the loads from ``first`` on, each when its slot is free."""
    loads, depth, lines, mode = word_load(plan), word_load(plan + 16), word_load(plan + 40), word_load(plan + 64)
    for i in range(first, loads):
        if mode == BESIDE and not reached(ctl, lines, CONSUMED, i - depth + 1):
            return
        if not load(ctl, plan, i, out, spec):
            return


@part
def consume(ctl: int, plan: int, out: int, spec: int) -> int:
    """Make the products, each when its load is done; in turns this side loads as well. Returns how many."""
    count: int = word_load(plan + 8)
    loads, rows, lines = word_load(plan), word_load(plan + 32), word_load(plan + 40)
    stamps, mode = word_load(plan + 56), word_load(plan + 64)
    loaded = 0
    for i in range(count):
        at = rows + 8 * PRODUCT_WORDS * i
        needs = word_load(at)
        if mode == BESIDE and not reached(ctl, lines, PRODUCED, needs):
            return i
        while mode == IN_TURNS and loaded < min(needs, loads):
            if not load(ctl, plan, loaded, out, spec):
                return i
            loaded += 1
        word_store(stamps + 16 * i, stamp(ctl, spec))
        call_gemm(at)
        word_store(stamps + 16 * i + 8, stamp(ctl, spec))
        atomic_store(lines + CONSUMED, word_load(at + 8))
    if mode == IN_TURNS:
        produce(ctl, plan, loaded, out, spec)
    return count


@kernel("int64(int64, int64, int64, int64)")
def tile_kernel(ctl: int, member: int, members: int, plan: int) -> int:
    """Multiply (member 0) or load (member 1) as ``plan`` says.

    Output lines of both: a failed load + 1, its errno and its result; member 0's fourth word: the products done.
    """
    out = ctl + OUTPUT + 64 * member
    word_store(out, 0)
    spec = word_load(plan + 40) + SPECS + 64 * member
    start: int = enter(ctl, member, members)
    if start < 0:
        return -1
    if member == 0:
        word_store(out + 24, consume(ctl, plan, out, spec))
    elif member == 1 and word_load(plan + 64) != IN_TURNS:
        produce(ctl, plan, 0, out, spec)
    passed: int = leave(ctl, member, members, start)
    return passed


def sgemm_address() -> int:
    """Return the address of scipy's sgemm (Fortran calling convention, 32-bit integers). Raises Unavailable."""
    from scipy.linalg import cython_blas

    capsule = cython_blas.__pyx_capi__["sgemm"]
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    declared = name(capsule)
    if b"int *" not in declared:
        raise Unavailable("the BLAS of scipy has other integers", where="sgemm", got=declared, expected="int *")
    return int(pointer(capsule, declared))


class Products:
    """The rows of a sequence of C += A B or C = A B in float32, column-major, by :func:`sgemm_address`.

    ``add`` takes the load whose tile it needs (counted from 1; 0: none), how many loads are done with afterwards, the
    three sizes, and address and leading dimension of A, B and C; ``first`` overwrites C.
    """

    def __init__(self, count: int) -> None:
        self.rows = np.zeros((max(1, count), PRODUCT_WORDS), np.int64)
        self._sizes = np.zeros((max(1, count), 6), np.int32)
        self._letter, self._scalars = np.frombuffer(b"N\0", np.uint8).copy(), np.array([0.0, 1.0], np.float32)
        self._function, self.count = sgemm_address(), 0

    def add(
        self, needs: int, frees: int, size: tuple[int, int, int], a: tuple[int, int], b: tuple[int, int],
        c: tuple[int, int], *, first: bool,
    ) -> None:  # fmt: skip
        i, (m, n, k) = self.count, size
        self._sizes[i] = (m, n, k, a[1], b[1], c[1])
        at = int(self._sizes.ctypes.data) + i * self._sizes.strides[0]
        letter, zero = int(self._letter.ctypes.data), int(self._scalars.ctypes.data)
        self.rows[i] = (
            needs, frees, self._function, letter, letter, at, at + 4, at + 8, zero + 4, a[0], at + 12, b[0], at + 16,
            zero if first else zero + 4, c[0], at + 20,
        )  # fmt: skip
        self.count += 1


class TilePass:
    """``loads`` (rows as :func:`io_calls.call_row` makes them) into ``depth`` slots, and ``products`` on them.

    ``team``: its first member multiplies and its second one loads; with one slot the first does both. After a run,
    ``load_stamps`` and ``product_stamps`` (n, 2) hold begin and end of each in nanoseconds of the monotonic clock.
    """

    def __init__(self, loads: Rows, products: Products, depth: int, team: Team, keep: object = None) -> None:
        if len(team) < min(2, depth):
            raise UsageError("a producer and a consumer need two threads", where="kernels.tile_passes", got=len(team))
        if loads.dtype != np.int64 or loads.ndim != 2 or loads.shape[1:] != (LOAD_WORDS,) or depth < 1:
            raise UsageError(
                "not loads", where="kernels.tile_passes", got=f"{loads.dtype} {loads.shape}, {depth} slots"
            )
        self.loads, self.products, self.depth, self.team = np.ascontiguousarray(loads), products, depth, team
        self._keep = keep
        self.load_stamps = np.zeros((max(1, len(loads)), 2), np.int64)
        self.product_stamps = np.zeros((max(1, products.count), 2), np.int64)
        raw = np.zeros(SPECS // 8 + 8 * len(team) + 8, np.int64)
        skip = -raw.ctypes.data % 64 // 8
        self._lines = raw[skip:]
        self._plan = np.zeros(PLAN, np.int64)
        self._fixed = libc.address_of("pread"), libc.address_of("__errno_location")

    def run(self, loads: int | None = None, products: int | None = None, *, apart: bool = False) -> float:
        """Return the seconds of the first ``loads`` and ``products`` (default: all of both).

        ``apart``: neither side waits for the other, for one side alone. Raises Unavailable naming a load that failed.
        """
        count = len(self.loads) if loads is None else loads
        work = self.products.count if products is None else products
        turns = IN_TURNS if self.depth == 1 else (APART if apart else BESIDE)
        self._lines[: SPECS // 8] = 0
        self._plan[: 8 + 3] = (
            count, work, self.depth, int(self.loads.ctypes.data), int(self.products.rows.ctypes.data),
            int(self._lines.ctypes.data), int(self.load_stamps.ctypes.data), int(self.product_stamps.ctypes.data),
            turns, *self._fixed,
        )  # fmt: skip
        seconds = self.team.run(tile_kernel, int(self._plan.ctypes.data))
        for failed, code, done in self.team.outputs[:2, :3].tolist():
            if failed:
                wanted = self.loads[failed - 1, 5]
                got = f"{os.strerror(code)} (errno {code})" if done < 0 else f"{done} of {wanted} bytes"
                raise Unavailable("a tile could not be read", where=f"load {failed - 1} of {count}", got=got)
        done = int(self.team.outputs[0, 3])
        if done != work:
            raise Unavailable("the products ended early", where="kernels.tile_passes", got=done, expected=str(work))
        return seconds
