"""The CPU elastic buffer: no byte lost in any interleaving, no chunk reused under a copy, calls in the right order."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory import payload
from kvbench.memory.cuda.device import Stream
from kvbench.systems.ellm.buffer import Copy, ElasticBuffer, Mover, Place, Refill, Spill
from kvbench.systems.ellm.movers import LoaderThread, StreamMover
from tests.fake_cuda import Rig, rig

CHUNK = 64
BLOCK = 3 * CHUNK - 8
KEYS = 5
SLOTS = 8


class Job:
    def __init__(self, copies: Sequence[Copy], key: str) -> None:
        self.copies, self.key, self.carried, self.error = list(copies), key, 0, ""

    @property
    def over(self) -> bool:
        return bool(self.error) or self.carried == len(self.copies)


class StepMover:
    """Copies nothing before it is told to, then a piece of any block's job: bytes are read as late, and in as strange
    an order, as several streams may read them. Jobs of one block keep their order."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, copies: Sequence[Copy], label: str) -> Job:
        self.jobs.append(Job(copies, label.split(" ", 1)[1]))
        return self.jobs[-1]

    def step(self, pick: int = 0) -> None:
        first = {job.key: job for job in reversed(self.jobs) if not job.over}
        if first:
            job = list(first.values())[pick % len(first)]
            copy = job.copies[job.carried]
            ctypes.memmove(copy.target, copy.source, copy.nbytes)
            job.carried += 1

    def done(self, ticket: object) -> bool:
        assert isinstance(ticket, Job)
        if ticket.error:
            raise KvbenchError(ticket.error)
        return ticket.over

    def wait(self, ticket: object) -> None:
        assert isinstance(ticket, Job)
        for job in self.jobs[: self.jobs.index(ticket) + 1]:
            while job.key == ticket.key and not job.over:
                ctypes.memmove(*dataclasses.astuple(job.copies[job.carried]))
                job.carried += 1

    def order(self, ticket: object) -> None:
        self.wait(ticket)


@dataclasses.dataclass
class World:
    """Near memory of SLOTS blocks, a buffer of ``chunks`` chunks behind it, and what each key's bytes should be."""

    mover: Mover
    chunks: int
    memory: np.ndarray = dataclasses.field(init=False)
    far: np.ndarray = dataclasses.field(init=False)
    buffer: ElasticBuffer = dataclasses.field(init=False)
    slots: dict[int, int] = dataclasses.field(default_factory=dict)  # key -> near slot, while its near copy is whole

    def __post_init__(self) -> None:
        self.memory = np.full((SLOTS, BLOCK), 0xFF, np.uint8)
        self.far = np.full(self.chunks * CHUNK, 0xFF, np.uint8)
        self.buffer = ElasticBuffer(self.mover, self.far.ctypes.data, self.far.nbytes, chunk=CHUNK)
        self.coming: dict[int, int] = {}
        self.gone: set[int] = set()

    def near(self, slot: int) -> int:
        return int(self.memory[slot].ctypes.data)

    def free_slot(self) -> int | None:
        taken = {*self.slots.values(), *self.coming.values()}
        return next((slot for slot in range(SLOTS) if slot not in taken), None)

    def create(self, key: int) -> None:
        slot = self.free_slot()
        assert slot is not None
        self.slots[key] = slot
        payload.fill(self.memory[slot], key + 1)

    def holds(self, key: int, slot: int) -> bool:
        return bool(np.array_equal(self.memory[slot], payload.expected(BLOCK, key + 1)))

    def act(self, name: str, key: int) -> None:
        """Do ``name`` on ``key`` where its state allows; what the state forbids has to be refused."""
        place, buffer = self.buffer.place(key), self.buffer
        if name == "offload" and place is None:
            buffer.settle()
            fits = buffer.room >= -(-BLOCK // CHUNK) * CHUNK
            assert buffer.offload(key, self.near(self.slots[key]), BLOCK) == fits
        elif name == "evict" and place in (Place.LEAVING, Place.HELD):
            buffer.evict(key)
            self.memory[self.slots.pop(key)] = 0xEE  # later work of the compute side
        elif name == "fetch" and place is Place.FAR:
            slot = self.free_slot()
            assert slot is not None
            self.coming[key] = slot
            buffer.fetch(key, self.near(slot))
        elif name == "read" and place is Place.COMING:
            buffer.ready(key)
            assert self.holds(key, self.coming[key])
        elif name == "cancel" and place in (Place.LEAVING, Place.HELD):
            buffer.cancel(key)
            assert buffer.place(key) is None
        elif name == "cancel" and place is Place.COMING:
            buffer.cancel(key)
            self.memory[self.coming.pop(key)] = 0xDD
        elif name == "drop" and place is not None:
            buffer.drop(key)
            self.slots.pop(key, None)
            self.coming.pop(key, None)
            self.create(key)
        elif name not in ("offload", "read", "drop"):
            with pytest.raises(UsageError):
                getattr(buffer, name)(*((key, self.near(0)) if name == "fetch" else (key,)))

    def arrive(self) -> None:
        """Take note of fetches that are over."""
        for key, slot in list(self.coming.items()):
            if self.buffer.place(key) is None:
                assert self.holds(key, slot)
                self.slots[key] = self.coming.pop(key)

    def check(self) -> None:
        assert 0 <= self.buffer.used <= self.buffer.physical
        assert self.buffer.logical <= self.buffer.physical
        for key, slot in self.slots.items():
            assert self.holds(key, slot), f"key {key} is not near"

    def finish(self) -> None:
        """Bring everything back: every key's bytes are near, every chunk is free."""
        self.buffer.wait()
        self.arrive()
        for key in range(KEYS):
            place = self.buffer.place(key)
            if place is Place.FAR:
                self.act("fetch", key)
            elif place is not None:
                self.buffer.cancel(key)
        self.buffer.wait()
        self.arrive()
        assert sorted(self.slots) == list(range(KEYS))
        self.check()
        assert self.buffer.used == 0
        self.buffer.close()


ACTS = st.sampled_from(["offload", "offload", "evict", "evict", "fetch", "read", "cancel", "drop"])
MOVES = st.one_of(
    st.tuples(ACTS, st.integers(0, KEYS - 1)),
    st.tuples(st.just("step"), st.integers(0, 9)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("resize"), st.integers(0, 9)),
)


@settings(max_examples=150, deadline=None)
@given(chunks=st.integers(1, 9), moves=st.lists(MOVES, max_size=60))
def test_no_byte_is_lost_in_any_interleaving(chunks: int, moves: list[tuple[str, int]]) -> None:
    mover = StepMover()
    world = World(mover, chunks)
    for key in range(KEYS):
        world.create(key)
    for name, number in moves:
        if name == "step":
            mover.step(number)
        elif name == "settle":
            world.buffer.settle()
        elif name == "resize":
            before = [world.buffer.place(key) for key in range(KEYS)]
            world.buffer.resize(min(number * CHUNK, world.buffer.physical))
            assert [world.buffer.place(key) for key in range(KEYS)] == before
        else:
            world.act(name, number)
        world.arrive()
        world.check()
    world.finish()


@settings(max_examples=20, deadline=None)
@given(moves=st.lists(st.tuples(ACTS, st.integers(0, KEYS - 1)), max_size=40))
def test_no_byte_is_lost_with_a_real_thread(moves: list[tuple[str, int]]) -> None:
    with LoaderThread() as loader:
        world = World(loader, 9)
        for key in range(KEYS):
            world.create(key)
        for name, key in moves:
            world.buffer.settle()
            world.arrive()
            world.act(name, key)
        world.finish()


def test_the_property_test_sees_a_chunk_that_is_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: ElasticBuffer, key: object, block: object) -> None:
        self._blocks.pop(key)
        self._free.extend(reversed(block.chunks))  # type: ignore[attr-defined]

    monkeypatch.setattr(ElasticBuffer, "_forget", careless)
    mover = StepMover()
    world = World(mover, 3)
    for key in range(KEYS):
        world.create(key)
    for name, key in (("offload", 0), ("cancel", 0), ("offload", 1)):
        world.act(name, key)
    mover.wait(mover.jobs[1])
    mover.wait(mover.jobs[0])  # lands in chunks that hold the other block by now
    world.act("evict", 1)
    with pytest.raises(AssertionError):
        world.finish()


def test_chunks_of_a_cancelled_offload_wait_for_its_copy() -> None:
    mover = StepMover()
    world = World(mover, 3)
    world.create(0)
    world.create(1)
    world.act("offload", 0)
    world.buffer.cancel(0)
    assert (world.buffer.used, world.buffer.room) == (3 * CHUNK, 0)
    assert not world.buffer.offload(1, world.near(world.slots[1]), BLOCK)
    mover.step()
    assert world.buffer.offload(1, world.near(world.slots[1]), BLOCK)


def test_logical_size_limits_new_blocks_and_evicts_none() -> None:
    mover = StepMover()
    world = World(mover, 9)
    for key in range(3):
        world.create(key)
    world.buffer.resize(6 * CHUNK)
    assert world.buffer.offload(0, world.near(0), BLOCK)
    assert world.buffer.offload(1, world.near(1), BLOCK)
    assert not world.buffer.offload(2, world.near(2), BLOCK)
    world.buffer.resize(0)
    assert (world.buffer.used, world.buffer.room, world.buffer.refused) == (6 * CHUNK, 0, 1)
    assert [world.buffer.place(key) for key in range(3)] == [Place.LEAVING, Place.LEAVING, None]
    for size in (-1, 9 * CHUNK + 1):
        with pytest.raises(UsageError, match="no such logical size"):
            world.buffer.resize(size)


def test_what_is_refused() -> None:
    mover = StepMover()
    with pytest.raises(UsageError, match="whole number of chunks"):
        ElasticBuffer(mover, 0, 100, chunk=64)
    world = World(mover, 9)
    world.create(0)
    assert world.buffer.offload(0, world.near(0), BLOCK)
    with pytest.raises(UsageError, match="here already, got '0 leaving'"):
        world.buffer.offload(0, world.near(0), BLOCK)
    with pytest.raises(UsageError, match="cannot evict this block, got '7 not here', expected leaving or held"):
        world.buffer.evict(7)
    with pytest.raises(UsageError, match="no bytes"):
        world.buffer.offload(1, world.near(0), 0)
    world.buffer.evict(0)
    with pytest.raises(UsageError, match="only copy is here, got '1, the first 0'"):
        world.buffer.close()
    with pytest.raises(UsageError, match="cannot cancel"):
        world.buffer.cancel(0)
    with pytest.raises(UsageError, match="cannot wait for"):
        world.buffer.ready(0)
    world.buffer.drop(0)
    world.buffer.close()
    with pytest.raises(UsageError, match="without layers"):
        Spill(world.buffer, "r", [])


def test_a_failed_copy_leaves_the_other_one() -> None:
    mover = StepMover()
    world = World(mover, 9)
    world.create(0)
    assert world.buffer.offload(0, world.near(0), BLOCK)
    mover.jobs[0].error = "the link is down"
    with pytest.raises(KvbenchError, match=r"failed while it was leaving.*the link is down.*the other copy is whole"):
        world.buffer.settle()
    assert (world.buffer.place(0), world.buffer.used) == (None, 0)
    assert world.buffer.offload(0, world.near(0), BLOCK)
    world.act("evict", 0)
    world.act("fetch", 0)
    mover.jobs[-1].error = "the link is down"
    with pytest.raises(KvbenchError, match="failed while it was coming"):
        world.buffer.settle()
    assert world.buffer.place(0) is Place.FAR
    world.coming.clear()
    world.act("fetch", 0)
    world.buffer.wait()
    world.arrive()
    assert world.holds(0, world.slots[0])


# -- the thread --------------------------------------------------------------------------------------------------------


class Marks:
    def __init__(self) -> None:
        self.names: list[tuple[str, int]] = []

    def mark(self, name: str) -> None:
        self.names.append((name, threading.get_native_id()))


def test_a_request_leaves_and_comes_back_layer_by_layer() -> None:
    marks, layers = Marks(), 3
    near = np.empty((layers, 1000), np.uint8)
    far = np.zeros(layers * 1024, np.uint8)
    blocks = [(int(row.ctypes.data), row.nbytes) for row in near]
    with LoaderThread(recorder=marks) as loader:
        buffer = ElasticBuffer(loader, far.ctypes.data, far.nbytes, chunk=256)
        spill = Spill(buffer, "r", blocks)
        for layer in range(layers):
            payload.fill(near[layer], layer + 1)
            spill.after(layer)
        assert spill.taken
        assert not Spill(buffer, "other", blocks).taken
        spill.evict()
        near[:] = 0
        refill = Refill(buffer, "r", blocks)
        refill.start()
        for layer in range(layers):
            refill.before(layer)
            assert np.array_equal(near[layer], payload.expected(1000, layer + 1))
        buffer.wait()
        assert (buffer.used, buffer.moved_out, buffer.moved_in) == (0, near.nbytes, near.nbytes)
        tid = loader.tid
    labels = [f"{act} ('r', {layer})" for act in ("offload", "fetch") for layer in range(layers)]
    assert marks.names == [(f"{end} {label}", tid) for label in labels for end in ("begin", "end")]
    with pytest.raises(UsageError, match="closed"):
        loader.submit([], "late")


def test_an_error_in_the_thread_reaches_the_caller_and_keeps_the_near_copy() -> None:
    class Broken:
        def mark(self, name: str) -> None:
            raise RuntimeError("no clock")

    near, far = np.zeros(100, np.uint8), np.zeros(128, np.uint8)
    with LoaderThread(recorder=Broken()) as loader:
        buffer = ElasticBuffer(loader, far.ctypes.data, far.nbytes, chunk=64)
        assert buffer.offload("k", near.ctypes.data, near.nbytes)
        with pytest.raises(KvbenchError, match="the loader thread failed, got 'no clock'"):
            buffer.evict("k")
        with pytest.raises(KvbenchError, match="failed while it was leaving"):
            buffer.settle()
        assert buffer.used == 0
        with pytest.raises(UsageError, match="not a ticket"):
            loader.done(object())


# -- the side stream ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Iterator[Rig]:
    with rig() as made:
        yield made


def hosted(gpu: Rig, nbytes: int) -> int:
    pointer = ctypes.c_void_p()
    gpu.device.call("cuMemHostAlloc", ctypes.byref(pointer), nbytes, 3)
    return pointer.value or 0


def in_memory(gpu: Rig, nbytes: int) -> int:
    address = ctypes.c_uint64()
    gpu.device.call("cuMemAlloc", ctypes.byref(address), nbytes)
    return address.value


def test_order_of_calls_on_a_gpu(gpu: Rig) -> None:
    """Copies wait for the layer that writes their source, and what overwrites it waits for them, all on the device."""
    near, far = in_memory(gpu, 256), hosted(gpu, 512)
    with Stream(gpu.device) as compute, StreamMover(gpu.device, compute) as mover:
        buffer = ElasticBuffer(mover, far, 512, chunk=128)
        gpu.fake.set(pause=1)
        compute.set_bytes(near, 7, 256)
        gpu.fake.forget()
        assert buffer.offload("k", near, 256)
        buffer.evict("k")
        compute.set_bytes(near, 9, 256)
        buffer.fetch("k", near)
        buffer.ready("k")
        calls = gpu.fake.trace()
        by = [(call.name, call.args) for call in calls if call.name not in ("cuEventCreate", "cuEventQuery")]
        side, main = mover.side.handle, compute.handle
        assert side is not None
        assert main is not None
        names = [name for name, _ in by]
        assert names == [
            "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent",
            "cuMemsetD8Async",
            "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent",
        ]  # fmt: skip
        streams = {"cuEventRecord": 1, "cuStreamWaitEvent": 0, "cuMemcpyAsync": 3, "cuMemsetD8Async": 3}
        on = [args[streams[name]] for name, args in by]
        a, b = main.value, side.value
        assert on == [a, b, b, b, a, a, a, b, b, b, a]
        assert by[1][1][1] == by[0][1][0]
        assert by[4][1][1] == by[3][1][0]
        assert by[10][1][1] == by[9][1][0]
        assert not any("Synchronize" in call.name for call in calls)
        assert buffer.place("k") is Place.COMING
        gpu.fake.set(pause=0)
        buffer.wait()
        compute.synchronize()
        assert set(gpu.fake.peek(near, 256).tolist()) == {7}
        assert buffer.used == 0
        assert buffer.offload("k", near, 200)
        buffer.wait()
        buffer.cancel("k")
        buffer.close()
        with pytest.raises(UsageError, match="not a ticket"):
            mover.done(object())
    gpu.device.call("cuMemFree", near)
    gpu.device.call("cuMemFreeHost", far)


def test_every_call_that_fails_on_a_gpu_leaves_nothing_behind(gpu: Rig) -> None:
    near, far = in_memory(gpu, 256), hosted(gpu, 512)
    failed = lines = 0
    for k in range(1, 40):
        gpu.fake.fail(k)
        stream, mover = None, None
        try:
            stream = Stream(gpu.device)
            mover = StreamMover(gpu.device, stream)
            buffer = ElasticBuffer(mover, far, 512, chunk=128)
            assert buffer.offload("k", near, 256)
            buffer.evict("k")
            buffer.fetch("k", near)
            buffer.wait()
        except KvbenchError as error:
            lines += str(error).count("\n")
            failed += 1
        finally:
            for made in (mover, stream):
                if made is not None:
                    try:
                        made.close()
                    except KvbenchError:
                        made.close()
        if not gpu.fake.fired:
            break
    assert (failed >= 10, lines) == (True, 0)
    gpu.fake.fail(10**6)
    gpu.device.call("cuMemFree", near)
    gpu.device.call("cuMemFreeHost", far)
