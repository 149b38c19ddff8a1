"""A pool in a scratch file: read and written past the page cache where alignment allows, else visibly through it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvbench.errors import Unavailable, UsageError
from kvbench.memory import payload
from kvbench.memory.file import FILE_UNIT, ScratchFile
from kvbench.memory.readers import probe_counter, read_bytes
from kvbench.transport.host_job import CHUNK, GUARD, KEPT, Bytes, HostJob, HostTransport, MemoryEnd, Rows, Scalar

FALLBACK = "buffered_fallback"
Values = int | list[int] | Rows


class FileEnd:
    """A pool of ``nbytes`` between guards in ``file``, whose content is the payload of the file's seed.

    ``direct_fd`` reads and writes with O_DIRECT, None where that does not work (``direct_reason``).
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
        self._counter = probe_counter(file)
        self._fetched, self._passes = 0, 0

    @staticmethod
    def needs(nbytes: int) -> int:
        """Return the bytes of the file of a pool of ``nbytes``."""
        return -(-(nbytes + 2 * GUARD) // FILE_UNIT) * FILE_UNIT

    def __enter__(self) -> FileEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor opened here. Closing twice is fine."""
        if self.direct_fd is not None:
            os.close(self.direct_fd)
            self.direct_fd = None

    def image(self) -> Bytes:
        """Return what storage holds: written back, dropped from the page cache, read again."""
        os.fdatasync(self.fd)
        self.file.drop_cache()
        whole = np.empty(self.nbytes + 2 * GUARD, np.uint8)
        for start in range(0, whole.size, CHUNK):
            piece, done = whole[start : start + CHUNK].data, 0
            while done < len(piece):
                got = os.preadv(self.fd, [piece[done:]], start + done)
                if got == 0:
                    raise Unavailable("the scratch file ends early", got=start + done, expected=f"{whole.size} bytes")
                done += got
        self.file.drop_cache()
        return whole

    def content(self, check: bool) -> Bytes:
        """Return the payload the file was written with: what a pass must find, whatever storage holds by now."""
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
        self.file.drop_cache()
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

    def forget(self) -> None:
        """Drop the file's pages before a pass that reads through the cache."""
        self.file.drop_cache()

    def count(self, before: int | None) -> int | None:
        """Without ``before`` return the counter of bytes fetched from storage; with it add what a pass fetched."""
        if self._counter.value is not True:
            return None
        now = read_bytes().value
        if before is not None and now is not None:
            self._fetched += now - before
            self._passes += 1
        return now

    def fetched(self) -> int | None:
        """Return the mean bytes a counted pass fetched from storage, None if the counter does not work here."""
        return round(self._fetched / self._passes) if self._passes else None

    @property
    def counter_reason(self) -> str:
        """Why :meth:`fetched` is None."""
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
    flags = [FALLBACK] if reason else []
    if not reason and file.file.direct.works is None:
        flags.append("direct_unproven")
    flush: IoCalls | None = None
    if reason and not fetch:  # buffered writes are done when they have left memory
        alone = np.array([0] + [1] * len(job.team), np.int64)
        flush = IoCalls(call_rows("fdatasync", [file.fd], 0, 0, 0, 0), alone, job.team)

    def submit(reps: int) -> float:
        total = 0.0
        for _ in range(reps):
            job.spoil()
            before = None
            if reason:
                file.forget()
                before = file.count(None) if fetch else None
            taken.append(run())
            total += taken[-1] + (flush.run() if flush is not None else 0.0)
            if before is not None:
                file.count(before)
        return total

    notes: dict[str, Scalar] = {"file_system": file.file.system.kind, **(detail or {})}
    if reason:
        notes["buffered_because"] = reason
    return HostTransport(
        name, f"{call} {'buffered' if reason else 'O_DIRECT'}", submit, calls,
        job.total if not reason else file.fetched if fetch else unknown,
        link_reason=(lambda: file.counter_reason) if fetch else written_back,
        submitted=partial(tuple, taken) if flush is not None else tuple, flags=tuple(flags), detail=notes,
    )  # fmt: skip


def unknown() -> None:
    """No number: what a transport says that has none."""


def written_back() -> str:
    """Return why buffered writes have no link bytes."""
    return "what the kernel writes back is whole pages, and not counted"
