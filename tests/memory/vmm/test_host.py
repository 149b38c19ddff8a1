"""The host driver at its limits: mappings, addresses, descriptors, memory, huge pages; and a touch after the unmap."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.machine.probe import ROOT
from kvbench.memory import libc
from kvbench.memory.vmm.host import QUIET, HostVmm, _mappings, can_touch
from kvbench.memory.vmm.protocol import Exhausted
from tests.memory.vmm.rigs import host_rig

PAGE = libc.base_page_bytes()


def child(body: Callable[[], object]) -> tuple[int, str]:
    """Run ``body`` in a forked process, which changes its limits or dies; return its exit code and what it said."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            faulthandler.disable()
            said = body()
            os.write(writer, str(said).encode())
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-8192:])
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said_there = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said_there


def passes(body: Callable[[], object]) -> str:
    code, said = child(body)
    assert code == 0, said
    return said


def refused(request: Callable[[], object], words: str) -> Exhausted | Unavailable:
    with pytest.raises(Unavailable, match=words) as caught:
        request()
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_limit_of_mappings_is_named_and_the_call_undone() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 18:
        pytest.skip(f"vm.max_map_count is {limit}: reaching it takes too long")

    def body() -> int:
        vmm = HostVmm(limit * PAGE)
        place = vmm.reserve(2 * limit * PAGE)
        chunks = vmm.create_many(PAGE, limit)
        last = (2 * limit - 1) * PAGE
        vmm.map(place, last, chunks[-1])
        vmm.set_access(place, last, PAGE)
        ctypes.memmove(place.address + last, b"kept", 4)
        before, held = vmm.counters(), _mappings(ROOT)
        offsets = [2 * k * PAGE for k in range(limit - 1)]
        error = refused(lambda: vmm.map_many(place, offsets, chunks[:-1]), f"map number .*max_map_count is {limit}")
        assert vmm.counters() == before
        assert _mappings(ROOT) <= held + 8
        assert ctypes.string_at(place.address + last, 4) == b"kept"
        assert not can_touch(place.address)
        vmm.map_many(place, offsets[:100], chunks[:100])
        assert isinstance(error, Exhausted)
        return error.index

    assert limit // 4 < int(passes(body)) < limit


def fill_mappings(limit: int, room: int) -> list[int]:
    """Take mappings, most of them by a driver of its own, until the process has no more; return the last ``room`` or
    so. Python keeps room for small objects, as it has no mappings left to make any itself."""
    spare = [[k] for k in range(400_000)]
    del spare[::2]
    _kept.append(spare)
    filler = HostVmm(limit * PAGE)
    place = filler.reserve(2 * limit * PAGE)
    scattered = filler.create_many(PAGE, (limit - _mappings(ROOT) - room) // 2)
    filler.map_many(place, [2 * k * PAGE for k in range(len(scattered))], scattered)
    _kept.append(filler)
    held = [0] * (4 * room)
    for k in range(len(held)):
        try:
            held[k] = libc.mmap(0, PAGE, k % 2, QUIET)
        except OSError:
            return held[:k]
    raise AssertionError("the limit was not reached")


_kept: list[object] = []  # by a child that ends without cleaning up


def test_at_the_limit_of_mappings_a_range_that_cannot_be_cut_out_stays() -> None:
    """The middle of a mapping can only go while there is room for the second half."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 18:
        pytest.skip(f"vm.max_map_count is {limit}: reaching it takes too long")

    def body() -> str:
        vmm = HostVmm(64 * PAGE)
        place = vmm.reserve(64 * PAGE)
        vmm.map_many(place, [k * PAGE for k in range(64)], vmm.create_many(PAGE, 64))
        vmm.set_access(place, 0, 64 * PAGE)
        held = fill_mappings(limit, 400)
        error = refused(
            lambda: vmm.unmap_many(place, [(k * PAGE, PAGE) for k in range(1, 63, 2)]), "unmap number .*max_map_count"
        )
        for address in held:
            libc.munmap(address, PAGE)
        assert isinstance(error, Exhausted)
        reached = [can_touch(place.address + k * PAGE) for k in range(1, 63, 2)]
        assert vmm.counters().mappings == 64 - error.index
        assert reached == [k >= error.index for k in range(31)]
        vmm.destroy()
        return "consistent"

    assert passes(body) == "consistent"


def test_at_the_limit_of_mappings_everything_is_given_back_and_no_driver_can_be_had() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 18:
        pytest.skip(f"vm.max_map_count is {limit}: reaching it takes too long")

    def body() -> str:
        HostVmm(PAGE).close()
        vmm = HostVmm(limit * PAGE)
        count = limit // 2 - 2000
        place = vmm.reserve(2 * count * PAGE)
        vmm.map_many(place, [2 * k * PAGE for k in range(count)], vmm.create_many(PAGE, count))
        held = fill_mappings(limit, 400)
        refused(lambda: HostVmm(PAGE), "no room for a mapping.*max_map_count")
        found = vmm.destroy()
        left = vmm.counters()
        assert (left.reservations, left.chunks, left.mappings, left.fds, left.lost) == (0, 0, 0, 0, 0)
        assert (found.reservations, found.chunks, found.mappings) == (1, count, count)
        assert len(held) > 0
        return "given back"

    assert passes(body) == "given back"


def test_a_limit_of_addresses_is_named() -> None:
    def body() -> None:
        vmm = HostVmm(PAGE)
        soft = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
        refused(lambda: vmm.reserve(2 << 30), f"limited to {soft} bytes: see ulimit -v")
        vmm.free(vmm.reserve(PAGE))
        vmm.close()

    passes(body)


def test_a_limit_of_descriptors_is_named_and_a_driver_holds_one() -> None:
    def body() -> None:
        soft = max(map(int, os.listdir("/proc/self/fd"))) + 6
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        made: list[HostVmm] = []

        def more() -> None:
            for _ in range(soft):
                made.append(HostVmm(PAGE))

        refused(more, "ulimit -n|Too many open files")
        assert made
        made.pop().close()
        before = len(os.listdir("/proc/self/fd"))
        assert all(vmm.counters().fds == 1 for vmm in made)
        for vmm in made:
            vmm.close()
        assert len(os.listdir("/proc/self/fd")) == before - len(made)

    passes(body)


def test_a_limit_of_file_sizes_is_named() -> None:
    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE, 8 * PAGE))
        vmm = HostVmm(64 * PAGE)
        held = vmm.create_many(PAGE, 8)
        refused(lambda: vmm.create(PAGE), "ulimit -f")
        assert vmm.counters().chunks == 8
        vmm.release_many(held)
        vmm.close()

    passes(body)


def test_a_limit_of_file_sizes_below_a_page_is_named() -> None:
    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        before = len(os.listdir("/proc/self/fd"))
        refused(lambda: HostVmm(PAGE), "the memfd does not grow.*ulimit -f")
        assert len(os.listdir("/proc/self/fd")) == before

    passes(body)


def test_more_than_the_memory_left_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 65536 kB\nMemAvailable: 32768 kB\n")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="asked for 48 MiB of host memory"):
        HostVmm(48 << 20, root=tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_empty_pool_of_huge_pages_is_named(tmp_path: Path) -> None:
    pool = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    for name, count in (("nr_hugepages", 3), ("free_hugepages", 3), ("resv_hugepages", 2)):
        (pool / name).write_text(f"{count}\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 65536 kB\nHugepagesize: 2048 kB\n")
    with pytest.raises(Unavailable, match=r"not enough reserved huge pages.*1 free.*nr_hugepages"):
        HostVmm(4 << 20, "huge", root=tmp_path)


def test_huge_pages_that_are_gone_when_mapped_leave_nothing() -> None:
    """The kernel says no only at the map: the pool that a look at it promised was taken meanwhile."""
    if int(Path("/proc/sys/vm/nr_hugepages").read_text()):
        pytest.skip("this machine has reserved huge pages")
    with host_rig() as rig:
        rig.vmm.pages = "huge"  # type: ignore[attr-defined]
        place, chunk = rig.vmm.reserve(rig.grain), rig.vmm.create(rig.grain)
        rig.fail("map", 1)
        with pytest.raises(Exhausted, match=r"map number 0.*nr_hugepages"):
            rig.vmm.map(place, 0, chunk)
        assert rig.vmm.counters().mappings == 0


@pytest.mark.hugepages
def test_reserved_huge_pages_hold_chunks() -> None:
    with HostVmm(2 << 20, "huge") as vmm:
        place, chunk = vmm.reserve(vmm.granularity()), vmm.create(vmm.granularity())
        vmm.map(place, 0, chunk)
        vmm.set_access(place, 0, place.nbytes)
        ctypes.memset(place.address, 1, place.nbytes)
        assert ctypes.string_at(place.address + place.nbytes - 1, 1) == b"\1"


def test_shared_memory_without_huge_pages_says_how_to_have_them(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "hpage_pmd_size").write_text("2097152\n")
    (folder / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    with pytest.raises(Unavailable, match=r"no transparent huge pages.*never.*shmem_enabled"):
        HostVmm(2 << 20, "thp", root=tmp_path)


def test_sizes_are_whole_pages() -> None:
    for wrong in (PAGE + 1, PAGE // 2, 0):
        with pytest.raises(UsageError, match="granularity off the page"):
            HostVmm(16 * PAGE, granularity=wrong)
    with pytest.raises(UsageError, match="capacity is off"):
        HostVmm(PAGE + 1)


@pytest.mark.parametrize("when", ["before access", "after unmap", "after free"])
def test_a_touch_of_what_is_not_there_ends_the_process_that_does_it(when: str) -> None:
    def body() -> str:
        vmm = HostVmm(PAGE)
        place = vmm.reserve(PAGE)
        vmm.map(place, 0, vmm.create(PAGE))
        if when == "after unmap":
            vmm.set_access(place, 0, PAGE)
            ctypes.memset(place.address, 1, 1)
        if when != "before access":
            vmm.unmap(place, 0, PAGE)
        if when == "after free":
            vmm.free(place)
        if can_touch(place.address):
            return "reachable"
        ctypes.memset(place.address, 1, 1)
        return "survived"

    assert child(body) == (-signal.SIGSEGV, "")


def test_released_memory_goes_back_to_the_system_and_populated_memory_is_there() -> None:
    with HostVmm(64 * PAGE, granularity=4 * PAGE) as vmm:
        place = vmm.reserve(64 * PAGE)
        chunks = vmm.create_many(4 * PAGE, 8)
        vmm.map_many(place, [k * 4 * PAGE for k in range(8)], chunks)
        assert vmm.file_bytes() == 0
        vmm.set_access(place, 0, 16 * PAGE)
        assert vmm.file_bytes() == 16 * PAGE
        vmm.unmap(place, 0, 32 * PAGE)
        assert vmm.file_bytes() == 16 * PAGE
        vmm.release_many(chunks[:2])
        assert vmm.file_bytes() == 8 * PAGE
        again = vmm.create_many(4 * PAGE, 2)
        assert sorted(chunk.handle for chunk in again) == [0, 4 * PAGE]
