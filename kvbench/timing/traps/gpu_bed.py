"""The GPU as traps drive it: a session like a case's, the boards as NVML tells them, and times by the event clock."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvbench.errors import MissingExtra, Unavailable
from kvbench.machine.gpu import Gpus, read_gpus
from kvbench.memory.cuda.device import Launch, Stream, allocate
from kvbench.memory.cuda.service import THREADS, Service
from kvbench.timing import gpu_session
from kvbench.timing.events import EventRun, Submit
from kvbench.timing.gpu_session import GpuSession
from kvbench.timing.traps.record import NotApplicable

REPEATS = 5


@contextmanager
def gpu() -> Iterator[GpuSession]:
    """Yield a session on GPU 0, opened as a case opens it.

    Raises NotApplicable where there is no GPU, Unavailable where there is one and something else is missing.
    """
    _driver()
    try:
        session = GpuSession(0)
    except MissingExtra as error:
        raise Unavailable(str(error)) from error
    with session:
        yield session


def _driver() -> None:
    try:
        gpu_session.open_driver()
    except Unavailable as error:
        raise NotApplicable(error.what) from error


def boards() -> Gpus:
    """Return what NVML lists. Raises NotApplicable without a GPU, Unavailable where NVML cannot be asked about it."""
    _driver()
    found = read_gpus()
    if not found.boards:
        raise Unavailable(found.reason or "no board is listed", where="NVML")
    return found


def reader(service: Service, address: int, nbytes: int) -> Submit:
    """Return what queues one read of every whole word of ``nbytes`` at ``address`` by all threads of the device."""
    words = nbytes // 8
    arguments = [ctypes.c_uint64(value) for value in (address, words, 1)]
    launch = Launch(service.flush, service.grid(words), THREADS, arguments)

    def submit(stream: Stream) -> None:
        stream.launch(launch)

    return submit


@contextmanager
def zeroed(session: GpuSession, nbytes: int) -> Iterator[int]:
    """Yield the address of ``nbytes`` of GPU memory that were written. Raises Unavailable without room."""
    with ExitStack() as stack:
        address = allocate(session.device, nbytes, stack)
        session.clock.stream.set_bytes(address, 0, nbytes)
        session.clock.stream.synchronize()
        yield address


def median(run: EventRun, reps: int = 1) -> float:
    """Return the median seconds of one call, over REPEATS measurements of ``reps`` calls."""
    return statistics.median(run(reps) / reps for _ in range(REPEATS))
