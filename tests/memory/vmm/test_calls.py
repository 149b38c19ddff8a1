"""The work of vmm_calls and remap: what is timed is what was asked, and a driver that cheats leaves no number."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.call_loop import TeamRunner
from kvbench.kernels.libc import address_of
from kvbench.kernels.team import Team
from kvbench.memory import libc
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import Driver as CudaDriver
from kvbench.memory.cuda.service import Service
from kvbench.memory.vmm.book import Claim
from kvbench.memory.vmm.calls import OPS, CallWork, Op, Order
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.driver import Driver
from kvbench.memory.vmm.host import HostVmm
from kvbench.memory.vmm.protocol import Chunk
from kvbench.memory.vmm.remap import Addresses, Allocs, Chunks, Mmaps, Remap
from kvbench.memory.vmm.touch import CudaTouch, HostTouch, Touch
from tests import fake_cuda

GRAIN = 4 * libc.base_page_bytes()
COUNT = 6


class Spy(TeamRunner):
    """Notes which functions were called while it counted."""

    def __init__(self, team: Team) -> None:
        super().__init__(team, stamps=True)
        self.timed: list[tuple[int, int]] = []

    def __call__(self, function, rows, *, errno, results=None):  # type: ignore[no-untyped-def]
        if self.counted:
            self.timed.append((function, len(rows)))
        return super().__call__(function, rows, errno=errno, results=results)


Opened = tuple[Driver, Spy, Touch]


@contextmanager
def host(members: int = 1) -> Iterator[Opened]:
    with Team([min(os.sched_getaffinity(0))] * members) as team:
        spy = Spy(team)
        with HostVmm(COUNT * GRAIN, granularity=GRAIN, runner=spy) as vmm:
            yield vmm, spy, HostTouch()


@contextmanager
def cuda(members: int = 1) -> Iterator[Opened]:
    with (
        fake_cuda.fake() as fake,
        Device(CudaDriver(fake.path)) as device,
        Service(device, fake_cuda.IMAGE) as service,
        Team([min(os.sched_getaffinity(0))] * members) as team,
    ):
        spy = Spy(team)
        with CudaVmm(device, runner=spy) as vmm:
            yield vmm, spy, CudaTouch(vmm, service)


DRIVERS = {"host": host, "cuda": cuda}
WANTED = {
    "reserve": ["mmap"], "map": ["mmap"], "set_access": ["mprotect", "madvise"], "unmap": ["mmap"],
    "release": ["fallocate"], "free": ["munmap"],
}  # fmt: skip
DRIVER_CALLS = {
    "reserve": "cuMemAddressReserve", "create": "cuMemCreate", "map": "cuMemMap", "set_access": "cuMemSetAccess",
    "unmap": "cuMemUnmap", "release": "cuMemRelease", "free": "cuMemAddressFree",
}  # fmt: skip


@pytest.mark.parametrize("name", DRIVERS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("order", ["contiguous", "scattered"])
def test_the_calls_that_are_timed_are_those_of_the_op(name: str, op: Op, order: Order) -> None:
    with DRIVERS[name](2) as (vmm, spy, touch):
        if name == "host" and op == "create":
            with pytest.raises(Unavailable, match="makes no call"):
                CallWork(vmm, spy, touch, op, GRAIN, COUNT, order)
            return
        grain = vmm.granularity()
        work = CallWork(vmm, spy, touch, op, grain, COUNT, order)
        with pytest.raises(VerifyError, match="nothing was run"):
            work.verify()
        spy.timed.clear()
        before = vmm.counters()
        seconds = work.run(2)
        if isinstance(vmm, CudaVmm):
            functions = [vmm.device.driver.address(DRIVER_CALLS[op])]
        else:
            functions = [address_of(call) for call in WANTED[op]]
        one = order == "contiguous" and op in ("set_access", "unmap")
        assert work.calls == (1 if one else COUNT)
        assert spy.timed == [(f, work.calls) for _ in range(2) for f in functions]
        assert seconds > 0.0
        assert [len(each) for each in work.each] == [work.calls] * 2
        assert vmm.counters() == before
        work.verify()
        assert vmm.counters() == before


def test_a_runner_of_another_driver_is_refused() -> None:
    with host() as (vmm, spy, touch), pytest.raises(UsageError, match="runner"):
        CallWork(vmm, Spy(spy.team), touch, "map", GRAIN, COUNT, "contiguous")


def test_an_access_that_does_not_populate_leaves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "MADV_POPULATE_WRITE", libc.MADV_NORMAL)
    grain, count = 64 * GRAIN, 4
    with Team([min(os.sched_getaffinity(0))]) as team:
        spy = Spy(team)
        with HostVmm(count * grain, granularity=grain, runner=spy) as vmm:
            work = CallWork(vmm, spy, HostTouch(), "set_access", grain, count, "contiguous")
            work.run(1)
            with pytest.raises(VerifyError, match="still faults"):
                work.verify()


def test_a_map_of_the_wrong_chunk_leaves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as (vmm, spy, touch):
        work = CallWork(vmm, spy, touch, "map", GRAIN, COUNT, "scattered")
        work.run(1)
        right = HostVmm._map

        def wrong(self: HostVmm, claim: Claim) -> object:
            if len(claim.handle) > 1:
                claim.handle[:] = claim.handle[0]
            return right(self, claim)

        monkeypatch.setattr(HostVmm, "_map", wrong)
        with pytest.raises(VerifyError, match="not the chunk"):
            work.verify()


def test_an_unmap_that_does_nothing_leaves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as (vmm, spy, touch):
        work = CallWork(vmm, spy, touch, "unmap", GRAIN, COUNT, "contiguous")
        work.run(1)

        def nothing(self: HostVmm, claim: Claim) -> None:
            spy(address_of("getpid"), np.zeros((len(claim.low), 6), np.int64), errno=True)

        monkeypatch.setattr(HostVmm, "_unmap", nothing)
        with pytest.raises(VerifyError, match="after it was given up"):
            work.verify()


def test_a_release_that_keeps_the_memory_leaves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as (vmm, spy, touch):
        work = CallWork(vmm, spy, touch, "release", GRAIN, COUNT, "contiguous")
        work.run(1)

        def keep(self: HostVmm, chunks: Sequence[Chunk]) -> None:
            self._used -= sum(chunk.nbytes for chunk in chunks)
            spy(address_of("getpid"), np.zeros((len(chunks), 6), np.int64), errno=True)

        monkeypatch.setattr(HostVmm, "_release", keep)
        with pytest.raises(VerifyError, match="did not come and go"):
            work.verify()


@pytest.mark.parametrize("name", DRIVERS)
@pytest.mark.parametrize("way", ["cold", "created", "plain"])
def test_each_way_to_touched_memory_gives_all_of_it_back(name: str, way: str) -> None:
    with DRIVERS[name]() as (vmm, spy, touch):
        grain = vmm.granularity()
        before = vmm.device.memory()[0] if isinstance(vmm, CudaVmm) else 0
        if way != "plain":
            made = Chunks(vmm, touch, grain, COUNT, cold=way == "cold")
        elif isinstance(vmm, CudaVmm):
            made = Allocs(spy, touch, grain, COUNT, vmm)  # type: ignore[assignment]
        else:
            made = Mmaps(spy, touch, grain, COUNT, "4k")  # type: ignore[assignment]
        work = Remap(made, spy, touch, grain)
        with pytest.raises(VerifyError, match="nothing was run"):
            work.verify()
        assert work.run(3) > 0.0
        ((seconds, [(back, bare)]),) = work.taken.items()
        assert seconds > 0.0
        assert back > 0.0
        assert bare > 0.0
        work.verify()
        made.close()
        found = vmm.counters()
        assert (found.reservations, found.chunks, found.mappings, found.lost) == (0, 0, 0, 0)
        if isinstance(vmm, CudaVmm):
            assert vmm.device.memory()[0] == before


def test_runs_that_take_exactly_as_long_are_both_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as (_, spy, touch):
        work = Remap(Mmaps(spy, touch, GRAIN, 2, "4k"), spy, touch, GRAIN)
        ticks = iter(range(100))
        monkeypatch.setattr("kvbench.memory.vmm.remap.time.perf_counter", lambda: float(next(ticks)))
        assert work.run(1) == work.run(1) == 1.0
        assert [back for back, _ in work.taken[1.0]] == [1.0, 1.0]


def test_pieces_that_overlap_leave_no_number() -> None:
    with host() as (_, spy, touch):
        way = Mmaps(spy, touch, GRAIN, 2, "4k")
        work = Remap(way, spy, touch, GRAIN)
        work.run(1)
        right = way.take

        def same() -> Addresses:
            right()
            libc.munmap(int(way._addresses[1]), GRAIN)
            way._addresses[1] = way._addresses[0]
            return way._addresses

        way.take = same  # type: ignore[method-assign]
        with pytest.raises(VerifyError, match="overlap"):
            work.verify()


def test_a_refused_call_is_named() -> None:
    with host() as (_, spy, touch):
        way = Mmaps(spy, touch, GRAIN, 2, "4k")
        way._table[:, 1] = 0
        with pytest.raises(Unavailable, match="number 0"):
            way.take()
        with pytest.raises(Unavailable, match="less than a page"):
            Mmaps(spy, touch, GRAIN, 2, "thp")
