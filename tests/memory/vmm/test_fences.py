"""Nothing is unmapped under work that may read it: the order of the calls, threads that wait, fences that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.cuda.device import Device, Stream
from kvbench.memory.cuda.driver import Driver as CudaDriver
from kvbench.memory.vmm import driver as driver_module
from kvbench.memory.vmm.cuda import CudaVmm, EventFence
from kvbench.memory.vmm.driver import ThreadFence
from tests import fake_cuda
from tests.memory.vmm.rigs import Rig, host_rig, rig

__all__ = ["rig"]


class Noted:
    """A fence that is over when told, and says what was asked of it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.words: list[str] = []

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        self.words.append("wait")
        assert self.over.wait(10)
        self.words.append("over")

    def close(self) -> None:
        self.words.append("close")


def test_unmap_and_free_wait_for_every_fence_of_their_reservation(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    place, other = vmm.reserve(2 * g), vmm.reserve(g)
    chunk = vmm.create(g)
    vmm.map(place, 0, chunk)
    vmm.map(other, 0, chunk)
    vmm.set_access(place, 0, g)
    rig.write(place.address, b"read me")
    first, second, elsewhere = Noted(), Noted(), Noted()
    for where, fence in ((place, first), (place, second), (other, elsewhere)):
        vmm.guard(where, fence)
    done = threading.Event()

    def unmap() -> None:
        vmm.unmap(place, 0, g)
        done.set()

    thread = threading.Thread(target=unmap)
    thread.start()
    try:
        assert not done.wait(0.05)
        assert rig.read(place.address, 7) == b"read me"
        with pytest.raises(UsageError, match="other hands"):
            vmm.unmap(place, 0, g)
        first.over.set()
        assert not done.wait(0.05)
        second.over.set()
        assert done.wait(10)
    finally:
        first.over.set()
        second.over.set()
        thread.join()
    assert [first.words, second.words, elsewhere.words] == [["wait", "over", "close"]] * 2 + [[]]
    assert not rig.reachable(place.address)
    elsewhere.over.set()
    vmm.unmap(other, 0, g)
    last = Noted()
    last.over.set()
    vmm.guard(place, last)
    vmm.free(place)
    assert last.words == ["wait", "over", "close"]


def test_a_fence_that_fails_leaves_everything_mapped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "WAIT_S", 0.02)
    vmm, g = rig.vmm, rig.grain
    place = vmm.reserve(g)
    vmm.map(place, 0, vmm.create(g))
    vmm.set_access(place, 0, g)
    rig.write(place.address, b"kept")
    fence = ThreadFence(2)
    fence.leave()
    vmm.guard(place, fence)
    requests: tuple[Callable[[], None], ...] = (lambda: vmm.unmap(place, 0, g), lambda: vmm.free(place))
    for request in requests:
        with pytest.raises(KvbenchError, match=r"do not come to an end.*1 after"):
            request()
    assert rig.read(place.address, 4) == b"kept"
    assert vmm.counters().mappings == 1
    fence.leave()
    assert fence.done()
    with pytest.raises(UsageError, match="more readers"):
        fence.leave()
    vmm.unmap(place, 0, g)


def test_fences_that_are_over_are_closed_when_others_come() -> None:
    with host_rig() as rig:
        place = rig.vmm.reserve(rig.grain)
        fences = [Noted() for _ in range(3)]
        for fence in fences:
            rig.vmm.guard(place, fence)
            fence.over.set()
        assert [fence.words for fence in fences] == [["close"], ["close"], []]


def test_the_event_of_a_stream_is_reached_before_the_first_unmap() -> None:
    with fake_cuda.fake() as fake, Device(CudaDriver(fake.path)) as device, Stream(device) as stream:
        vmm = CudaVmm(device)
        g = vmm.granularity()
        place = vmm.reserve(2 * g)
        vmm.map_many(place, [0, g], vmm.create_many(g, 2))
        vmm.set_access(place, 0, 2 * g)
        fake.set(pause=1)
        stream.set_bytes(place.address, 7, 2 * g)  # work that still has to be done
        vmm.guard(place, EventFence(device, stream))
        fake.forget()
        thread = threading.Thread(target=lambda: vmm.unmap_many(place, [(0, g), (g, g)]))
        thread.start()
        time.sleep(0.05)
        while "cuEventSynchronize" not in fake.names():
            time.sleep(0.001)
        assert "cuMemUnmap" not in fake.names()
        fake.set(pause=0)
        thread.join()
        names = [name for name in fake.names() if name in ("cuEventSynchronize", "cuEventDestroy_v2", "cuMemUnmap")]
        assert names == ["cuEventSynchronize", "cuEventDestroy_v2", "cuMemUnmap", "cuMemUnmap"]
        stream.synchronize()  # what read the range did not break
        vmm.destroy()


def test_an_event_fence_knows_whether_it_is_over() -> None:
    with fake_cuda.fake() as fake, Device(CudaDriver(fake.path)) as device, Stream(device) as stream:
        fake.set(pause=1)
        fence = EventFence(device, stream)
        assert not fence.done()
        fake.set(pause=0)
        fence.wait()
        assert fence.done()
        fence.close()
        fence.close()
        assert fence.done()
        fake.fail(call="cuEventRecord")
        with pytest.raises(KvbenchError, match="cuEventRecord"):
            EventFence(device, stream)
    assert "events" not in fake.live()


@pytest.mark.parametrize("fence", [None, "str", object()])
def test_what_cannot_be_waited_for_is_no_fence(rig: Rig, fence: object) -> None:
    place = rig.vmm.reserve(rig.grain)
    with pytest.raises(UsageError, match="not a fence"):
        rig.vmm.guard(place, fence)  # type: ignore[arg-type]
    rig.vmm.free(place)


class Broken(Noted):
    def wait(self) -> None:
        raise RuntimeError("lost work")


def test_a_fence_that_fails_does_not_keep_the_rest(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    guarded, others = vmm.reserve(g), [vmm.reserve(g) for _ in range(3)]
    chunk, spare = vmm.create_many(g, 2)
    vmm.map(guarded, 0, chunk)
    vmm.map(others[-1], 0, spare)
    vmm.guard(guarded, Broken())
    with pytest.raises(KvbenchError, match=r"a fence failed.*RuntimeError: lost work"):
        vmm.unmap(guarded, 0, g)
    with pytest.raises(KvbenchError, match="a fence failed"):
        vmm.destroy()
    left = vmm.counters()
    assert (left.reservations, left.chunks, left.mappings) == (1, 1, 1)
    vmm.destroy()
