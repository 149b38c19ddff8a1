"""Transport ``direct``: the file is mapped and copied from or to in place; the kernel fetches pages as they fault."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import TracebackType

import numpy as np

from kvbench.errors import Unavailable
from kvbench.memory import libc
from kvbench.memory.file import ScratchFile
from kvbench.transport.host_file import file_side, unknown, written_back
from kvbench.transport.host_job import KEPT, HostJob, HostTransport, Scalar

MS_SYNC = 4
WAYS = ("memcpy none", "nt none")


class Mapping:
    """``nbytes`` of ``file`` mapped shared at ``address``, unmapped at the end. Unavailable when the kernel refuses."""

    def __init__(self, file: ScratchFile, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self.address = libc.mmap(0, nbytes, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED, file.fd)
        except OSError as error:
            raise Unavailable("the scratch file cannot be mapped", got=error.strerror) from error

    def forget(self) -> None:
        """Drop the pages from this address space; mapped pages would survive in the page cache."""
        libc.madvise(self.address, self.nbytes, libc.MADV_DONTNEED)

    def __enter__(self) -> Mapping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        libc.munmap(self.address, self.nbytes)


def open_direct(job: HostJob) -> dict[str, HostTransport]:
    """Return the ways to copy ``job``'s fragments from or to the mapped file; cold before each pass, synced after it.

    A device error under a mapping is a SIGBUS and ends the process.
    """
    from kvbench.kernels.io_calls import IoCalls, call_row
    from kvbench.kernels.moves import FragmentCopy, variants

    side = file_side(job)
    mapped = job.enter(Mapping(side.file.file, side.file.file.nbytes))
    rows = np.stack((mapped.address + side.offsets, side.addresses, side.sizes), axis=1)
    if not side.fetch:
        rows = rows[:, [1, 0, 2]]
    rows = np.ascontiguousarray(rows)
    sync: IoCalls | None = None
    if not side.fetch:
        alone = np.array([0] + [1] * len(job.team), np.int64)
        row = call_row("msync", mapped.address, mapped.nbytes, MS_SYNC, returns=0)
        sync = IoCalls(np.array([row], np.int64), alone, job.team)
    notes: dict[str, Scalar] = {"file_system": side.file.file.system.kind}
    found = {}
    for name in WAYS:
        if name not in variants(rows):
            continue
        work, taken = FragmentCopy(name, rows, job.team), deque[float](maxlen=KEPT)

        def submit(reps: int, work: FragmentCopy = work, taken: deque[float] = taken) -> float:
            total = 0.0
            for _ in range(reps):
                job.spoil()
                mapped.forget()
                side.file.forget()
                before = side.file.count(None) if side.fetch else None
                taken.append(work.run(1))
                total += taken[-1] + (sync.run() if sync is not None else 0.0)
                if before is not None:
                    side.file.count(before)
            return total

        found[name] = HostTransport(
            "direct", f"mmap, {work.kernel}{'' if sync is None else ', msync'}", submit, len(rows),
            side.file.fetched if side.fetch else unknown,
            link_reason=(lambda: side.file.counter_reason) if side.fetch else written_back,
            submitted=partial(tuple, taken) if sync is not None else tuple, detail=notes,
        )  # fmt: skip
    return found
