"""From asking for memory to its first touch, and giving it back: by mapping chunks, and by what programs do without."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbench.errors import KvbenchError, MissingExtra, Unavailable, VerifyError
from kvbench.memory import libc
from kvbench.memory.cuda.service import Service
from kvbench.memory.region import Pages, check_huge_pool, page_bytes
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.driver import Driver, rows
from kvbench.memory.vmm.protocol import Chunk, Reservation
from kvbench.memory.vmm.touch import Touch, check_mapped

if TYPE_CHECKING:
    from kvbench.kernels.call_loop import Failure, TeamRunner

Addresses = npt.NDArray[np.int64]


class Way(Protocol):
    """One way to have ``count`` pieces of memory. ``calls`` names what it calls."""

    calls: str

    def take(self) -> Addresses:
        """Return the addresses of the pieces (int64 [count]); they may be touched."""

    def give_back(self) -> None:
        """Give the pieces of the last :meth:`take` back."""

    def check(self) -> None:
        """Raise VerifyError unless the pieces just taken are what they should be."""

    def close(self) -> None:
        """Give everything else back."""


class Chunks:
    """Chunks mapped one after the other into one reservation. ``cold``: they are created and released each time."""

    def __init__(self, vmm: Driver, touch: Touch, chunk_bytes: int, count: int, *, cold: bool) -> None:
        self._vmm, self._touch, self._cold = vmm, touch, cold
        self._bytes, self._count = chunk_bytes, count
        self._place = vmm.reserve(chunk_bytes * count)
        self._offsets = chunk_bytes * np.arange(count, dtype=np.int64)
        self._addresses = self._place.address + self._offsets
        self._chunks: list[Chunk] = []
        self.calls = "map_many + set_access"
        if cold:
            self.calls = f"create_many + {self.calls}"
        else:
            self._chunks = vmm.create_many(chunk_bytes, count)
            self.take()  # the pages of a host chunk come with its first access
            touch.first(self._addresses, chunk_bytes)
            self.give_back()

    @property
    def place(self) -> Reservation:
        """The addresses all of them are mapped into."""
        return self._place

    def take(self) -> Addresses:
        if self._cold:
            self._chunks = self._vmm.create_many(self._bytes, self._count)
        self._vmm.map_many(self._place, self._offsets, self._chunks)
        self._vmm.set_access(self._place, 0, self._place.nbytes)
        return self._addresses

    def give_back(self) -> None:
        self._vmm.unmap(self._place, 0, self._place.nbytes)
        if self._cold:
            self._vmm.release_many(self._chunks)
            self._chunks = []

    def check(self) -> None:
        check_mapped(self._vmm, self._touch, self._place, self._offsets.tolist(), self._chunks)

    def close(self) -> None:
        if self._chunks:
            self._vmm.release_many(self._chunks)
        self._vmm.free(self._place)


class _Pieces:
    """Pieces of memory by one call each, checked by writing to all before reading any."""

    calls = ""

    def __init__(self, runner: TeamRunner, touch: Touch, nbytes: int, count: int) -> None:
        self._runner, self._touch, self._bytes, self._count = runner, touch, nbytes, count
        self._addresses: Addresses = np.zeros(count, np.int64)

    def _run(self, function: int, table: Addresses, *, errno: bool, results: Addresses | None = None) -> None:
        failure = self._runner(function, table, errno=errno, results=results)
        if failure is not None:
            raise self._refused(failure)

    def _refused(self, failure: Failure) -> KvbenchError:
        text = f"number {failure.index}: {os.strerror(failure.code)}"
        return Unavailable("a call was refused", where=self.calls, got=text)

    def check(self) -> None:
        words = [f"piece {k}".encode() for k in range(self._count)]
        addresses = self._addresses.tolist()
        for address, word in zip(addresses, words, strict=True):
            self._touch.write(address, word)
            self._touch.write(address + self._bytes - len(word), word)
        for address, word in zip(addresses, words, strict=True):
            ends = [self._touch.read(address + at, len(word)) for at in (0, self._bytes - len(word))]
            if ends != [word, word]:
                raise VerifyError("pieces of memory overlap", where=self.calls, got=repr(ends[0]), expected=repr(word))

    def close(self) -> None:
        """Nothing is kept between two passes."""


class Mmaps(_Pieces):
    """One anonymous mapping a piece, faulted in by its first touch; munmap gives it back."""

    def __init__(self, runner: TeamRunner, touch: Touch, nbytes: int, count: int, pages: Pages) -> None:
        super().__init__(runner, touch, nbytes, count)
        page = page_bytes(pages)
        if nbytes % page:
            raise Unavailable("less than a page", where=f"pages={pages}", got=nbytes, expected=f"a multiple of {page}")
        if pages == "huge":
            check_huge_pool(nbytes * count, page)
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | (libc.MAP_HUGETLB if pages == "huge" else 0)
        self._table = rows(count, 0, nbytes, libc.PROT_READ | libc.PROT_WRITE, flags, -1, 0)
        self._advice = {"4k": libc.MADV_NOHUGEPAGE, "thp": libc.MADV_HUGEPAGE}.get(pages)
        self.calls = "mmap" if self._advice is None else "mmap + madvise"

    def take(self) -> Addresses:
        self._run(_function("mmap"), self._table, errno=True, results=self._addresses)
        if self._advice is not None:
            self._run(_function("madvise"), rows(self._count, self._addresses, self._bytes, self._advice), errno=True)
        return self._addresses

    def give_back(self) -> None:
        self._run(_function("munmap"), rows(self._count, self._addresses, self._bytes), errno=True)


class Allocs(_Pieces):
    """cuMemAlloc and cuMemFree: what cudaMalloc and cudaFree call."""

    calls = "cuMemAlloc"

    def __init__(self, runner: TeamRunner, touch: Touch, nbytes: int, count: int, vmm: CudaVmm) -> None:
        super().__init__(runner, touch, nbytes, count)
        self._vmm, self._driver = vmm, vmm.device.driver

    def _refused(self, failure: Failure) -> KvbenchError:
        return self._vmm.refused(self.calls, failure.index, failure.code, "choose smaller sizes or end other programs")

    def take(self) -> Addresses:
        places = self._addresses.ctypes.data + 8 * np.arange(self._count, dtype=np.int64)
        self._run(self._driver.address("cuMemAlloc"), rows(self._count, places, self._bytes), errno=False)
        return self._addresses

    def give_back(self) -> None:
        self._run(self._driver.address("cuMemFree"), rows(self._count, self._addresses), errno=False)


class TorchCache(_Pieces):
    """Tensors of torch's caching allocator. Raises MissingExtra without torch, Unavailable when it has no CUDA."""

    calls = "torch.empty"

    def __init__(self, runner: TeamRunner, touch: Touch, nbytes: int, count: int, service: Service) -> None:
        super().__init__(runner, touch, nbytes, count)
        try:
            import torch
        except ImportError as error:
            raise MissingExtra("torch", "torch", "torch's caching allocator") from error
        if not torch.cuda.is_available():
            raise Unavailable("this torch has no CUDA", where="way=torch", got=torch.__version__)
        self._torch: Any = torch
        self._device = service.device
        self._held: list[Any] = []

    def take(self) -> Addresses:
        where = f"cuda:{self._device.ordinal}"
        self._held = [self._torch.empty(self._bytes, dtype=self._torch.uint8, device=where) for _ in range(self._count)]
        self._addresses[:] = [tensor.data_ptr() for tensor in self._held]
        self._device.bind()
        return self._addresses

    def give_back(self) -> None:
        self._held.clear()

    def close(self) -> None:
        self._held.clear()
        self._torch.cuda.empty_cache()


class Remap:
    """Times ``way``: seconds until the last piece is touched, seconds of giving all back, and of the calls alone.

    ``taken`` has the seconds a pass of each :meth:`run` by their first: (giving back, calls alone) of every run that
    took exactly as long.
    """

    def __init__(self, way: Way, runner: TeamRunner, touch: Touch, nbytes: int) -> None:
        self.way = way
        self.taken: dict[float, list[tuple[float, float]]] = {}
        self._runner, self._touch, self._bytes = runner, touch, nbytes

    def run(self, reps: int) -> float:
        """Take, touch and give back ``reps`` times; return the seconds of taking and touching."""
        total = back = bare = 0.0
        for _ in range(reps):
            self._runner.begin()
            start = time.perf_counter()
            addresses = self.way.take()
            self._touch.first(addresses, self._bytes)
            ready = time.perf_counter()
            bare += self._runner.end()
            self.way.give_back()
            back += time.perf_counter() - ready
            total += ready - start
        self.taken.setdefault(total / reps, []).append((back / reps, bare / reps))
        return total

    def verify(self) -> None:
        """Take once more and check it. Raises VerifyError."""
        if not self.taken:
            raise VerifyError("nothing was run", where=self.way.calls)
        self.way.take()
        try:
            self.way.check()
        finally:
            self.way.give_back()


def _function(name: str) -> int:
    from kvbench.kernels.libc import address_of

    return address_of(name)
