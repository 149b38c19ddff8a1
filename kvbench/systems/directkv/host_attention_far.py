"""Far memory of the host forms, memory of a node or a scratch file, and the threads that read it ahead or store to it.

What crosses is counted twice: by the reads themselves, and for a file by the kernel's own counter (``read_bytes`` of
this process), which is the one a row shows where it works.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.raw import bytes_at
from kvbench.machine.topology import Topology
from kvbench.memory.file import ScratchFile, scratch_dir
from kvbench.memory.host import HostBuffer, host_buffer, preflight
from kvbench.memory.tiers import Tier, require_tier
from kvbench.transport.host_file import FALLBACK, Fetched, FileEnd

Bytes = npt.NDArray[np.uint8]
Enter = Callable[[AbstractContextManager[Any]], Any]
UNIT = 4096  # far offsets and sizes are multiples of this: what O_DIRECT asks for at most
FILE_READERS = 4  # reads of a file under way at once


class Far(Protocol):
    """``nbytes`` of far memory. Offsets, and sizes given to ``read`` and ``write``, are multiples of ``UNIT``.

    ``flags`` are what a row about it must say; ``readers`` is how many threads keep it busy; ``moved`` bytes were read
    and written so far. ``cached`` reads leave their target in the caches where that can be chosen.
    """

    nbytes: int
    flags: tuple[str, ...]
    readers: int

    @property
    def moved(self) -> int: ...
    def read(self, offset: int, into: Bytes, *, cached: bool = True) -> None: ...
    def write(self, offset: int, data: Bytes) -> None: ...
    def peek(self, offset: int, nbytes: int) -> Bytes: ...
    def address(self) -> int: ...
    def tally(self) -> Tally: ...


class Tally:
    """Counts what passes move: ``begin`` before and ``end`` after each. ``storage`` counts what a disk delivered.

    ``reads``: mean bytes a pass read and wrote by its own calls. ``link``: what crossed, by the kernel where it counts,
    else ``reads``; None before the first pass and for reads in place that nobody counts. ``source`` names the counter.
    """

    def __init__(self, far: Far, forget: Callable[[], None] | None = None, storage: Fetched | None = None) -> None:
        self._far, self._forget, self._storage = far, forget, storage
        self._start = self._total = self._passes = 0

    def begin(self) -> None:
        """Begin a pass: cold, where it goes through a cache. Raises Unavailable where it cannot be."""
        if self._forget is not None:
            self._forget()
        self._start = self._far.moved
        if self._storage is not None:
            self._storage.begin()

    def end(self) -> None:
        """End a pass."""
        if self._storage is not None:
            self._storage.end()
        self._total += self._far.moved - self._start
        self._passes += 1

    @property
    def reads(self) -> int | None:
        return round(self._total / self._passes) if self._passes and self._total else None

    @property
    def link(self) -> int | None:
        counted = None if self._storage is None else self._storage.mean()
        return self.reads if counted is None else counted

    @property
    def source(self) -> str:
        counted = None if self._storage is None else self._storage.mean()
        return "the calls of the readers" if counted is None else "read_bytes of the process"


class _Counter:
    """Bytes moved by any thread."""

    def __init__(self) -> None:
        self._lock, self.moved = threading.Lock(), 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.moved += nbytes


class MemoryFar:
    """Far memory that is host memory at ``address``; the caller keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        from kvbench.kernels.gather_passes import NT
        from kvbench.kernels.moves import move_fragments

        self.nbytes, self.readers, self.flags = nbytes, 1, tuple[str, ...]()
        self._view, self._address = bytes_at(address, nbytes), address
        self._count = _Counter()
        self._move, self._kind = move_fragments, NT

    @property
    def moved(self) -> int:
        """Bytes read and written so far."""
        return self._count.moved

    def read(self, offset: int, into: Bytes, *, cached: bool = True) -> None:
        """Copy ``into.size`` bytes from ``offset``; not ``cached``: past the caches, as a large copy does it best."""
        source = self._view[offset : offset + into.size]
        row = np.array([source.ctypes.data, into.ctypes.data, into.size], np.int64)
        if cached or bool((row % 512).any()):
            np.copyto(into, source)
        else:
            self._move(self._kind, int(row.ctypes.data), 0, 1, 512, 2, 4096, 0)
        self._count.add(into.size)

    def write(self, offset: int, data: Bytes) -> None:
        """Copy ``data`` to ``offset``."""
        np.copyto(self._view[offset : offset + data.size], data)
        self._count.add(data.size)

    def peek(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes as they are, not counted."""
        return self._view[offset : offset + nbytes].copy()

    def address(self) -> int:
        """Return the address a kernel reads in place."""
        return self._address

    def tally(self) -> Tally:
        """Return a counter of passes."""
        return Tally(self)


class FileFar:
    """Far memory that is a scratch file, read and written with O_DIRECT where that works, else cold through the cache.

    Raises Unavailable where the file system keeps its files in memory: that is no far tier.
    """

    def __init__(self, end: FileEnd) -> None:
        if end.in_memory:
            raise Unavailable(
                "this file system keeps its files in memory, which is no far tier", where=str(end.file.directory),
                got=end.file.system.kind, mend="give --scratch a directory on a disk",
            )  # fmt: skip
        self.end_, self.nbytes, self.readers = end, end.nbytes, FILE_READERS
        self._buffered = end.direct_fd is None
        self._fd = end.fd if end.direct_fd is None else end.direct_fd
        self.flags = (*end.flags, FALLBACK) if self._buffered else end.flags
        self._count = _Counter()
        self._mapped = False

    @property
    def moved(self) -> int:
        """Bytes read and written so far."""
        return self._count.moved

    def read(self, offset: int, into: Bytes, *, cached: bool = True) -> None:
        """Read ``into.size`` bytes from ``offset``. Unavailable when the device fails, VerifyError at the end."""
        done = 0
        try:
            while done < into.size:
                got = os.preadv(self._fd, [into.data[done:]], self.end_.base + offset + done)
                if got == 0:
                    raise VerifyError("the far file ends early", got=offset + done, expected=f"{self.nbytes} bytes")
                done += got
        except OSError as error:
            raise self.end_.file.failed(error) from error
        self._count.add(into.size)

    def write(self, offset: int, data: Bytes) -> None:
        """Write ``data`` to ``offset``. Raises Unavailable where the device fails."""
        done = 0
        try:
            while done < data.size:
                done += os.pwritev(self._fd, [data.data[done:]], self.end_.base + offset + done)
            if self._buffered:
                os.fdatasync(self._fd)
        except OSError as error:
            raise self.end_.file.failed(error, "writing it") from error
        self._count.add(data.size)

    def peek(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes as storage holds them, read through the cache and not counted."""
        found = np.frombuffer(os.pread(self.end_.fd, nbytes, self.end_.base + offset), np.uint8)
        if found.size != nbytes:
            raise VerifyError("the far file ends early", got=found.size, expected=f"{nbytes} bytes at {offset}")
        return found

    def tally(self) -> Tally:
        """Return a counter of passes; each is cold where it goes through the page cache."""
        through = self._buffered or self._mapped
        return Tally(self, (lambda: self.end_.forget(self.nbytes)) if through else None, Fetched(self.end_))

    def address(self) -> int:
        """Return the address of the mapped file, which a kernel reads in place by page faults."""
        self._mapped = True
        return self.end_.map() + self.end_.base


def open_far(
    tier: Tier, nbytes: int, enter: Enter, memory: Callable[[int], int], scratch: os.PathLike[str] | None, seed: int
) -> Far:
    """Return ``nbytes`` of ``tier``: ``memory(nbytes)`` gives the address of host memory, ``scratch`` holds files.

    Raises UsageError for another tier or no bytes, Unavailable where the tier, memory or a file cannot be had.
    """
    if tier.name not in ("dram", "file"):
        raise UsageError(
            "not a far tier of a host form", where="far", got=str(tier), expected="dram, dram@NODE or file"
        )
    if nbytes < 1:
        raise UsageError("far memory of no bytes", where="far", got=nbytes)
    require_tier(tier)
    size = -(-nbytes // UNIT) * UNIT
    if tier.name == "dram":
        return MemoryFar(memory(size), size)
    file = enter(ScratchFile(FileEnd.needs(size), scratch_dir(scratch), seed))
    return FileFar(enter(FileEnd(file, size)))


def near_cpus(near: Tier, topology: Topology) -> tuple[int, ...]:
    """Return the CPUs that compute beside ``near``: one a core, of its node where it names one.

    Raises Unavailable where no CPU of that node may be used.
    """
    if near.node is None:
        return topology.measuring_cpus("all")
    own = {cpu for node in topology.nodes if node.id == near.node for cpu in node.cpus}
    allowed = tuple(cpu for cpu in topology.affinity if cpu in own)
    if not allowed:
        raise Unavailable("no CPU of the near node is in the affinity mask", where=str(near), got=topology.affinity)
    return topology.measuring_cpus("all", allowed)


class NearMemory:
    """Buffers in near memory, touched and page-aligned: ``held`` bytes asked for so far, ``resident`` as the kernel's
    page tables say (None: they do not tell). Nothing is given back before the caller's end, so both are peaks.

    ``budget``: bytes it may have, None: as much as the machine holds. Raises UsageError beyond it.
    """

    def __init__(self, enter: Enter, budget: int | None = None, node: int | None = None) -> None:
        self._enter, self.budget, self._node = enter, budget, node
        self.held = 0
        self.resident: int | None = 0

    def take(self, nbytes: int, what: str) -> Bytes:
        """Return a buffer of ``nbytes`` for ``what``."""
        if self.budget is not None and self.held + nbytes > self.budget:
            raise UsageError(
                "the near budget does not hold this buffer", where=what, got=f"{nbytes} B beside {self.held} B",
                expected=f"at most {max(0, self.budget - self.held)} B more of {self.budget} B",
                mend="choose smaller tiles or a larger budget",
            )  # fmt: skip
        preflight(nbytes)
        pages = "thp" if nbytes >= 2 << 20 else "4k"
        buffer: HostBuffer = self._enter(host_buffer(nbytes, pages, self._node, kind=None))  # type: ignore[arg-type]
        self.held += nbytes
        found = buffer.placement.resident
        self.resident = None if found is None or self.resident is None else self.resident + found
        return buffer.array()


class Flow:
    """One pass through a :class:`Pipe`: ``take`` the next part in order, ``give`` its slot back in the same order."""

    def __init__(
        self, far: Far, slots: Sequence[Bytes], parts: Sequence[tuple[int, int]], readers: int, cached: bool
    ) -> None:
        self._far, self.slots, self._parts, self._readers = far, slots, parts, readers
        self._cached = cached
        self._free: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in range(readers)]
        self._full: list[queue.SimpleQueue[int | BaseException]] = [queue.SimpleQueue() for _ in range(readers)]
        for slot in range(len(slots)):
            self._free[slot % readers].put(slot)
        self._taken = self._given = 0
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def produce(self, reader: int) -> None:
        """Read this reader's parts into slots as they come free."""
        try:
            for offset, nbytes in self._parts[reader :: self._readers]:
                slot = self._free[reader].get()
                if slot is None:
                    break
                self._far.read(offset, self.slots[slot][:nbytes], cached=self._cached)
                self._full[reader].put(slot)
        except BaseException as error:  # handed to the thread that takes
            self._full[reader].put(error)
        finally:
            self.done.put(None)

    def take(self) -> int:
        """Return the slot that holds the next part; waits for it. Raises what its read raised."""
        found = self._full[self._taken % self._readers].get()
        if isinstance(found, BaseException):
            raise found
        self._taken += 1
        return found

    def give(self) -> None:
        """Hand back the slot of the oldest part taken."""
        self._free[self._given % self._readers].put(self._given % len(self.slots))
        self._given += 1

    def stop(self) -> None:
        """Let the readers end, whatever they wait for, and wait for them."""
        for one in self._free:
            one.put(None)
        for _ in range(self._readers):
            self.done.get()


class Pipe:
    """``readers`` threads that read parts of ``far`` into ``slots`` ahead of the thread that takes them.

    Part i goes into slot i modulo their number. ``cpus`` pins reader i to ``cpus[i % len(cpus)]``; ``tids`` are the
    readers', ``pinned`` says whether every pin held. Raises UsageError unless slots are a multiple of readers.
    """

    def __init__(
        self, far: Far, slots: Sequence[Bytes], readers: int, cpus: Sequence[int] = (), *, cached: bool = True
    ) -> None:
        if readers < 1 or not slots or len(slots) % readers:
            raise UsageError(
                "slots do not divide among readers", where="pipe", got=f"{len(slots)} and {readers}",
                expected="a multiple, at least one each",
            )  # fmt: skip
        self.far, self.slots, self.readers, self._cached = far, list(slots), readers, cached
        self._inbox: list[queue.SimpleQueue[Flow | None]] = [queue.SimpleQueue() for _ in range(readers)]
        self.pinned = True
        ready: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()

        def serve(reader: int) -> None:
            fine = True
            if cpus:
                try:
                    os.sched_setaffinity(0, {cpus[reader % len(cpus)]})
                except OSError:
                    fine = False
            ready.put((threading.get_native_id(), fine))
            while (flow := self._inbox[reader].get()) is not None:
                flow.produce(reader)

        self._threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()
        said = [ready.get() for _ in self._threads]
        self.tids = [tid for tid, _ in said]
        self.pinned = all(fine for _, fine in said)

    def run(self, parts: Sequence[tuple[int, int]], consume: Callable[[Flow], None]) -> None:
        """Read ``parts``, (offset, bytes) each, while ``consume(flow)`` takes them. Raises what either side raised."""
        flow = Flow(self.far, self.slots, parts, self.readers, self._cached)
        for inbox in self._inbox:
            inbox.put(flow)
        try:
            consume(flow)
        finally:
            flow.stop()

    def close(self) -> None:
        """End the threads. Closing twice is fine."""
        for inbox in self._inbox:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
