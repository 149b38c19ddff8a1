"""A copy on a side stream beside other work on the GPU, queued so that it can be proven to be under way all the time.

Strata, OSDI 2026, figure 5: what a few blocks of a copy kernel take from a prefill or decode. The copy is started first
and the other work waits until one pass of it is done: its blocks then hold their multiprocessors. Further passes are
queued behind it, an event each, and the last one has to end after the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.systems.strata.overlap_queue import Enter, Submit
from kvbench.transport.gpu_pieces import Mover

MOST_PASSES = 400  # of the copy in one submission: a launch queue holds about 1024 operations


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of the work, and of the ``passes`` of the copy that lie wholly inside it (0.0 for none).

    ``covered``: the copy was under way from before the begin of the work to after its end.
    """

    work: float
    copy: float
    passes: int
    covered: bool


class Hold(Protocol):
    """Holds a stream from ``arm`` to ``release``; ``late``: it gave up before."""

    @property
    def late(self) -> bool: ...
    def arm(self, stream: Stream) -> None: ...
    def release(self) -> None: ...


class Beside:
    """``repeats`` times ``victim`` on the caller's stream beside ``copies`` on a stream of its own, one after the
    other and over and over. Stream and events go with ``enter``.

    ``hold``: both streams wait behind it until all is queued, for windows that the host would take as long to queue.
    With one, a window raises KvbenchError where queueing waited for the device.
    """

    def __init__(
        self, device: Device, victim: Submit, copies: Sequence[Mover], enter: Enter, hold: Hold | None = None
    ) -> None:
        self._device, self._victim, self._copies, self._enter = device, victim, list(copies), enter
        self._hold = hold
        self.repeats = 1
        self.side: Stream = enter(Stream(device))
        self._start, self._begin, self._end = (enter(Event(device)) for _ in range(3))
        self._marks: list[Event] = []

    def _mark(self, number: int) -> Event:
        while len(self._marks) <= number:
            self._marks.append(self._enter(Event(self._device)))
        return self._marks[number]

    @contextmanager
    def _held(self, stream: Stream) -> Iterator[None]:
        """Queue what is inside behind the hold, and wait for ``stream``."""
        if self._hold is not None:
            self._hold.arm(stream)
        try:
            yield
        finally:
            if self._hold is not None:
                self._hold.release()
        stream.synchronize()
        if self._hold is not None and self._hold.late:
            raise KvbenchError("queueing waited for the device behind the blocking kernel", where="beside")

    def alone(self, stream: Stream) -> float:
        """Do the work while nothing else runs, and return its seconds."""
        with self._held(stream):
            self._work(stream)
        seconds: float = self._end.since(self._begin)
        return seconds

    def _work(self, stream: Stream) -> None:
        stream.record(self._begin)
        for _ in range(self.repeats):
            self._victim(stream)
        stream.record(self._end)

    def copy_alone(self, stream: Stream, passes: int) -> float:
        """Do ``passes`` passes of the copy while nothing else runs, and return the seconds of one after the first."""
        with self._held(stream):
            self._queue(stream, passes)
        self.side.synchronize()
        return self._mark(passes).since(self._mark(1)) / (passes - 1)

    def _queue(self, stream: Stream, passes: int) -> None:
        if not 2 <= passes <= MOST_PASSES:
            raise UsageError("passes of the copy", where="beside", got=passes, expected=f"2 to {MOST_PASSES}")
        stream.record(self._start)
        self.side.wait(self._start)
        self.side.record(self._mark(0))
        for number in range(1, passes + 1):
            self._copies[number % len(self._copies)].submit(self.side)
            self.side.record(self._mark(number))

    def both(self, stream: Stream, passes: int) -> Window:
        """Do the work beside ``passes`` passes of the copy, the first of which is done before the work begins."""
        with self._held(stream):
            self._queue(stream, passes)
            stream.wait(self._mark(1))
            self._work(stream)
            stream.wait(self._mark(passes))
        begin, end = (event.since(self._start) for event in (self._begin, self._end))
        marks = [self._mark(number).since(self._start) for number in range(passes + 1)]
        inside = [at for at in marks if begin <= at <= end]
        covered = marks[0] <= begin and end <= marks[-1]
        return Window(end - begin, inside[-1] - inside[0] if len(inside) > 1 else 0.0, max(0, len(inside) - 1), covered)
