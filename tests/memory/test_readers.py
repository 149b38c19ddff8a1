"""File readers: every byte read once, the payload proven, storage bytes counted, a warm cache told from a cold one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.machine.probe import Fact
from kvbench.memory import file as file_module
from kvbench.memory import readers
from kvbench.memory.file import FileSystem, ScratchFile
from kvbench.memory.readers import METHODS, FileReader, Method, probe_counter, read_bytes
from tests.memory.test_limits import tree

SIZE = (1 << 20) + 4096  # the last 64 KiB block is a short one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScratchFile]:
    with ScratchFile(SIZE, tmp_path_factory.mktemp("scratch"), seed=11) as file:
        yield file


def need_disk(file: ScratchFile) -> None:
    if file.direct.works is not True:
        pytest.skip(file.direct.reason)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("block", "depth"), [(4096, 1), (65536, 3), (SIZE, 1)])
def test_passes_take_time_and_verify(shared: ScratchFile, method: Method, block: int, depth: int) -> None:
    if method == "direct":
        need_disk(shared)
    with FileReader(shared, method, block, depth) as reader:
        assert reader.run(2) > 0
        reader.verify()
        assert len(set(reader.tids)) == depth
        assert reader.unique_bytes == SIZE
        if reader.counter.value:
            assert reader.link_bytes == SIZE
            assert reader.flags == ()
        else:
            assert reader.link_bytes is None
            assert reader.link_reason


@pytest.mark.parametrize("advice", readers.ADVICE)
def test_the_kernel_name_states_the_advice(shared: ScratchFile, advice: readers.Advice) -> None:
    methods: tuple[Method, ...] = ("pread", "mmap")
    for method in methods:
        with FileReader(shared, method, 65536, advice=advice) as reader:
            reader.run()
            reader.verify()
            assert reader.kernel.endswith(advice)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_pass_covers_every_block_once_in_a_new_order(
    shared: ScratchFile, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    real, seen = os.preadv, list[tuple[int, int]]()

    def record(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((offset, buffers[0].nbytes))
        return real(fd, buffers, offset)

    with FileReader(shared, "pread", 65536, depth, seed=1) as reader:
        monkeypatch.setattr(os, "preadv", record)
        orders = []
        for _ in range(2):
            seen.clear()
            reader.run()
            orders.append([offset for offset, _ in seen])
            assert sorted(seen) == [(o, min(65536, SIZE - o)) for o in range(0, SIZE, 65536)]
        assert orders[0] != sorted(orders[0])
        assert orders[0] != orders[1]


@pytest.mark.parametrize("method", METHODS)
def test_other_bytes_than_were_written_fail(tmp_path: Path, method: Method) -> None:
    with ScratchFile(SIZE, tmp_path) as file:
        if method == "direct":
            need_disk(file)
        with FileReader(file, method, 65536, 2) as reader:
            reader.run()
            byte = file.expected(SIZE - 16, 1)[0]
            os.pwrite(file.fd, bytes([byte ^ 1]), SIZE - 16)
            os.fsync(file.fd)
            with pytest.raises(VerifyError, match=f"byte {SIZE - 16}"):
                reader.verify()


def test_a_wrong_sum_of_a_timed_mmap_pass_fails_though_the_file_is_right(tmp_path: Path) -> None:
    with ScratchFile(SIZE, tmp_path) as file, FileReader(file, "mmap", 65536) as reader:
        good = os.pread(file.fd, 8, 0)
        os.pwrite(file.fd, bytes(8), 0)
        os.fsync(file.fd)
        reader.run()
        os.pwrite(file.fd, good, 0)
        os.fsync(file.fd)
        with pytest.raises(VerifyError, match="timed pass"):
            reader.verify()


def test_a_stale_buffer_of_the_timed_pass_fails(shared: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileReader(shared, "pread", SIZE) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda _fd, buffers, _offset: buffers[0].nbytes)  # claims, reads nothing
            reader.run()
        with pytest.raises(VerifyError):
            reader.verify()


def test_short_reads_are_completed_and_an_early_end_fails(shared: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    with FileReader(shared, "pread", 65536) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:5000]], offset))
            reader.run()
            reader.verify()
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(VerifyError, match="ends early"):
            reader.run()


def test_a_device_error_names_the_directory(shared: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with FileReader(shared, "pread", 65536, 2) as reader:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(Unavailable, match="Input/output error") as caught:
            reader.run()
        assert str(shared.directory) in str(caught.value)


def test_pages_another_mapping_holds_are_flagged_as_warm(tmp_path: Path) -> None:
    with ScratchFile(SIZE, tmp_path) as file:
        need_disk(file)
        holder = file.map()
        held = sum(holder[at] for at in range(0, SIZE, 4096))  # mapped pages survive the fadvise
        with FileReader(file, "pread", 65536) as reader:
            reader.run()
            assert held
            assert "cache_not_dropped" in reader.flags
            if reader.counter.value:
                assert "link_below_unique" in reader.flags
                assert reader.link_bytes == 0
        holder.close()


def test_an_uncountable_cache_is_flagged(shared: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScratchFile, "cached_bytes", lambda _self: Fact(None, "no mincore"))
    with FileReader(shared, "pread", 65536) as reader:
        reader.run()
        assert "cache_unknown" in reader.flags


def test_a_counter_that_counts_nothing_gives_no_link_bytes(
    shared: ScratchFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_disk(shared)
    monkeypatch.setattr(readers, "read_bytes", lambda *_: Fact(77))
    assert probe_counter(shared).value is False
    with FileReader(shared, "direct", 65536) as reader:
        reader.run()
        assert reader.link_bytes is None
        assert "read_bytes grew by [0, 0]" in reader.link_reason
    monkeypatch.setattr(readers, "read_bytes", lambda *_: Fact(None, "hidden"))
    assert probe_counter(shared) == Fact(None, "hidden")


def test_the_counter_file(tmp_path: Path) -> None:
    assert read_bytes(tree(tmp_path, {"proc/self/io": "rchar: 1\nread_bytes: 4096\n"})).value == 4096
    assert read_bytes(tree(tmp_path, {"proc/self/io": "rchar: 1\n"})).value is None
    assert "io" in read_bytes(tmp_path / "none").reason


def test_no_pass_is_no_link_bytes(shared: ScratchFile) -> None:
    with FileReader(shared, "pread", 65536) as reader:
        assert reader.link_bytes is None
        assert reader.link_reason


@pytest.mark.parametrize(
    ("method", "block", "depth", "advice"),
    [("read", 4096, 1, "normal"), ("pread", 100, 1, "normal"), ("pread", 0, 1, "normal"), ("pread", 4096, 0, "normal"),
     ("pread", 4096, 257, "normal"), ("mmap", 4096, 1, "willneed")],
)  # fmt: skip
def test_impossible_arguments(
    shared: ScratchFile, method: Method, block: int, depth: int, advice: readers.Advice
) -> None:
    with pytest.raises(UsageError):
        FileReader(shared, method, block, depth, advice=advice)


def test_zero_passes_are_refused(shared: ScratchFile) -> None:
    with FileReader(shared, "pread", 65536) as reader, pytest.raises(UsageError):
        reader.run(0)


def test_more_blocks_in_flight_than_the_file_has(shared: ScratchFile) -> None:
    with pytest.raises(Unavailable, match="larger file"):
        FileReader(shared, "pread", SIZE // 4096 * 4096, 2)


def test_direct_is_refused_with_the_reason_where_it_would_be_a_memory_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "file_system", lambda _path: FileSystem("tmpfs", "tmpfs", "0:1"))
    with ScratchFile(SIZE, tmp_path) as file, pytest.raises(Unavailable, match="tmpfs"):
        FileReader(file, "direct", 4096)


def test_direct_needs_aligned_blocks(shared: ScratchFile) -> None:
    need_disk(shared)
    with (
        pytest.raises(Unavailable, match="multiple of")
        if shared.direct.offset_align > 512
        else pytest.raises(UsageError)
    ):
        FileReader(shared, "direct", 512 if shared.direct.offset_align > 512 else 256)
