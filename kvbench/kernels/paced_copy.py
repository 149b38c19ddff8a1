"""A copy in memory at a chosen rate beside something else: so much of the memory's bandwidth is taken.

One pinned thread copies pieces from one buffer to another, each at its moment; behind its schedule it goes on at once,
so the rate asked for is the most it copies. It spins between two pieces: its CPU is its own.
"""

from __future__ import annotations

import queue
import threading
import time
from types import TracebackType

import numpy as np

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.kernels import libc
from kvbench.kernels.intrinsics import atomic_load, atomic_store, call_memcpy, pause, word_store
from kvbench.kernels.jit import kernel
from kvbench.kernels.pace import ABORT, FIRST_SPEC, make_block, now_ns
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.team import pin

PIECE = 1 << 20
COPIED, BEGAN, ENDED = 0, 64, 72  # byte offsets in the copier's lines
STARTED_S = 10.0


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def copy_paced(block: int, own: int, dst: int, src: int, pieces: int, piece: int, period: int, memcpy: int) -> int:
    """Copy the pieces over and over, one each ``period`` ns, until ``block`` says stop; return how many."""
    began = now_ns(block, FIRST_SPEC)
    word_store(own + BEGAN, began)
    due, done, at, now = began, 0, 0, began
    while atomic_load(block + ABORT) == 0:
        call_memcpy(memcpy, dst + at * piece, src + at * piece, piece)
        done += 1
        at = 0 if at + 1 == pieces else at + 1
        atomic_store(own + COPIED, done)
        now = now_ns(block, FIRST_SPEC)
        due = max(due + period, now - 8 * period)  # what was missed is not made up for by a burst
        while now < due and atomic_load(block + ABORT) == 0:
            pause()
            now = now_ns(block, FIRST_SPEC)
    word_store(own + ENDED, now_ns(block, FIRST_SPEC))
    return done


class PacedCopy:
    """Copies ``nbytes`` from ``src`` to ``dst`` in pieces of 1 MiB, over and over, by a thread pinned to ``cpu``.

    ``start(rate)`` in copied bytes a second (None: as fast as it goes), ``stop()`` returns the rate it had. Use as a
    context manager. Raises UsageError for less than one piece.
    """

    def __init__(self, cpu: int, dst: int, src: int, nbytes: int) -> None:
        if nbytes < PIECE:
            raise UsageError("nothing to copy", where="paced copy", got=nbytes, expected=f"{PIECE} bytes or more")
        self._pieces, self._dst, self._src = nbytes // PIECE, dst, src
        memory = np.zeros(24, np.int64)
        skip = -memory.ctypes.data % 64 // 8
        self._block, self._lines = make_block(), memory[skip : skip + 16].reshape(2, 8)
        self._inbox = queue.SimpleQueue[int | None]()
        self._replies = queue.SimpleQueue[BaseException | None]()
        ready = queue.SimpleQueue[tuple[int, str | None]]()
        self._running = False

        def serve() -> None:
            ready.put((threading.get_native_id(), pin(cpu)))
            block, own = int(self._block.ctypes.data), int(self._lines.ctypes.data)
            while (period := self._inbox.get()) is not None:
                failure: BaseException | None = None
                try:
                    copy_paced(block, own, dst, src, self._pieces, PIECE, period, libc.address_of("memcpy"))
                except BaseException as error:  # handed to whoever calls stop()
                    failure = error
                self._replies.put(failure)

        self._thread = threading.Thread(target=serve, name="kvbench-paced", daemon=True)
        self._thread.start()
        self.tid, self.pin_reason = ready.get()

    def start(self, rate: float | None = None) -> None:
        """Start copying; return when the first piece is copied. Raises UsageError for no rate, KvbenchError if busy."""
        if self._running:
            raise KvbenchError("the paced copy already runs", where="paced copy")
        if rate is not None and not rate > 0.0:
            raise UsageError("not a rate", where="paced copy", got=rate, expected="bytes a second")
        self._block[ABORT // 8] = 0
        self._lines[:] = 0
        self._running = True
        self._inbox.put(0 if rate is None else round(PIECE / rate * 1e9))
        deadline = time.monotonic() + STARTED_S
        while not self._lines[0, 0]:
            if time.monotonic() > deadline:
                self.stop()
                raise KvbenchError("the copier did not start", where="paced copy", got=f"nothing in {STARTED_S:g} s")
            time.sleep(0)

    def stop(self) -> float:
        """End the copy and return the bytes a second it copied. Raises KvbenchError when it does not run or failed."""
        if not self._running:
            raise KvbenchError("the paced copy does not run", where="paced copy")
        self._block[ABORT // 8] = 1
        failure = self._replies.get()
        self._running = False
        if failure is not None:
            raise KvbenchError("the copier failed", where="paced copy", got=str(failure)) from failure
        began, ended = int(self._lines[1, 0]), int(self._lines[1, 1])
        return PIECE * int(self._lines[0, 0]) / max(1, ended - began) * 1e9

    def full_rate(self, seconds: float = 0.05) -> float:
        """Return the bytes a second it copies with nothing to wait for."""
        self.start()
        time.sleep(seconds)
        return self.stop()

    def verify(self) -> None:
        """Spoil the first piece of the target, copy, and compare it. Raises VerifyError."""
        target, source = bytes_at(self._dst, PIECE), bytes_at(self._src, PIECE)
        target[:] = ~source
        self.start()
        self.stop()
        if not np.array_equal(target, source):
            raise VerifyError("a piece was not copied", where="paced copy")

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._running:
            self.stop()
        self._inbox.put(None)
        self._thread.join(timeout=STARTED_S)

    def __enter__(self) -> PacedCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
