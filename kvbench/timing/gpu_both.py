"""Two pieces of work at once on one device: how long each took, and each alone in its view while the other runs on."""

from __future__ import annotations

import math

from kvbench.errors import KvbenchError
from kvbench.memory.cuda.device import Event, Stream
from kvbench.timing.events import RESOLVE, EventClock, Submit
from kvbench.timing.gpu_session import GpuSession

MARGIN = 1.3  # the companion is given this much more work than it should need


class Together:
    """Submits ``first`` on the clock's stream and ``second`` on a stream of its own, forked from and joined to it.

    ``repeats``: how often each is queued. ``operations`` counts everything queued, for the clock. Ends with ``gpu``.
    """

    def __init__(
        self, gpu: GpuSession, first: Submit, second: Submit, operations: tuple[int, int],
        repeats: tuple[int, int] = (1, 1),
    ) -> None:  # fmt: skip
        self._work, self._repeats = (first, second), repeats
        self.other: Stream = gpu.enter(Stream(gpu.device))
        self._begin, *self._ends = (gpu.enter(Event(gpu.device)) for _ in range(3))
        self.operations = sum(n * r for n, r in zip(operations, repeats, strict=True)) + 5

    def submit(self, stream: Stream) -> None:
        """Queue both."""
        stream.record(self._begin)
        self.other.wait(self._begin)
        for each, work, times, end in zip((stream, self.other), self._work, self._repeats, self._ends, strict=True):
            for _ in range(times):
                work(each)
            each.record(end)
        stream.wait(self._ends[1])

    def seconds(self) -> tuple[float, float]:
        """Return the seconds from the fork to the end of each, of the latest submission, which is done."""
        return self._ends[0].since(self._begin), self._ends[1].since(self._begin)


class Loaded:
    """``run(reps)``: seconds of ``work`` while ``companion`` is busy from before its start to after its end.

    ``alone`` counts the passes in which it was not. ``seconds``: what each took in an earlier run of both.
    """

    def __init__(
        self, gpu: GpuSession, work: Submit, companion: Submit, operations: tuple[int, int],
        seconds: tuple[float, float], *, cold: bool,
    ) -> None:  # fmt: skip
        if not (seconds[0] > 0.0 and seconds[1] > 0.0):
            raise KvbenchError("two pieces of work that took no time", where="both", got=seconds)
        repeats = math.ceil(MARGIN * seconds[0] / seconds[1]) + 1
        self._both = Together(gpu, work, companion, operations, (1, repeats))
        clock: EventClock = gpu.clock
        make = clock.cold if cold else clock.hot
        self.events = make(self._both.submit, self._both.operations, (self._both.other,))
        self.alone = self.passes = 0
        self._quantum, self._own = clock.quantum.seconds, 0.0

    def __call__(self, reps: int) -> float:
        total = 0.0
        for _ in range(reps):
            self.events(1)
            own, other = self._both.seconds()
            self.passes, self._own = self.passes + 1, own
            self.alone += other < own
            total += own
        return total

    def require_resolved(self) -> None:
        """Raise KvbenchError unless the latest window of ``work`` is long enough for the events around it."""
        if self._own < RESOLVE * self._quantum:
            raise KvbenchError(
                "too short for the event clock", where="both", got=f"a window of {self._own * 1e6:.3g} us",
                expected=f"at least {RESOLVE:g} x {self._quantum * 1e6:.3g} us", mend="choose larger sizes",
            )  # fmt: skip
