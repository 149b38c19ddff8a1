"""Host transports: one index set, the same bytes out of each, and a check that a wrong one does not pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels import uring
from kvbench.kernels.team import Team
from kvbench.machine.probe import Fact
from kvbench.memory import file as files
from kvbench.memory.file import ScratchFile
from kvbench.memory.host import host_buffer
from kvbench.model.geometry import LAYOUTS, KVGeometry
from kvbench.model.layout import Moves
from kvbench.systems.strata.ends import delivered
from kvbench.systems.strata.transfer import plan
from kvbench.transport import host_file
from kvbench.transport.host_batch import VECTORS, groups
from kvbench.transport.host_file import FALLBACK, FileEnd
from kvbench.transport.host_job import GUARD, End, HostJob, HostTransport, MemoryEnd
from kvbench.transport.host_open import OF_FILE, OF_MEMORY, open_host
from kvbench.transport.host_staged import blocks

CPU, SEED, PAGES = min(os.sched_getaffinity(0)), 3, 5
EVEN = KVGeometry("even", 3, 2, 256, 2, 2, "made up")  # items of 1 KiB, heads of 512 B
ODD = KVGeometry("odd", 2, 1, 328, 1, 2, "made up")  # items of 656 B: no whole cache lines, no sectors


@dataclass(frozen=True, slots=True)
class Rig:
    """What a case needs: two threads, files in a directory of the test, everything closed at its end."""

    stack: ExitStack
    team: Team
    folder: Path

    def end(self, tier: str, nbytes: int) -> End:
        if tier == "file":
            file = self.stack.enter_context(ScratchFile(FileEnd.needs(nbytes), self.folder, SEED))
            return self.stack.enter_context(FileEnd(file, nbytes))
        return MemoryEnd(
            self.stack.enter_context(host_buffer(MemoryEnd.needs(nbytes), "4k", seed=SEED)).address, nbytes, SEED
        )

    def job(self, far: str, direction: str, layout: str, order: str = "shuffled", shape: KVGeometry = EVEN) -> HostJob:
        chosen = plan(shape, layout, 2, PAGES, order, 11)
        ends = {"near": self.end("dram", chosen.near.nbytes), "far": self.end(far, chosen.far.nbytes)}
        source, target = ("far", "near") if direction == "fetch" else ("near", "far")
        moves = chosen.moves(direction)
        return HostJob(moves, ends[source], ends[target], self.team, self.stack.enter_context, SEED)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack, Team([CPU] * 2) as team:
        yield Rig(stack, team, tmp_path)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("direction", ["fetch", "evict"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_transport_moves_the_same_bytes(layout: str, direction: str, order: str, rig: Rig) -> None:
    for far, names in (("dram", OF_MEMORY), ("file", OF_FILE)):
        job = rig.job(far, direction, layout, order)
        left: dict[str, bytes] = {}
        for transport in names:
            for name, way in open_host(transport, job).items():
                assert way.submit(2) > 0
                job.verify(way.submit)
                assert way.name == transport
                left[f"{transport} {name}"] = job.target.image().tobytes()
        assert len(set(left.values())) == 1, far
        assert len(left) >= len(names)


def test_sizes_that_are_no_cache_lines_fall_back_visibly(rig: Rig) -> None:
    memory = open_host("cpu", rig.job("dram", "fetch", "page_first", shape=ODD))
    assert {name: way.flags for name, way in memory.items()} == {"memcpy none": ("uneven_fragments",)}
    for direction in ("fetch", "evict"):
        job = rig.job("file", direction, "page_first", shape=ODD)
        for transport in OF_FILE:
            for way in open_host(transport, job).values():
                way.submit(1)
                job.verify(way.submit)
                if transport != "direct":
                    assert FALLBACK in way.flags
                    assert "buffered" in way.kernel
                    assert way.detail["buffered_because"]
                assert not isinstance(way.link, int)


def test_where_direct_transfers_are_refused_the_row_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refused(path: str | Path, flags: int, *more: int) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refused)
    job = rig.job("file", "fetch", "layer_first")
    monkeypatch.undo()
    way = open_host("cpu", job)["calls"]
    way.submit(1)
    job.verify(way.submit)
    assert way.flags == (FALLBACK,)
    assert way.detail["buffered_because"]


def test_buffered_writes_count_until_they_left_memory(rig: Rig) -> None:
    way = open_host("cpu", rig.job("file", "evict", "page_first", shape=ODD))["calls"]
    whole = way.submit(1)
    submitted = way.submitted()
    assert len(submitted) == 1
    assert 0 < submitted[0] < whole
    assert "not counted" in way.link_reason()
    direct = open_host("cpu", rig.job("file", "evict", "layer_first"))["calls"]
    direct.submit(1)
    if FALLBACK not in direct.flags:
        assert direct.submitted() == ()
        assert direct.link == rig.job("file", "evict", "layer_first").total


Break = Callable[[HostJob, Callable[[int], float]], Callable[[int], float]]


def skips_a_fragment(job: HostJob, submit: Callable[[int], float]) -> Callable[[int], float]:
    assert isinstance(job.target, MemoryEnd)
    last = int(job.moves.dst_offset[-1]) + GUARD

    def wrong(reps: int) -> float:
        before = job.target.image()[last : last + 8].copy()
        seconds = submit(reps)
        job.target.image()[last : last + 8] = before
        return seconds

    return wrong


def overruns(place: int) -> Break:
    def broken(job: HostJob, submit: Callable[[int], float]) -> Callable[[int], float]:
        def wrong(reps: int) -> float:
            seconds = submit(reps)
            job.target.image()[place] ^= 1
            return seconds

        return wrong

    return broken


def works_once(job: HostJob, submit: Callable[[int], float]) -> Callable[[int], float]:
    seconds = [submit(1)]

    def wrong(reps: int) -> float:
        job.spoil()
        return seconds[0] * reps

    return wrong


def writes_the_page_between(job: HostJob, submit: Callable[[int], float]) -> Callable[[int], float]:
    return overruns(GUARD + job.target.nbytes - 1)(job, submit)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (skips_a_fragment, "a fragment did not arrive"),
        (works_once, "a fragment did not arrive"),
        (overruns(GUARD - 1), "beside the moved fragments were changed"),
        (overruns(-GUARD), "beside the moved fragments were changed"),
        (overruns(-1), "beside the moved fragments were changed"),
        (writes_the_page_between, "beside the moved fragments were changed"),
    ],
)
def test_a_wrong_transport_does_not_pass(broken: Break, words: str, rig: Rig) -> None:
    job = rig.job("dram", "evict", "page_first")  # the far pool's last page is a gap between moved ones
    wrong = broken(job, open_host("cpu", job)["memcpy none"].submit)
    wrong(1)
    with pytest.raises(VerifyError, match=words):
        job.verify(wrong)


def test_a_source_that_was_written_to_does_not_pass(rig: Rig) -> None:
    job = rig.job("dram", "fetch", "layer_first")
    way = open_host("cpu", job)["memcpy none"]
    job.source.image()[GUARD + 5] ^= 1
    way.submit(1)
    with pytest.raises(VerifyError, match="does not hold its payload"):
        job.verify(way.submit)


def test_a_file_that_lost_bytes_does_not_pass(rig: Rig) -> None:
    job = rig.job("file", "evict", "layer_first")
    way = open_host("cpu", job)["calls"]
    way.submit(1)
    assert isinstance(job.target, FileEnd)
    os.pwrite(job.target.fd, b"xxxx", GUARD + int(job.moves.dst_offset[3]))
    with pytest.raises(VerifyError, match="a fragment did not arrive"):
        job.verify(way.submit)


def test_bad_input_is_refused_before_memory_is_touched(rig: Rig) -> None:
    good = plan(EVEN, "layer_first", 2, PAGES, "sorted", 1)
    near, far = rig.end("dram", good.near.nbytes), rig.end("dram", good.far.nbytes)
    before = near.image().copy()
    small = rig.end("dram", good.near.nbytes - 64)

    def job(moves: Moves, source: End, target: End) -> HostJob:
        return HostJob(moves, source, target, rig.team, rig.stack.enter_context, SEED)

    with pytest.raises(UsageError, match=r"target: the buffer is smaller than the geometry"):
        job(good.moves("fetch"), far, small)
    with pytest.raises(UsageError, match=r"source: the buffer is smaller"):
        job(good.moves("evict"), small, far)
    none = np.zeros(0, np.int64)
    with pytest.raises(UsageError, match="nothing to move, got '2 skipped entries'"):
        job(Moves(none, none, none, 0, 2), far, near)
    assert np.array_equal(near.image(), before)
    with pytest.raises(UsageError, match="unknown host transport, got 'rdma'"):
        open_host("rdma", job(good.moves("fetch"), far, near))
    with pytest.raises(UsageError, match="between memory and a file"):
        open_host("batch", job(good.moves("fetch"), far, near))


def test_without_io_uring_batch_is_preadv_and_says_why(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring, "probe", lambda: "io_uring cannot be used, got 'Operation not permitted'")
    ways: dict[str, HostTransport] = open_host("batch", rig.job("file", "fetch", "page_first"))
    assert list(ways) == ["preadv"]
    assert "Operation not permitted" in str(ways["preadv"].detail["io_uring"])


def test_calls_join_what_follows_in_the_file_up_to_their_limits() -> None:
    offsets = np.array([0, 10, 20, 40, 50, 0], np.int64)
    starts, counts, sizes = groups(offsets, np.full(6, 10, np.int64))
    assert (starts.tolist(), counts.tolist(), sizes.tolist()) == ([0, 3, 5], [3, 2, 1], [30, 20, 10])
    assert groups(offsets, np.full(6, 10, np.int64), limit=20)[1].tolist() == [2, 1, 2, 1]
    many = np.arange(VECTORS + 1, dtype=np.int64)
    assert groups(many, np.ones_like(many))[1].tolist() == [VECTORS, 1]


def test_staged_blocks_hold_their_limit_or_one_fragment() -> None:
    assert blocks(np.array([4, 4, 4, 20, 4], np.int64), 10).tolist() == [0, 2, 3, 4, 5]
    assert blocks(np.array([4], np.int64), 10).tolist() == [0, 1]


def test_a_scratch_file_smaller_than_the_pool_is_refused(rig: Rig) -> None:
    file = rig.stack.enter_context(ScratchFile(4096 * 4, rig.folder, SEED))
    with pytest.raises(Unavailable, match="smaller than the pool"):
        FileEnd(file, 4096 * 3)


# -- what is read from a file comes from the file ----------------------------------------------------------------------


def test_jobs_on_one_file_do_not_keep_its_pages_for_each_other(rig: Rig) -> None:
    first = rig.job("file", "fetch", "layer_first")
    second = HostJob(first.moves, first.source, first.target, rig.team, rig.stack.enter_context, SEED)
    assert isinstance(first.source, FileEnd)
    ways = [open_host("direct", job)["memcpy none"] for job in (first, second)]
    for _ in range(3):
        for way in ways:
            way.submit(1)
            assert (first.source.file.cached_bytes().value or 0) > 0  # mapped and read: now it is in memory
    first.source.forget(first.total)
    assert first.source.file.cached_bytes().value == 0
    for way in ways:
        assert isinstance(way.link, int) is False
        found = delivered(way, first.total, "fetch")
        assert found is not None
        assert found.counted is None or found.counted >= first.total
        assert "link_below_unique" not in found.flags


@pytest.mark.parametrize("transport", OF_FILE)
def test_a_pass_whose_pages_stay_cached_is_no_number(transport: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "DROP_WAITS", (0.0, 0.001))
    job = rig.job("file", "fetch", "page_first", shape=ODD)  # no sectors: all go through the page cache
    ways = list(open_host(transport, job).values())
    assert isinstance(job.source, FileEnd)
    held = job.source.file.map()  # somebody else's mapping
    try:
        assert len(bytes(held)) == job.source.file.nbytes
        for way in ways:
            with pytest.raises(Unavailable, match="cache_not_dropped"):
                way.submit(1)
    finally:
        held.close()
    for way in ways:
        assert way.submit(1) > 0


def test_a_cache_that_cannot_be_read_back_is_flagged(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScratchFile, "cached_bytes", lambda _: Fact(None, "mincore: refused"))
    job = rig.job("file", "fetch", "page_first", shape=ODD)
    for transport in OF_FILE:
        for way in open_host(transport, job).values():
            assert way.submit(1) > 0
            assert "cache_unknown" in way.flags


@pytest.mark.parametrize("direction", ["fetch", "evict"])
def test_a_file_in_memory_is_flagged_by_every_transport(
    direction: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "file_system", lambda _: files.FileSystem("tmpfs", "tmpfs", "0:1"))
    job = rig.job("file", direction, "layer_first")
    for transport in OF_FILE:
        for way in open_host(transport, job).values():
            way.submit(1)
            job.verify(way.submit)
            assert "file_in_memory" in way.flags


def test_bytes_of_storage_are_counted_by_transport_and_not_by_file(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = rig.job("file", "fetch", "page_first", shape=ODD)
    one, other = open_host("cpu", job)["calls"], open_host("staged", job)["calls"]
    assert isinstance(job.source, FileEnd)
    job.source.counter = Fact(True)
    readings = iter([100, 150, 1000, 1000])
    monkeypatch.setattr(host_file, "read_bytes", lambda: Fact(next(readings)))
    fresh = [open_host(name, job)["calls"] for name in ("cpu", "staged")]
    for way in fresh:
        way.submit(1)
    assert [way.link() if callable(way.link) else way.link for way in fresh] == [50, 0]
    found = [delivered(way, 50, "fetch") for way in fresh]
    assert [each.flags for each in found if each is not None] == [(), ("link_below_unique",)]
    assert [way.link() if callable(way.link) else way.link for way in (one, other)] == [None, None]


def test_a_check_that_memory_cannot_hold_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    end = rig.end("file", 8192)

    def no_room(nbytes: int) -> int:
        raise Unavailable(f"asked for {nbytes} bytes")

    monkeypatch.setattr(host_file, "preflight", no_room)
    for check in (end.image, lambda: end.content(True)):
        with pytest.raises(Unavailable, match=f"asked for {8192 + 2 * GUARD} bytes"):
            check()
