"""Both drivers of virtual memory behind one rig: tiny chunks on the host, the fake driver for CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvbench.kernels.call_loop import Failure, Rows, alone
from kvbench.kernels.libc import address_of
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import Driver as CudaDriver
from kvbench.memory.vmm.cuda import CALLS, CudaVmm
from kvbench.memory.vmm.driver import Driver
from kvbench.memory.vmm.host import HostVmm, can_touch
from tests import fake_cuda
from tests.fake_cuda import Fake

HOST_CALLS = {"map": "mmap", "set_access": "madvise", "unmap": "mmap", "release": "fallocate"}
CHUNKS = 16  # the pool of a rig


@dataclass
class Faulty:
    """A runner that lets the ``at``-th call from now on of one C function fail with ``code``."""

    function: int = 0
    at: int = 0
    code: int = 12
    seen: list[int] = field(default_factory=list)

    def __call__(self, function: int, rows: Rows, *, errno: bool, results: Rows | None = None) -> Failure | None:
        self.seen.append(function)
        if function != self.function or not 0 < self.at <= len(rows):
            if function == self.function and self.at:
                self.at -= len(rows)
            return alone(function, rows, errno=errno, results=results)
        index = self.at - 1
        self.at = 0
        if index:
            found = alone(function, rows[:index], errno=errno)
            assert found is None
        made = [k < index for k in range(len(rows))]
        return Failure(index, self.code, np.array(made, np.bool_))


@dataclass
class Rig:
    vmm: Driver
    fake: Fake | None
    faulty: Faulty | None

    @property
    def grain(self) -> int:
        return self.vmm.granularity()

    def fail(self, op: str, k: int) -> None:
        """Let the ``k``-th call of ``op`` from now on fail with nothing done."""
        if self.fake is not None:
            self.fake.fail(k, 2, call=CALLS[op], keep=True)
        else:
            assert self.faulty is not None
            self.faulty.function, self.faulty.at = address_of(HOST_CALLS[op]), k

    def write(self, address: int, data: bytes) -> None:
        if self.fake is not None:
            self.fake.poke(address, data)
        else:
            ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        if self.fake is not None:
            return self.fake.peek(address, nbytes).tobytes()
        return ctypes.string_at(address, nbytes)

    def reachable(self, address: int) -> bool:
        if self.fake is None:
            return can_touch(address)
        out = ctypes.create_string_buffer(1)
        return bool(self.fake._c.fake_peek(address, out, 1) == 0)


@contextmanager
def host_rig() -> Iterator[Rig]:
    faulty = Faulty()
    vmm = HostVmm(CHUNKS * 16384, granularity=16384, runner=faulty)
    try:
        yield Rig(vmm, None, faulty)
    finally:
        faulty.at = 0
        vmm.destroy()


@contextmanager
def cuda_rig(**settings: int) -> Iterator[Rig]:
    with (
        fake_cuda.fake(granularity=16384, total_bytes=CHUNKS * 16384, **settings) as made,
        Device(CudaDriver(made.path)) as device,
    ):
        vmm = CudaVmm(device)
        try:
            yield Rig(vmm, made, None)
        finally:
            vmm.destroy()


@pytest.fixture(params=["host", "cuda"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with host_rig() if request.param == "host" else cuda_rig() as made:
        yield made
