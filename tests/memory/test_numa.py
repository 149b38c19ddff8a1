"""NUMA nodes from fake trees, and placement of real pages."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvbench.machine.probe import parse_cpu_list
from kvbench.memory import libc, numa
from kvbench.memory.region import Region
from tests.memory.test_limits import tree


def node_files(number: int, cpus: str, kib: int, free: int = 0) -> dict[str, str]:
    base = f"sys/devices/system/node/node{number}"
    text = f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:        {free} kB\n"
    return {f"{base}/cpulist": f"{cpus}\n", f"{base}/meminfo": text}


@pytest.mark.parametrize(
    ("text", "want"), [("0-3,8\n", (0, 1, 2, 3, 8)), ("", ()), ("5", (5,)), ("0-1,4-5", (0, 1, 4, 5))]
)
def test_kernel_lists(text: str, want: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == want


def test_a_node_without_cpus_is_never_dram(tmp_path: Path) -> None:
    files = node_files(0, "0-71", 1000, 10) | node_files(1, "", 2000) | node_files(10, "72", 0)
    root = tree(tmp_path, files)
    listed = numa.nodes(root).value
    assert listed is not None
    assert [(n.number, len(n.cpus), n.memory, n.free) for n in listed] == [
        (0, 72, 1000 << 10, 10 << 10), (1, 0, 2000 << 10, 0), (10, 1, 0, 0),
    ]  # fmt: skip
    dram = numa.dram_nodes(root).value
    assert dram is not None
    assert [n.number for n in dram] == [0]


def test_without_sys_nodes_are_unknown(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path).value is None
    assert "node" in numa.dram_nodes(tmp_path).reason


def test_histogram_counts_touched_pages_only() -> None:
    page = libc.base_page_bytes()
    region = Region(16 * page)
    here = numa.histogram(region.address, region.mapped)
    if here.value is None:
        pytest.skip(f"move_pages: {here.reason}")
    assert here.value == {}
    assert numa.node_of(region.address).value is None
    libc.madvise(region.address, 4 * page, libc.MADV_POPULATE_WRITE)
    found = numa.histogram(region.address, region.mapped).value
    assert found is not None
    assert sum(found.values()) == 4 * page
    assert numa.node_of(region.address + 5).value in found


def test_histogram_of_a_sampled_range_scales_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    page = libc.base_page_bytes()
    region = Region(64 * page)
    libc.madvise(region.address, region.mapped, libc.MADV_POPULATE_WRITE)
    monkeypatch.setattr(numa, "QUERY_PAGES", 16)
    found = numa.histogram(region.address, region.mapped)
    if found.value is None:
        pytest.skip(f"move_pages: {found.reason}")
    assert sum(found.value.values()) == 64 * page


@pytest.mark.parametrize(("code", "want"), [(errno.EPERM, None), (errno.ENOSYS, None), (errno.EINVAL, False)])
def test_a_forbidden_bind_is_unknown_and_a_refused_one_false(
    monkeypatch: pytest.MonkeyPatch, code: int, want: bool | None
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(libc, "mbind", refuse)
    monkeypatch.setattr(libc, "set_mempolicy", refuse)
    reading = numa.bind(0, 4096, 0)
    assert (reading.value, reading.reason) == (want, "no")
    with numa.memory_policy(0) as policy:
        assert policy.value is want


def test_memory_policy_is_restored() -> None:
    try:
        before = libc.get_mempolicy()
    except OSError as error:
        pytest.skip(f"get_mempolicy: {error}")
    with numa.memory_policy(0) as policy:
        if policy.value:
            assert libc.get_mempolicy() == (libc.MPOL_BIND, (0,))
    assert libc.get_mempolicy() == before


def test_an_unknown_architecture_has_no_numa_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    reading = numa.node_of(4096)
    assert reading.value is None
    assert "pdp11" in reading.reason
