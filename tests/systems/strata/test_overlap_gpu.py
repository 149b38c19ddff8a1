"""The overlap on the fake device: order of calls, rotating event sets, right bytes, and removed waits are caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.memory.cuda import portable
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.driver import CudaError
from kvbench.memory.cuda.kernels import Kernels
from kvbench.model.geometry import KVGeometry
from kvbench.model.layout import Pool
from kvbench.systems.strata.overlap import Schedule
from kvbench.systems.strata.overlap_gpu import GpuOverlap
from kvbench.systems.strata.overlap_queue import SETS, Layers
from kvbench.transport.gpu_pieces import scattered
from tests.fake_cuda import Call
from tests.suites.gpu_rig import IMAGE, LadderFake, device
from tests.transport.paged_rig import tell

LAYERS = 4
SHAPE = KVGeometry("small", LAYERS, 2, 64, 2, 2, "test")
POOL = Pool(SHAPE, "layer_first", 8, 4)  # fragments of 2 KiB, 16 KiB a layer
ORDER = scattered(POOL.pages, 3)
ADD = ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2", "cuLaunchKernel")


@contextmanager
def made(patch: pytest.MonkeyPatch, transport: str = "ce", **settings: int) -> Iterator[tuple[GpuOverlap, LadderFake]]:
    with device(**settings) as (lib, service), ExitStack() as stack:
        patch.setattr(portable, "image_of", lambda kernel, arch: tell(lib, kernel))
        kernels = Kernels(service.device, lambda source, arch: IMAGE, stack)
        stream = stack.enter_context(Stream(service.device))
        work = GpuOverlap(service, kernels, stack.enter_context, stream, POOL, ORDER, transport, 7)
        yield work, lib


@pytest.mark.parametrize("transport", ["ce", "batch", "sm"])
def test_a_pass_moves_the_right_bytes_and_computes_after_each_layer(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    with made(monkeypatch, transport) as (work, _):
        assert work.arithmetic(1e6) > 0.0
        found = work.run()
        work.compare()
        assert found.load.shape == found.compute.shape == (LAYERS, 2)
        assert np.all(found.compute[:, 0] >= found.load[:, 1])
        assert found.busy + found.stall == pytest.approx(found.total)
        work.verify()


def added(calls: list[Call]) -> list[tuple[str, int, int]]:
    """Return (name, stream, event) of everything queued; the event is 0 for copies and launches."""
    found = []
    for call in calls:
        if call.name == "cuEventRecord":
            found.append((call.name, call.args[1], call.args[0]))
        elif call.name == "cuStreamWaitEvent":
            found.append((call.name, call.args[0], call.args[1]))
        elif call.name in ADD:
            found.append((call.name, 0, 0))
    return found


def proven(calls: list[Call]) -> bool:
    """Return whether every computation (a launch) follows a wait for an event recorded after that layer's copies."""
    copied: list[int] = []  # events recorded on the side stream after copies, in order of layers
    copies = launches = 0
    awaited: set[int] = set()
    for name, _, event in added(calls):
        if name == "cuMemcpyAsync":
            copies += 1
        elif name == "cuEventRecord" and copies:
            copied.append(event)
            copies = 0
        elif name == "cuStreamWaitEvent":
            awaited.add(event)
        elif name == "cuLaunchKernel":
            layer = launches // SHAPE.planes
            launches += 1
            if layer >= len(copied) or copied[layer] not in awaited:
                return False
    return launches == LAYERS * SHAPE.planes


def test_the_order_of_calls_is_start_copy_event_wait_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(monkeypatch) as (work, lib):
        work.poison()
        lib.forget()
        work._queue.submit(work._stream)
        calls = lib.trace()
        work._wait()
        main, side = work._stream.handle.value, work._queue.side.handle.value
        queued = added(calls)
        assert queued[0][:2] == ("cuEventRecord", main)
        assert queued[1] == ("cuStreamWaitEvent", side, queued[0][2])
        assert proven(calls)
        assert not {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"} & {call.name for call in calls}


@pytest.mark.parametrize("layer", [0, 2])
def test_a_removed_wait_is_caught_by_the_trace_and_by_the_payload(monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    """The layer's copy is held back until it has been computed: without its wait it is read too early for sure."""
    fine = Schedule.layerwise(LAYERS)
    waits, holds = list(fine.waits), list(fine.holds)
    waits[layer] = -1
    with made(monkeypatch) as (work, lib):
        lib.forget()
        work._queue.submit(work._stream, replace(fine, waits=tuple(waits)))
        assert not proven(lib.trace())
        work._wait()
        holds[layer] = layer
        with pytest.raises(VerifyError, match=rf"layer {layer}.*before it had arrived"):
            work.run(Schedule(tuple(waits), tuple(holds)))
        work.run()


def test_a_wait_for_a_load_that_comes_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes an event that was never recorded for one that has happened."""
    holds = (-1, 1, -1, -1)
    with made(monkeypatch) as (work, _), pytest.raises(UsageError, match="would not wait"):
        work.run(replace(Schedule.layerwise(LAYERS), holds=holds))


@pytest.mark.parametrize("schedule", [Schedule.serial(LAYERS), Schedule((0, 1, 2, 3), (-1, -1, 0, 1))])
def test_other_schedules_keep_their_order(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    with made(monkeypatch) as (work, _):
        found = work.run(schedule)
        for layer in range(LAYERS):
            assert found.compute[layer, 0] >= found.load[schedule.waits[layer], 1]
            if schedule.holds[layer] >= 0:
                assert found.load[layer, 0] >= found.compute[schedule.holds[layer], 1]


def test_a_fourth_pass_may_not_take_the_events_of_one_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(monkeypatch) as (work, lib):
        lib.set(pause=1)
        for _ in range(SETS):
            work._queue.submit(work._stream)
        with pytest.raises(KvbenchError, match="still in use"):
            work._queue.submit(work._stream)
        lib.set(pause=0)
        work._wait()
        work._queue.submit(work._stream)
        work._wait()


def test_each_side_alone_and_both_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(monkeypatch) as (work, _):
        loaded, computed = work.load_alone(), work.compute_alone(2 * LAYERS)
        assert (len(loaded.load), len(loaded.compute)) == (LAYERS, 0)
        assert (len(computed.load), len(computed.compute)) == (0, 2 * LAYERS)
        both = work.beside(3, 3)
        assert min(len(both.load), len(both.compute)) >= 3
        assert both.beside() is not None
        assert np.all(np.diff(both.load.reshape(-1)) >= 0)


def test_work_that_is_not_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(monkeypatch) as (work, lib):
        work.arithmetic(1e6)
        work.run()
        lib.missing(1)
        with pytest.raises(VerifyError):
            work.run()


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_refused_call_is_an_error_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with made(monkeypatch) as (work, lib):
        lib.fail(2, 1, call=call)
        with pytest.raises(CudaError):
            work.run()


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such transport"), made(monkeypatch, "carrier pigeon"):
        pass
    with made(monkeypatch) as (work, _):
        with pytest.raises(UsageError, match="operations"):
            work.arithmetic(-1e9)
        with pytest.raises(UsageError, match="beside"):
            work.beside(0, 1)
        assert (work._far.tier, work._near.tier) == ("pinned", "hbm")
        assert work.layer_bytes * LAYERS == work.link_bytes == POOL.nbytes
        with pytest.raises(UsageError, match="layers"):
            Layers(work._service.device, [], [], work._enter)
