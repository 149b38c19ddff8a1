"""T4, T5, T6, T34, T55: is the memory that is read and written the memory the row names, all of it?"""

from __future__ import annotations

import os
import re
import resource
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.contract.case import Case
from kvbench.errors import Unavailable, VerifyError
from kvbench.memory import libc
from kvbench.timing.traps.bed import Bed, PathBroken
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import GiB, MiB, format_value

if TYPE_CHECKING:
    from kvbench.measure import Measure
    from kvbench.memory.region import Pages

RESIDENT_LEAST = 0.99
INCOMPRESSIBLE = 0.98  # of its size under zlib: random words do not shrink, their 5-byte frame counts
FAULT_SHARE = 0.01
FAULTS_ALLOWED = 16  # the interpreter's own
SHARE_SLACK = 0.02
TAIL = 4096
PIECE = 64 * MiB
LARGE = 4 * GiB + MiB  # beyond 2^31 and 2^32 bytes, and not a whole number of either


def mapping_bytes(address: int, field: str) -> int | None:
    """Return ``field`` (``Rss``, ``AnonHugePages``) of the mapping that begins at ``address`` by /proc/self/smaps.

    Read here once more: what ``memory/`` says of a buffer must not be the judge of itself. None without smaps.
    """
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"(?ms)^{address:x}-[0-9a-f]+ .*?^{field}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def never_written(nbytes: int = 32 * MiB) -> Finding:
    """T4: bytes of a buffer in memory after the measured read of it, against its size."""
    from kvbench.kernels.stream import Stream
    from kvbench.memory.region import Region

    threshold = f"at least {RESIDENT_LEAST:.0%}"
    bed = Bed()
    with bed.team() as team, bed.buffer(nbytes) as buffer:
        work = Stream("read", [buffer.address], nbytes, team)
        seconds = min(work.run() for _ in range(3))
        resident = mapping_bytes(buffer.address, "Rss")
        failure = _verify_error(work)
        region = Region(nbytes, "4k")
        empty = Stream("read", [region.address], nbytes, team)
        hollow = min(empty.run() for _ in range(3))
        kept = mapping_bytes(region.address, "Rss")
    if resident is None:
        return unknown("no /proc/self/smaps here, so nobody knows what is in memory", threshold, mend="mount /proc")
    found, expected = Number("in memory after the read", resident, "B"), Number("size of the buffer", nbytes, "B")
    note = (
        f"the same read of pages nobody wrote: {format_value(nbytes / hollow, 'B/s')}, "
        f"{0 if kept is None else kept} bytes in memory; of the buffer: {format_value(nbytes / seconds, 'B/s')}"
    )
    reason = f"{resident / nbytes:.1%} of the buffer is in memory: the rest reads one shared page of zeros"
    if resident >= RESIDENT_LEAST * nbytes and failure:
        reason = failure
    return check(resident >= RESIDENT_LEAST * nbytes and not failure, found, expected, threshold, reason, note)


def constant_payload(nbytes: int = 8 * MiB) -> Finding:
    """T5: different words at the heads of a buffer's pages, against its pages; and what zlib makes of a piece."""
    threshold = f"one for each page, and no piece compresses below {INCOMPRESSIBLE:.0%}"
    with Bed().buffer(nbytes) as buffer:
        page = buffer.placement.page_bytes or 4096
        heads = buffer.array(np.uint64)[:: page // 8]
        distinct, pages = len(np.unique(heads)), len(heads)
        piece = buffer.array(np.uint8)[nbytes // 2 : nbytes // 2 + 16 * page].tobytes()
    share = len(zlib.compress(piece, 1)) / len(piece)
    good = distinct == pages and share >= INCOMPRESSIBLE
    reason = f"{pages - distinct} pages begin alike" if distinct != pages else f"a piece compresses to {share:.1%}"
    return check(
        good, Number("different page heads", distinct, "words"), Number("pages", pages, "pages"), threshold,
        f"the payload is not random: {reason}", f"{len(piece)} bytes compress to {share:.1%}",
    )  # fmt: skip


def first_touch(nbytes: int = 16 * MiB) -> Finding:
    """T6: page faults inside the first timed passes over fresh buffers, against their pages."""
    from kvbench.kernels.stream import Stream
    from kvbench.memory.region import Region

    threshold = f"at most {FAULT_SHARE:.0%}"
    bed = Bed()
    with bed.team() as team:
        bare = Region(nbytes, "4k")
        pages = 2 * nbytes // bare.base_page
        control, _ = _faults(Stream("read", [bare.address], nbytes, team))
        if control < pages // 4:
            return unknown(f"{control} faults counted for {pages // 2} untouched pages: not counted here", threshold)
        with bed.buffer(nbytes) as source, bed.buffer(nbytes, kind=None) as target:
            reads, writes = (
                Stream("read", [source.address], nbytes, team),
                Stream("write", [target.address], nbytes, team),
            )
            read, write = _faults(reads), _faults(writes)
            later = min(writes.run() for _ in range(3))
    faults = read[0] + write[0]
    limit = max(FAULTS_ALLOWED, FAULT_SHARE * pages)
    return check(
        faults <= limit, Number("faults in the first read and write", faults, "faults"),
        Number("pages passed over", pages, "pages"), threshold,
        f"{faults} page faults lie inside timed passes: they time the kernel's page allocator",
        f"first write pass {write[1] / later:.2f} x a later one (its caches are cold)",
        f"{control} faults in {pages // 2} untouched pages",
    )  # fmt: skip


def huge_pages(nbytes: int = 16 * MiB) -> Finding:
    """T34: the share of huge pages a row records, against what smaps says of the very buffer it read."""
    from kvbench.memory.limits import thp

    threshold = f"within {SHARE_SLACK:.0%}, none in a 4k buffer"
    mode = thp().enabled
    base = _share(nbytes, "4k")
    notes = [f"mode {mode.value or mode.reason}", f"4k buffer: recorded {base[0]}, counted {base[1]}"]
    if base[1] is None:
        return unknown("no /proc/self/smaps here, so nobody knows what pages a buffer has", threshold)
    if base[0] is None or max(base[0], base[1]) > 0.0:
        found = Number("huge share of a 4k buffer, counted", base[1], "1")
        return check(False, found, Number("recorded", base[0] or 0.0, "1"), threshold,
                     "a row says pages=4k about other pages, or does not know its pages", *notes)  # fmt: skip
    try:
        recorded, counted = _share(nbytes, "thp")
    except Unavailable as error:
        finding = unknown(f"pages=thp is not to be had: {error}", threshold, mend=error.mend)
        return finding.note(*notes)
    if counted is None or recorded is None:
        return check(False, Number("huge share, counted", counted or 0.0, "1"), Number("recorded", 0.0, "1"),
                     threshold, "the row does not record the pages of its buffer", *notes)  # fmt: skip
    return check(
        abs(recorded - counted) <= SHARE_SLACK, Number("huge share of a thp buffer, counted", counted, "1"),
        Number("recorded with the row", recorded, "1"), threshold, "the row says something else about its pages",
        *notes,
    )  # fmt: skip


def beyond_32_bits(nbytes: int = LARGE) -> Finding:
    """T55: how far the kernels get into more than 2^32 bytes; the 4 KiB before each power of two and the last."""
    from kvbench.kernels import passes
    from kvbench.kernels.gather import Gather
    from kvbench.kernels.raw import bytes_at
    from kvbench.kernels.stream import Stream

    threshold = "to the last byte"
    expected = Number("bytes there are", nbytes, "bytes")
    ends = [end for end in (2**31, 2**32) if end < nbytes] + [nbytes]

    def fault(reached: int, what: str) -> Finding:
        return check(False, Number("reached at most", reached, "bytes"), expected, threshold, what)

    try:
        with _long_memory(nbytes, ends) as address, Bed().team("all") as team:
            words = bytes_at(address, nbytes).view(np.uint64)
            Stream("write", [address], nbytes, team).run()
            for end in ends:
                places = np.arange((end - TAIL) // 8, end // 8, dtype=np.uint64)
                # a written word is first + place * STEP (kernels.passes): one subtraction for each, modulo 2^64
                if not np.array_equal(words[places] - words[0], places * np.uint64(passes.STEP)):
                    return fault(end - TAIL, f"write leaves the 4 KiB before byte {end}")
            read = Stream("read", [address], nbytes, team)
            sums = []
            for added in (0, 1):
                words[-1] += np.uint64(added)
                read.run()
                sums.append(int(team.outputs[:, 0].view(np.uint64).sum(dtype=np.uint64)))
            if (sums[1] - sums[0]) % 2**64 != 1:
                return fault(nbytes - 8, "the checksum of a read does not see the last word change")
            last = nbytes // TAIL - 1
            gather = Gather("read none", address, nbytes, TAIL, np.array([last, last // 2, 0], np.int64), team)
            gather.run()
            if failure := _verify_error(gather):
                return fault(nbytes - TAIL, f"gather: {failure}")
    except OSError as error:
        return unknown(f"{nbytes} bytes cannot be mapped here: {error}", threshold, None, expected)
    return check(True, Number("written, read and gathered to", nbytes, "bytes"), expected, threshold, "",
                 f"looked at the 4 KiB before {', '.join(map(str, ends))}")  # fmt: skip


@contextmanager
def _long_memory(nbytes: int, landmarks: Sequence[int]) -> Iterator[int]:
    """Yield the address of ``nbytes`` of which only the MiB at 0 and those before ``landmarks`` have their own memory.

    All between is one piece mapped again and again: addresses and sizes are what overflows, so no machine is too small.
    """
    alone = [0, *(mark - MiB for mark in landmarks)]
    shared = len(alone) * MiB
    fixed = libc.MAP_FIXED | libc.MAP_SHARED
    access = libc.PROT_READ | libc.PROT_WRITE
    fd = os.memfd_create("kvbench-trap")
    try:
        os.ftruncate(fd, shared + PIECE)
        address = libc.mmap(0, nbytes, libc.PROT_NONE, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE)
        try:
            for at in range(0, nbytes, PIECE):
                libc.mmap(address + at, min(PIECE, nbytes - at), access, fixed, fd, shared)
            for number, at in enumerate(alone):
                libc.mmap(address + at, MiB, access, fixed, fd, number * MiB)
            with suppress(OSError):  # before Linux 5.14 every page faults in on its own, which takes a few seconds more
                libc.madvise(address, nbytes, libc.MADV_POPULATE_WRITE)
            yield address
        finally:
            libc.munmap(address, nbytes)
    finally:
        os.close(fd)


def _faults(work: Any) -> tuple[int, float]:
    """Return the page faults of this thread, a team of one, during one pass of ``work``, and its seconds."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    seconds = float(work.run())
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before, seconds


def _verify_error(work: Any) -> str:
    try:
        work.verify()
    except VerifyError as error:
        return str(error)
    return ""


def _share(nbytes: int, pages: Pages) -> tuple[float | None, float | None]:
    """Return (recorded with the row, counted by smaps) huge share of the buffer of a measured read."""
    counted: list[int | None] = []

    def page_share(case: Case, measure: Measure) -> None:
        from kvbench.kernels.stream import Stream

        buffer = measure.sources(1, nbytes, pages)[0]
        work = Stream("read", [buffer.address], nbytes, measure.team(1))
        measure(work.run, link=work.link_bytes, verify=work.verify)
        counted.append(mapping_bytes(buffer.address, "AnonHugePages"))

    row = Bed().measured(page_share)
    recorded = row.detail.get("huge_share")
    share = None if counted[0] is None else counted[0] / nbytes
    if recorded is not None and not isinstance(recorded, float | int):
        raise PathBroken("huge_share is not a number", got=recorded)
    return (None if recorded is None else float(recorded)), share
