"""The host driver: one memfd whose offsets are the chunks, mapped over addresses that were reserved without access.

What CUDA does when memory is created happens here when it is made accessible: the pages of a fresh chunk are taken and
cleared by ``set_access``, so that a touch after it costs no fault on either driver. A proxy for a GPU's calls in what
can be done and in which order, never in what it costs.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import os
import resource
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.machine.probe import ROOT
from kvbench.memory import libc
from kvbench.memory.host import preflight
from kvbench.memory.limits import read_text, thp
from kvbench.memory.region import Pages, check_huge_pool, check_pages, page_bytes
from kvbench.memory.vmm.book import Claim
from kvbench.memory.vmm.driver import Driver, rows
from kvbench.memory.vmm.protocol import Chunk, Exhausted, Reservation, VmmError
from kvbench.memory.vmm.ranges import Ints
from kvbench.units import format_bytes

if TYPE_CHECKING:
    from kvbench.kernels.call_loop import Failure, Runner

MFD_CLOEXEC, MFD_HUGETLB, MFD_HUGE_SHIFT = 1, 4, 26
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE needs FALLOC_FL_KEEP_SIZE
QUIET = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
WRITABLE = libc.PROT_READ | libc.PROT_WRITE
SHMEM_HUGE = frozenset({"always", "within_size", "advise", "force"})
BALLAST = 8  # mappings kept so that an undo has room when the process is at its limit
NEAR_LIMIT = 64  # mappings: closer to the limit than this is at the limit


class HostVmm(Driver):
    """Chunks of at most ``capacity`` bytes together, of base pages (``4k``), huge pages of shared memory (``thp``) or
    reserved huge pages (``huge``).

    ``granularity``: what sizes are multiples of, at least one page of the kind and the default. ``runner`` makes the
    calls (default: a compiled loop in the calling thread). Raises UsageError for arguments that make no sense,
    Unavailable when memory, pages, descriptors or the kernel's calls (5.14: MADV_POPULATE_WRITE) are not to be had.
    """

    name = "host"

    def __init__(
        self, capacity: int, pages: Pages = "4k", *, granularity: int | None = None, runner: Runner | None = None,
        root: Path = ROOT,
    ) -> None:  # fmt: skip
        check_pages(pages)
        self.page = _page(pages, root)
        grain = self.page if granularity is None else granularity
        if grain < self.page or grain % self.page:
            raise UsageError(
                "granularity off the page size", where="vmm host", got=f"{grain} bytes",
                expected=f"a multiple of {self.page} bytes",
            )  # fmt: skip
        super().__init__(grain, runner)
        self.book.check_size(capacity, "the capacity")
        self.pages, self.capacity = pages, capacity
        self._root = root
        self._used = self._end_of_file = 0
        self._holes: dict[int, list[int]] = {}
        self._offsets_lock = threading.Lock()
        self._fd = _memfd(pages, self.page)
        self._ballast: list[int] = []
        self._ballasts = BALLAST
        try:
            if pages == "huge":
                check_huge_pool(capacity, self.page, root)
            else:
                preflight(capacity, root)
            self._keep_ballast()
            self._probe()
        except BaseException:
            self._end()
            raise

    def _probe(self) -> None:
        """Find out, before anything depends on it, that this kernel can populate a mapping."""
        try:
            os.ftruncate(self._fd, self.page)
        except OSError as error:
            raise Unavailable(
                "the memfd does not grow", where="vmm host", got=error.strerror, mend="see ulimit -f"
            ) from error
        try:
            address = libc.mmap(0, self.page, WRITABLE, libc.MAP_SHARED | libc.MAP_NORESERVE, self._fd, 0)
        except OSError as error:
            self._drop_ballast()  # see _error
            raise Unavailable(
                "no room for a mapping", where="vmm host", got=os.strerror(error.errno or 0), mend=self._why(0, 0)
            ) from error
        try:
            libc.madvise(address, self.page, libc.MADV_POPULATE_WRITE)
        except OSError as error:
            raise Unavailable(
                "memory cannot be populated by a call", where="vmm host", got=error.strerror,
                expected="Linux 5.14 or later, and free pages",
            ) from error  # fmt: skip
        finally:
            libc.munmap(address, self.page)
            os.ftruncate(self._fd, 0)

    # -- addresses -----------------------------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> int:
        align = self.page
        extra = 0 if align == libc.base_page_bytes() else align
        try:
            if nbytes + extra > sys.maxsize:  # ctypes would cut it to 64 bits and map what is left
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            start = libc.mmap(0, nbytes + extra, libc.PROT_NONE, QUIET)
        except OSError as error:
            raise Exhausted(
                f"no {format_bytes(nbytes)} of addresses, {os.strerror(error.errno or 0)}", call="mmap", index=0,
                code=error.errno or 0, where="vmm host reserve", mend=self._why(0, nbytes),
            ) from error  # fmt: skip
        address = -(-start // align) * align
        for edge, size in ((start, address - start), (address + nbytes, start + extra - address)):
            if size:
                libc.munmap(edge, size)
        return address

    def _free(self, reservation: Reservation) -> None:
        try:
            libc.munmap(reservation.address, reservation.nbytes)
        except OSError as error:
            raise VmmError(
                error.strerror or "refused", call="munmap", index=0, code=error.errno or 0, where="vmm host free"
            ) from error

    # -- chunks --------------------------------------------------------------------------------------------------

    def _create(self, nbytes: int, count: int) -> list[int]:
        with self._offsets_lock:
            if self._used + nbytes * count > self.capacity:
                fitting = (self.capacity - self._used) // nbytes
                raise Exhausted(
                    f"the pool of {format_bytes(self.capacity)} is used up", call="create", index=fitting,
                    code=errno.ENOMEM, where="vmm host", mend="release chunks or make the pool larger",
                )  # fmt: skip
            holes = self._holes.setdefault(nbytes, [])
            fresh = max(0, count - len(holes))
            if fresh:
                end = self._end_of_file + fresh * nbytes
                try:
                    os.ftruncate(self._fd, end)
                except OSError as error:
                    raise Exhausted(
                        f"the memfd does not grow, {error.strerror}", call="ftruncate", index=count - fresh,
                        code=error.errno or 0, where="vmm host create", mend="see ulimit -f",
                    ) from error  # fmt: skip
            # lowest first: chunks made together lie together, before and after others were released
            found = [heapq.heappop(holes) for _ in range(count - fresh)]
            found += [self._end_of_file + k * nbytes for k in range(fresh)]
            self._end_of_file += fresh * nbytes
            self._used += nbytes * count
            return found

    def _release(self, chunks: Sequence[Chunk]) -> tuple[Failure, bool] | None:
        offsets = np.fromiter((c.handle for c in chunks), np.int64, len(chunks))
        sizes = np.fromiter((c.nbytes for c in chunks), np.int64, len(chunks))
        failure = self.runner(
            _address("fallocate"), rows(len(chunks), self._fd, PUNCH_HOLE, offsets, sizes), errno=True
        )
        gone = chunks if failure is None else [c for c, made in zip(chunks, failure.made, strict=True) if made]
        with self._offsets_lock:
            for chunk in gone:
                heapq.heappush(self._holes.setdefault(chunk.nbytes, []), chunk.handle)
                self._used -= chunk.nbytes
        return None if failure is None else (failure, False)

    # -- mappings ------------------------------------------------------------------------------------------------

    def _map(self, claim: Claim) -> tuple[Failure, list[int]] | None:
        flags = libc.MAP_SHARED | libc.MAP_FIXED
        table = rows(len(claim.low), claim.address, claim.nbytes, libc.PROT_NONE, flags, self._fd, claim.handle)
        failure = self.runner(_address("mmap"), table, errno=True)
        if failure is None:
            return None
        made = np.flatnonzero(failure.made)[::-1]
        if not len(made):
            return failure, []
        self._drop_ballast()
        undone = self._over(claim.address[made], claim.nbytes[made])
        self._keep_ballast()
        return failure, [] if undone is None else made[~undone.made].tolist()

    def _over(self, address: Ints, nbytes: Ints) -> Failure | None:
        """Put inaccessible addresses over ranges."""
        table = rows(len(address), address, nbytes, libc.PROT_NONE, QUIET | libc.MAP_FIXED, -1, 0)
        return self.runner(_address("mmap"), table, errno=True)

    def _access(self, claim: Claim) -> Failure | None:
        count = len(claim.low)
        steps = [("mprotect", WRITABLE), ("madvise", libc.MADV_POPULATE_WRITE)]
        if self.pages == "thp":
            steps.insert(1, ("madvise", libc.MADV_HUGEPAGE))
        for name, argument in steps:
            failure = self.runner(_address(name), rows(count, claim.address, claim.nbytes, argument), errno=True)
            if failure is not None:
                closed = self.book.without_access(claim)
                if closed:
                    self._drop_ballast()
                    table = np.asarray(closed, np.int64)
                    self.runner(
                        _address("mprotect"), rows(len(closed), table[:, 0], table[:, 1], libc.PROT_NONE), errno=True
                    )
                    self._keep_ballast()
                return failure
        return None

    def _unmap(self, claim: Claim) -> tuple[Failure, list[bool | None]] | None:
        failure = self._over(claim.address, claim.nbytes)
        return None if failure is None else (failure, failure.made.tolist())

    # -- limits --------------------------------------------------------------------------------------------------

    def _drop_ballast(self) -> None:
        """Give mappings back, so that an undo which cuts one in two has room for the second."""
        while self._ballast:
            libc.munmap(self._ballast.pop(), libc.base_page_bytes())

    def _make_room(self) -> None:
        self._ballasts = 0
        self._drop_ballast()

    def _keep_ballast(self) -> None:
        page = libc.base_page_bytes()
        # Every second page has another protection, so that the kernel cannot make one mapping of neighbours.
        while len(self._ballast) < self._ballasts:
            prot = libc.PROT_READ if len(self._ballast) % 2 else libc.PROT_NONE
            try:
                self._ballast.append(libc.mmap(0, page, prot, QUIET))
            except OSError:
                return  # at the limit with nothing mapped by this driver: the next undo has as much room as now

    def _error(self, call: str, failure: Failure) -> KvbenchError:
        text = os.strerror(failure.code) if failure.code > 0 else "refused"
        done = int(failure.made.sum())
        if failure.code in (errno.ENOMEM, errno.EFAULT, errno.EAGAIN, errno.ENOSPC):
            self._drop_ballast()  # Python needs a mapping itself to say that there is none left
            mend = self._why(done, 0)
            self._keep_ballast()
            return Exhausted(text, call=call, index=failure.index, code=failure.code, where="vmm host", mend=mend)
        return VmmError(text, call=call, index=failure.index, code=failure.code, where="vmm host")

    def _why(self, done: int, nbytes: int) -> str:
        """Return what was most probably used up, and how to have more of it."""
        limit = read_text(self._root / "proc/sys/vm/max_map_count").value
        held = _mappings(self._root)
        if limit is not None and limit.strip().isdigit() and held + 2 * done + NEAR_LIMIT >= int(limit):
            more = f"sudo sysctl vm.max_map_count={2 * int(limit)}"
            return f"the process has all the mappings it may, vm.max_map_count is {limit.strip()}: {more}"
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        if soft != resource.RLIM_INFINITY:
            return f"addresses are limited to {soft} bytes: see ulimit -v"
        if nbytes:
            return "ask for fewer addresses"
        if self.pages == "huge":
            return "reserve more huge pages: sudo sysctl vm.nr_hugepages=N"
        return "end other programs, or raise the memory limit of this one"

    @property
    def descriptor(self) -> int:
        """The memfd whose offsets are the chunks, for who maps the same pages by other means."""
        return self._fd

    def file_bytes(self) -> int:
        """Return the bytes of memory behind all chunks, as the kernel counts them."""
        return 512 * os.fstat(self._fd).st_blocks

    def _fds(self) -> int:
        return 0 if self._fd < 0 else 1

    def _end(self) -> None:
        self._drop_ballast()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _mappings(root: Path) -> int:
    """Return how many mappings this process has, 0 where /proc does not tell; in small pieces, see where it is used."""
    try:
        with open(root / "proc/self/maps", "rb", buffering=0) as lines:
            return sum(piece.count(b"\n") for piece in iter(partial(lines.read, 4096), b""))
    except OSError:
        return 0


def _page(pages: Pages, root: Path) -> int:
    """Return the bytes of a page of the kind in shared memory. Raises Unavailable where shared memory has none."""
    if pages != "thp":
        return page_bytes(pages, root)
    state = thp(root)
    if state.page_bytes.value is None:
        raise Unavailable(
            "no transparent huge pages", where="pages=thp", got=state.page_bytes.reason, mend="use pages=4k"
        )
    if state.shmem.value not in SHMEM_HUGE:
        raise Unavailable(
            "shared memory gets no transparent huge pages", where="pages=thp",
            got=state.shmem.value or state.shmem.reason, expected="advise, within_size or always",
            mend="echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )  # fmt: skip
    return state.page_bytes.value


def _memfd(pages: Pages, page: int) -> int:
    flags = MFD_CLOEXEC
    if pages == "huge":
        flags |= MFD_HUGETLB | (page.bit_length() - 1) << MFD_HUGE_SHIFT
    try:
        return os.memfd_create("kvbench-vmm", flags)
    except OSError as error:
        mend = "see ulimit -n" if error.errno in (errno.EMFILE, errno.ENFILE) else "use pages=4k"
        raise Unavailable("no memfd", where=f"vmm host, pages={pages}", got=error.strerror, mend=mend) from error


def _address(name: str) -> int:
    from kvbench.kernels.libc import address_of

    return address_of(name)


def can_touch(address: int) -> bool:
    """Return whether the byte at ``address`` can be read, by a call that fails where a load would end the process."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        return int(_write(writer, address, 1)) == 1
    finally:
        os.close(reader)
        os.close(writer)


_write = ctypes.CDLL(None, use_errno=True).write
_write.restype, _write.argtypes = ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
