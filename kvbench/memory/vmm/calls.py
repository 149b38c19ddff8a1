"""One call of a driver of virtual memory at a time: many of them, timed inside the compiled loop that makes them."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvbench.errors import KvbenchError, Unavailable, UsageError, VerifyError
from kvbench.memory import libc
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.driver import Driver, rows
from kvbench.memory.vmm.host import QUIET, HostVmm
from kvbench.memory.vmm.protocol import Chunk, Reservation, Span
from kvbench.memory.vmm.touch import Touch, check_mapped, check_unreachable

if TYPE_CHECKING:
    from kvbench.kernels.call_loop import TeamRunner

Op = Literal["reserve", "create", "map", "set_access", "unmap", "release", "free"]
OPS: tuple[Op, ...] = get_args(Op)
Order = Literal["contiguous", "scattered"]
FAULT_SHARE = 0.01  # of the pages touched after set_access: more faults than this and it did not populate
SYSTEM_CALLS = {
    "reserve": "mmap", "map": "mmap", "set_access": "mprotect + madvise", "unmap": "mmap", "release": "fallocate",
    "free": "munmap",
}  # fmt: skip
DRIVER_CALLS = {
    "reserve": "cuMemAddressReserve", "create": "cuMemCreate", "map": "cuMemMap", "set_access": "cuMemSetAccess",
    "unmap": "cuMemUnmap", "release": "cuMemRelease", "free": "cuMemAddressFree",
}  # fmt: skip


class CallWork:
    """``count`` chunks of ``chunk_bytes`` and one ``op`` on them; ``run`` returns the seconds of its calls alone.

    ``contiguous``: chunk after chunk in one range, which set_access and unmap take in one call. ``scattered``: in
    random order with a hole after each, so one call a chunk. reserve, create, release and free make one call each.
    ``calls`` are those of a pass, ``kernel`` their names. ``runner`` must be the driver's.

    Raises UsageError for a runner that is not the driver's, Unavailable where the driver makes no call for ``op``.
    """

    def __init__(
        self, vmm: Driver, runner: TeamRunner, touch: Touch, op: Op, chunk_bytes: int, count: int, order: Order,
        seed: int = 1,
    ) -> None:  # fmt: skip
        if vmm.runner is not runner:
            raise UsageError("the runner is not the driver's", where="vmm calls")
        names = SYSTEM_CALLS if isinstance(vmm, HostVmm) else DRIVER_CALLS
        if op not in names:
            raise Unavailable("a chunk of the memfd is an offset: creating one makes no call", where=f"op={op}")
        self.vmm, self.op, self.chunk_bytes, self.count = vmm, op, chunk_bytes, count
        self.kernel = f"{names[op]} in a compiled loop"
        self.each: list[npt.NDArray[np.float64]] = []
        self._runner, self._touch = runner, touch
        step = chunk_bytes if order == "contiguous" else 2 * chunk_bytes
        offsets = step * np.arange(count, dtype=np.int64)
        if order == "scattered":
            offsets = np.random.default_rng(seed).permutation(offsets)
        self.offsets: list[int] = offsets.tolist()
        one = order == "contiguous"
        self.spans: list[Span] = [(0, count * chunk_bytes)] if one else [(at, chunk_bytes) for at in self.offsets]
        self.calls = len(self.spans) if op in ("set_access", "unmap") else count
        self._place: Reservation | None = None
        if op in ("map", "set_access", "unmap"):
            self._place = vmm.reserve(count * step)
        self._chunks: list[Chunk] = vmm.create_many(chunk_bytes, count) if op in ("map", "set_access", "unmap") else []
        self._passes = 0
        self._seconds = 0.0

    def run(self, reps: int) -> float:
        """Make the calls of ``reps`` passes, undoing each outside the window; return the seconds of the calls."""
        seconds = 0.0
        self.each.clear()
        for _ in range(reps):
            self._pass(check=False)
            seconds += self._seconds
        self._passes += reps
        return seconds

    def verify(self) -> None:
        """Make one more pass and check what it did. Raises VerifyError."""
        if not self._passes:
            raise VerifyError("nothing was run", where=self.kernel)
        self._pass(check=True)

    def _pass(self, *, check: bool) -> None:
        self._seconds = 0.0
        if self.op in ("reserve", "free"):
            self._addresses(check=check)
        elif self.op in ("create", "release"):
            self._handles(check=check)
        else:
            self._mappings(check=check)

    def _made(self, op: Op, call: Callable[[], object]) -> None:
        """Make the calls of ``op``; keep their time where it is the one measured."""
        if op != self.op:
            call()
            return
        self._runner.begin()
        call()
        self._seconds = self._runner.end()
        if self._runner.calls % self.calls or not self._runner.calls:
            raise KvbenchError("other calls than those asked were timed", where=self.kernel, got=self._runner.calls)
        if self._runner.each:
            self.each.append(np.sum(self._runner.each, axis=0))  # set_access of the host: two calls a range

    # -- one pass ------------------------------------------------------------------------------------------------

    def _mappings(self, *, check: bool) -> None:
        vmm, place = self.vmm, self._place
        assert place is not None
        self._made("map", lambda: vmm.map_many(place, self.offsets, self._chunks))
        if check and isinstance(vmm, HostVmm):
            check_unreachable(self._touch, [place.address + self.offsets[0]], "map without set_access")
        if self.op != "map" or check:
            self._made("set_access", lambda: vmm.set_access_many(place, self.spans))
        if check:
            self._check_populated(place)
            check_mapped(vmm, self._touch, place, self.offsets, self._chunks)
        self._made("unmap", lambda: vmm.unmap_many(place, self.spans))
        if check:
            check_unreachable(self._touch, [place.address + at for at in self.offsets], self.kernel)
        if self.op == "set_access":
            # what was populated would be there already the next time
            vmm.release_many(self._chunks)
            self._chunks = vmm.create_many(self.chunk_bytes, self.count)

    def _check_populated(self, place: Reservation) -> None:
        if not isinstance(self.vmm, HostVmm):
            return
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._touch.first([place.address + at for at in self.offsets], self.chunk_bytes)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        pages = self.count * self.chunk_bytes // libc.base_page_bytes()
        if faults > max(8, FAULT_SHARE * pages):
            raise VerifyError(
                "touching what was made accessible still faults", where=self.kernel, got=f"{faults} faults",
                expected=f"none in {pages} pages",
            )  # fmt: skip

    def _handles(self, *, check: bool) -> None:
        vmm = self.vmm
        held = self._held()
        chunks: list[Chunk] = []
        self._made("create", lambda: chunks.extend(vmm.create_many(self.chunk_bytes, self.count)))
        if isinstance(vmm, HostVmm):
            self._populate(chunks)
        taken = self._held()
        self._made("release", lambda: vmm.release_many(chunks))
        total, back = self.count * self.chunk_bytes, taken - self._held()
        if check and (taken - held < total or back < total):
            raise VerifyError(
                "memory did not come and go with the chunks", where=self.kernel,
                got=f"{taken - held} bytes taken, {back} given back", expected=f"{total}",
            )  # fmt: skip

    def _populate(self, chunks: list[Chunk]) -> None:
        place = self.vmm.reserve(self.count * self.chunk_bytes)
        self.vmm.map_many(place, [k * self.chunk_bytes for k in range(self.count)], chunks)
        self.vmm.set_access(place, 0, place.nbytes)
        self.vmm.unmap(place, 0, place.nbytes)
        self.vmm.free(place)

    def _held(self) -> int:
        """Return the bytes of physical memory that the driver's chunks hold, as the system counts them (trap T62)."""
        if isinstance(self.vmm, HostVmm):
            return self.vmm.file_bytes()
        assert isinstance(self.vmm, CudaVmm)
        free, total = self.vmm.device.memory()
        return total - free

    def _addresses(self, *, check: bool) -> None:
        count, size = self.count, self.chunk_bytes
        found = np.zeros(count, np.int64)
        if isinstance(self.vmm, HostVmm):
            table = rows(count, 0, size, libc.PROT_NONE, QUIET, -1, 0)
            self._made("reserve", lambda: self._call(_function("mmap"), table, results=found))
        else:
            table = rows(count, found.ctypes.data + 8 * np.arange(count, dtype=np.int64), size)
            self._made("reserve", lambda: self._call(self._driver("cuMemAddressReserve"), table))
        if check:
            if len(np.unique(found)) != count or not found.all():
                raise VerifyError("addresses were given twice, or none", where=self.kernel)
            check_unreachable(self._touch, found.tolist(), self.kernel)
        function = _function("munmap") if isinstance(self.vmm, HostVmm) else self._driver("cuMemAddressFree")
        back = rows(count, found, size)
        self._made("free", lambda: self._call(function, back))

    def _call(self, function: int, table: npt.NDArray[np.int64], results: npt.NDArray[np.int64] | None = None) -> None:
        failure = self._runner(function, table, errno=isinstance(self.vmm, HostVmm), results=results)
        if failure is not None and isinstance(self.vmm, CudaVmm):
            raise self.vmm.refused(DRIVER_CALLS[self.op], failure.index, failure.code)
        if failure is not None:
            raise Unavailable("a call was refused", where=self.kernel, got=f"number {failure.index}: {failure.code}")

    def _driver(self, call: str) -> int:
        assert isinstance(self.vmm, CudaVmm)
        return self.vmm.device.driver.address(call)


def _function(name: str) -> int:
    from kvbench.kernels.libc import address_of

    return address_of(name)
