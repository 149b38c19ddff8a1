"""Transport ``cpu``: host threads copy fragment by fragment, or make one file call a fragment."""

from __future__ import annotations

from kvbench.transport.host_file import call_rows, descriptor, file_side, through_file
from kvbench.transport.host_job import HostJob, HostTransport, MemoryEnd


def open_cpu(job: HostJob) -> dict[str, HostTransport]:
    """Return the ways to copy ``job``'s fragments by name; the fastest is the transport.

    Memory: every variant of :mod:`kvbench.kernels.moves`, only memcpy (flag ``uneven_fragments``) where fragments are
    not whole cache lines. File: pread or pwrite, O_DIRECT where aligned, else ``buffered_fallback`` with the reason.
    """
    if isinstance(job.source, MemoryEnd) and isinstance(job.target, MemoryEnd):
        return _memory(job, job.source.address, job.target.address)
    return {"calls": _file(job)}


def _memory(job: HostJob, source: int, target: int) -> dict[str, HostTransport]:
    from kvbench.kernels.moves import FragmentCopy, aligned, variants

    rows = job.memory_rows(source, target)
    flags = () if aligned(rows) else ("uneven_fragments",)
    found = {}
    for name in variants(rows):
        work = FragmentCopy(name, rows, job.team)

        def submit(reps: int, work: FragmentCopy = work) -> float:
            job.spoil()
            return work.run(reps)

        found[name] = HostTransport("cpu", work.kernel, submit, len(rows), job.total, flags=flags)
    return found


def _file(job: HostJob) -> HostTransport:
    from kvbench.kernels.io_calls import IoCalls
    from kvbench.kernels.moves import shares

    side = file_side(job)
    reason = side.file.unaligned(side.offsets, side.sizes, side.addresses)
    call = "pread" if side.fetch else "pwrite"
    rows = call_rows(call, descriptor(side.file, reason), side.addresses, side.sizes, side.offsets, side.sizes)
    work = IoCalls(rows, shares(side.sizes, len(job.team)), job.team)
    return through_file(job, "cpu", call, work.run, len(rows), reason)
