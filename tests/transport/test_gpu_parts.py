"""Parts of the GPU transports one by one: fragments, paths, compiled calls, sums, two streams at once."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.kernels.driver_loop import CallLoop
from kvbench.kernels.gpu import catalogue, reference
from kvbench.kernels.gpu.build import missing_nvrtc
from kvbench.memory import payload
from kvbench.memory.cuda.buffers import hbm
from kvbench.memory.cuda.device import Device, Stream
from kvbench.memory.cuda.driver import CudaError, Driver, PoisonedDevice
from kvbench.memory.cuda.kernels import Kernels, payload_sum, ramp, ramp_sum
from kvbench.memory.cuda.service import Service
from kvbench.timing import events, gpu_session
from kvbench.timing.gpu_both import Loaded, Together
from kvbench.timing.gpu_session import GpuSession, before_each
from kvbench.timing.gpu_submit import Submission
from kvbench.transport.gpu_ce import CopyEngine
from kvbench.transport.gpu_link import Link, open_lanes
from kvbench.transport.gpu_paths import makes_sense
from kvbench.transport.gpu_pieces import Pieces, scattered
from tests import fake_cuda
from tests.needs import require
from tests.suites.gpu_rig import BYTE_S, IMAGE, OPERATION_S, LadderFake, device, fake

SIZE = 4096


@pytest.fixture
def gpu() -> Iterator[tuple[LadderFake, Service]]:
    with device() as made:
        yield made


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuSession]:
    with fake() as made:
        monkeypatch.setattr(gpu_session, "open_driver", lambda: Driver(made.path))
        monkeypatch.setattr(gpu_session, "keep_context", lambda driver, ordinal: None)
        monkeypatch.setattr(
            gpu_session, "image_of", lambda source, arch: fake_cuda.IMAGE if source.name == "service.cu" else IMAGE
        )
        monkeypatch.setattr(events, "ESCAPE_S", 5.0)
        with GpuSession() as opened:
            yield opened
        assert made.live() == {}


# -- fragments and paths -----------------------------------------------------------------------------------------------


@given(st.integers(4, 300), st.integers(0, 2**32 - 1))
def test_scattered_slots_are_a_permutation_without_neighbours(count: int, seed: int) -> None:
    order = scattered(count, seed)
    assert sorted(order.tolist()) == list(range(count))
    assert not np.any(np.diff(order) == 1)
    assert np.array_equal(order, scattered(count, seed))


def test_what_cannot_be_scattered() -> None:
    assert scattered(1, 5).tolist() == [0]
    for count in (2, 3):
        with pytest.raises(UsageError, match="too few"):
            scattered(count, 1)


def test_pieces_say_where_each_fragment_lies() -> None:
    pieces = Pieces(1000, 5000, 64, np.array([2, 0, 1], np.int64))
    assert pieces.targets().tolist() == [1000, 1064, 1128]
    assert pieces.sources().tolist() == [5128, 5000, 5064]
    assert (pieces.count, pieces.nbytes) == (3, 192)


@pytest.mark.parametrize(
    ("path", "there"),
    [
        (("pinned", "ce", "both", 4096, 1), True), (("pinned", "batch", "fetch", 4096, 64), True),
        (("pinned", "ce", "fetch", 4096, 1024), False), (("pinned", "ce", "fetch", 4096, 2), False),
        (("pinned", "sm", "fetch", 4096, 64), False), (("pageable", "ce", "both", 4096, 1), False),
        (("pageable", "sm", "fetch", 4096, 1), False), (("managed", "direct", "evict", 4096, 1), False),
        (("file", "ce", "fetch", 4096, 1), False), (("file", "staged", "evict", 4096, 1), True),
        (("file", "staged", "both", 4096, 1), False),
        (("file", "staged", "fetch", 4096, 1), True), (("tape", "ce", "fetch", 4096, 1), False),
    ],
)  # fmt: skip
def test_which_paths_there_are(path: tuple[str, str, str, int, int], there: bool) -> None:
    assert makes_sense(*path) == there


def test_a_path_there_is_not_is_refused(gpu: tuple[LadderFake, Service]) -> None:
    with ExitStack() as stack:
        kernels = Kernels(gpu[1].device, lambda source, arch: IMAGE, stack)
        with pytest.raises(UsageError, match="no such link"):
            open_lanes(gpu[1], kernels, stack.enter_context, Link("pageable", "sm", "fetch", SIZE))


# -- compiled calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [2, 4, 8, 9, 11])
def test_a_loop_makes_the_calls_of_its_rows_in_order_and_stops_at_the_first_code(arguments: int) -> None:
    seen: list[tuple[int, ...]] = []

    def called(*values: int) -> int:
        seen.append(values)
        return 700 if values[0] == 30 else 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * arguments)(called)
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    rows = np.arange(4 * arguments, dtype=np.int64).reshape(4, arguments) + 2**40
    rows[:, 0] = (10, 20, 30, 40)
    loop = CallLoop(address, rows)
    assert loop() == 700
    assert seen == [tuple(row) for row in rows[:3].tolist()]
    seen.clear()
    assert loop.repeat(3) == 0
    assert seen == [tuple(rows[0].tolist())] * 3


@pytest.mark.parametrize(
    "rows", [np.zeros((1, 3), np.int64), np.zeros((0, 4), np.int64), np.zeros(4, np.int64), np.zeros((2, 4), np.int32)]
)
def test_other_rows_are_refused(rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
    with pytest.raises(UsageError):
        CallLoop(0, rows)


def test_a_copy_engine_copies_in_the_order_of_its_slots_and_says_who_refused(gpu: tuple[LadderFake, Service]) -> None:
    lib, service = gpu
    with hbm(service, 4 * SIZE, seed=1) as source, hbm(service, 4 * SIZE, seed=2) as target:
        order = np.array([2, 0, 3, 1], np.int64)
        mover = CopyEngine(service.device, Pieces(target.copy_address, source.copy_address, SIZE, order))
        before = service.stream.queued
        mover.submit(service.stream)
        service.stream.synchronize()
        assert service.stream.queued - before == mover.operations == 4
        found = lib.peek(target.copy_address, 4 * SIZE)
        for slot, origin in enumerate(order.tolist()):
            assert np.array_equal(found[slot * SIZE :][:SIZE], payload.expected(SIZE, 1, offset=origin * SIZE))
        lib.fail(3, 1, call="cuMemcpyAsync")
        with pytest.raises(CudaError, match="cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"):
            mover.submit(service.stream)
        with Stream(service.device) as other:
            mover.submit(other)
            other.synchronize()
        with pytest.raises(KvbenchError, match="closed"):
            mover.submit(other)


def test_after_a_device_error_no_call_is_made() -> None:
    with fake() as lib:
        driver = Driver(lib.path)
        with Device(driver) as opened, Service(opened, fake_cuda.IMAGE) as service:
            memory = hbm(service, 2 * SIZE)
            at = memory.copy_address
            mover = CopyEngine(opened, Pieces(at, at + SIZE, SIZE, np.zeros(1, np.int64)))
            lib.fail_op(1, 700)
            mover.submit(service.stream)
            with pytest.raises(PoisonedDevice):
                service.stream.synchronize()
            lib.forget()
            with pytest.raises(PoisonedDevice):
                mover.submit(service.stream)
            assert lib.names() == []


# -- oracles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4096, (1 << 20) - 8, (1 << 20) + 13, (2 << 20) + 8])
def test_sums_agree_with_the_bytes_they_are_of(nbytes: int) -> None:
    assert payload_sum(nbytes, 3) == reference.read(payload.expected(nbytes, 3))
    first, step = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
    whole = reference.write(nbytes, first, step)
    assert ramp_sum(nbytes, first, step) == reference.read(whole)
    at = nbytes // 16 * 8
    assert np.array_equal(ramp(at, nbytes - at, first, step), whole[at:])


def test_a_kernel_takes_only_what_it_can(gpu: tuple[LadderFake, Service]) -> None:
    with ExitStack() as stack, hbm(gpu[1], 64) as memory:
        kernels = Kernels(gpu[1].device, lambda source, arch: IMAGE, stack)
        at = memory.copy_address
        for grid, values, block in ((0, (at, at, 64), None), (1, (at, at, 64), 2048), (1, (at + 8, at, 64), None)):
            with pytest.raises(UsageError):
                kernels.launch("copy", grid, *values, block=block)
        with pytest.raises(UsageError, match="CUDA C"):
            kernels.launch("read_sum_i32", 1, at, at, 4)
        assert kernels.launch("copy", 2, at, at, 64).block == 512


def test_the_kernels_become_code_that_holds_their_entries() -> None:
    require("nvrtc", missing_nvrtc())
    for source in {kernel.source for kernel in catalogue.KERNELS.values() if kernel.form == "cuda"}:
        image = gpu_session.image_of(source, (9, 0))
        entries = [k.entry for k in catalogue.KERNELS.values() if k.source == source]
        assert all(entry.encode() in image for entry in entries)


# -- two at once -------------------------------------------------------------------------------------------------------


def copies(session: GpuSession, nbytes: int) -> CopyEngine:
    memory = session.enter(hbm(session.service, 2 * nbytes))
    at = memory.copy_address
    return CopyEngine(session.device, Pieces(at, at + nbytes, nbytes, np.zeros(1, np.int64)))


def test_each_of_two_streams_has_its_own_seconds(session: GpuSession) -> None:
    short, long = copies(session, 4096), copies(session, 1 << 20)
    both = Together(session, long.submit, short.submit, (1, 1))
    run = session.clock.hot(both.submit, both.operations, [both.other])
    total = run(1)
    first, second = both.seconds()
    assert first == pytest.approx(OPERATION_S + (1 << 20) * BYTE_S, rel=0.01)
    assert second == pytest.approx(OPERATION_S + 4096 * BYTE_S, rel=0.2)
    assert total >= max(first, second)


@pytest.mark.parametrize("own", [0, 1])
def test_a_stream_is_measured_while_the_other_is_busy_to_the_end(session: GpuSession, own: int) -> None:
    """T37: with equal bytes the slower of two directions would finish alone, and faster for it."""
    movers = copies(session, 1 << 18), copies(session, 1 << 20)
    ends = tuple(OPERATION_S + mover.link_bytes * BYTE_S for mover in movers)
    loaded = Loaded(
        session, movers[own].submit, movers[1 - own].submit, (1, 1), (ends[own], ends[1 - own]), cold=False
    )  # fmt: skip
    assert loaded(3) == pytest.approx(3 * ends[own], rel=0.02)
    assert (loaded.passes, loaded.alone) == (3, 0)
    loaded.require_resolved()
    starved = Loaded(session, movers[1].submit, movers[0].submit, (1, 1), (ends[0], 10 * ends[1]), cold=False)
    starved(2)
    assert starved.alone == starved.passes == 2
    with pytest.raises(KvbenchError, match="took no time"):
        Loaded(session, movers[0].submit, movers[1].submit, (1, 1), (0.0, 1.0), cold=False)


def test_a_stream_too_short_for_the_clock_says_so(session: GpuSession) -> None:
    """T16: the window of both is long enough, the one that is reported is not."""
    tiny, large = copies(session, 16), copies(session, 1 << 20)
    loaded = Loaded(session, tiny.submit, large.submit, (1, 1), (1e-6, 2e-5), cold=False)
    loaded(1)
    session.clock.quantum = dataclasses.replace(session.clock.quantum, step=1e-6)
    coarse = Loaded(session, tiny.submit, large.submit, (1, 1), (1e-6, 2e-5), cold=False)
    coarse(1)
    with pytest.raises(KvbenchError, match="too short for the event clock"):
        coarse.require_resolved()


def test_submission_counts_the_hosts_share_and_refuses_a_call_that_waits(
    session: GpuSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = copies(session, 16)
    loop = Submission(session.clock, work.calls, 1)
    assert loop.count == session.clock.depth - 1
    before = session.clock.stream.queued
    assert loop.run(2) > 0.0
    assert session.clock.stream.queued - before == 2 * (loop.count + 1)
    monkeypatch.setattr(type(session.clock.blocker), "late", property(lambda self: True))
    with pytest.raises(KvbenchError, match="waited for the device"):
        loop.run(1)


def test_preparation_lies_outside_the_window() -> None:
    done: list[str] = []

    def run(reps: int) -> float:
        done.append("run")
        return 0.5

    assert before_each(run, lambda: done.append("prepare"))(2) == 1.0
    assert done == ["prepare", "run"] * 2
    with pytest.raises(KvbenchError, match="own seconds"):
        before_each(lambda reps: None, lambda: None)(1)


def test_the_first_error_is_the_one_that_leaves_a_session(session: GpuSession) -> None:
    with pytest.raises(VerifyError, match="first"), GpuSession():
        raise VerifyError("first")
