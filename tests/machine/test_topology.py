"""Cores, nodes and caches of machines we do not have, and which CPUs measure there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench.errors import Unavailable
from kvbench.machine.topology import LLC_UNKNOWN_BYTES, describe, llc_bytes, measuring_cpus, read_topology
from tests.machine.conftest import Tree
from tests.machine.trees import cpu, write

MIB = 2**20


def test_two_sockets_with_smt(tree: Tree) -> None:
    found = read_topology(tree("epyc"))
    assert (found.cores, found.sockets, found.threads_per_core, len(found.cpus)) == (8, 2, 2, 16)
    assert [node.cpus for node in found.nodes] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert not any(node.cpuless for node in found.nodes)
    assert describe(found) == "2 socket(s), 2 NUMA node(s), 8 core(s), 16 CPU(s) (mask 0-15)"


def test_llc_is_the_sum_of_distinct_instances_the_mask_reaches(tree: Tree) -> None:
    found = read_topology(tree("epyc"))
    assert (found.llc().bytes, found.llc().instances) == (4 * 32 * MIB, 4)
    assert found.llc((0, 8, 1)).bytes == 32 * MIB  # two cores and a sibling below one L3
    assert found.llc((0, 2)).bytes == 64 * MIB
    assert found.llc((0, 2)).flags == ()


def test_threads_go_to_cores_first_node_by_node_then_to_siblings(tree: Tree) -> None:
    found = read_topology(tree("epyc"))
    assert found.measuring_cpus("all") == tuple(range(8))
    assert found.measuring_cpus(10) == (*range(8), 8, 9)
    assert sorted(found.measuring_cpus(16)) == list(range(16))
    assert found.measuring_cpus(2, (3, 11, 12, 4)) == (3, 4)  # 11 is a sibling of 3, 12 of 4
    assert found.measuring_cpus("all", (8, 9)) == (8, 9)


def test_interleaved_numbering_fills_a_node_before_the_next(tmp_path: Path) -> None:
    write(tmp_path, "/sys/devices/system/cpu/online", "0-3")
    for n in range(4):
        cpu(tmp_path, n, str(n), n % 2, {})
    write(tmp_path, "/sys/devices/system/node/online", "0-1")
    write(tmp_path, "/sys/devices/system/node/node0/cpulist", "0,2")
    write(tmp_path, "/sys/devices/system/node/node1/cpulist", "1,3")
    assert read_topology(tmp_path).measuring_cpus(3) == (0, 2, 1)


def test_more_threads_than_the_mask_holds(tree: Tree) -> None:
    found = read_topology(tree("vm"))
    with pytest.raises(Unavailable, match="threads=4: not enough CPUs, got 2, expected 4 in the affinity mask"):
        found.measuring_cpus(4)
    with pytest.raises(ValueError, match="at least one thread"):
        found.measuring_cpus(0)


def test_coherent_gpu_memory_is_a_node_without_cpus(tree: Tree) -> None:
    found = read_topology(tree("gh200"))
    assert [node.cpuless for node in found.nodes] == [False, *[True] * 8]
    assert found.page_bytes.value == 65536
    assert found.llc().bytes == 114 * MIB


def test_without_sysfs_cores_come_from_cpuinfo_and_the_llc_is_flagged(tree: Tree) -> None:
    found = read_topology(tree("container"))
    assert (found.cores, len(found.cpus), found.threads_per_core) == (2, 4, 2)
    llc = found.llc()
    assert (llc.bytes, llc.flags) == (LLC_UNKNOWN_BYTES, ("llc_unknown",))
    assert llc.reason
    assert {"NUMA nodes", "caches", "sysfs topology"} <= {name for name, _ in found.gaps}


@pytest.mark.parametrize("spoil", ["size", "level-one-only"])
def test_levels_without_a_size_are_no_llc(tmp_path: Path, spoil: str) -> None:
    write(tmp_path, "/sys/devices/system/cpu/online", "0")
    caches = {0: (1, "Data", "64K", "0")}
    if spoil == "size":
        caches[1] = (2, "Unified", "0K", "0")
    cpu(tmp_path, 0, "0", 0, caches)
    found = read_topology(tmp_path).llc()
    assert found.unknown
    assert found.bytes == LLC_UNKNOWN_BYTES


def test_an_instruction_cache_is_never_the_last_level(tmp_path: Path) -> None:
    write(tmp_path, "/sys/devices/system/cpu/online", "0")
    cpu(tmp_path, 0, "0", 0, {0: (2, "Unified", "512K", "0"), 1: (3, "Instruction", "9M", "0")})
    assert read_topology(tmp_path).llc().bytes == 512 * 1024


def test_no_tree_makes_it_fail(every_tree: Path) -> None:
    found = read_topology(every_tree)
    assert found.llc().bytes > 0
    if every_tree.name == "empty":
        assert found.cpus == ()
        assert found.sockets is None
        assert found.measuring_cpus("all") == ()
        assert {"cpus", "affinity", "page size"} <= {name for name, _ in found.gaps}


def test_hostile_files_do_not_make_it_fail(tmp_path: Path) -> None:
    write(tmp_path, "/sys/devices/system/cpu/online", "0-4294967295")
    write(tmp_path, "/sys/devices/system/node/online", b"\xff\xff")
    write(tmp_path, "/proc/cpuinfo", "processor : x\n\nprocessor\t: 0\nphysical id : y\n")
    write(tmp_path, "/proc/self/status", "Cpus_allowed_list:\tzero\n")
    found = read_topology(tmp_path)
    assert [c.id for c in found.cpus] == [0]
    assert found.cpus[0].socket is None


def test_this_machine_agrees_with_the_scheduler() -> None:
    mask = os.sched_getaffinity(0)
    found = read_topology()
    assert set(found.affinity) == mask
    assert measuring_cpus(1)[0] in mask
    assert set(measuring_cpus(len(mask))) == mask
    assert found.page_bytes.value == os.sysconf("SC_PAGE_SIZE")
    assert llc_bytes() > 0
