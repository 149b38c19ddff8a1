"""A pool in a scratch file: read and written past the page cache where alignment allows, else visibly through it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvbench.errors import Unavailable, UsageError
from kvbench.memory import libc, payload
from kvbench.memory.file import FILE_UNIT, MEMORY_FILE_SYSTEMS, ScratchFile
from kvbench.memory.host import preflight
from kvbench.memory.readers import CACHED_LEAST, probe_counter, read_bytes
from kvbench.transport.host_job import CHUNK, GUARD, KEPT, Bytes, HostJob, HostTransport, MemoryEnd, Rows, Scalar

FALLBACK = "buffered_fallback"
DROP_WAITS = (0.0, 0.001, 0.005, 0.02, 0.1)  # seconds before each try: pages of a readahead under way cannot be dropped
Values = int | list[int] | Rows


class FileEnd:
    """A pool of ``nbytes`` between guards in ``file``, whose content is the payload of the file's seed.

    ``direct_fd`` reads and writes with O_DIRECT, None where that does not work (``direct_reason``). ``flags`` say what
    kind of file its passes are about: ``file_in_memory``, ``cache_unknown``.
    """

    def __init__(self, file: ScratchFile, nbytes: int) -> None:
        if file.nbytes < self.needs(nbytes):
            raise Unavailable("the scratch file is smaller than the pool", got=file.nbytes, expected=f"{nbytes} bytes")
        self.file, self.nbytes, self.fd = file, nbytes, file.fd
        self.base = GUARD
        self.direct_fd: int | None = None
        self.direct_reason = file.direct.reason
        if file.direct.works is not False:
            try:  # the file has no name any more; its own descriptor gives it one
                self.direct_fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                self.direct_reason = f"O_DIRECT for writing: {error.strerror}"
        self._seed = file.seed
        self.counter = probe_counter(file)
        self.in_memory = file.system.kind in MEMORY_FILE_SYSTEMS
        self._mapped: int | None = None
        self.flags: tuple[str, ...] = ("file_in_memory",) if self.in_memory else ()
        if not self.in_memory and file.cached_bytes().value is None:
            self.flags = ("cache_unknown",)

    @staticmethod
    def needs(nbytes: int) -> int:
        """Return the bytes of the file of a pool of ``nbytes``."""
        return -(-(nbytes + 2 * GUARD) // FILE_UNIT) * FILE_UNIT

    def __enter__(self) -> FileEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor and the mapping opened here. Closing twice is fine."""
        if self._mapped is not None:
            libc.munmap(self._mapped, self.file.nbytes)
            self._mapped = None
        if self.direct_fd is not None:
            os.close(self.direct_fd)
            self.direct_fd = None

    def image(self) -> Bytes:
        """Return what storage holds: written back, dropped from the page cache, read again.

        Raises Unavailable where memory for it, or the bytes, are not to be had.
        """
        preflight(self.nbytes + 2 * GUARD)
        os.fdatasync(self.fd)
        self._drop()
        whole = np.empty(self.nbytes + 2 * GUARD, np.uint8)
        for start in range(0, whole.size, CHUNK):
            piece, done = whole[start : start + CHUNK].data, 0
            while done < len(piece):
                got = os.preadv(self.fd, [piece[done:]], start + done)
                if got == 0:
                    raise Unavailable("the scratch file ends early", got=start + done, expected=f"{whole.size} bytes")
                done += got
        self._drop()
        return whole

    def content(self, check: bool) -> Bytes:
        """Return the payload the file was written with: what a pass must find, whatever storage holds by now.

        Raises Unavailable where there is no memory for it.
        """
        preflight(self.nbytes + 2 * GUARD)
        return payload.expected(self.nbytes + 2 * GUARD, self._seed)

    def refill(self, seed: int) -> None:
        """Fill pool and guards with the payload of ``seed`` and bring it to storage."""
        size = self.nbytes + 2 * GUARD
        for start in range(0, size, CHUNK):
            piece = payload.expected(min(CHUNK, size - start), seed, "bits", start)
            done = 0
            while done < piece.size:
                done += os.pwrite(self.fd, piece.data[done:], start + done)
        os.fdatasync(self.fd)
        self._drop()
        self._seed = seed

    def unaligned(self, offsets: Rows, sizes: Rows, addresses: Rows) -> str:
        """Return why these transfers cannot use O_DIRECT, empty when they can."""
        if self.direct_fd is None:
            return self.direct_reason or "no O_DIRECT here"
        for what, values, unit in (
            ("file offset", offsets, self.file.direct.offset_align),
            ("size", sizes, self.file.direct.offset_align),
            ("memory address", addresses, self.file.direct.memory_align),
        ):
            bad = np.flatnonzero(values % max(1, unit))
            if len(bad):
                return f"{what} {int(values[bad[0]])} is not a multiple of {unit} bytes"
        return ""

    def map(self) -> int:
        """Return the address of the whole file, mapped shared; the same one for all. Unavailable when refused.

        Pages that any mapping holds stay in the page cache, so there is one, and :meth:`forget` knows it.
        """
        if self._mapped is None:
            try:
                self._mapped = libc.mmap(
                    0, self.file.nbytes, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED, self.fd
                )
            except OSError as error:
                raise Unavailable("the scratch file cannot be mapped", got=error.strerror) from error
        return self._mapped

    def forget(self, moved: int) -> None:
        """Drop the file's pages before a pass of ``moved`` bytes through the page cache.

        Raises Unavailable while pages worth a hundredth of them stay: what memory serves is no number of a file. Where
        files are memory (flag ``file_in_memory``) there is nothing to drop.
        """
        if self.in_memory:
            return
        for wait in DROP_WAITS:
            time.sleep(wait)
            self._drop()
            left = self.file.cached_bytes().value
            if left is None or left <= CACHED_LEAST * moved:  # None: flag cache_unknown
                return
        raise Unavailable(
            "cache_not_dropped: pages of the scratch file stay in memory, so a pass would not reach the file",
            where=str(self.file.directory), got=f"{left} bytes cached before a pass of {moved}",
            mend="give --scratch a directory on a local disk",
        )  # fmt: skip

    def _drop(self) -> None:
        if self._mapped is not None:
            libc.madvise(self._mapped, self.file.nbytes, libc.MADV_DONTNEED)
        self.file.drop_cache()


class Fetched:
    """Bytes storage delivered to the passes of one transport from ``file``, by the kernel's counter of this process.

    ``begin()`` before and ``end()`` after each pass. ``mean()`` bytes a pass, None where the counter does not work or
    nothing was counted: ``reason()`` says which.
    """

    def __init__(self, file: FileEnd) -> None:
        self._counter = file.counter
        self._before: int | None = None
        self._total, self._passes = 0, 0

    def begin(self) -> None:
        self._before = read_bytes().value if self._counter.value is True else None

    def end(self) -> None:
        now = read_bytes().value if self._before is not None else None
        if self._before is not None and now is not None:
            self._total += now - self._before
            self._passes += 1

    def mean(self) -> int | None:
        return round(self._total / self._passes) if self._passes else None

    def reason(self) -> str:
        return self._counter.reason or "no pass yet"


@dataclass(frozen=True, slots=True)
class FileSide:
    """A job seen from its file: int64 (n,) offsets in the file, bytes, and memory addresses of the fragments."""

    file: FileEnd
    fetch: bool
    offsets: Rows
    sizes: Rows
    addresses: Rows


def file_side(job: HostJob) -> FileSide:
    """Return ``job`` from the side of its file. Raises UsageError for a job between other ends."""
    moves, source, target = job.moves, job.source, job.target
    if isinstance(source, FileEnd) and isinstance(target, MemoryEnd):
        return FileSide(source, True, moves.src_offset + source.base, moves.bytes, moves.dst_offset + target.address)
    if isinstance(source, MemoryEnd) and isinstance(target, FileEnd):
        return FileSide(target, False, moves.dst_offset + target.base, moves.bytes, moves.src_offset + source.address)
    raise UsageError("this transport moves between memory and a file", where="host transport")


def descriptor(file: FileEnd, reason: str) -> int:
    """Return the descriptor to use: that of O_DIRECT, or the buffered one where a ``reason`` speaks against it."""
    return file.fd if reason or file.direct_fd is None else file.direct_fd


def call_rows(call: str, a: Values, b: Values, c: Values, d: Values, wanted: Values) -> Rows:
    """Return rows of :class:`kvbench.kernels.io_calls.IoCalls`; arguments are numbers or int64 (n,)."""
    from kvbench.kernels.io_calls import call_row

    columns = np.broadcast_arrays(call_row(call, returns=0)[0], a, b, c, d, wanted)
    return np.ascontiguousarray(np.stack(columns, axis=1).astype(np.int64))


def through_file(
    job: HostJob, name: str, call: str, run: Callable[[], float], calls: int, reason: str,
    detail: Mapping[str, Scalar] | None = None,
) -> HostTransport:  # fmt: skip
    """Return the transport whose pass is ``run``: cold before each, written back after it where it is buffered.

    ``reason``: why O_DIRECT is not used, empty when it is. Without it the row is flagged, and link bytes are counted.
    """
    from kvbench.kernels.io_calls import IoCalls

    side, taken = file_side(job), deque[float](maxlen=KEPT)
    file, fetch = side.file, side.fetch
    flags = [FALLBACK, *file.flags] if reason else []
    if not reason and file.file.direct.works is None:
        flags.append("direct_unproven")
    flush: IoCalls | None = None
    if reason and not fetch:  # buffered writes are done when they have left memory
        alone = np.array([0] + [1] * len(job.team), np.int64)
        flush = IoCalls(call_rows("fdatasync", [file.fd], 0, 0, 0, 0), alone, job.team)

    counted = Fetched(file)

    def submit(reps: int) -> float:
        total = 0.0
        for _ in range(reps):
            job.spoil()
            if reason:
                file.forget(job.total)
                counted.begin()
            taken.append(run())
            total += taken[-1] + (flush.run() if flush is not None else 0.0)
            if reason:
                counted.end()
        return total

    notes: dict[str, Scalar] = {"file_system": file.file.system.kind, **(detail or {})}
    if reason:
        notes["buffered_because"] = reason
    return HostTransport(
        name, f"{call} {'buffered' if reason else 'O_DIRECT'}", submit, calls,
        job.total if not reason else counted.mean if fetch else unknown,
        link_reason=counted.reason if fetch else written_back,
        submitted=partial(tuple, taken) if flush is not None else tuple, flags=tuple(flags), detail=notes,
    )  # fmt: skip


def unknown() -> None:
    """No number: what a transport says that has none."""


def written_back() -> str:
    """Return why buffered writes have no link bytes."""
    return "what the kernel writes back is whole pages, and not counted"
