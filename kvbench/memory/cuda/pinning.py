"""What page-locked memory costs before anything is copied: map, first touch, register, give back (trap T47)."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from types import TracebackType

import numpy as np

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.memory import libc, numa, payload
from kvbench.memory.cuda.buffers import HOSTALLOC, REGISTER, How, pointer_facts
from kvbench.memory.cuda.driver import CudaError
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.memory.cuda.service import Service
from kvbench.memory.host import preflight
from kvbench.memory.region import Pages, Region

REFUSALS = frozenset(
    CONSTANTS[name] for name in ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED")
)
THP_LEAST = 0.5  # below this share the row would say "thp" of a buffer of base pages


@dataclass(frozen=True, slots=True)
class Spans:
    """Seconds of each step: getting addresses (hostalloc: all of cuMemHostAlloc), first touch, registering (None with
    hostalloc, which pins as it allocates), and giving back."""

    alloc: float
    touch: float
    register: float | None
    unpin: float

    @property
    def ready(self) -> float:
        """Seconds until page-locked and touched memory is there."""
        return self.alloc + self.touch + (self.register or 0.0)


class Pinning:
    """Pins ``nbytes`` of fresh memory and gives them back, each time it is asked.

    ``how`` "register": mmap, first touch by ``threads`` threads, cuMemHostRegister; "hostalloc": cuMemHostAlloc, then
    the same touch of pages that are there. ``node`` (default: the GPU's) is where the pages are asked to be.
    Raises UsageError for huge pages with hostalloc, Unavailable when memory, pages or the node are not to be had.
    """

    def __init__(
        self, service: Service, nbytes: int, how: How, pages: Pages, threads: int = 1, node: int | None = None
    ) -> None:
        if how == "hostalloc" and pages != "4k":
            raise UsageError("cuMemHostAlloc chooses its pages itself", where="pin", got=pages, expected="4k")
        self.nbytes, self.how, self.pages, self.threads = nbytes, how, pages, threads
        self.node = service.device.facts.node.value if node is None else node
        self.flags: dict[str, None] = {}
        self.spans: list[Spans] = []
        self._service, self._device = service, service.device
        preflight(nbytes, node=self.node)
        with ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(threads, "kvbench-touch"))
            list(self._pool.map(time.sleep, [0.0] * threads))  # threads are made at their first work
            self._stack = stack.pop_all()

    def run(self, reps: int) -> float:
        """Return the seconds of pinning ``reps`` times; ``spans`` keeps the mean of each step, one a call."""
        taken = [self.once() for _ in range(reps)]
        steps = [[step for step in steps if step is not None] for steps in zip(*map(astuple, taken), strict=True)]
        alloc, touch, register, unpin = (sum(step) / reps if step else None for step in steps)
        self.spans.append(Spans(alloc or 0.0, touch or 0.0, register, unpin or 0.0))
        return sum(each.ready for each in taken)

    def verify(self) -> None:
        """Pin once more, write payload by the host and have the device read all places. Raises VerifyError."""
        self.once(check=True)

    def once(self, *, check: bool = False) -> Spans:
        """Pin and give back once. Raises Unavailable when it is refused, VerifyError when it is not page-locked."""
        return self._register(check) if self.how == "register" else self._hostalloc(check)

    def _register(self, check: bool) -> Spans:
        marks = [time.perf_counter_ns()]
        region = Region(self.nbytes, self.pages)
        try:
            if self.node is not None:
                bound = numa.bind(region.address, region.mapped, self.node)
                if bound.value is False:
                    raise Unavailable("memory cannot be bound there", where="pin", got=f"{self.node}: {bound.reason}")
                if not bound.value:
                    self.flags["unbound"] = None
            marks.append(time.perf_counter_ns())
            self._touch(np.asarray(region)[:: region.base_page])
            marks.append(time.perf_counter_ns())
            self._called("cuMemHostRegister", region.address, self.nbytes, REGISTER)
            marks.append(time.perf_counter_ns())
            try:
                if self.pages == "thp":
                    self._whole_pages(region)
                self._is_pinned(region.address, check)
            finally:
                marks.append(time.perf_counter_ns())
                self._device.release("cuMemHostUnregister", region.address)
                marks.append(time.perf_counter_ns())
        finally:
            region.drop()
        marks.append(time.perf_counter_ns())
        mapped, touched, registered = (_seconds(marks[i], marks[i + 1]) for i in range(3))
        return Spans(mapped, touched, registered, _seconds(marks[4], marks[6]))

    def _touch(self, pages: payload.Bytes) -> None:
        """Write the bytes, one of every base page: with transparent pages only some of them may come whole."""
        part = -(-pages.size // self.threads)

        def write(start: int) -> None:
            pages[start : start + part] = 1

        list(self._pool.map(write, range(0, pages.size, part)))

    def _whole_pages(self, region: Region) -> None:
        found = region.residency().value
        if found is None:
            self.flags["pages_unverified"] = None
        elif found.thp < THP_LEAST * region.mapped:
            raise Unavailable(
                "the kernel gave base pages", where="pin pages=thp",
                got=f"{found.thp / region.mapped:.0%} in huge pages",
                mend="echo 1 | sudo tee /proc/sys/vm/compact_memory",
            )  # fmt: skip

    def _hostalloc(self, check: bool) -> Spans:
        pointer = ctypes.c_void_p()
        with ExitStack() as policy:
            if self.node is not None:
                accepted = policy.enter_context(numa.memory_policy(self.node))
                if not accepted.value:
                    self.flags["unbound"] = None
            begin = time.perf_counter_ns()
            self._called("cuMemHostAlloc", ctypes.byref(pointer), self.nbytes, HOSTALLOC)
            have = time.perf_counter_ns()
        host = pointer.value or 0
        try:
            view = np.ctypeslib.as_array((ctypes.c_ubyte * self.nbytes).from_address(host))
            before = time.perf_counter_ns()
            self._touch(view[:: libc.base_page_bytes()])
            touched = time.perf_counter_ns()
            self._is_pinned(host, check)
        finally:
            gone = time.perf_counter_ns()
            self._device.release("cuMemFreeHost", host)
            end = time.perf_counter_ns()
        return Spans(_seconds(begin, have), _seconds(before, touched), None, _seconds(gone, end))

    def _called(self, call: str, *arguments: object) -> None:
        try:
            self._device.call(call, *arguments)
        except CudaError as error:
            if error.code not in REFUSALS:
                raise
            raise Unavailable(
                f"{self.nbytes} bytes could not be pinned", where=f"pin ({self.how})",
                got=f"{error.call}: {error.name}",
                mend="choose smaller sizes; see kvbench doctor for the limit of lockable memory",
            ) from error  # fmt: skip

    def _is_pinned(self, host: int, check: bool) -> None:
        """Raise VerifyError unless the driver calls both ends page-locked; with ``check`` the device reads payload."""
        for address in (host, host + self.nbytes - 1):
            found = pointer_facts(self._device, address).tier
            if found != "pinned":
                raise VerifyError("the driver calls it something else", where="pin", got=found, expected="pinned")
        if check:
            payload.fill(np.ctypeslib.as_array((ctypes.c_ubyte * self.nbytes).from_address(host)), 3)
            alias = ctypes.c_uint64()
            self._device.call("cuMemHostGetDevicePointer", ctypes.byref(alias), host, 0)
            self._service.check(alias.value, self.nbytes, f"pin ({self.how})", 3)

    def close(self) -> None:
        """End the threads. Closing twice is fine."""
        self._stack.close()

    def __enter__(self) -> Pinning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _seconds(begin: int, end: int) -> float:
    return (end - begin) * 1e-9
