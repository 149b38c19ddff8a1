"""Both drivers for the pool's tests, with faults on demand and a way to read and write what is mapped."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvbench.kernels import libc
from kvbench.kernels.call_loop import Failure, alone
from kvbench.kernels.raw import bytes_at
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.driver import Driver
from kvbench.memory.vmm.host import HostVmm
from kvbench.systems.ellm.background import Background, Job
from tests import fake_cuda

CHUNK = 4096
Rows = npt.NDArray[np.int64]
_ENOMEM = errno.ENOMEM  # a parameter of the runner has the module's name
# What the pool asks for again and again; mmap is both map and unmap on the host.
HOST_CALLS = ("mmap", "mprotect", "madvise")
CUDA_CALLS = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemAddressReserve")


@dataclass
class FaultyRunner:
    """Makes the calls, but the ``left``-th of the function ``name`` from now on fails and is not made."""

    name: str = ""
    left: int = 0
    made: list[str] = field(default_factory=list)

    def __call__(self, function: int, rows: Rows, *, errno: bool) -> Failure | None:
        name = next(name for name in (*HOST_CALLS, "fallocate") if libc.address_of(name) == function)
        self.made += [name] * len(rows)
        if name != self.name or not 0 < self.left <= len(rows):
            if name == self.name:
                self.left -= len(rows)
            return alone(function, rows, errno=errno)
        first, self.left = self.left - 1, 0
        before = alone(function, np.ascontiguousarray(rows[:first]), errno=errno) if first else None
        assert before is None
        return Failure(first, _ENOMEM, np.arange(len(rows)) < first)


class Rig(ABC):
    """A driver, and what a test needs beside it."""

    calls: tuple[str, ...] = ()

    def __init__(self, vmm: Driver) -> None:
        self.vmm = vmm

    @abstractmethod
    def fail(self, call: str, k: int) -> None:
        """Let the ``k``-th call of ``call`` from now on fail."""

    @abstractmethod
    def heal(self) -> None:
        """Let nothing fail any more."""

    @abstractmethod
    def read(self, address: int) -> int:
        """Return the 64-bit word at an address."""

    @abstractmethod
    def write(self, address: int, value: int) -> None:
        """Change the 64-bit word at an address."""


class HostRig(Rig):
    calls = HOST_CALLS

    def __init__(self, vmm: HostVmm, runner: FaultyRunner) -> None:
        super().__init__(vmm)
        self.runner = runner

    def fail(self, call: str, k: int) -> None:
        self.runner.name, self.runner.left = call, k

    def heal(self) -> None:
        self.runner.left = 0

    def read(self, address: int) -> int:
        return int(bytes_at(address, 8).view(np.uint64)[0])

    def write(self, address: int, value: int) -> None:
        bytes_at(address, 8).view(np.uint64)[0] = value


class FakeRig(Rig):
    calls = CUDA_CALLS

    def __init__(self, vmm: CudaVmm, fake: fake_cuda.Fake) -> None:
        super().__init__(vmm)
        self.fake = fake

    def fail(self, call: str, k: int) -> None:
        self.fake.fail(k, 2, call=call)

    def heal(self) -> None:
        self.fake.fail(0)

    def read(self, address: int) -> int:
        return int(self.fake.peek(address, 8).view(np.uint64)[0])

    def write(self, address: int, value: int) -> None:
        self.fake.poke(address, np.uint64(value).tobytes())


@contextmanager
def host_rig(chunks: int = 64) -> Iterator[HostRig]:
    """A host driver with room for ``chunks``; a test that ends well has left nothing in it."""
    runner = FaultyRunner()
    with HostVmm(chunks * CHUNK, runner=runner) as vmm:
        yield HostRig(vmm, runner)


@contextmanager
def fake_rig(chunks: int = 64) -> Iterator[FakeRig]:
    """The CUDA driver on the fake one, with chunks as small as the host's."""
    with fake_cuda.rig(granularity=CHUNK) as rig, CudaVmm(rig.device) as vmm:
        yield FakeRig(vmm, rig.fake)


class Stepwise(Background):
    """A background that works only when somebody waits or :meth:`step` is called: every order can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Job] = []

    def submit(self, work: Callable[[], None]) -> Job:
        job = _Waited(work, self)
        self.queue.append(job)
        return job

    def step(self) -> None:
        if self.queue:
            self.queue.pop(0).run()

    def close(self) -> None:
        while self.queue:
            self.step()


class _Waited(Job):
    __slots__ = ("_owner",)

    def __init__(self, work: Callable[[], None], owner: Stepwise) -> None:
        super().__init__(work)
        self._owner = owner

    def wait(self) -> None:
        while not self.done:
            self._owner.step()


RIGS = {"host": host_rig, "cuda": fake_rig}
