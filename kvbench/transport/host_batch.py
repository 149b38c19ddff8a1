"""Transport ``batch`` of a file: many fragments a system call, by preadv and pwritev or by io_uring."""

from __future__ import annotations

import numpy as np

from kvbench.errors import Unavailable
from kvbench.transport.host_file import FileSide, call_rows, descriptor, file_side, through_file
from kvbench.transport.host_job import HostJob, HostTransport, Rows, Scalar

VECTORS = 1024  # IOV_MAX of Linux: entries one vector call takes
CALL_BYTES = 64 << 20  # a call moves at most 2 GiB - 4 KiB; smaller ones let threads share the work


def open_batch(job: HostJob) -> dict[str, HostTransport]:
    """Return ``preadv`` (or pwritev), and ``io_uring`` where this system lets us have it; the faster is the transport.

    A vector call takes the fragments that follow each other in the file, up to 1024, in the order of the index: where
    none do it is one call a fragment, and ``calls`` says so. Without io_uring the row's detail has the reason.
    """
    from kvbench.kernels.io_calls import IoCalls
    from kvbench.kernels.uring import probe

    side = file_side(job)
    reason = side.file.unaligned(side.offsets, side.sizes, side.addresses)
    fd, vectors = descriptor(side.file, reason), _vectors(side)
    starts, counts, sizes = groups(side.offsets, side.sizes)
    addresses = vectors.ctypes.data + 16 * starts
    call = "preadv" if side.fetch else "pwritev"
    rows = call_rows(call, fd, addresses, counts, side.offsets[starts], sizes)
    parts = _parts(sizes, len(job.team))
    work = IoCalls(rows, parts, job.team, keep=vectors)
    refused = probe()
    notes: dict[str, Scalar] = {"fragments_a_call": round(len(side.sizes) / len(rows), 2), "io_uring": refused or "yes"}
    found = {call: through_file(job, "batch", call, work.run, len(rows), reason, notes)}
    if not refused:
        try:
            found["io_uring"] = _uring(job, side, fd, rows, parts, vectors, reason, notes)
        except Unavailable as error:  # the probe's ring was granted and this one was not: memlock, descriptors
            notes["io_uring"] = str(error)
    return found


def groups(offsets: Rows, sizes: Rows, limit: int = CALL_BYTES) -> tuple[Rows, Rows, Rows]:
    """Return first fragment, fragments and bytes of each call: neighbours in the file, in order, up to ``limit`` bytes.

    A fragment larger than ``limit`` is a call of its own.
    """
    follows = offsets[1:] == offsets[:-1] + sizes[:-1]
    starts, members, total = [0], 1, int(sizes[0])
    for i, (joined, size) in enumerate(zip(follows.tolist(), sizes[1:].tolist(), strict=True), 1):
        if joined and members < VECTORS and total + size <= limit:
            members, total = members + 1, total + size
        else:
            starts.append(i)
            members, total = 1, size
    begin = np.array(starts, np.int64)
    counts = np.diff(np.append(begin, len(sizes)))
    return begin, counts, np.add.reduceat(sizes, begin)


def _vectors(side: FileSide) -> Rows:
    return np.ascontiguousarray(np.stack((side.addresses, side.sizes), axis=1))


def _parts(sizes: Rows, members: int) -> Rows:
    from kvbench.kernels.moves import shares

    return shares(sizes, members)


def _uring(
    job: HostJob, side: FileSide, fd: int, rows: Rows, parts: Rows, vectors: Rows, reason: str,
    notes: dict[str, Scalar],
) -> HostTransport:  # fmt: skip
    from kvbench.kernels.uring import DEPTH, RingCalls

    work = job.enter(RingCalls(not side.fetch, fd, rows[:, 2:], parts, job.team, keep=vectors))
    return through_file(
        job, "batch", "io_uring readv" if side.fetch else "io_uring writev", work.run, len(rows), reason,
        {**notes, "depth": DEPTH * len(job.team)},
    )  # fmt: skip
