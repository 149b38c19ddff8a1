"""The CUDA driver on the fake: every call may fail, none follows a device error, nothing is given back twice."""

from __future__ import annotations

import pytest

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.kernels.call_loop import TeamRunner
from kvbench.kernels.team import Team
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import Driver as CudaDriver
from kvbench.memory.cuda.driver import PoisonedDevice
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.protocol import Exhausted, VmmError
from tests import fake_cuda
from tests.memory.vmm.rigs import Rig, cuda_rig

CALLS = ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess")
BACK = ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree")


def whole(rig: Rig) -> None:
    """Use every call of the driver once or twice and give all back."""
    vmm, g = rig.vmm, rig.grain
    place = vmm.reserve(4 * g)
    try:
        chunks = vmm.create_many(g, 2)
        try:
            vmm.map_many(place, [0, 2 * g], chunks)
            try:
                vmm.set_access_many(place, [(0, g), (2 * g, g)])
                rig.write(place.address, b"x")
            finally:
                vmm.unmap_many(place, [(0, g), (2 * g, g)])
        finally:
            vmm.release_many(chunks)
    finally:
        vmm.free(place)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("k", [1, 2])
def test_a_failing_call_leaves_nothing_behind(call: str, k: int) -> None:
    with cuda_rig() as rig:
        assert rig.fake is not None
        if call == "cuMemAddressReserve" and k == 2:
            whole(rig)
        rig.fake.fail(1 if call == "cuMemAddressReserve" else k, 2, call=call)
        with pytest.raises(Exhausted, match=f"{call} number.*OUT_OF_MEMORY") as caught:
            whole(rig)
        assert rig.fake.fired
        assert caught.value.call == call
        live = {name: count for name, count in rig.fake.live().items() if name != "contexts"}
        found = rig.vmm.counters()
        assert live == {}
        assert (found.reservations, found.chunks, found.mappings, found.lost) == (0, 0, 0, 0)
        whole(rig)


@pytest.mark.parametrize("call", BACK)
@pytest.mark.parametrize("keep", [True, False])
def test_a_call_that_gives_back_may_have_done_so_though_it_reports_an_error(call: str, keep: bool) -> None:
    with cuda_rig() as rig:
        assert rig.fake is not None
        rig.fake.fail(1, 1, call=call, keep=keep)
        with pytest.raises((VmmError, UsageError)):
            whole(rig)
        found, live = rig.vmm.counters(), rig.fake.live()
        if call == "cuMemUnmap":  # the pointer's attribute tells
            assert found.mappings == live.get("mappings", 0) == (2 if keep else 1)
            assert found.lost == 0
            return
        assert found.lost == 1
        kind = {"cuMemRelease": "handles", "cuMemAddressFree": "reservations"}[call]
        known = {"handles": found.chunks, "reservations": found.reservations}[kind]
        assert live.get(kind, 0) - known == int(keep)
        calls = [c.args[0] for c in rig.fake.trace() if c.name == call]
        rig.vmm.destroy()
        again = [c.args[0] for c in rig.fake.trace() if c.name == call]
        assert len(again) == len(set(again))
        assert again[: len(calls)] == calls


def test_an_undo_that_fails_is_counted_and_its_place_stays_taken() -> None:
    with cuda_rig() as rig:
        assert rig.fake is not None
        vmm, g = rig.vmm, rig.grain
        place = vmm.reserve(4 * g)
        chunks = vmm.create_many(g, 2)
        vmm.map(place, 2 * g, chunks[0])  # the second map of the call below meets it: a refusal of the driver
        vmm.book.commit_unmap(vmm.book.claim_spans(place, [(2 * g, g)], "unmap", unmap=True))
        rig.fake.fail(1, 1, call="cuMemUnmap", keep=True)
        with pytest.raises(VmmError, match="cuMemMap number 1"):
            vmm.map_many(place, [0, 2 * g], chunks)
        assert vmm.counters().lost == 1
        with pytest.raises(UsageError, match="mapped there already"):
            vmm.map(place, 0, chunks[1])
        with pytest.raises(UsageError, match="still hold"):
            vmm.free(place)
        rig.fake.reset()
        rig.vmm.device.driver.poisoned = PoisonedDevice("test", 700, "x", "y")  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", [*CALLS, *BACK])
def test_after_a_device_error_nothing_is_called(call: str) -> None:
    with cuda_rig() as rig:
        assert rig.fake is not None
        rig.fake.fail(1, 700, call=call, sticky=True)
        with pytest.raises(KvbenchError):
            whole(rig)
        assert rig.vmm.device.driver.poisoned is not None  # type: ignore[attr-defined]
        rig.fake.forget()
        for request in (lambda: rig.vmm.reserve(rig.grain), lambda: rig.vmm.create(rig.grain)):
            with pytest.raises(PoisonedDevice):
                request()
        assert rig.fake.names() == []


def test_members_of_a_team_call_with_the_context_current() -> None:
    with fake_cuda.fake() as fake, Device(CudaDriver(fake.path)) as device, Team([0, 0]) as team:
        vmm = CudaVmm(device, runner=TeamRunner(team))
        g = vmm.granularity()
        bound = [c.thread for c in fake.trace() if c.name == "cuCtxSetCurrent"]
        assert set(team.tids) <= set(bound)
        place = vmm.reserve(8 * g)
        chunks = vmm.create_many(g, 8)
        fake.forget()
        vmm.map_many(place, [k * g for k in range(8)], chunks)
        maps = [c for c in fake.trace() if c.name == "cuMemMap"]
        assert {c.args[0] for c in maps} == {place.address + k * g for k in range(8)}
        assert {c.thread for c in maps} == set(team.tids)
        vmm.destroy()


def test_sizes_are_multiples_of_what_the_driver_says() -> None:
    with fake_cuda.fake(granularity=2 << 20) as fake, Device(CudaDriver(fake.path)) as device:
        assert CudaVmm(device).granularity() == 2 << 20
        big = CudaVmm(device, granularity=20 << 20)
        chunk = big.create(20 << 20)
        with pytest.raises(UsageError, match="multiple of 20971520"):
            big.create(2 << 20)
        big.release(chunk)
        for wrong in (1 << 20, 3 << 20):
            with pytest.raises(UsageError, match="granularity off"):
                CudaVmm(device, granularity=wrong)


def test_a_driver_without_the_calls_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda.fake() as fake, Device(CudaDriver(fake.path)) as device:
        monkeypatch.delitem(device.driver._addresses, "cuMemGetAllocationGranularity")
        with pytest.raises(Unavailable, match="lacks cuMemGetAllocationGranularity"):
            CudaVmm(device)


def test_not_supported_is_no_failure_of_the_case() -> None:
    with cuda_rig() as rig:
        assert rig.fake is not None
        rig.fake.fail(1, 801, call="cuMemCreate")
        with pytest.raises(Unavailable, match="NOT_SUPPORTED"):
            rig.vmm.create(rig.grain)
        rig.fake.fail(1, 1, call="cuMemCreate")
        with pytest.raises(VmmError) as caught:
            rig.vmm.create(rig.grain)
        assert not isinstance(caught.value, Unavailable)
        assert isinstance(caught.value, KvbenchError)
