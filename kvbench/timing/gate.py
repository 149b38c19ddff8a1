"""Was a sample disturbed? Gates read the kernel's accounting of the measuring threads at block boundaries.

CPU time over wall says nothing for work that waits (a 1 MiB O_DIRECT read has 0.09 on a quiet and on a hogged core);
the time a *runnable* thread spent waiting for a core does (findings.md, Timing). That is field 2 of ``schedstat``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Literal, Protocol

GateKind = Literal["delay", "cpu"]

# Measured on 1 MiB direct reads: 0.015 on a quiet core, 0.147 with two hogs on it. The limit is their geometric mean.
DELAY_SHARE_LIMIT = 0.05
# Pure compute that got less of its core than this had company; the clock reads and the call itself cost well under 1 %.
CPU_SHARE_FLOOR = 0.95

_FIELD_BYTES = 96  # three decimal u64 and separators need at most 63


class Gate(Protocol):
    """Protocol of a gate. ``reason`` is empty while it works and says why once it cannot."""

    kind: GateKind
    reason: str

    def rebase(self) -> None:
        """Start a new interval now, forgetting what happened since the last boundary."""

    def disturbed(self, wall_ns: int) -> bool:
        """Close the interval of ``wall_ns`` and start the next: was it disturbed? False once the gate is off."""

    def close(self) -> None:
        """Release what the gate holds open."""


class DelayGate:
    """Run-queue delay of each thread over the wall time of a block; the worst thread decides."""

    kind: GateKind = "delay"

    def __init__(self, tids: Sequence[int] = (), limit: float = DELAY_SHARE_LIMIT) -> None:
        self.reason = ""
        self.limit = limit
        self._fds: list[int] = []
        self._last: list[int] = []
        self._disturbed = 0
        ids = tuple(dict.fromkeys(tids)) or (threading.get_native_id(),)
        try:
            for tid in ids:
                self._fds.append(os.open(f"/proc/self/task/{tid}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
            own = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._fds.append(own)
            # A kernel with accounting switched off prints "0 0 0" for ever, which would read as "never disturbed".
            # The thread that asks has certainly run, so a zero in its first field gives that away.
            ran = int(os.pread(own, _FIELD_BYTES, 0).split(b" ", 2)[0])
            self._fds.pop()
            os.close(own)
            if ran == 0:
                self._off("schedstat counts nothing on this kernel")
            self._last = [0] * len(self._fds)
            self.rebase()
        except (OSError, ValueError, IndexError) as error:
            self._off(f"schedstat of a measuring thread cannot be read ({_why(error)})")

    def rebase(self) -> None:
        self.disturbed(1)

    def disturbed(self, wall_ns: int) -> bool:
        worst = 0
        last = self._last
        try:
            for i, fd in enumerate(self._fds):
                delay = int(os.pread(fd, _FIELD_BYTES, 0).split(b" ", 2)[1])
                if delay - last[i] > worst:
                    worst = delay - last[i]
                last[i] = delay
        except (OSError, ValueError, IndexError) as error:
            self._off(f"schedstat of a measuring thread cannot be read ({_why(error)})")
            return False
        return worst > self.limit * wall_ns

    def close(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def _off(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.close()


class CpuGate:
    """CPU time of each thread over the wall time of a block, for pure compute only; the worst thread decides."""

    kind: GateKind = "cpu"

    def __init__(self, tids: Sequence[int] = (), floor: float = CPU_SHARE_FLOOR) -> None:
        self.reason = ""
        self.floor = floor
        ids = tuple(dict.fromkeys(tids)) or (threading.get_native_id(),)
        # The kernel's own encoding of "CPU clock of thread tid" (CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED, posix-timers.h):
        # unlike schedstat's first field it is exact between scheduler ticks, and it needs no pthread handle.
        self._clocks = [(~tid << 3) | 6 for tid in ids]
        self._last = [0] * len(ids)
        self.rebase()

    def rebase(self) -> None:
        self.disturbed(0)

    def disturbed(self, wall_ns: int) -> bool:
        low = False
        need = self.floor * wall_ns
        last = self._last
        try:
            for i, clock in enumerate(self._clocks):
                used = time.clock_gettime_ns(clock)
                low = low or used - last[i] < need
                last[i] = used
        except OSError as error:
            self.reason = f"the CPU clock of a measuring thread cannot be read ({_why(error)})"
            self._clocks = []
            return False
        return low

    def close(self) -> None:
        self._clocks = []


def open_gate(kind: GateKind | None, tids: Sequence[int] = ()) -> Gate | None:
    """Return the gate of ``kind`` over ``tids`` (the calling thread when empty), or None for ``kind`` None.

    A gate that cannot work is returned all the same, with its ``reason`` set: the sampler flags it.
    """
    if kind is None:
        return None
    if kind == "delay":
        return DelayGate(tids)
    if kind == "cpu":
        return CpuGate(tids)
    raise ValueError(f"gate {kind!r}, expected 'delay', 'cpu' or None")


def _why(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else type(error).__name__
