"""The event clock on the fake driver: what it brackets, what it refuses, and that any failure leaves nothing behind."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvbench.errors import KvbenchError, Unavailable
from kvbench.memory.cuda.device import Device, Event, Launch, Stream
from kvbench.memory.cuda.driver import CudaError, Driver, PoisonedDevice
from kvbench.memory.cuda.service import Service
from kvbench.timing import events
from kvbench.timing.budget import budget
from kvbench.timing.events import DEPTH, EventClock, EventQuantum, EventRun
from kvbench.timing.sampler import sample, sample_pair
from tests.fake_cuda import IMAGE, Fake, Rig, fake, rig

SIZE = 4096
VIRTUAL = {"virtual_time": 1, "op_ns": 600, "byte_ps": 250, "record_ns": 40, "event_quantum_ns": 1}
COPY_S = (600 + SIZE * 0.25) * 1e-9
EMPTY_S = 40e-9


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy test machine wakes the fake's threads late; what is looked for here lasts longer than that."""
    monkeypatch.setattr(events, "ESCAPE_S", 0.2)
    monkeypatch.setattr(events, "ESCAPE_TRIES", 2)


@pytest.fixture
def gpu() -> Iterator[Rig]:
    with rig(l2_bytes=1 << 16) as made:
        yield made


@pytest.fixture
def clock(gpu: Rig) -> Iterator[EventClock]:
    with EventClock(gpu.service, timeout_s=10.0) as made:
        yield made


class Work:
    """Device memory and copies within it."""

    def __init__(self, gpu: Rig) -> None:
        self.gpu, address = gpu, ctypes.c_uint64()
        gpu.device.call("cuMemAlloc", ctypes.byref(address), 2 * SIZE)
        self.address = address.value

    def copy(self, stream: Stream) -> None:
        stream.copy(self.address, self.address + SIZE, SIZE)

    def close(self) -> None:
        self.gpu.device.release("cuMemFree", self.address)


@pytest.fixture
def work(gpu: Rig) -> Iterator[Work]:
    made = Work(gpu)
    yield made
    made.close()


def make(clock: EventClock, kind: str) -> Callable[..., EventRun]:
    method: Callable[..., EventRun] = getattr(clock, kind)
    return method


@contextmanager
def spinning(gpu: Rig, milliseconds: int) -> Iterator[Launch]:
    """A kernel that does nothing for a time: a blocker whose word never comes."""
    address = ctypes.c_uint64()
    gpu.device.call("cuMemAlloc", ctypes.byref(address), 8)
    gpu.service.stream.set_bytes(address.value, 0, 8)
    gpu.service.stream.synchronize()
    late, ticket, patience = address.value + 4, ctypes.c_uint32(1), ctypes.c_uint64(milliseconds * 1_000_000)
    yield Launch(gpu.service.block, 1, 1, (address, ctypes.c_uint64(late), ticket, patience))
    gpu.device.call("cuMemFree", address.value)


# -- what is bracketed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reps", [1, 7, 1200])
@pytest.mark.parametrize("kind", ["hot", "isolated", "cold"])
def test_the_seconds_are_those_of_the_work_alone(kind: str, reps: int) -> None:
    """In virtual time the sum is known: the copies, and per window what one record costs; no flush, no blocker."""
    with rig(l2_bytes=1 << 12, **VIRTUAL) as gpu, EventClock(gpu.service) as clock:
        work = Work(gpu)
        run = make(clock, kind)(work.copy)
        per_batch = {"hot": DEPTH - 3, "isolated": (DEPTH - 1) // 3, "cold": (DEPTH - 1) // 4}[kind]
        windows = -(-reps // per_batch) if kind == "hot" else reps
        assert run(reps) == pytest.approx(reps * COPY_S + windows * EMPTY_S, rel=1e-5)
        assert run.window_s == pytest.approx((reps * COPY_S + windows * EMPTY_S) / windows, rel=1e-5)
        work.close()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("hot", "block record copy copy record"),
        ("isolated", "block record copy record record copy record"),
        ("cold", "block flush record copy record flush record copy record"),
        ("submission", "copy copy"),
    ],
)
def test_the_order_of_calls_and_their_stream(gpu: Rig, clock: EventClock, work: Work, kind: str, expected: str) -> None:
    run = make(clock, kind)(work.copy)
    gpu.fake.forget()
    run(2)
    names = {"cuLaunchKernel": "kernel", "cuEventRecord": "record", "cuMemcpyAsync": "copy"}
    calls = [call for call in gpu.fake.trace() if call.name in names]
    blocks = {ctypes.c_void_p.from_buffer(clock._service.block).value: "block"}
    found = []
    for call in calls:
        word = names[call.name]
        found.append(blocks.get(call.args[0], "flush") if word == "kernel" else word)
    assert " ".join(found) == expected
    assert clock.stream.handle is not None
    assert {call.args[1 if call.name == "cuEventRecord" else 3] for call in calls} == {clock.stream.handle.value}


@pytest.mark.parametrize(("kind", "operations"), [("hot", 1), ("hot", 3), ("isolated", 2), ("cold", 5)])
def test_never_more_than_the_cap_waits_behind_the_blocker(
    gpu: Rig, clock: EventClock, work: Work, kind: str, operations: int
) -> None:
    def submit(stream: Stream) -> None:
        for _ in range(operations):
            work.copy(stream)

    run = make(clock, kind)(submit, operations)
    gpu.fake.forget()
    run(700)
    most, waiting = 0, 0
    for name in gpu.fake.names():
        waiting = 0 if name == "cuStreamSynchronize" else waiting + (name in QUEUED)
        most = max(most, waiting)
    assert DEPTH - 10 <= most <= DEPTH


QUEUED = ("cuLaunchKernel", "cuEventRecord", "cuMemcpyAsync", "cuMemsetD8Async")


def test_the_flush_covers_a_multiple_of_the_queried_l2(gpu: Rig, clock: EventClock, work: Work) -> None:
    """T11: neither a hard-coded size nor one that a table has for the model's name."""
    gpu.fake.forget()
    clock.cold(work.copy)
    assert [c.args[0] for c in gpu.fake.trace() if c.name == "cuMemAlloc_v2"] == [2 * (1 << 16)]
    clock.cold(work.copy)
    assert gpu.fake.names().count("cuMemAlloc_v2") == 1


def test_without_a_known_l2_there_is_no_cold() -> None:
    with rig(l2_bytes=0) as gpu, EventClock(gpu.service) as clock, pytest.raises(Unavailable, match="no L2 size"):
        clock.cold(lambda stream: None)


def test_submission_needs_no_blocker_and_takes_any_number(gpu: Rig, clock: EventClock, work: Work) -> None:
    """16,384 copies behind a blocker would deadlock on the full queue; from an idle stream they are a plain loop."""
    count = 1500

    def submit(stream: Stream) -> None:
        for _ in range(count):
            work.copy(stream)

    with pytest.raises(Unavailable, match=r"more operations than may wait .*got 1500, expected at most 497"):
        clock.hot(submit, count)
    run = clock.submission(submit, count)
    gpu.fake.forget()
    assert run(1) > 0
    assert "cuLaunchKernel" not in gpu.fake.names()
    run.require_resolved()  # the host's clock, not the device's, decides here


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hot", "isolated", "cold", "submission"])
def test_work_on_another_stream_is_named(gpu: Rig, clock: EventClock, work: Work, kind: str) -> None:
    """T20."""
    with Stream(gpu.device) as other:
        with pytest.raises(
            KvbenchError, match=r"got .0 operations on the clock's stream, 1 on others., expected 1 and 0"
        ):
            make(clock, kind)(lambda stream: work.copy(other))

        def both(stream: Stream) -> None:
            work.copy(stream)
            work.copy(other)

        with pytest.raises(KvbenchError, match="1 operations on the clock's stream, 1 on others"):
            make(clock, kind)(both)


def test_work_that_leaves_later_is_caught_at_that_call(gpu: Rig, clock: EventClock, work: Work) -> None:
    with Stream(gpu.device) as other:
        chosen = [clock.stream]
        run = clock.hot(lambda stream: work.copy(chosen[0]))
        assert run(3) > 0
        chosen[0] = other
        with pytest.raises(KvbenchError, match="queue all work on the stream"):
            run(3)


def test_work_behind_the_back_of_the_count_shows_in_the_time(
    gpu: Rig, clock: EventClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T20: queued by other means on another stream, and claimed to be on this one."""
    monkeypatch.setattr(events, "ESCAPE_S", 0.03)

    def submit(target: Stream) -> Callable[[Stream], None]:
        def queue(stream: Stream) -> None:
            gpu.device.call("cuLaunchKernel", spin.function, 1, 1, 1, 1, 1, 1, 0, target.handle, spin.packed, None)
            stream.count(1)

        return queue

    with Stream(gpu.device) as other, spinning(gpu, milliseconds=10) as spin:
        with pytest.raises(KvbenchError, match="works on after the clock's stream is done"):
            clock.hot(submit(other))
        assert clock.hot(submit(clock.stream))(1) >= 0.009


def test_a_wrong_count_of_operations_is_refused(clock: EventClock, work: Work) -> None:
    with pytest.raises(KvbenchError, match=r"got .1 operations .*expected 2 and 0"):
        clock.hot(work.copy, 2)
    with pytest.raises(KvbenchError, match=r"got .0 operations"):
        clock.hot(lambda stream: None)
    with pytest.raises(KvbenchError, match="queues nothing"):
        clock.hot(work.copy, 0)


def test_waiting_behind_the_blocker_ends_with_the_reason(gpu: Rig, work: Work) -> None:
    with EventClock(gpu.service, timeout_s=0.05) as clock:

        def submit(stream: Stream) -> None:
            work.copy(stream)
            stream.synchronize()

        run = clock.hot(submit)  # without the blocker it ends
        with pytest.raises(KvbenchError, match=r"waited for the device behind the blocking kernel.*within 0.05 s"):
            run(1)
        assert clock.hot(work.copy)(2) > 0


def test_a_failing_submit_releases_the_blocker(clock: EventClock, work: Work) -> None:
    wrong: list[type[BaseException]] = []

    def submit(stream: Stream) -> None:
        work.copy(stream)
        if wrong:
            raise wrong.pop()

    run = clock.isolated(submit)
    for kind in (ValueError, KeyboardInterrupt):
        wrong.append(kind)
        with pytest.raises(kind):
            run(3)
        waiter = threading.Thread(target=clock.stream.synchronize, daemon=True)
        waiter.start()
        waiter.join(5)  # the blocker's own timeout is 10 s
        assert not waiter.is_alive()
        assert run(3) > 0


def test_a_second_stream_is_bracketed_if_it_is_joined(gpu: Rig, clock: EventClock, work: Work) -> None:
    with Stream(gpu.device) as other, Event(gpu.device) as fork, Event(gpu.device) as join:

        def both(stream: Stream) -> None:
            stream.record(fork)
            other.wait(fork)
            work.copy(stream)
            work.copy(other)
            other.record(join)
            stream.wait(join)

        assert clock.hot(both, 6, (other,))(3) > 0
        assert clock.submission(both, 6, [other])(2) > 0
        with pytest.raises(KvbenchError, match=r"got .3 operations on the clock's stream, 3 on others"):
            clock.hot(both, 6)


def test_a_second_stream_that_is_not_joined_is_caught(gpu: Rig, clock: EventClock, work: Work) -> None:
    with Stream(gpu.device) as other, spinning(gpu, milliseconds=300) as spin:

        def apart(stream: Stream) -> None:
            work.copy(stream)
            other.launch(spin)

        with pytest.raises(KvbenchError, match=r"1 of 1 not joined"):
            clock.hot(apart, 2, [other])


@pytest.mark.parametrize("reps", [0, -1])
def test_no_pass_is_no_measurement(clock: EventClock, work: Work, reps: int) -> None:
    with pytest.raises(KvbenchError, match="at least one pass"):
        clock.hot(work.copy)(reps)


# -- the clock itself --------------------------------------------------------------------------------------------------


def test_the_quantum_is_measured_and_short_windows_are_refused() -> None:
    """T16: 0.5 us is what some devices resolve."""
    with rig(**(VIRTUAL | {"record_ns": 700, "event_quantum_ns": 500})) as gpu, EventClock(gpu.service) as clock:
        work = Work(gpu)
        assert clock.quantum.step == pytest.approx(500e-9, rel=1e-3)
        assert clock.quantum.empty == pytest.approx(500e-9, rel=1e-3)
        assert clock.quantum.spread == pytest.approx(500e-9, rel=1e-3)
        assert clock.quantum.seconds == max(clock.quantum.step, clock.quantum.spread)
        assert clock.quantum.pairs >= 1000
        run = clock.isolated(work.copy)
        with pytest.raises(KvbenchError, match="no window"):
            run.require_resolved()
        run(100)
        with pytest.raises(
            KvbenchError, match=r"too short for the event clock.*got .windows of 2\..* us.*20 x 0\.5 us"
        ):
            run.require_resolved()
        streamed = clock.hot(work.copy)
        streamed(100)
        streamed.require_resolved()
        work.close()


def test_the_quantum_joins_step_and_spread() -> None:
    assert EventQuantum(step=1e-9, empty=1e-6, spread=3e-7, pairs=9).seconds == 3e-7
    assert EventQuantum(step=5e-7, empty=0.0, spread=0.0, pairs=9).seconds == 5e-7


def test_a_clock_that_stands_still_is_refused() -> None:
    with rig(**(VIRTUAL | {"record_ns": 0})) as gpu, pytest.raises(KvbenchError, match="does not advance"):
        EventClock(gpu.service)


def test_the_sampler_takes_the_clock_as_it_takes_host_work(clock: EventClock, work: Work) -> None:
    limits = replace(budget("smoke"), block_seconds=20e-6, quanta=0.0, cap_seconds=0.3)
    taken = sample(clock.hot(work.copy), limits, gate=None)
    assert taken.summary is not None
    assert taken.summary.n >= 3
    pair = sample_pair(clock.hot(work.copy), clock.isolated(work.copy), limits, gate=None)
    assert pair.a.summary is not None
    assert pair.b.summary is not None


# -- device errors and failure points ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hot", "isolated", "cold", "submission"])
def test_a_device_error_leaves_no_number_and_poisons_the_worker(
    gpu: Rig, clock: EventClock, work: Work, kind: str
) -> None:
    """T41: the error comes up in the phase that caused it, and nothing is called after it."""
    run = make(clock, kind)(work.copy)
    assert run(2) > 0
    gpu.fake.fail_op(3 if kind != "submission" else 1, 700)
    with pytest.raises(PoisonedDevice, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*new worker"):
        run(2)
    gpu.fake.forget()
    for use in (lambda: run(2), lambda: clock.hot(work.copy), lambda: EventClock(gpu.service)):
        with pytest.raises(PoisonedDevice):
            use()
    assert gpu.fake.names() == []
    assert gpu.driver.poisoned is not None


def scenario(driver: Driver) -> None:
    with Device(driver) as device, Service(device, IMAGE) as service, EventClock(service) as clock:

        def submit(stream: Stream) -> None:
            stream.set_bytes(service._scratch, 0, 64)

        for kind in ("hot", "isolated", "cold", "submission"):
            make(clock, kind)(submit)(2)


def outcomes(monkeypatch: pytest.MonkeyPatch, code: int, sticky: bool = False) -> Iterator[tuple[str, Exception, Fake]]:
    monkeypatch.setattr(events, "CHAINS", 1)
    monkeypatch.setattr(events, "CHAIN", 4)
    with fake(record_ns=1, l2_bytes=64) as lib:
        for k in range(8, 1000):  # the first ones open the device, which tests of the buffers break
            lib.reset()
            lib.set(l2_bytes=64)
            driver = Driver(lib.path)
            lib.forget()
            lib.fail(k, code, sticky=sticky)
            error: KvbenchError | None = None
            try:
                scenario(driver)
            except KvbenchError as raised:
                error = raised
            if not lib.fired:
                assert k > 150
                return
            name = lib.names()[k - 1]
            if (name, error) != ("cuDeviceGetAttribute", None):  # the host node may be unknown
                assert error is not None, name
                yield name, error, lib
    pytest.fail("the scenario does not end")


def test_any_failing_call_unwinds_what_was_done_and_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for name, error, lib in outcomes(monkeypatch, 999):
        seen.add(name)
        assert lib.live() == {}, name
        assert isinstance(error, CudaError)
        assert name.partition("_v")[0] in str(error)
        assert "\n" not in str(error)
    assert {"cuEventRecord", "cuEventElapsedTime", "cuLaunchKernel", "cuMemHostAlloc", "cuEventDestroy_v2"} <= seen


def test_a_device_error_at_any_call_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, error, _ in outcomes(monkeypatch, 700, sticky=True):
        assert isinstance(error, PoisonedDevice), name
