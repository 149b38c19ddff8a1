"""Fact a scratch file by `pread`, O_DIRECT or mmap: every block once a pass, in random order, by several threads."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.machine.probe import ROOT, Fact
from kvbench.memory import payload
from kvbench.memory.crew import Crew
from kvbench.memory.file import FILE_UNIT, WRITE_CHUNK, ScratchFile
from kvbench.memory.host import HostBuffer, host_buffer
from kvbench.memory.limits import read_text
from kvbench.units import format_bytes

Method = Literal["pread", "direct", "mmap"]
Advice = Literal["normal", "random"]
METHODS: tuple[Method, ...] = get_args(Method)
ADVICE: tuple[Advice, ...] = get_args(Advice)
MAX_DEPTH = 256
SECTOR = 512
CACHED_LEAST = 0.01  # share of the file still cached from which a pass does not count as cold
COUNTER_TRIES = 3  # the counter holds the whole process: a module being loaded meanwhile spoils one try
_MASK64 = (1 << 64) - 1
_FADVISE = {"normal": os.POSIX_FADV_NORMAL, "random": os.POSIX_FADV_RANDOM}


def read_bytes(root: Path = ROOT) -> Fact[int]:
    """Return ``read_bytes`` of /proc/self/io: bytes this process caused to be fetched from storage, all its threads."""
    text = read_text(root / "proc/self/io")
    for line in (text.value or "").splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes" and value.strip().isdigit():
            return Fact(int(value))
    return Fact(None, text.reason or f"{root / 'proc/self/io'} has no read_bytes")


def probe_counter(file: ScratchFile, root: Path = ROOT) -> Fact[bool]:
    """Check by two known O_DIRECT reads that ``read_bytes`` counts here: loop devices, FUSE and sandboxes may say 0.

    None with the reason when there is nothing to check with, False when the counter missed the reads.
    """
    if file.direct_fd is None or file.direct.works is not True:
        return Fact(None, f"no direct read to check the counter with: {file.direct.reason}")
    buffer = mmap.mmap(-1, 16 * FILE_UNIT)
    grown: list[int] = []
    for _ in range(COUNTER_TRIES):
        asked, grown = [FILE_UNIT, min(file.nbytes, len(buffer))], []
        for length in asked:
            before = read_bytes(root)
            try:
                os.preadv(file.direct_fd, [memoryview(buffer)[:length]], 0)
            except OSError as error:
                raise file.failed(error) from error
            after = read_bytes(root)
            if before.value is None or after.value is None:
                return Fact(None, before.reason or after.reason)
            grown.append(after.value - before.value)
        if grown == asked:
            return Fact(True)
    return Fact(False, f"read_bytes grew by {grown} for direct reads of {asked} bytes")


class FileReader:
    """Passes over a scratch file: ``depth`` threads read its blocks, each block once a pass, in a new random order.

    ``method``: "pread" copies through the page cache, "direct" (O_DIRECT) bypasses it, "mmap" reads in place and adds
    up every 8-byte word. Before every pass, outside the timed window, the file's cache is dropped; what stayed shows
    in ``flags``: ``cache_not_dropped``, ``cache_unknown``. The caches of the device and of a host below a virtual
    machine are out of reach. ``advice`` is the kernel's readahead hint for pread (fadvise) and mmap (madvise).
    A device error under mmap is a SIGBUS and ends the process; the other methods raise Unavailable.

    ``unique_bytes`` is the file, read once a pass; ``link_bytes`` what storage delivered a pass, measured.
    Raises UsageError for impossible arguments, Unavailable where this file cannot be read that way.
    """

    def __init__(
        self,
        file: ScratchFile,
        method: Method,
        block: int,
        depth: int = 1,
        *,
        seed: int = 1,
        advice: Advice = "normal",
        cpus: Sequence[int] = (),
    ) -> None:
        _check(file, method, block, depth, advice)
        self.file, self.method, self.block, self.depth = file, method, block, depth
        self.unique_bytes = file.nbytes
        self.blocks = -(-file.nbytes // block)
        names = {
            "pread": f"preadv+fadvise_{advice}",
            "direct": "preadv+O_DIRECT",
            "mmap": f"mmap_sum64+madvise_{advice}",
        }
        self.kernel = names[method]
        self.counter = probe_counter(file)
        self._advice, self._rng = advice, np.random.default_rng(seed)
        self._flags: dict[str, None] = {}
        self._link, self._passes, self._counted = 0, 0, self.counter.value is True
        self._slots: list[npt.NDArray[np.uint8]] = []
        self._orders: list[list[int]] = [[] for _ in range(depth)]
        self._last: list[int | None] = [None] * depth
        self._sums, self._totals, self._checking = [0] * depth, set[int](), False
        self._buffer: HostBuffer | None = None
        self._map: mmap.mmap | None = None
        if method == "mmap":
            self._map = file.map()
            self._map.madvise(mmap.MADV_RANDOM if advice == "random" else mmap.MADV_NORMAL)
        else:
            stride = -(-block // FILE_UNIT) * FILE_UNIT
            self._buffer = host_buffer(depth * stride, kind=None)
            whole = self._buffer.array()
            self._slots = [whole[i * stride : i * stride + block] for i in range(depth)]
        if method == "direct" and file.direct.works is None:
            self._flags["direct_unproven"] = None
        self._crew = Crew(depth, self._read_mapped if method == "mmap" else self._read_copied, cpus)
        self.tids = self._crew.tids
        if cpus and not self._crew.pinned:
            self._flags["unpinned"] = None

    @property
    def link_bytes(self) -> int | None:
        """Mean bytes a timed pass fetched from storage, by /proc/self/io; None if unmeasured (see ``link_reason``)."""
        return round(self._link / self._passes) if self._counted and self._passes else None

    @property
    def link_reason(self) -> str:
        """Why ``link_bytes`` is None, else empty."""
        if self._counted:
            return "" if self._passes else "no pass yet"
        return self.counter.reason

    @property
    def flags(self) -> tuple[str, ...]:
        """What a row about these passes must say. ``link_below_unique``: a cache of this system served part of them."""
        short = self.link_bytes is not None and self.link_bytes < (1 - CACHED_LEAST) * self.unique_bytes
        return (*self._flags, "link_below_unique") if short else tuple(self._flags)

    def run(self, reps: int = 1) -> float:
        """Read the file ``reps`` times; return the seconds of the passes alone, dropping caches in between unmeasured.

        Raises Unavailable when the device fails, VerifyError when the file ends early.
        """
        if reps < 1:
            raise UsageError("a measurement needs at least one pass", where="file_read", got=reps)
        return sum(self._pass(timed=True) for _ in range(reps))

    def verify(self) -> None:
        """Raise VerifyError unless what the last timed pass left, and every block of one more pass, is the payload.

        The further pass reads by the same method and threads into poisoned buffers. Under mmap the sum of each timed
        pass, over every byte it read, is checked as well.
        """
        if self._map is not None:
            want = self._expected_sum()
            wrong = sorted(total for total in self._totals if total != want)
            if wrong:
                raise VerifyError(
                    "a timed pass read other bytes than were written",
                    where=self._name,
                    got=wrong[0],
                    expected=str(want),
                )
        else:
            for slot, offset in enumerate(self._last):
                if offset is not None:
                    self._compare(self._slots[slot][: self._length(offset)], offset)
        self._checking = True
        try:
            self._pass(timed=False)
        finally:
            self._checking = False

    def close(self) -> None:
        """Stop the threads and give the buffers back; the file stays open."""
        self._crew.close()
        self._slots, self._map = [], None
        if self._buffer is not None:
            self._buffer.close()
        if self.method == "pread" and self._advice == "random" and self.file.fd >= 0:
            os.posix_fadvise(self.file.fd, 0, 0, os.POSIX_FADV_NORMAL)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _name(self) -> str:
        return f"file_read {self.method} block={format_bytes(self.block)} depth={self.depth}"

    def _length(self, offset: int) -> int:
        return min(self.block, self.file.nbytes - offset)

    def _pass(self, *, timed: bool) -> float:
        order = (self._rng.permutation(self.blocks) * self.block).tolist()
        self._orders = [order[i :: self.depth] for i in range(self.depth)]
        self._sums = [0] * self.depth
        self._make_cold()
        before = read_bytes().value if self._counted else None
        try:
            seconds = self._crew.run_pass()
        except OSError as error:
            raise self.file.failed(error) from error
        if timed:
            after = read_bytes().value if self._counted else None
            if before is not None and after is not None:
                self._link += after - before
            self._passes += 1
            if self._map is not None:
                self._totals.add(sum(self._sums) & _MASK64)
        return seconds

    def _make_cold(self) -> None:
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)  # mapped pages would survive the fadvise
        if self.method == "pread":
            os.posix_fadvise(self.file.fd, 0, 0, _FADVISE[self._advice])
        self.file.drop_cache()
        if self.method == "direct":
            return
        left = self.file.cached_bytes()
        if left.value is None:
            self._flags["cache_unknown"] = None
        elif left.value > CACHED_LEAST * self.file.nbytes:
            self._flags["cache_not_dropped"] = None

    def _read_copied(self, index: int) -> None:
        fd = self.file.direct_fd if self.method == "direct" else self.file.fd
        assert fd is not None
        buffer, view = self._slots[index], self._slots[index].data
        for offset in self._orders[index]:
            if self._crew.stopping:
                return
            length = self._length(offset)
            if self._checking:
                payload.poison(buffer)
            done = os.preadv(fd, [view[:length]], offset)
            while done < length:
                more = os.preadv(fd, [view[done:length]], offset + done)
                if more == 0:
                    raise VerifyError(
                        "the file ends early", where=self._name, got=offset + done, expected=f"{self.file.nbytes} bytes"
                    )
                done += more
            if self._checking:
                self._compare(buffer[:length], offset)
        self._last[index] = self._orders[index][-1]

    def _read_mapped(self, index: int) -> None:
        assert self._map is not None
        words, total = np.frombuffer(self._map, np.uint64), 0
        for offset in self._orders[index]:
            if self._crew.stopping:
                return
            piece = words[offset // 8 : (offset + self._length(offset)) // 8]
            total += int(np.add.reduce(piece))  # wraps at 2^64, as the expected sum does
            if self._checking:
                self._compare(piece.view(np.uint8), offset)
        self._sums[index] = total

    def _compare(self, got: npt.NDArray[np.uint8], offset: int) -> None:
        want = self.file.expected(offset, got.size)
        if not np.array_equal(got, want):
            at = int(np.argmax(got != want))
            raise VerifyError(
                "a block holds other bytes than were written", where=self._name,
                got=f"checksum {payload.checksum(got):#x}",
                expected=f"{payload.checksum(want):#x}, first difference at byte {offset + at}",
            )  # fmt: skip

    def _expected_sum(self) -> int:
        total = 0
        for start in range(0, self.file.nbytes, WRITE_CHUNK):
            piece = self.file.expected(start, min(WRITE_CHUNK, self.file.nbytes - start))
            total += int(np.add.reduce(piece.view(np.uint64)))
        return total & _MASK64


def _check(file: ScratchFile, method: str, block: int, depth: int, advice: str) -> None:
    if method not in METHODS:
        raise UsageError("unknown read method", where="method", got=method, expected=f"one of {', '.join(METHODS)}")
    if advice not in ADVICE:
        raise UsageError("unknown readahead advice", where="advice", got=advice, expected=f"one of {', '.join(ADVICE)}")
    if block < SECTOR or block % SECTOR:
        raise UsageError("not a block size", where="block", got=block, expected=f"a multiple of {SECTOR} bytes")
    if not 1 <= depth <= MAX_DEPTH:
        raise UsageError("not a depth", where="depth", got=depth, expected=f"1 to {MAX_DEPTH} threads")
    if depth * block > file.nbytes:
        raise Unavailable(
            f"{depth} blocks of {format_bytes(block)} at once", where="file_read",
            got=f"a file of {format_bytes(file.nbytes)}", mend="choose a larger file, smaller blocks or less depth",
        )  # fmt: skip
    if method != "direct":
        return
    if file.direct.works is False:
        raise Unavailable("no direct reads here", where=str(file.directory), got=file.direct.reason,
                          mend="give --scratch a directory on a disk")  # fmt: skip
    if block % file.direct.offset_align:
        raise Unavailable("direct reads need larger blocks here", where="block", got=block,
                          expected=f"a multiple of {file.direct.offset_align} bytes")  # fmt: skip
