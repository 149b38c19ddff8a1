"""Loops over libc calls that move bytes (pread, pwrite, preadv, pwritev, fdatasync, msync, memcpy), by a team.

Each call goes through the function's address in compiled code, without Python between two of them. A pread or pwrite
that moves less than asked is finished by further ones; a vector call that comes back short would need its vector cut
and counts as failed. A failure stops its member, which leaves the row, errno and result in its output line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels import emit, libc
from kvbench.kernels.intrinsics import word_load, word_store
from kvbench.kernels.jit import kernel
from kvbench.kernels.sync import OUTPUT, enter, leave
from kvbench.kernels.team import Team

from numba.core import types  # isort: skip  jit.py has to be first
from numba.extending import intrinsic  # isort: skip

Rows = np.ndarray[Any, np.dtype[np.int64]]

_INT = types.int64
_called: Callable[[Any], Any] = intrinsic  # numba itself hands in the first argument, which no type says


def _emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return emit.call(builder, args[0], list(args[1:]), emit.I64)


def _emit_errno(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    place = emit.call(builder, args[0], [], emit.I64)
    return builder.zext(emit.load(builder, place, emit.I32, 4), emit.I64)


@_called
def call_io(typingctx: Any, f: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The function at address f on four integers or pointers; returns its ssize_t."""
    return _INT(*[_INT] * 5), _emit


@_called
def errno_at(typingctx: Any, f: Any) -> Any:
    """This thread's errno; f is the address of __errno_location."""
    return _INT(_INT), _emit_errno


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def io_kernel(
    ctl: int, member: int, members: int, rows: int, bounds: int, pread: int, pwrite: int, errno: int
) -> int:  # fmt: skip
    """Make this member's calls; output line: row + 1 of a failed one (0: none), its errno, what it returned."""
    lo = word_load(bounds + 8 * member)
    hi = word_load(bounds + 8 * (member + 1))
    out = ctl + OUTPUT + 64 * member
    word_store(out, 0)
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    for i in range(lo, hi):
        at = rows + 48 * i
        function, a, b = word_load(at), word_load(at + 8), word_load(at + 16)
        c, d, wanted = word_load(at + 24), word_load(at + 32), word_load(at + 40)
        done = call_io(function, a, b, c, d)
        while 0 < done < wanted and (function in (pread, pwrite)):
            more = call_io(function, a, b + done, c - done, d + done)  # one call moves at most 2 GiB - 4 KiB
            if more <= 0:
                if more < 0:
                    done = more
                break
            done += more
        if done != wanted:
            word_store(out + 8, errno_at(errno))
            word_store(out + 16, done)
            word_store(out, i + 1)
            break
    return leave(ctl, member, members, start)


def call_row(function: str, *args: int, returns: int) -> list[int]:
    """Return the row of a call of libc's ``function`` with up to four arguments; ``returns`` is what success gives."""
    return [libc.address_of(function), *args, *[0] * (4 - len(args)), returns]


class IoCalls:
    """Calls, one a row of int64 (n, 6): function address, four arguments, and the result that means success.

    ``bounds``, int64 (members + 1,), gives each member of ``team`` its part; a member makes its calls in order. Rows,
    bounds and whatever ``keep`` holds (vectors the rows point to) are kept alive here. Raises UsageError for no rows or
    other arrays.
    """

    def __init__(self, rows: Rows, bounds: Rows, team: Team, keep: object = None) -> None:
        if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1:] != (6,) or not rows.flags.c_contiguous:
            raise UsageError("not rows of calls", where="kernels.io_calls", got=f"{rows.dtype} {rows.shape}")
        edges = np.ascontiguousarray(bounds, np.int64)
        parts = len(edges) == len(team) + 1 and edges[0] == 0 and edges[-1] == len(rows)
        if not len(rows) or not parts or bool((np.diff(edges) < 0).any()):
            raise UsageError(
                "not parts of the rows", where="kernels.io_calls", got=edges.tolist(), expected=f"{len(rows)} rows"
            )
        self.rows, self.team, self._bounds, self._keep = rows, team, edges, keep
        self._fixed = tuple(libc.address_of(name) for name in ("pread", "pwrite", "__errno_location"))

    def run(self) -> float:
        """Make every call once; return the seconds. Raises Unavailable naming the call that failed, and why."""
        seconds = self.team.run(io_kernel, int(self.rows.ctypes.data), int(self._bounds.ctypes.data), *self._fixed)
        for failed, code, done in self.team.outputs[:, :3].tolist():
            if failed:
                row = self.rows[failed - 1].tolist()
                got = f"{os.strerror(code)} (errno {code})" if done < 0 else f"{done} of {row[5]} bytes"
                raise Unavailable(f"{_name(row[0])} failed", where=f"call {failed - 1} of {len(self.rows)}", got=got)
        return seconds


def _name(address: int) -> str:
    known = ("pread", "pwrite", "preadv", "pwritev", "fdatasync", "msync", "memcpy")
    return next((name for name in known if libc.address_of(name) == address), "a call")
