"""The clock of the device: CUDA events behind a blocking kernel, as ``run(reps) -> seconds`` for the sampler.

Without a blocker an event pair also times the gaps in which the device waits for the host to submit (cccl PR 7391: 6.17
for 2.00 us, trap T17). With one, submission itself is hidden; where submission is what a transport costs, it is timed
by the host from an idle stream (:meth:`EventClock.submission`), and the device's part is a second metric.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Literal

from kvbench.errors import KvbenchError, Unavailable
from kvbench.memory.cuda.device import Device, Event, Launch, Stream, allocate
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.memory.cuda.service import THREADS, Service
from kvbench.timing.clock import now_ns

Submit = Callable[[Stream], None]
Kind = Literal["hot", "isolated", "cold", "submission"]

DEPTH = 500  # operations queued at most: about 1024 fit, beyond them submission waits for the device (trap T18)
TIMEOUT_S = 5.0  # the blocker gives up by itself: far longer than queuing DEPTH operations, short for a person
FLUSH_MULTIPLE = 2  # of the queried L2: replacement is not least-recently-used, one L2 of reads leaves old lines
CHAINS, CHAIN = 3, 402  # event records for the quantum: 1203 gaps
RESOLVE = 20.0  # a window shorter than this many times the spread of empty pairs is not a measurement (trap T16)
ESCAPE_S, ESCAPE_SHARE, ESCAPE_TRIES = 200e-6, 0.3, 5


@dataclass(frozen=True, slots=True)
class EventQuantum:
    """What events resolve, in seconds: ``step`` the smallest difference seen, ``empty`` the median of two records in a
    row, ``spread`` their 5th to 95th percentile. ``empty`` is never subtracted from a result: it overlaps the work."""

    step: float
    empty: float
    spread: float
    pairs: int

    @property
    def seconds(self) -> float:
        """The uncertainty of one window."""
        return max(self.step, self.spread)


class Blocker:
    """A kernel that holds a stream until :meth:`release`, or gives up by the device's own clock after ``timeout_s``."""

    def __init__(self, service: Service, timeout_s: float, stack: ExitStack) -> None:
        device, pointer, alias = service.device, ctypes.c_void_p(), ctypes.c_uint64()
        flags = CONSTANTS["CU_MEMHOSTALLOC_PORTABLE"] | CONSTANTS["CU_MEMHOSTALLOC_DEVICEMAP"]
        device.call("cuMemHostAlloc", ctypes.byref(pointer), 256, flags)
        stack.callback(device.release, "cuMemFreeHost", pointer.value)
        device.call("cuMemHostGetDevicePointer", ctypes.byref(alias), pointer, 0)
        base = pointer.value or 0
        self.timeout_s = timeout_s
        # A cache line each: the device writes one while the host may write the other.
        self._go, self._late = ctypes.c_uint32.from_address(base), ctypes.c_uint32.from_address(base + 128)
        self._go.value = self._late.value = 0
        self._ticket = ctypes.c_uint32(0)  # each use has its own: a late kernel cannot be mistaken for the next one
        arguments = (
            ctypes.c_uint64(alias.value), ctypes.c_uint64(alias.value + 128), self._ticket,
            ctypes.c_uint64(int(timeout_s * 1e9)),
        )  # fmt: skip
        self._launch = Launch(service.block, 1, 1, arguments)

    def arm(self, stream: Stream) -> None:
        """Queue the kernel; everything queued after it waits."""
        self._ticket.value += 1
        stream.launch(self._launch)

    def release(self) -> None:
        """Let the stream go on."""
        self._go.value = self._ticket.value

    @property
    def late(self) -> bool:
        """Whether the kernel gave up before it was released; to be asked once the stream has passed it."""
        return self._late.value == self._ticket.value


def _own(kind: Kind, calls: int) -> int:
    """Return how many operations the clock itself queues around ``calls`` calls, the blocker not counted."""
    return {"hot": 2, "isolated": 2 * calls, "cold": 3 * calls, "submission": 0}[kind]


@dataclass(frozen=True, slots=True)
class _Work:
    """What is timed: ``submit`` queues ``operations`` on the clock's stream and ``also``, and nothing elsewhere."""

    kind: Kind
    submit: Submit
    operations: int
    also: tuple[Stream, ...]


class EventRun:
    """``run(reps)`` for the sampler: seconds of ``reps`` calls of ``submit`` on the clock's stream.

    After sampling, :meth:`require_resolved` raises where the clock is too coarse for what was measured.
    """

    def __init__(self, clock: EventClock, work: _Work) -> None:
        self.kind, self.operations = work.kind, work.operations
        self.window_s: float | None = None  # mean window of the latest call
        self._clock, self._work = clock, work

    def __call__(self, reps: int) -> float:
        """Return the device's seconds (submission: the host's).

        Raises PoisonedDevice after a device error; KvbenchError when something waited for the device behind the
        blocker, or queued other than it said or elsewhere.
        """
        seconds, count = self._clock._measure(self._work, reps)
        self.window_s = seconds / count
        return seconds

    def require_resolved(self) -> None:
        """Raise KvbenchError unless the latest call's windows were RESOLVE times as long as events are uncertain."""
        quantum = self._clock.quantum
        if self.kind != "submission" and (self.window_s is None or self.window_s < RESOLVE * quantum.seconds):
            raise KvbenchError(
                "too short for the event clock", where=f"events ({self.kind})",
                got="no window" if self.window_s is None else f"windows of {self.window_s * 1e6:.3g} us",
                expected=f"at least {RESOLVE:g} x {quantum.seconds * 1e6:.3g} us", mend="do more per call",
            )  # fmt: skip


class EventClock:
    """Events, a blocker and a cache flush on one stream of ``service``'s device. For one thread at a time.

    ``quantum`` is measured here. Work is given as ``submit(stream)``, which queues ``operations`` operations on that
    stream and nothing anywhere else; this is counted at every call, and work queued behind kvbench's back is looked
    for once (trap T20). Errors surface after each phase; after a device error every use raises PoisonedDevice.
    """

    def __init__(self, service: Service, *, depth: int = DEPTH, timeout_s: float = TIMEOUT_S) -> None:
        self.device: Device = service.device
        self.depth = depth
        self._service = service
        self._pairs: list[tuple[Event, Event]] = []
        self._flush: Launch | None = None
        with ExitStack() as stack:
            self.stream: Stream = stack.enter_context(Stream(self.device))
            self.blocker = Blocker(service, timeout_s, stack)
            self._resources = stack
            self._first_launch()
            self.quantum = self._measure_quantum()
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Give everything back. Closing twice is fine."""
        self._resources.close()

    def __enter__(self) -> EventClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what to time --------------------------------------------------------------------------------------------

    def hot(self, submit: Submit, operations: int = 1, also: Sequence[Stream] = ()) -> EventRun:
        """Calls in a row inside one pair of events, caches as the call before left them: the streamed rate.

        ``also``: further streams that ``submit`` queues on, forked from the clock's stream and joined to it by events;
        ``operations`` counts those too, records and waits included.

        Raises Unavailable when one call queues more than fits behind the blocker; KvbenchError when the work is not on
        the stream.
        """
        return self._prepared(_Work("hot", submit, operations, tuple(also)))

    def isolated(self, submit: Submit, operations: int = 1, also: Sequence[Stream] = ()) -> EventRun:
        """Each call inside its own pair of events, all behind one blocker; otherwise like :meth:`hot`."""
        return self._prepared(_Work("isolated", submit, operations, tuple(also)))

    def cold(self, submit: Submit, operations: int = 1, also: Sequence[Stream] = ()) -> EventRun:
        """Each call inside its own pair after a flush of the L2 the driver reports; otherwise like :meth:`hot`.

        Raises Unavailable where the driver reports no L2.
        """
        if self._flush is None:
            size = FLUSH_MULTIPLE * self.device.facts.l2_bytes // 8 * 8
            if not size:
                raise Unavailable("the driver reports no L2 size, so nothing can be flushed", where="events (cold)")
            buffer = allocate(self.device, size, self._resources)
            self.stream.set_bytes(buffer, 0, size)
            words, never = size // 8, 1  # of zeros nothing is ever 1: see kv_flush
            arguments = [ctypes.c_uint64(value) for value in (buffer, words, never)]
            flush = Launch(self._service.flush, self._service.grid(words), THREADS, arguments)
            self.stream.launch(flush)
            self._finish()
            self._flush = flush
        return self._prepared(_Work("cold", submit, operations, tuple(also)))

    def submission(self, submit: Submit, operations: int = 1, also: Sequence[Stream] = ()) -> EventRun:
        """Each call from an idle device, by the host's clock from the first submit to completion: no blocker, so any
        number of operations. Use :meth:`hot` of the same work for the second metric ``device_only``."""
        return self._prepared(_Work("submission", submit, operations, tuple(also)))

    def _prepared(self, work: _Work) -> EventRun:
        where = f"events ({work.kind})"
        if work.operations < 1:
            raise KvbenchError("work that queues nothing cannot be timed", where=where, got=work.operations)
        if work.kind != "submission" and self._per_batch(work) < 1:
            raise Unavailable(
                "more operations than may wait behind the blocker", where=where, got=work.operations,
                expected=f"at most {self.depth - 1 - _own(work.kind, 1)}",
                mend="time it with submission(), or in parts",
            )  # fmt: skip
        # The first launch of a kernel loads it, which may wait for the device: not behind the blocker (nvbench 339).
        self._counted(work, 1, 0, lambda: work.submit(self.stream))
        self._look_for_escapes(work)
        return EventRun(self, work)

    # -- measuring -----------------------------------------------------------------------------------------------

    def _per_batch(self, work: _Work) -> int:
        """Return how many calls fit behind one blocker."""
        if work.kind == "hot":
            return (self.depth - 1 - _own("hot", 1)) // work.operations
        return (self.depth - 1) // (work.operations + _own(work.kind, 1))

    def _measure(self, work: _Work, reps: int) -> tuple[float, int]:
        """Return the seconds of ``reps`` calls and how many windows they were measured in."""
        if reps < 1:
            raise KvbenchError("a measurement needs at least one pass", where=f"events ({work.kind})", got=reps)
        if work.kind == "submission":
            return sum(self._submitted(work) for _ in range(reps)), reps
        seconds, count, left = 0.0, 0, reps
        while left:
            calls = min(left, self._per_batch(work))
            windows = self._batch(work, calls)
            seconds, count, left = seconds + sum(windows), count + len(windows), left - calls
        return seconds, count

    def _submitted(self, work: _Work) -> float:
        self.device.synchronize()
        spent = [0]

        def once() -> None:
            begin = now_ns()
            work.submit(self.stream)
            self.stream.synchronize()
            spent[0] = now_ns() - begin

        self._counted(work, 1, 0, once)
        return spent[0] * 1e-9

    def _batch(self, work: _Work, calls: int) -> list[float]:
        pairs = self._events(1 if work.kind == "hot" else calls)
        stream = self.stream

        def queue() -> None:
            self.blocker.arm(stream)
            try:
                if work.kind == "hot":
                    stream.record(pairs[0][0])
                    for _ in range(calls):
                        work.submit(stream)
                    stream.record(pairs[0][1])
                    return
                for start, stop in pairs:
                    if work.kind == "cold" and self._flush is not None:
                        stream.launch(self._flush)
                    stream.record(start)
                    work.submit(stream)
                    stream.record(stop)
            finally:
                self.blocker.release()

        self._counted(work, calls, 1 + _own(work.kind, calls), queue)
        return [stop.since(start) for start, stop in pairs]

    def _counted(self, work: _Work, calls: int, own: int, queue: Callable[[], None]) -> None:
        """Do ``queue``, wait for it, and raise unless it queued what was said, here, and the blocker did not give up.

        ``own`` operations are the clock's.
        """
        streams = (self.stream, *work.also)
        before = sum(stream.queued for stream in streams), self.device.queued
        queue()
        self._finish(work.also)
        here = sum(stream.queued for stream in streams) - before[0] - own
        everywhere = self.device.queued - before[1] - own
        if here != work.operations * calls or everywhere != here:
            raise KvbenchError(
                "the work is not what the clock brackets", where=f"events ({work.kind})",
                got=f"{here} operations on the clock's stream, {everywhere - here} on others",
                expected=f"{work.operations * calls} and 0", mend="queue all work on the stream that submit() is given",
            )  # fmt: skip
        if own and self.blocker.late:
            raise KvbenchError(
                "the work waited for the device behind the blocking kernel", where=f"events ({work.kind})",
                got=f"no end of submission within {self.blocker.timeout_s:g} s",
                expected="calls that only queue", mend="move allocations, pageable copies and first launches out of it",
            )  # fmt: skip

    def _finish(self, also: Sequence[Stream] = ()) -> None:
        """End a phase: wait, and let any error of it come up here, before a number is made of it (trap T41)."""
        self.stream.synchronize()
        loose = [stream for stream in also if not stream.idle]
        self.device.synchronize()
        if loose:
            raise KvbenchError(
                "a further stream worked on after the clock's stream was done", where="events",
                got=f"{len(loose)} of {len(also)} not joined", mend="record an event there and wait for it here",
            )  # fmt: skip

    def _look_for_escapes(self, work: _Work) -> None:
        """Raise KvbenchError if the device works on well after the clock's stream is done (trap T20).

        Counting sees only what goes through :class:`Stream`. What does not is seen here if it lasts: from an idle
        device and without blocker, the events must account for nearly all of the time until all of it is idle.
        """
        calls = max(1, min(8, (self.depth - 2) // work.operations))
        start, stop = self._events(1)[0]
        missing = elapsed = 0.0
        for _ in range(ESCAPE_TRIES):  # a host thread that lost its CPU looks the same once, not every time
            begin = now_ns()
            self.stream.record(start)
            for _ in range(calls):
                work.submit(self.stream)
            self.stream.record(stop)
            self._finish()
            elapsed = stop.since(start)
            missing = (now_ns() - begin) * 1e-9 - elapsed
            if missing <= max(ESCAPE_S, ESCAPE_SHARE * elapsed):
                return
        raise KvbenchError(
            "the device works on after the clock's stream is done", where=f"events ({work.kind})",
            got=f"{missing * 1e6:.0f} us beyond the {elapsed * 1e6:.0f} us between the events",
            mend="queue all work on the stream that submit() is given",
        )  # fmt: skip

    def _events(self, pairs: int) -> list[tuple[Event, Event]]:
        while len(self._pairs) < pairs:
            start = self._resources.enter_context(Event(self.device))
            self._pairs.append((start, self._resources.enter_context(Event(self.device))))
        return self._pairs[:pairs]

    def _first_launch(self) -> None:
        self.blocker.arm(self.stream)
        self.blocker.release()
        self._finish()

    def _measure_quantum(self) -> EventQuantum:
        events = [event for pair in self._events(min(CHAIN, self.depth) // 2) for event in pair][: self.depth - 1]
        gaps: list[float] = []
        for _ in range(CHAINS):
            self.blocker.arm(self.stream)
            try:
                for event in events:
                    self.stream.record(event)
            finally:
                self.blocker.release()
            self._finish()
            stamps = [event.since(events[0]) for event in events]
            # Elapsed times are floats in ms: below 0.1 ns their last digit is noise, and no device clock is that fine.
            gaps += [round(b - a, 10) for a, b in pairwise(stamps)]
        levels = sorted({0.0, *gaps})
        steps = [b - a for a, b in pairwise(levels)]
        if not steps or levels[0] < 0.0:
            raise KvbenchError(
                "the event clock does not advance", where="events", got=f"gaps {levels[:3]} s", expected="positive gaps"
            )
        cuts = statistics.quantiles(gaps, n=20)
        return EventQuantum(round(min(steps), 10), statistics.median(gaps), cuts[-1] - cuts[0], len(gaps))
