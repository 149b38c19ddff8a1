"""Every paged transport on the fake device: the same bytes at the same places, call order, faults, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.memory import payload
from kvbench.memory.cuda.buffers import hbm, pinned
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import CudaError, Driver
from kvbench.memory.cuda.service import Service
from kvbench.model.geometry import LAYOUTS
from kvbench.model.layout import Moves
from kvbench.transport.gpu_lane import OTHER
from kvbench.transport.paged import GUARD, open_paged
from kvbench.transport.paged_batch import PagedBatch
from kvbench.transport.paged_ce import PagedEngine
from kvbench.transport.paged_edges import OnSide
from kvbench.transport.paged_set import Fragments, box
from kvbench.transport.paged_sm import NARROW, PageThreads, device_table
from tests import fake_cuda
from tests.suites.gpu_rig import fake
from tests.transport.paged_rig import Paged, image_of_target, paged, shape

OURS = ("ce", "batch", "sm", "staged")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paged]:
    with paged(monkeypatch) as made:
        yield made


def by_bytes(direction: str, layout: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What the target must hold, guards included, fragment by fragment."""
    asked = shape(layout)
    moves = asked.moves(direction)
    source, target = (asked.far, asked.near) if direction == "fetch" else (asked.near, asked.far)
    seed = 6 if direction == "fetch" else 5
    want = payload.expected(target.nbytes + 2 * GUARD, seed + OTHER)
    have = payload.expected(source.nbytes + 2 * GUARD, seed)
    for frm, to, size in zip(moves.src_offset, moves.dst_offset, moves.bytes, strict=True):
        want[GUARD + to : GUARD + to + size] = have[GUARD + frm : GUARD + frm + size]
    return want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", ["fetch", "evict"])
@pytest.mark.parametrize("transport", OURS)
def test_every_transport_leaves_the_same_bytes(gpu: Paged, transport: str, direction: str, layout: str) -> None:
    asked = shape(layout)
    lane = gpu.open(transport, direction, asked)
    assert (lane.source_tier, lane.target_tier) == (("pinned", "hbm") if direction == "fetch" else ("hbm", "pinned"))
    with pytest.raises(VerifyError, match="a fragment did not arrive"):
        lane.check()
    before = gpu.service.stream.queued
    gpu.make(lane)
    assert gpu.service.stream.queued - before == lane.mover.operations
    lane.check()
    assert lane.mover.link_bytes == asked.moves(direction).total
    assert np.array_equal(image_of_target(lane), by_bytes(direction, layout))
    lane.spoil()
    with pytest.raises(VerifyError):
        lane.check()
    gpu.make(lane)
    lane.check()


@pytest.mark.parametrize("alias_differs", [0, 1])
def test_pinned_memory_is_used_by_the_address_the_driver_names(
    monkeypatch: pytest.MonkeyPatch, alias_differs: int
) -> None:
    with paged(monkeypatch, alias_differs=alias_differs) as gpu:
        for direction in ("fetch", "evict"):
            for transport in ("ce", "batch", "sm", "staged"):
                lane = gpu.open(transport, direction, shape())
                gpu.make(lane)
                lane.check()


@pytest.mark.parametrize(("head", "elements", "width"), [(24, 2, 8), (20, 4, 4), (6, 2, 2), (5, 1, 1), (32, 1, 16)])
@pytest.mark.parametrize("planes", [1, 2])
def test_an_item_that_is_no_multiple_of_16_falls_back_and_says_so(
    gpu: Paged, head: int, elements: int, width: int, planes: int
) -> None:
    asked = shape("page_head", head=head, elements=elements, planes=planes, tokens=1)
    for transport in ("sm", "staged"):
        for index in ("i32", "i64") if transport == "sm" else ("i64",):
            lane = gpu.open(transport, "fetch", asked, index=index)
            gpu.make(lane)
            lane.check()
            assert f"{width}-byte accesses" in lane.mover.kernel
            assert (NARROW in lane.flags) == (width < 16)


def test_canaries_and_what_lies_between_are_looked_at(gpu: Paged) -> None:
    lane = gpu.open("ce", "evict", shape())
    gpu.make(lane)
    lane.check()
    target = lane.check._target  # type: ignore[attr-defined]
    view = target.array()
    gap = shape().far.offset(3, 0, 0, 0, 0)  # a page nothing goes to
    for at, said in ((0, "in front of the pool"), (view.size - 1, "behind the pool"),
                     (GUARD + gap, f"at byte {gap} of the pool")):  # fmt: skip
        view[at] ^= 1
        with pytest.raises(VerifyError, match="bytes changed that no fragment goes to") as caught:
            lane.check()
        assert said in str(caught.value)
        view[at] ^= 1
    lane.check()


def test_a_changed_source_is_noticed(gpu: Paged) -> None:
    lane = gpu.open("ce", "evict", shape())
    gpu.make(lane)
    source = lane.check._source  # type: ignore[attr-defined]
    found = gpu.fake.peek(source.copy_address + 100, 1)
    gpu.fake.poke(source.copy_address + 100, bytes([int(found[0]) ^ 1]))
    with pytest.raises(VerifyError, match="the source changed"):
        lane.check()


@pytest.mark.parametrize("transport", ["sm", "staged"])
def test_a_kernel_that_moves_too_little_is_noticed(gpu: Paged, transport: str) -> None:
    lane = gpu.open(transport, "fetch", shape())
    gpu.fake.missing(1)
    gpu.make(lane)
    with pytest.raises(VerifyError, match="a fragment did not arrive"):
        lane.check()


# -- call order --------------------------------------------------------------------------------------------------------


def test_ce_makes_one_call_a_merged_fragment_in_order(gpu: Paged) -> None:
    asked = shape()
    lane, moves = gpu.open("ce", "fetch", asked), asked.moves("fetch")
    gpu.fake.forget()
    gpu.make(lane)
    calls = gpu.fake.trace()
    assert [c.name for c in calls] == ["cuMemcpyAsync"] * len(moves) + ["cuStreamSynchronize"]
    base = calls[0].args[0] - int(moves.dst_offset[0]), calls[0].args[1] - int(moves.src_offset[0])
    assert [c.args[0] - base[0] for c in calls[:-1]] == moves.dst_offset.tolist()
    assert [c.args[1] - base[1] for c in calls[:-1]] == moves.src_offset.tolist()
    assert [c.args[2] for c in calls[:-1]] == moves.bytes.tolist()
    handle = gpu.service.stream.handle
    assert handle is not None
    assert {c.args[3] for c in calls[:-1]} == {handle.value} != {0}  # never the default stream


def test_batch_makes_as_many_calls_as_the_cap_asks_for(gpu: Paged) -> None:
    asked = shape()
    moves = asked.moves("evict")
    with hbm(gpu.service, asked.near.nbytes) as near, pinned(gpu.service, asked.far.nbytes) as far:
        batch = PagedBatch(gpu.service, Fragments(far.copy_address, near.copy_address, moves), descriptors=40)
        gpu.fake.forget()
        batch.submit(gpu.service.stream)
        gpu.service.stream.synchronize()
        calls = -(-len(moves) // 40)
        assert gpu.fake.names() == ["cuMemcpyBatchAsync_v2"] * calls + ["cuStreamSynchronize"]
        assert batch.kernel == f"cuMemcpyBatchAsync x {calls}, {len(moves)} descriptors"
        assert batch.operations == len(moves)
        have = payload.expected(near.nbytes, near.seed)
        for frm, to, size in zip(moves.src_offset, moves.dst_offset, moves.bytes, strict=True):
            assert np.array_equal(far.array()[to : to + size], have[frm : frm + size])


def test_staged_copies_once_where_the_far_pages_follow_each_other(gpu: Paged) -> None:
    scattered = shape()
    together = replace(scattered, far_pages=(4, 2, 5, 0, 1, 3))
    for asked, runs in ((together, 2), (scattered, 3)):  # V follows K: its pages 0 to 2 the pages 6 and 7 of K
        for direction, order in (("evict", ["cuLaunchKernel", *["cuMemcpyAsync"] * runs]),
                                 ("fetch", [*["cuMemcpyAsync"] * runs, "cuLaunchKernel"])):  # fmt: skip
            lane = gpu.open("staged", direction, asked)
            gpu.fake.forget()
            gpu.make(lane)
            assert gpu.fake.names() == [*order, "cuStreamSynchronize"]
            assert f"cuMemcpyAsync x {runs}" in lane.mover.kernel
            lane.check()


def test_a_side_stream_waits_for_the_caller_and_the_caller_for_it(gpu: Paged) -> None:
    lane = gpu.open("ce", "fetch", shape())
    edged = OnSide(gpu.service.device, gpu.stack.enter_context, lane.mover)
    stream, side = gpu.service.stream, edged.side
    before = stream.queued + side.queued
    gpu.fake.forget()
    edged.submit(stream)
    assert stream.queued + side.queued - before == edged.operations
    own, other = (s.handle.value if s.handle else None for s in (stream, side))
    calls = gpu.fake.trace()
    start, done = calls[0].args[0], calls[-2].args[0]
    assert (calls[0].name, calls[0].args[1]) == ("cuEventRecord", own)
    assert (calls[1].name, calls[1].args[:2]) == ("cuStreamWaitEvent", (other, start))
    assert {(c.name, c.args[3]) for c in calls[2:-2]} == {("cuMemcpyAsync", other)}
    assert (calls[-2].name, calls[-2].args[1]) == ("cuEventRecord", other)
    assert (calls[-1].name, calls[-1].args[:2]) == ("cuStreamWaitEvent", (own, done))
    assert not any("Synchronize" in c.name for c in calls)  # the host waits for nothing
    stream.synchronize()
    lane.check()


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", OURS)
def test_a_fault_at_any_call_leaves_no_leak_and_one_line(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    fired, k = 0, 1
    while True:
        with paged(monkeypatch) as gpu:  # its end finds whatever is still alive
            gpu.fake.fail(k, 1)
            said = what_it_says(gpu, transport)
            hit = gpu.fake.fired
            gpu.fake.fail(1 << 40)
        assert (said is None) != hit
        assert said is None or "\n" not in said
        if said is None:
            break
        fired, k = fired + 1, k + 3
    assert fired > 10


def what_it_says(gpu: Paged, transport: str) -> str | None:
    """Open, make and check one pass; return the error's line, None when all went well."""
    try:
        lane = gpu.open(transport, "evict", shape())
        gpu.make(lane)
        lane.check()
    except (CudaError, Unavailable) as error:
        return str(error)
    return None


def test_a_copy_that_is_refused_says_which_call(gpu: Paged) -> None:
    lane = gpu.open("ce", "fetch", shape())
    gpu.fake.fail(4, 1, call="cuMemcpyAsync")
    with pytest.raises(CudaError, match="cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"):
        gpu.make(lane)


# -- bad input ---------------------------------------------------------------------------------------------------------


def rows(src: list[int], dst: list[int], size: list[int]) -> Moves:
    return Moves(np.array(src, np.int64), np.array(dst, np.int64), np.array(size, np.int64), 1, 0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (rows([], [], []), ["nothing to move", "no fragment"]),
        (rows([0, 64], [0, 32], [64, 64]), ["duplicated destination", "dst_offset[0] and [1]", "byte 32"]),
        (rows([0, 64], [0, 63], [64, 64]), ["duplicated destination", "byte 63"]),
        (rows([-16], [0], [16]), ["outside the pool", "src_offset[0]", "16 bytes at -16"]),
        (rows([0, 0], [0, 1 << 40], [16, 16]), ["outside the pool", "dst_offset[1]"]),
        (rows([0], [0], [0]), ["without bytes", "bytes[0]"]),
        (rows([0, 1], [0], [16]), ["different length"]),
        (Moves(np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int64), 1, 0),
         ["not a table in host memory", "int32", "numpy int64"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("transport", ["ce", "sm"])
def test_moves_that_cannot_be_are_refused_before_memory_is_touched(
    gpu: Paged, bad: Moves, words: list[str], transport: str
) -> None:
    asked = shape()
    gpu.fake.forget()
    with pytest.raises(UsageError) as caught:
        open_paged(transport, gpu.service, gpu.kernels, bad, "fetch", asked.near, asked.far, gpu.stack.enter_context, 1)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert gpu.fake.names() == []


def test_a_table_of_the_device_is_no_table_for_calls(gpu: Paged) -> None:
    class OnDevice:
        dtype, device = "torch.int64", "cuda:0"

        def __len__(self) -> int:
            return 1

    asked, one = shape(), np.zeros(1, np.int64)
    wrong = Moves(OnDevice(), one, one + 16, 1, 0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"ce fetch src_offset: not a table in host memory, got .*cuda:0"):
        open_paged("ce", gpu.service, gpu.kernels, wrong, "fetch", asked.near, asked.far, gpu.stack.enter_context, 1)


def test_a_table_in_host_memory_is_no_table_for_threads(gpu: Paged) -> None:
    asked = shape()
    chosen = box(asked.moves("fetch"), asked.far, asked.near)
    device, service = gpu.service.device, gpu.service
    near = gpu.stack.enter_context(hbm(service, asked.near.nbytes))
    far = gpu.stack.enter_context(pinned(service, asked.far.nbytes))
    good = device_table(service, chosen.src_pages, "i64", gpu.stack.enter_context).copy_address
    wrong = far.copy_address
    for tables, name in (((wrong, good), "dst_pages"), ((good, wrong), "src_pages")):
        with pytest.raises(UsageError, match=f"sm {name}: the table is on the wrong device, got 'pinned'"):
            PageThreads(device, gpu.kernels, chosen, near.copy_address, far.copy_address, tables, quota=1)


def test_half_a_page_is_no_page_for_threads(gpu: Paged) -> None:
    asked = shape("layer_first")
    whole = asked.moves("fetch")
    half = Moves(whole.src_offset[1:], whole.dst_offset[1:], whole.bytes[1:], whole.pages, 0)
    with pytest.raises(UsageError, match="not whole pages"):
        open_paged("sm", gpu.service, gpu.kernels, half, "fetch", asked.near, asked.far, gpu.stack.enter_context, 1)


@pytest.mark.parametrize(
    ("how", "words"),
    [({"quota": 0}, "no blocks"), ({"threads": 100}, "not a number of threads"), ({"transport": "cpu"}, "unknown tra")],
)
def test_what_threads_cannot_do_is_refused(gpu: Paged, how: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        gpu.open(str(how.pop("transport", "sm")), "fetch", shape(), **how)
    asked = shape()
    with pytest.raises(UsageError, match="unknown direction"):
        open_paged(
            "ce", gpu.service, gpu.kernels, asked.moves("fetch"), "both", asked.near, asked.far,
            gpu.stack.enter_context, 1,
        )  # fmt: skip


def test_an_index_that_does_not_fit_32_bits_is_refused(gpu: Paged) -> None:
    with pytest.raises(UsageError, match="index does not fit 32 bits"):
        device_table(gpu.service, np.array([1, 1 << 31]), "i32", gpu.stack.enter_context)


def test_too_many_fragments_are_not_a_sample(gpu: Paged) -> None:
    asked = shape()
    fragments = Fragments(0, 0, asked.moves("fetch"))
    for make in (lambda: PagedEngine(gpu.service.device, fragments, cap=10),
                 lambda: PagedBatch(gpu.service, fragments, cap=10)):  # fmt: skip
        with pytest.raises(Unavailable, match="more fragments than one pass takes"):
            make()


def test_a_driver_without_the_batched_call() -> None:
    asked = shape()
    with fake(driver_version=12060) as lib:
        with (
            Device(Driver(lib.path)) as opened,
            Service(opened, fake_cuda.IMAGE) as service,
            pytest.raises(Unavailable, match=r"lacks cuMemcpyBatchAsync.*12\.8"),
        ):
            PagedBatch(service, Fragments(0, 0, asked.moves("fetch")))
        assert lib.live() == {}


def test_page_locked_memory_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with paged(monkeypatch, pin_limit=1024) as gpu, pytest.raises(Unavailable, match=r"pinned.*could not be had"):
        gpu.open("ce", "fetch", shape())


def test_a_copy_of_3_gib_is_asked_for_as_3_gib(gpu: Paged) -> None:
    """32-bit sizes would ask for 1 GiB less than nothing; the fake refuses the call, so nothing is touched."""
    size = 3 << 30
    far = rows([0, 5 << 30], [size, 0], [size, size])
    engine = PagedEngine(gpu.service.device, Fragments(1 << 40, 1 << 42, far))
    gpu.fake.forget()
    gpu.fake.fail(1, 1, call="cuMemcpyAsync")
    with pytest.raises(CudaError):
        engine.submit(gpu.service.stream)
    (call,) = (c for c in gpu.fake.trace() if c.name == "cuMemcpyAsync")
    assert call.args[:3] == ((1 << 40) + size, 1 << 42, size)
    assert engine.calls._loop.rows[1, :3].tolist() == [1 << 40, (1 << 42) + (5 << 30), size]
    assert engine.link_bytes == 2 * size
