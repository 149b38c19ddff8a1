"""What a page costs: first touch, populate, unmap and drop of an anonymous range, one operation per call of `run`.

Set-up and checks lie outside the timed window; one ctypes call, about 0.5 us, lies inside (numpy's, for a touch).
"""

from __future__ import annotations

import errno
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

import numpy as np

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.machine.probe import ROOT
from kvbench.memory import libc
from kvbench.memory.host import preflight
from kvbench.memory.region import Pages, Region, check_pages, page_bytes

Operation = Literal["first_touch", "populate", "unmap", "drop"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_KERNELS: dict[str, str] = {
    "first_touch": "one byte stored per page (numpy strided assignment)",
    "populate": "madvise MADV_POPULATE_WRITE",
    "unmap": "munmap of touched pages",
    "drop": "madvise MADV_DONTNEED of touched pages",
}


class PageOperation:
    """One page operation on ``nbytes`` of fresh memory of one page type.

    ``first_touch`` stores one byte per page of the asked type, so its time is the faults and the kernel's zeroing, not
    a fill of the range; ``populate`` is one MADV_POPULATE_WRITE; ``unmap`` and ``drop`` (MADV_DONTNEED) start from
    touched pages. Every single operation is checked by the bytes resident around it. ``pages`` is how many pages of
    ``page_bytes`` one operation handles; ``nbytes`` must be a multiple of that size.

    Raises UsageError for impossible arguments; Unavailable when memory, pages or the call are not to be had here, and
    when the kernel gave smaller pages than asked.
    """

    def __init__(self, operation: Operation, nbytes: int, pages: Pages = "4k", root: Path = ROOT) -> None:
        if operation not in OPERATIONS:
            raise UsageError(
                "unknown page operation", where="touch", got=operation, expected=f"one of {', '.join(OPERATIONS)}"
            )
        check_pages(pages)
        self.operation, self.nbytes, self.page_type = operation, nbytes, pages
        self.page_bytes = page_bytes(pages, root)
        if nbytes < self.page_bytes or nbytes % self.page_bytes:
            raise Unavailable(
                "not whole pages",
                where=f"touch pages={pages}",
                got=nbytes,
                expected=f"a multiple of {self.page_bytes} bytes",
            )
        if pages != "huge":
            preflight(nbytes, root)
        self.pages = nbytes // self.page_bytes
        self.unique_bytes = nbytes
        self.kernel = _KERNELS[operation]
        self._region: Region | None = Region(nbytes, pages, root)
        self._done, self._root, self._deep = 0, root, True
        self._run_once()  # also the probe: whether this kernel has the call and gives these pages
        self._deep = False

    def run(self, reps: int = 1) -> float:
        """Do the operation ``reps`` times on fresh memory; return the seconds of the operations alone.

        Raises Unavailable when the kernel gave other pages than asked, VerifyError when an operation did not work.
        """
        if reps < 1:
            raise UsageError("a measurement needs at least one operation", where="touch", got=reps)
        return sum(self._run_once() for _ in range(reps)) / 1e9

    def verify(self) -> None:
        """Raise VerifyError if nothing was done yet, or if one more operation, checked in depth, fails its check."""
        if self._done < 2:  # one of them is the constructor's probe
            raise VerifyError("no operation was timed", where=f"touch {self.operation}")
        self._deep = True
        try:
            self._run_once()
        finally:
            self._deep = False

    def close(self) -> None:
        """Give the memory back. Closing twice is fine."""
        if self._region is not None:
            self._region.drop()
            self._region = None

    def __enter__(self) -> PageOperation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_once(self) -> int:
        """Return the nanoseconds of one operation on fresh memory."""
        if self._region is None:
            raise ValueError("the page operation is closed")
        spent = self._unmap() if self.operation == "unmap" else self._in_place(self._region)
        self._done += 1
        return spent

    def _in_place(self, region: Region) -> int:
        region.map()
        self._expect(region, 0, "before")
        view = np.asarray(region)[:: self.page_bytes]
        if self.operation == "drop":
            view[:] = 1
            self._expect(region, self.nbytes, "before")
        if self.operation == "first_touch":
            start = time.perf_counter_ns()
            view[:] = 1
            stop = time.perf_counter_ns()
        else:
            advice = libc.MADV_POPULATE_WRITE if self.operation == "populate" else libc.MADV_DONTNEED
            try:
                start = time.perf_counter_ns()
                libc.madvise(region.address, self.nbytes, advice)
                stop = time.perf_counter_ns()
            except OSError as error:
                old = self.operation == "populate" and error.errno == errno.EINVAL
                raise Unavailable(
                    f"{self.kernel} is refused", where=f"touch pages={self.page_type}",
                    got="a kernel before Linux 5.14" if old else (error.strerror or str(error)),
                ) from error  # fmt: skip
        self._expect(region, 0 if self.operation == "drop" else self.nbytes, "after")
        return stop - start

    def _unmap(self) -> int:
        # Its own region each time: a hole left in a kept one could be taken by another thread's mmap.
        region = Region(self.nbytes, self.page_type, self._root)
        np.asarray(region)[:: self.page_bytes] = 1
        self._expect(region, self.nbytes, "before")
        region.give_back_guards()
        region.disown()
        start = time.perf_counter_ns()
        libc.munmap(region.address, self.nbytes)
        stop = time.perf_counter_ns()
        left = region.mincore_bytes().value  # None: not mapped, as it should be
        if left == self.nbytes:
            raise VerifyError("pages are still there", where="touch unmap", got=left, expected="0 bytes resident")
        return stop - start

    def _expect(self, region: Region, want: int, when: str) -> None:
        """Check resident bytes, and for THP that touched pages were huge ones."""
        present = region.mincore_bytes()
        if present.value is None:
            raise Unavailable("resident pages cannot be counted", where=f"touch {self.operation}", got=present.reason)
        # A touch of one byte per THP shows base pages as absent ones; populate fills them, so smaps must tell. Fact
        # smaps walks every page table of the process and leaves the caches cold: not between timed operations.
        deep = self._deep and self.page_type == "thp" and self.operation == "populate" and want
        state = region.residency() if deep else None
        if state is not None and state.value is None:
            raise Unavailable("huge pages cannot be counted", where=f"touch {self.operation}", got=state.reason)
        got = state.value.thp if state is not None and state.value is not None else present.value
        if got == want:
            return
        if self.page_type == "thp" and want:
            raise Unavailable(
                "the kernel gave base pages", where="touch pages=thp", got=f"{got} of {want} bytes in huge pages",
                mend="echo 1 | sudo tee /proc/sys/vm/compact_memory",
            )  # fmt: skip
        raise VerifyError(f"resident bytes {when} the operation", got=got,
                          where=f"touch {self.operation} pages={self.page_type}", expected=str(want))  # fmt: skip
