"""Loops over calls of C functions that map memory: which of them were made, where one failed, how long each took.

Unlike :mod:`kvbench.kernels.driver_loop` these say which call of a row of calls failed, so that a caller can undo
exactly those before it, and may run on a team. The function's address travels as an argument, as in all kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError
from kvbench.kernels import emit, libc
from kvbench.kernels.intrinsics import barrier, byte_store, call_clock, opaque, word_load, word_store
from kvbench.kernels.jit import kernel, numba, part
from kvbench.kernels.sync import enter, leave, share_start
from kvbench.kernels.team import Team

from numba.core import types  # isort: skip  jit.py has to be first
from numba.extending import intrinsic  # isort: skip

Rows = npt.NDArray[np.int64]
Results = npt.NDArray[np.int64]
ARGUMENTS = 6
_INT = types.int64
uint64 = numba.uint64


def _emit_call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    # Six integer arguments travel in registers on every ABI kvbench knows, so a function that takes fewer does not see
    # the rest.
    return emit.call(builder, args[0], list(args[1:]), emit.I64)


def _emit_low(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    # The functions return int or a pointer: in the low half both say -1 when they fail, and the address of a mapping,
    # a multiple of the page size, never does. The high half of an int is anything.
    return builder.sext(builder.trunc(args[0], emit.I32), emit.I64)


def _emit_errno(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    place = emit.call(builder, args[0], [], emit.I64)
    return builder.sext(emit.load(builder, place, emit.I32, 4), emit.I64)


_called: Callable[[Any], Any] = intrinsic  # numba itself hands in the first argument, which no type says


@_called
def _call6(typingctx: Any, f: Any, a: Any, b: Any, c: Any, d: Any, e: Any, g: Any) -> Any:
    return _INT(*[_INT] * 7), _emit_call


@_called
def _low(typingctx: Any, value: Any) -> Any:
    return _INT(_INT), _emit_low


@_called
def _errno(typingctx: Any, location: Any) -> Any:
    return _INT(_INT), _emit_errno


@part
def _calls(
    function: int, errno: int, rows: int, lo: int, hi: int, codes: int, results: int, stamps: int, clock: int,
    clock_id: int,
) -> int:  # fmt: skip
    """Make calls ``lo`` to ``hi``; return how many, the failed one not counted. Each writes 0 or its error to codes."""
    for i in range(lo, hi):
        at = rows + 48 * i
        if stamps != 0:
            call_clock(clock, clock_id, stamps + 32 * i)
        got = _call6(
            function, word_load(at), word_load(at + 8), word_load(at + 16), word_load(at + 24), word_load(at + 32),
            word_load(at + 40),
        )  # fmt: skip
        code = _low(got)
        if errno != 0:
            code = _errno(errno) if code == -1 else 0
        if stamps != 0:
            call_clock(clock, clock_id, stamps + 32 * i + 16)
        if results != 0:
            word_store(results + 8 * i, got)
        word_store(codes + 8 * i, code)
        if code != 0:
            return i - lo
    return hi - lo


@kernel("int64(int64, int64, int64, int64, int64, int64)")
def _alone(function: int, errno: int, rows: int, count: int, codes: int, results: int) -> int:
    return _calls(function, errno, rows, 0, count, codes, results, 0, 0, 0)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _together(
    ctl: int, member: int, members: int, function: int, errno: int, rows: int, count: int, codes: int, results: int,
    stamps: int, clock: int, clock_id: int,
) -> int:  # fmt: skip
    """Make this member's share of the calls between the meeting and the parting of the team."""
    lo = share_start(count, member, members)
    hi = share_start(count, member + 1, members)
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    _calls(function, errno, rows, lo, hi, codes, results, stamps, clock, clock_id)
    return leave(ctl, member, members, start)


@kernel("void(int64, int64, int64, int64, uint64)")
def touch_many(addresses: int, count: int, nbytes: int, step: int, value: int) -> None:
    """Write one byte every ``step`` bytes of the ``nbytes`` at each of ``count`` addresses (int64 at ``addresses``)."""
    for i in range(count):
        first = word_load(addresses + 8 * i)
        for at in range(0, nbytes, step):
            byte_store(opaque(first + at), value)
    barrier()


NOT_MADE = -1


@dataclass(frozen=True, slots=True)
class Failure:
    """Call ``index`` was the first in order to fail, with ``code``; ``made`` says of each whether it succeeded."""

    index: int
    code: int
    made: npt.NDArray[np.bool_]


class Runner(Protocol):
    """Makes one call a row, in order within a thread."""

    def __call__(self, function: int, rows: Rows, *, errno: bool, results: Results | None = None) -> Failure | None:
        """Call the C function at ``function`` once a row (int64 [calls, 6]); return the failure, None without one.

        ``errno``: the function fails by returning -1 and says why in errno; else by returning another int than 0.
        ``results`` (int64 [calls]) receives what each call returned.
        """


def _checked(rows: Rows) -> Rows:
    if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != ARGUMENTS or not rows.flags.c_contiguous:
        raise UsageError(
            "not rows of arguments",
            where="call loop",
            got=f"{rows.dtype} {rows.shape}",
            expected=f"int64 [n, {ARGUMENTS}]",
        )
    return rows


def _outcome(codes: npt.NDArray[np.int64]) -> Failure:
    bad = np.flatnonzero(codes > 0)
    if not len(bad):
        bad = np.flatnonzero(codes != 0)
    return Failure(int(bad[0]), int(codes[bad[0]]), codes == 0)


def errno_location() -> int:
    """Return the address of the function that tells where a thread's errno is (glibc and musl name it so)."""
    return libc.address_of("__errno_location")


def alone(function: int, rows: Rows, *, errno: bool, results: Results | None = None) -> Failure | None:
    """Run in the calling thread; see :class:`Runner`."""
    codes = np.full(len(_checked(rows)), NOT_MADE, np.int64)
    made = _alone(
        function, errno_location() if errno else 0, rows.ctypes.data, len(rows), codes.ctypes.data,
        0 if results is None else results.ctypes.data,
    )  # fmt: skip
    return None if made == len(rows) else _outcome(codes)


class TeamRunner:
    """A runner on ``team``, each member a contiguous part of the rows; keeps the time of what is ``counted``.

    ``seconds``: release of the members to the last arrival, summed since :meth:`begin`; ``calls`` are theirs.
    ``stamps`` keeps the time of each call too, an array a run in :attr:`each` (s); a reading of the clock is in it.
    """

    def __init__(self, team: Team, *, stamps: bool = False) -> None:
        self.team, self.stamps = team, stamps
        self.counted = False
        self.seconds = 0.0
        self.calls = 0
        self.each: list[npt.NDArray[np.float64]] = []

    def begin(self) -> None:
        """Count from now on, from zero."""
        self.counted, self.seconds, self.calls = True, 0.0, 0
        self.each.clear()

    def end(self) -> float:
        """Count no longer; return the seconds."""
        self.counted = False
        return self.seconds

    def __call__(self, function: int, rows: Rows, *, errno: bool, results: Results | None = None) -> Failure | None:
        """See :class:`Runner`."""
        codes = np.full(len(_checked(rows)), NOT_MADE, np.int64)
        times = np.zeros((len(rows), 2, 2), np.int64) if self.stamps and self.counted else None
        seconds = self.team.run(
            _together, function, errno_location() if errno else 0, rows.ctypes.data, len(rows), codes.ctypes.data,
            0 if results is None else results.ctypes.data, 0 if times is None else times.ctypes.data,
            libc.address_of("clock_gettime"), libc.CLOCK,
        )  # fmt: skip
        if self.counted:
            self.seconds += seconds
            self.calls += len(rows)
        if times is not None:
            spent = times[:, 1] - times[:, 0]
            self.each.append(spent[:, 0] + spent[:, 1] * 1e-9)
        return _outcome(codes) if codes.any() else None
