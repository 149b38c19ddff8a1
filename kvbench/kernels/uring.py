"""Vector reads and writes through io_uring: one ring a thread, a number of them in flight, no library needed.

Container run-times block the system call by default (Docker's seccomp profile since 2023), so it is probed first.
Layout of rings and entries: include/uapi/linux/io_uring.h; READV and WRITEV exist since Linux 5.1.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels import emit, libc
from kvbench.kernels.intrinsics import word_load, word_store
from kvbench.kernels.io_calls import errno_at
from kvbench.kernels.jit import inlined, kernel
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.sync import OUTPUT, enter, leave
from kvbench.kernels.team import Team
from kvbench.memory import libc as calls

from numba.core import types  # isort: skip  jit.py has to be first
from numba.extending import intrinsic  # isort: skip

Rows = np.ndarray[Any, np.dtype[np.int64]]
DEPTH = 32  # in flight a thread: what an NVMe queue needs to be busy, far below the ring
SETUP, ENTER = 425, 426  # the same number on every architecture that has io_uring
READV, WRITEV = 1, 2
GETEVENTS = 1
EINTR, EAGAIN, EBUSY = 4, 11, 16
SQ_RING, CQ_RING, SQES = 0, 0x8000000, 0x10000000  # mmap offsets
SINGLE_MMAP = 1  # feature bit, Linux 5.4: both rings in one mapping

_INT = types.int64
_called: Callable[[Any], Any] = intrinsic  # numba itself hands in the first argument, which no type says


def _emit_enter(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    zero = emit.I64(0)
    return emit.call(builder, args[0], [emit.I64(ENTER), *args[1:], zero, zero], emit.I64)


def _emit_load32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    pointer = builder.inttoptr(args[0], emit.I32.as_pointer())
    return builder.sext(builder.load_atomic(pointer, "acquire", 4), emit.I64)


def _emit_store32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    value, pointer = builder.trunc(args[1], emit.I32), builder.inttoptr(args[0], emit.I32.as_pointer())
    builder.store_atomic(value, pointer, "release", 4)
    return args[1]


@_called
def ring_enter(typingctx: Any, f: Any, fd: Any, submit: Any, wait: Any, flags: Any) -> Any:
    """io_uring_enter through libc's syscall at address f; returns what it submitted, or -1."""
    return _INT(*[_INT] * 5), _emit_enter


@_called
def int32_load(typingctx: Any, address: Any) -> Any:
    """Acquire load of an aligned int32."""
    return _INT(_INT), _emit_load32


@_called
def int32_store(typingctx: Any, address: Any, value: Any) -> Any:
    """Release store of the low 32 bits; returns the value."""
    return _INT(_INT, _INT), _emit_store32


@inlined
def _entry(at: int, opcode: int, fd: int, vector: int, count: int, offset: int, tag: int) -> None:
    """Write a submission entry of 64 bytes: opcode and fd, offset, address, length, tag, zeros."""
    word_store(at, opcode | (fd << 32))
    word_store(at + 8, offset)
    word_store(at + 16, vector)
    word_store(at + 24, count)
    word_store(at + 32, tag)
    word_store(at + 40, 0)
    word_store(at + 48, 0)
    word_store(at + 56, 0)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def ring_kernel(
    ctl: int, member: int, members: int, rings: int, opcode: int, fd: int, rows: int, bounds: int, depth: int,
    syscall: int, errno: int,
) -> int:  # fmt: skip
    """Submit and await this member's rows; output line: row + 1 of a failed one (0: none), what it returned."""
    lo = word_load(bounds + 8 * member)
    hi = word_load(bounds + 8 * (member + 1))
    ring = rings + 64 * member
    ring_fd, sq_tail, sq_mask, sqes = word_load(ring), word_load(ring + 8), word_load(ring + 16), word_load(ring + 24)
    cq_head, cq_tail, cq_mask, cqes = (
        word_load(ring + 32), word_load(ring + 40), word_load(ring + 48), word_load(ring + 56),
    )  # fmt: skip
    out = ctl + OUTPUT + 64 * member
    word_store(out, 0)
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    sent, taken, done, pending = lo, lo, lo, 0
    tail, head = int32_load(sq_tail), int32_load(cq_head)
    while done < hi:
        while sent < hi and sent - done < depth:
            row = rows + 32 * sent
            _entry(
                sqes + 64 * (tail & sq_mask), opcode, fd, word_load(row), word_load(row + 8), word_load(row + 16), sent
            )
            tail += 1
            sent += 1
        int32_store(sq_tail, tail)
        pending = sent - taken
        got = ring_enter(syscall, ring_fd, pending, 1, GETEVENTS)
        if got < 0:
            code = errno_at(errno)
            if code not in (EINTR, EAGAIN, EBUSY):  # a signal, or completions to be taken first
                word_store(out + 8, -code)
                word_store(out, taken + 1)
                break
            got = 0
        taken += got
        until = int32_load(cq_tail)
        while head != until:
            at = cqes + 16 * (head & cq_mask)
            tag, result = word_load(at), int32_load(at + 8)
            if result != word_load(rows + 32 * tag + 24) and word_load(out) == 0:
                word_store(out + 8, result)
                word_store(out, tag + 1)
                hi = sent  # nothing new; what is in flight still writes to the buffers, so it is awaited
            head = (head + 1) << 32 >> 32
            done += 1
        int32_store(cq_head, head)
    return leave(ctl, member, members, start)


class Ring:
    """One ring of ``entries``; ``words`` is what the kernel needs of it, int64 (8,).

    Raises Unavailable, with the reason, where the system call is missing, forbidden or too old.
    """

    def __init__(self, entries: int) -> None:
        self.fd = -1
        self._maps: list[tuple[int, int]] = []
        parameters = np.zeros(30, np.uint32)
        function = ctypes.CDLL(None, use_errno=True).syscall
        function.restype = ctypes.c_long
        fd = int(function(ctypes.c_long(SETUP), ctypes.c_long(entries), ctypes.c_void_p(parameters.ctypes.data)))
        if fd < 0:
            code = ctypes.get_errno()
            raise Unavailable(
                "io_uring cannot be used", where="io_uring_setup", got=os.strerror(code),
                mend="container run-times forbid it by default, kernel.io_uring_disabled may too",
            )  # fmt: skip
        self.fd = fd
        try:
            self._map(parameters)
        except BaseException:
            self.close()
            raise

    def _map(self, parameters: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        p = [int(value) for value in parameters]
        sq_entries, cq_entries, features = p[0], p[1], p[5]
        if not features & SINGLE_MMAP:
            raise Unavailable("io_uring is too old here", got=f"features {features:#x}", expected="Linux 5.4 or later")
        sq, cq = p[10:20], p[20:30]  # offsets: head, tail, mask, entries, flags, dropped, array / overflow, cqes
        size = max(sq[6] + 4 * sq_entries, cq[5] + 16 * cq_entries)
        rings, sqes = self._mmap(size, SQ_RING), self._mmap(64 * sq_entries, SQES)
        slots = bytes_at(rings + sq[6], 4 * sq_entries).view(np.uint32)
        slots[:] = np.arange(sq_entries, dtype=np.uint32)  # slot i always holds entry i
        masks = [int(bytes_at(rings + at, 4).view(np.uint32)[0]) for at in (sq[2], cq[2])]
        self.words = [
            self.fd, rings + sq[1], masks[0], sqes, rings + cq[0], rings + cq[1], masks[1], rings + cq[5],
        ]  # fmt: skip

    def _mmap(self, nbytes: int, offset: int) -> int:
        try:
            at = calls.mmap(0, nbytes, calls.PROT_READ | calls.PROT_WRITE, calls.MAP_SHARED, self.fd, offset)
        except OSError as error:
            raise Unavailable("io_uring's rings cannot be mapped", got=error.strerror) from error
        self._maps.append((at, nbytes))
        return at

    def close(self) -> None:
        """Give the ring back. Closing twice is fine."""
        for at, nbytes in self._maps:
            calls.munmap(at, nbytes)
        self._maps = []
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@cache
def probe() -> str:
    """Return why io_uring cannot be used here, empty when it can: a ring of one entry is made and given back."""
    try:
        Ring(1).close()
    except Unavailable as error:
        return str(error)
    return ""


class RingCalls:
    """Vector calls on ``fd``, one a row of int64 (n, 4): address and number of vectors, file offset, bytes expected.

    ``bounds``, int64 (members + 1,), gives each member of ``team`` its part and its own ring; ``keep`` is kept alive.
    Raises UsageError for no rows, Unavailable where io_uring cannot be had.
    """

    def __init__(self, write: bool, fd: int, rows: Rows, bounds: Rows, team: Team, keep: object = None) -> None:
        self.rows = np.ascontiguousarray(rows, np.int64)
        self._bounds = np.ascontiguousarray(bounds, np.int64)
        parts = len(self._bounds) == len(team) + 1 and self._bounds[0] == 0 and self._bounds[-1] == len(rows)
        if self.rows.ndim != 2 or self.rows.shape[1] != 4 or not len(rows) or not parts:
            raise UsageError("not rows of vector calls", where="kernels.uring", got=f"{rows.shape}")
        self.team, self._fd, self._opcode, self._keep = team, fd, WRITEV if write else READV, keep
        self._rings: list[Ring] = []
        try:
            for _ in range(len(team)):
                self._rings.append(Ring(DEPTH))
        except BaseException:
            self.close()
            raise
        self._words = np.array([ring.words for ring in self._rings], np.int64)

    def run(self) -> float:
        """Make every call once; return the seconds until the last completed. Raises Unavailable for one that failed."""
        if not self._rings:
            raise UsageError("the rings are closed", where="kernels.uring")
        seconds = self.team.run(
            ring_kernel, int(self._words.ctypes.data), self._opcode, self._fd, int(self.rows.ctypes.data),
            int(self._bounds.ctypes.data), DEPTH, libc.address_of("syscall"), libc.address_of("__errno_location"),
        )  # fmt: skip
        for failed, done in self.team.outputs[:, :2].tolist():
            if failed:
                wanted = int(self.rows[failed - 1, 3])
                got = os.strerror(-done) if done < 0 else f"{done} of {wanted} bytes"
                raise Unavailable("io_uring failed", where=f"call {failed - 1} of {len(self.rows)}", got=got)
        return seconds

    def close(self) -> None:
        """Give the rings back. Closing twice is fine."""
        for ring in self._rings:
            ring.close()
        self._rings = []

    def __enter__(self) -> RingCalls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
