"""Transport ``staged``: through a contiguous buffer between the two pools, block by block."""

from __future__ import annotations

import numpy as np

from kvbench.transport.host_batch import groups
from kvbench.transport.host_file import call_rows, descriptor, file_side, through_file
from kvbench.transport.host_job import HostJob, HostTransport, MemoryEnd, Rows, Scalar

BLOCK = 256 << 10  # of memory staged at a time: half of a common L2, so that the second copy reads a cache
FILE_BLOCK = 1 << 20  # of a file staged at a time: what a call needs to reach a disk's rate
# Non-temporal stores into the buffer would send it to memory and back.
THROUGH_CACHES = ("memcpy none", "plain none", "plain l2+4096")


def open_staged(job: HostJob) -> dict[str, HostTransport]:
    """Return the ways to move ``job``'s fragments through a buffer a thread (256 KiB; 1 MiB and more before a file)."""
    if isinstance(job.source, MemoryEnd) and isinstance(job.target, MemoryEnd):
        return _memory(job, job.source.address, job.target.address)
    return {"calls": _file(job)}


def blocks(sizes: Rows, limit: int) -> Rows:
    """Return where each block of fragments begins, and the end: at most ``limit`` bytes, or one fragment, each."""
    edges, total = [0], 0
    for i, size in enumerate(sizes.tolist()):
        if total and total + size > limit:
            edges.append(i)
            total = 0
        total += size
    return np.array([*edges, len(sizes)], np.int64)


def _memory(job: HostJob, source: int, target: int) -> dict[str, HostTransport]:
    from kvbench.kernels.moves import FragmentCopy, aligned, shares, variants
    from kvbench.memory.host import host_buffer

    rows, members = job.memory_rows(source, target), len(job.team)
    parts, room = shares(rows[:, 2], members), max(BLOCK, int(rows[:, 2].max()))
    buffer = job.enter(host_buffer(members * room, "thp", kind=None))
    made, edges = [], [0]
    for member in range(members):
        own = rows[parts[member] : parts[member + 1]]
        cuts = blocks(own[:, 2], BLOCK)
        for lo, hi in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            block = own[lo:hi]
            at = buffer.address + member * room + np.cumsum(block[:, 2]) - block[:, 2]
            made += [np.stack((block[:, 0], at, block[:, 2]), 1), np.stack((at, block[:, 1], block[:, 2]), 1)]
        edges.append(sum(len(piece) for piece in made))
    staged = np.ascontiguousarray(np.concatenate(made))
    found = {}
    for name in THROUGH_CACHES:
        if name not in variants(staged):
            continue
        work = FragmentCopy(name, staged, job.team, np.array(edges, np.int64))

        def submit(reps: int, work: FragmentCopy = work) -> float:
            job.spoil()
            return work.run(reps)

        found[name] = HostTransport(
            "staged", f"{work.kernel} twice", submit, len(staged), job.total,
            flags=() if aligned(staged) else ("uneven_fragments",), detail={"staging_bytes": room},
        )  # fmt: skip
    return found


def _file(job: HostJob) -> HostTransport:
    """One call for what follows each other in the file, whatever its place in memory, and a memcpy a fragment."""
    from kvbench.kernels.io_calls import IoCalls
    from kvbench.kernels.moves import shares
    from kvbench.memory.host import host_buffer

    side = file_side(job)
    starts, counts, sizes = groups(side.offsets, side.sizes, FILE_BLOCK)
    room = -(-max(FILE_BLOCK, int(sizes.max())) // 4096) * 4096
    buffer = job.enter(host_buffer(len(job.team) * room, "thp", kind=None))
    parts = shares(sizes, len(job.team))
    member = np.repeat(np.arange(len(job.team)), np.diff(parts))
    base = buffer.address + member * room
    reason = side.file.unaligned(side.offsets[starts], sizes, base)
    call = "pread" if side.fetch else "pwrite"
    calls = call_rows(call, descriptor(side.file, reason), base, sizes, side.offsets[starts], sizes)
    group = np.repeat(np.arange(len(starts)), counts)
    inside = side.offsets - side.offsets[starts][group]
    staged = base[group] + inside
    fro, to = (staged, side.addresses) if side.fetch else (side.addresses, staged)
    copies = call_rows("memcpy", to, fro, side.sizes, 0, to)
    # Row order: each group's call and copies together, the call first when it fetches.
    order = np.lexsort(
        (np.concatenate((np.zeros(len(calls)), np.ones(len(copies)))) * (1 if side.fetch else -1),
         np.concatenate((np.arange(len(calls)), group)))
    )  # fmt: skip
    rows = np.ascontiguousarray(np.concatenate((calls, copies))[order])
    per_group = np.concatenate(([0], np.cumsum(counts + 1)))
    work = IoCalls(rows, per_group[parts], job.team, keep=buffer)
    notes: dict[str, Scalar] = {"staging_bytes": room, "fragments_a_call": round(len(copies) / len(calls), 2)}
    return through_file(job, "staged", f"{call} + memcpy", work.run, len(calls), reason, notes)
