"""Transport ``direct``: the file is mapped and copied from or to in place; the kernel fetches pages as they fault."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np

from kvbench.transport.host_file import Fetched, file_side, unknown, written_back
from kvbench.transport.host_job import KEPT, HostJob, HostTransport, Scalar

MS_SYNC = 4
WAYS = ("memcpy none", "nt none")


def open_direct(job: HostJob) -> dict[str, HostTransport]:
    """Return the ways to copy ``job``'s fragments from or to the mapped file; cold before each pass, synced after it.

    Raises Unavailable where the file cannot be mapped, a pass where pages of it stay in memory before it.
    A device error under a mapping is a SIGBUS and ends the process.
    """
    from kvbench.kernels.io_calls import IoCalls, call_row
    from kvbench.kernels.moves import FragmentCopy, variants

    side = file_side(job)
    mapped = side.file.map()
    rows = np.stack((mapped + side.offsets, side.addresses, side.sizes), axis=1)
    if not side.fetch:
        rows = rows[:, [1, 0, 2]]
    rows = np.ascontiguousarray(rows)
    sync: IoCalls | None = None
    if not side.fetch:
        alone = np.array([0] + [1] * len(job.team), np.int64)
        row = call_row("msync", mapped, side.file.file.nbytes, MS_SYNC, returns=0)
        sync = IoCalls(np.array([row], np.int64), alone, job.team)
    notes: dict[str, Scalar] = {"file_system": side.file.file.system.kind}
    found = {}
    for name in WAYS:
        if name not in variants(rows):
            continue
        work, taken, counted = FragmentCopy(name, rows, job.team), deque[float](maxlen=KEPT), Fetched(side.file)

        def submit(
            reps: int, work: FragmentCopy = work, taken: deque[float] = taken, counted: Fetched = counted
        ) -> float:
            total = 0.0
            for _ in range(reps):
                job.spoil()
                side.file.forget(job.total)
                counted.begin()
                taken.append(work.run(1))
                total += taken[-1] + (sync.run() if sync is not None else 0.0)
                counted.end()
            return total

        found[name] = HostTransport(
            "direct", f"mmap, {work.kernel}{'' if sync is None else ', msync'}", submit, len(rows),
            counted.mean if side.fetch else unknown, link_reason=counted.reason if side.fetch else written_back,
            submitted=partial(tuple, taken) if sync is not None else tuple, flags=side.file.flags, detail=notes,
        )  # fmt: skip
    return found
