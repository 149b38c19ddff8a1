"""What carries blocks to and from the CPU elastic buffer: a pinned thread on the host, a side stream on a GPU."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.systems.ellm.buffer import Copy, Ticket

PIECE = 1 << 20  # bytes between two looks at the pace, and at most this long without the interpreter's lock
BACK_S = 60.0


class Recorder(Protocol):
    """Takes note of stages; whoever owns the clock gives one. Called from the thread that does the work."""

    def mark(self, name: str) -> None: ...


class _Job:
    def __init__(self, copies: Sequence[Copy], label: str) -> None:
        self.copies, self.label = tuple(copies), label
        self.over = threading.Event()
        self.error: BaseException | None = None


def _unpaced(_: int) -> None:
    return None


class LoaderThread:
    """A thread, pinned to ``cpu`` (None: not pinned), that copies in the order of submission.

    ``recorder`` gets ``begin LABEL`` and ``end LABEL`` of each ticket. ``pace(nbytes)`` is called in the thread after
    every piece of at most PIECE bytes, and may hold it back to emulate a slower link. ``tid`` is its native id,
    ``pin_reason`` why it is not pinned.
    """

    def __init__(
        self, cpu: int | None = None, recorder: Recorder | None = None, pace: Callable[[int], None] = _unpaced
    ) -> None:
        from kvbench.kernels.team import pin

        self.recorder, self.pace = recorder, pace
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()

        def serve() -> None:
            ready.put((threading.get_native_id(), None if cpu is None else pin(cpu)))
            while (job := self._jobs.get()) is not None:
                try:
                    self._carry(job)
                except BaseException as error:  # handed to the caller by done() and wait()
                    job.error = error
                job.over.set()

        self._thread = threading.Thread(target=serve, name="kvbench-loader", daemon=True)
        self._thread.start()
        self.tid, self.pin_reason = ready.get()
        self._closed = False

    def _carry(self, job: _Job) -> None:
        if self.recorder is not None:
            self.recorder.mark(f"begin {job.label}")
        for copy in job.copies:
            for at in range(0, copy.nbytes, PIECE):
                size = min(PIECE, copy.nbytes - at)
                ctypes.memmove(copy.target + at, copy.source + at, size)  # without the interpreter's lock
                self.pace(size)
        if self.recorder is not None:
            self.recorder.mark(f"end {job.label}")

    def submit(self, copies: Sequence[Copy], label: str) -> Ticket:
        """Queue ``copies``. The caller is the compute side: what it has written before is written. Raises UsageError
        once closed."""
        if self._closed:
            raise UsageError("the loader thread is closed", where="loader", got=label)
        job = _Job(copies, label)
        self._jobs.put(job)
        return job

    def done(self, ticket: Ticket) -> bool:
        """Return whether the copies are over; raise what made them fail."""
        job = _job(ticket)
        if not job.over.is_set():
            return False
        if job.error is not None:
            raise KvbenchError("the loader thread failed", where="loader", got=str(job.error)) from job.error
        return True

    def order(self, ticket: Ticket) -> None:
        """Wait: the compute side is the calling thread, so its later work comes after. Raises what made them fail."""
        self.wait(ticket)
        self.done(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Wait for the copies; :meth:`done` tells whether they went well. Raises KvbenchError after a minute."""
        if not _job(ticket).over.wait(BACK_S):
            raise KvbenchError("the loader thread does not come back", where="loader", got=f"{BACK_S:g} s of silence")

    def close(self) -> None:
        """End the thread once its queue is empty. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join(BACK_S)

    def __enter__(self) -> LoaderThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _job(ticket: Ticket) -> _Job:
    if not isinstance(ticket, _Job):
        raise UsageError("not a ticket of this loader", where="loader", got=type(ticket).__name__)
    return ticket


class _Flight:
    def __init__(self, event: Event) -> None:
        self.event: Event | None = event


class StreamMover:
    """Copies on a side stream of ``device`` beside the work on ``compute``.

    Each ticket: an event recorded on ``compute``, waited for by the side stream, the copies, an event recorded behind
    them. Nothing here waits on the host but :meth:`wait`. ``record``: called with the side stream before and after each
    ticket's copies, to time them by events. Buffer addresses are those the copy calls take.
    """

    def __init__(self, device: Device, compute: Stream, record: Callable[[Stream, str], None] | None = None) -> None:
        self._device, self._compute, self._record = device, compute, record
        self.side = Stream(device)
        self._spare: list[Event] = []
        self._made: list[Event] = []

    def submit(self, copies: Sequence[Copy], label: str) -> Ticket:
        """Queue ``copies`` behind what ``compute`` holds now. Raises CudaError when the driver objects."""
        start, done = self._event(), self._event()
        self._compute.record(start)
        self.side.wait(start)
        self._spare.append(start)  # a wait that was queued keeps the record it has seen
        if self._record is not None:
            self._record(self.side, f"begin {label}")
        for copy in copies:
            self.side.copy(copy.target, copy.source, copy.nbytes)
        if self._record is not None:
            self._record(self.side, f"end {label}")
        self.side.record(done)
        return _Flight(done)

    def done(self, ticket: Ticket) -> bool:
        """Return whether the event behind the copies has been reached. Raises CudaError for what went wrong before."""
        flight = _flight(ticket)
        if flight.event is None:
            return True
        code = self._device.driver.code("cuEventQuery", flight.event.handle)
        if code == CONSTANTS["CUDA_ERROR_NOT_READY"]:
            return False
        if code:
            raise self._device.driver.error("cuEventQuery", code)
        self._spare.append(flight.event)
        flight.event = None
        return True

    def order(self, ticket: Ticket) -> None:
        """Let what is queued on ``compute`` from now on wait for the copies."""
        flight = _flight(ticket)
        if flight.event is not None:
            self._compute.wait(flight.event)

    def wait(self, ticket: Ticket) -> None:
        """Wait for the copies on the host."""
        flight = _flight(ticket)
        if flight.event is not None:
            flight.event.synchronize()

    def _event(self) -> Event:
        if self._spare:
            return self._spare.pop()
        self._made.append(Event(self._device))
        return self._made[-1]

    def close(self) -> None:
        """Wait for the side stream and give everything back. Closing twice is fine."""
        if self.side.handle is not None and self._device.driver.poisoned is None:
            self.side.synchronize()
        for event in self._made:
            event.close()
        self.side.close()

    def __enter__(self) -> StreamMover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _flight(ticket: Ticket) -> _Flight:
    if not isinstance(ticket, _Flight):
        raise UsageError("not a ticket of this stream", where="loader", got=type(ticket).__name__)
    return ticket
