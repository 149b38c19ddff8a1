"""The host's share of a driver call: many in a compiled loop onto a stream that a blocker holds."""

from __future__ import annotations

from typing import Protocol

from kvbench.errors import KvbenchError
from kvbench.memory.cuda.device import Stream
from kvbench.timing.clock import now_ns
from kvbench.timing.events import EventClock


class Repeated(Protocol):
    """Makes the same call on a stream, ``times`` times."""

    def __call__(self, stream: Stream, times: int | None = None) -> None: ...


class Submission:
    """``run(reps)``: seconds the host spends in ``reps`` rounds of ``count`` calls that only queue.

    The blocker holds the stream meanwhile, so the device takes nothing from the queue; fewer than the clock's cap wait.
    Raises KvbenchError when a call waited for the device after all: then its time is another thing's.
    """

    def __init__(self, clock: EventClock, calls: Repeated, operations: int) -> None:
        self.count = (clock.depth - 1) // operations
        if self.count < 1:
            raise KvbenchError("more than may wait behind the blocker", where="submission", got=operations)
        self._clock, self._calls = clock, calls

    def run(self, reps: int) -> float:
        """Return the seconds of the calls alone."""
        return sum(self._round() for _ in range(reps)) * 1e-9

    def _round(self) -> int:
        stream, blocker = self._clock.stream, self._clock.blocker
        blocker.arm(stream)
        try:
            begin = now_ns()
            self._calls(stream, self.count)
            spent = now_ns() - begin
        finally:
            blocker.release()
        stream.synchronize()
        if blocker.late:
            raise KvbenchError(
                "a call waited for the device behind the blocking kernel", where="submission",
                got=f"no end within {blocker.timeout_s:g} s", expected="calls that only queue",
            )  # fmt: skip
        return spent
