"""Host buffers: exact, written, placed as they say; refused before memory runs out; harmless after close."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.machine.probe import Fact
from kvbench.memory import host, libc, limits, numa, payload
from kvbench.memory.host import Placement, host_buffer, preflight
from kvbench.memory.limits import Available
from kvbench.memory.region import Pages, Region, Residency, page_bytes, residency
from tests.memory.test_limits import GiB, meminfo, tree
from tests.memory.test_numa import node_files

MiB = 1 << 20


def thp_or_skip() -> None:
    try:
        page_bytes("thp")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * MiB + 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_base_pages_are_exact_filled_and_resident(nbytes: int, threads: int) -> None:
    with host_buffer(nbytes, "4k", threads=threads, seed=7) as buffer:
        array, place = buffer.array(), buffer.placement
        assert array.size == buffer.nbytes == nbytes
        assert array.ctypes.data == buffer.address
        assert np.array_equal(array, payload.expected(nbytes, 7))
        assert place.page_bytes == libc.base_page_bytes()
        if "pages_unverified" not in place.flags:
            assert place.resident == -(-nbytes // libc.base_page_bytes()) * libc.base_page_bytes()
            assert place.huge_share == 0


def test_thp_are_aligned_and_confirmed_by_smaps() -> None:
    thp_or_skip()
    size = page_bytes("thp")
    with host_buffer(size + 4096, "thp", kind="float64") as buffer:
        assert buffer.address % size == 0
        assert buffer.nbytes == size + 4096
        assert buffer.placement.resident == 2 * size
        assert buffer.placement.huge_share is not None
        assert buffer.placement.huge_share >= host.THP_LEAST
        assert buffer.array(np.float64).min() >= 1.0


@pytest.mark.hugepages
def test_reserved_huge_pages_are_taken() -> None:
    with host_buffer(4096, "huge") as buffer:
        assert buffer.placement.huge_share == 1
        assert buffer.placement.resident == buffer.placement.page_bytes == page_bytes("huge")


def test_neighbours_do_not_mix_their_counts() -> None:
    buffers = [host_buffer(MiB, "4k") for _ in range(4)]
    empty = Region(MiB)
    assert [b.placement.resident for b in buffers] == [MiB] * 4
    state = empty.residency()
    assert state.value is not None
    assert state.value.resident == 0


def test_a_write_past_the_end_stops_at_the_guard() -> None:
    code = (
        "import ctypes; from kvbench.memory.host import host_buffer; b = host_buffer(8192); "
        "ctypes.memset(b.address, 1, 8192); print('inside', flush=True); ctypes.memset(b.address + 8192, 1, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if libc.base_page_bytes() == 4096:
        assert done.stdout == "inside\n"
        assert done.returncode == -11


def test_a_view_kept_past_close_reads_zeros_and_memory_is_back() -> None:
    buffer = host_buffer(4 * MiB)
    view = buffer.array(np.uint64)
    before, address = payload.checksum(view), buffer.address
    buffer.close()
    buffer.close()
    state = residency(address, 4 * MiB)
    assert state.value is None or state.value.resident == 0
    assert not view.any()
    assert payload.checksum(view) != before
    for use in (buffer.array, lambda: buffer.address):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_the_address_range_goes_with_the_last_view() -> None:
    buffer = host_buffer(MiB)
    view, address = buffer.array(), buffer.address
    buffer.close()
    assert libc.resident_pages(address, MiB) == 0  # mapped: no error
    del view
    with pytest.raises(OSError, match="mincore"):
        libc.resident_pages(address, MiB)


def test_array_needs_whole_items() -> None:
    with host_buffer(12) as buffer, pytest.raises(ValueError, match="multiple"):
        buffer.array(np.float64)


@pytest.mark.parametrize(("nbytes", "pages", "threads"), [(0, "4k", 1), (-1, "4k", 1), (1, "2m", 1), (1, "4k", 0)])
def test_impossible_arguments_are_usage_errors(nbytes: int, pages: Pages, threads: int) -> None:
    with pytest.raises(UsageError):
        host_buffer(nbytes, pages, threads=threads)


def test_more_than_available_is_refused_before_anything_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo(2 * GiB)})
    monkeypatch.setattr(libc, "mmap", lambda *_: pytest.fail("mapped"))
    with pytest.raises(Unavailable, match=r"asked for 2 GiB .*1536.0 MiB|asked for 2 GiB .*available by MemAvailable"):
        host_buffer(2 * GiB, root=root)
    assert preflight(GiB, root) == limits.RESERVE_BYTES


def test_this_machine_refuses_a_pebibyte() -> None:
    with pytest.raises(Unavailable, match="asked for"):
        host_buffer(1 << 50)


def test_unknown_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="unknown"):
        preflight(1, tmp_path)


def test_the_asked_node_must_exist_and_have_room(tmp_path: Path) -> None:
    files = (
        {"proc/meminfo": meminfo(32 * GiB)}
        | node_files(0, "0", 1 << 25, 1 << 24)
        | node_files(1, "1", 1 << 25, 1 << 20)
    )
    root = tree(tmp_path, files)
    assert preflight(GiB, root, node=0) > 0
    with pytest.raises(Unavailable, match="NUMA node 1"):
        preflight(GiB, root, node=1)
    with pytest.raises(Unavailable, match="no such NUMA node"):
        preflight(1, root, node=2)


def test_one_node_with_lagging_counters_decides_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo(32 * GiB)} | node_files(0, "0", 1 << 20, 1 << 10))
    assert preflight(GiB, root, node=0) > 0


def test_memory_that_vanishes_while_writing_stops_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = iter([Available(10 * GiB, GiB, "test")] * 2 + [Available(GiB // 4, GiB, "test")] * 9)
    monkeypatch.setattr(host, "available_memory", lambda _root: Fact(next(rooms)))
    monkeypatch.setattr(host, "TOUCH_CHUNK", MiB)
    dropped: list[int] = []
    monkeypatch.setattr(Region, "drop", lambda self: dropped.append(self.mapped))
    with pytest.raises(Unavailable, match="ran low"):
        host_buffer(8 * MiB)
    assert dropped == [8 * MiB]


def placed(
    monkeypatch: pytest.MonkeyPatch, state: Residency | None, pages: Pages = "4k", node: int | None = None
) -> Placement:
    monkeypatch.setattr(Region, "residency", lambda _self: Fact(state, "" if state else "no smaps"))
    with host_buffer(2 * MiB, pages, node) as buffer:
        return buffer.placement


def test_swapped_out_pages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="did not stay"):
        placed(monkeypatch, Residency(MiB, 0, 0, 4096))


def test_base_pages_are_never_sold_as_thp(monkeypatch: pytest.MonkeyPatch) -> None:
    thp_or_skip()
    if page_bytes("thp") != 2 * MiB:
        pytest.skip("written for 2 MiB pages")
    with pytest.raises(Unavailable, match="gave base pages"):
        placed(monkeypatch, Residency(2 * MiB, 0, 0, 4096), "thp")
    partial = placed(monkeypatch, Residency(2 * MiB, 3 * MiB // 2, 0, 4096), "thp")
    assert "thp_partial" in partial.flags
    assert partial.page_bytes == 4096
    unknown = placed(monkeypatch, None, "thp")
    assert "pages_unverified" in unknown.flags
    assert (unknown.page_bytes, unknown.huge_share, unknown.resident) == (None, None, None)


def test_a_huge_page_in_a_base_page_buffer_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "thp_in_4k" in placed(monkeypatch, Residency(2 * MiB, 2 * MiB, 0, 4096)).flags


def test_a_forbidden_mbind_leaves_a_flag_and_a_refused_one_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        def mbind(*_: object) -> None:
            raise OSError(code, "refused here")

        monkeypatch.setattr(libc, "mbind", mbind)

    refuse(errno.EPERM)
    with host_buffer(4096, node=0) as buffer:
        assert "unbound" in buffer.placement.flags
    refuse(errno.EINVAL)
    with pytest.raises(Unavailable, match="node 0: refused here"):
        host_buffer(4096, node=0)


def test_pages_on_another_node_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "histogram", lambda *_: Fact({0: 4096, 3: 4096}))
    with host_buffer(8192, node=0) as buffer:
        assert "misplaced" in buffer.placement.flags
    monkeypatch.setattr(numa, "histogram", lambda *_: Fact(None, "no call"))
    with host_buffer(8192, node=0) as buffer:
        assert buffer.placement.nodes is None
        assert "nodes_unknown" in buffer.placement.flags


def test_thp_off_and_no_huge_pages_name_the_mending_command(tmp_path: Path) -> None:
    thp, huge = "sys/kernel/mm/transparent_hugepage", "sys/kernel/mm/hugepages/hugepages-2048kB"
    root = tree(tmp_path, {
        "proc/meminfo": meminfo(8 * GiB), f"{thp}/enabled": "always [never]", f"{thp}/hpage_pmd_size": "2097152",
        f"{huge}/nr_hugepages": "5", f"{huge}/free_hugepages": "1",
    })  # fmt: skip
    with pytest.raises(Unavailable, match="echo madvise"):
        host_buffer(1, "thp", root=root)
    with pytest.raises(Unavailable, match=r"echo 8 \| sudo tee .*hugepages-2048kB/nr_hugepages"):
        host_buffer(8 * MiB, "huge", root=root)
    with pytest.raises(Unavailable, match="no transparent"):
        page_bytes("thp", tmp_path / "nowhere")


def smaps(address: int, nbytes: int, **fields: int) -> str:
    head = f"{address:x}-{address + nbytes:x} rw-p 00000000 00:00 0\n"
    return head + "".join(f"{name}: {value} kB\n" for name, value in fields.items()) + "VmFlags: rd wr\n"


def test_smaps_of_exactly_the_range(tmp_path: Path) -> None:
    text = smaps(0x1000, 0x1000, Rss=4) + smaps(0x10000, 0x2000, KernelPageSize=4, Rss=8, AnonHugePages=4)
    root = tree(tmp_path, {"proc/self/smaps": text + smaps(0x12000, 0x1000, KernelPageSize=4, Rss=4)})
    assert residency(0x10000, 0x3000, root).value == Residency(12 << 10, 4 << 10, 0, 4096)
    assert "beyond" in residency(0x11000, 0x1000, root).reason
    assert "smaps lists 12288 of 16384" in residency(0x10000, 0x4000, root).reason
    assert "smaps" in residency(0x10000, 0x3000, tmp_path / "none").reason


def test_smaps_counts_hugetlb_as_resident(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"proc/self/smaps": smaps(0x200000, 0x200000, KernelPageSize=2048, Rss=0, Private_Hugetlb=2048)}
    )
    assert residency(0x200000, 0x200000, root).value == Residency(2 * MiB, 0, 2 * MiB, 2 * MiB)
