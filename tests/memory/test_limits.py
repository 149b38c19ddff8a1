"""Limits read from fake /proc and /sys trees: v1 and v2 cgroups, containers, and machines that say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.memory import limits

GiB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available: int, total: int = 64 * GiB) -> str:
    return f"MemTotal: {total // 1024} kB\nMemFree: 4 kB\nMemAvailable: {available // 1024} kB\nHugepagesize: 2048 kB\n"


V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_memlock_is_bytes_or_unlimited(tmp_path: Path) -> None:
    line = "Max locked memory         {}              unlimited              bytes\n"
    assert limits.memlock(tree(tmp_path, {"proc/self/limits": line.format(8388608)})).value == 8388608
    assert limits.memlock(tree(tmp_path, {"proc/self/limits": line.format("unlimited")})).value == limits.UNLIMITED


def test_an_empty_root_knows_nothing_and_says_why(tmp_path: Path) -> None:
    state = limits.read_limits(tmp_path)
    readings = (state.memlock, state.available, state.cgroup, state.huge, state.thp.enabled, state.thp.page_bytes)
    assert all(reading.value is None and reading.reason for reading in readings)
    nothing = limits.available_memory(tmp_path)
    assert nothing.value is None
    assert "meminfo" in nothing.reason


@pytest.mark.parametrize("garbage", ["", "\x00\x01", "MemAvailable: lots kB", "Max locked memory"])
def test_unreadable_text_is_unknown_not_a_crash(tmp_path: Path, garbage: str) -> None:
    names = ("proc/meminfo", "proc/self/limits", "sys/kernel/mm/transparent_hugepage/enabled", "proc/self/mountinfo")
    state = limits.read_limits(tree(tmp_path, dict.fromkeys(names, garbage)))
    assert state.available.value is None
    assert state.memlock.value is None
    assert state.thp.enabled.value is None


def test_reserve_is_kept_of_a_large_and_of_a_small_machine(tmp_path: Path) -> None:
    large = limits.available_memory(tree(tmp_path, {"proc/meminfo": meminfo(8 * GiB)})).value
    assert large is not None
    assert (large.nbytes, large.reserve) == (8 * GiB - limits.RESERVE_BYTES, limits.RESERVE_BYTES)
    small = limits.available_memory(tree(tmp_path, {"proc/meminfo": meminfo(GiB // 2, GiB)})).value
    assert small is not None
    assert (small.nbytes, small.reserve) == (GiB // 2 - GiB // 8, GiB // 8)


def test_cgroup_v2_parent_limit_binds_and_file_cache_counts_as_room(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/slice"
    root = tree(tmp_path, {
        "proc/meminfo": meminfo(32 * GiB), "proc/self/mountinfo": V2_MOUNT, "proc/self/cgroup": "0::/slice/job\n",
        f"{base}/job/memory.max": "max\n", f"{base}/job/memory.current": "1\n",
        f"{base}/memory.max": f"{4 * GiB}\n", f"{base}/memory.current": f"{3 * GiB}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {GiB}\n",
    })  # fmt: skip
    group = limits.cgroup_memory(root).value
    assert group is not None
    assert (group.version, group.limit, group.available) == (2, 4 * GiB, 2 * GiB)
    room = limits.available_memory(root).value
    assert room is not None
    assert room.nbytes == 2 * GiB - limits.RESERVE_BYTES
    assert "cgroup" in room.source


def test_cgroup_v1_mounted_below_its_path_as_in_a_container(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    root = tree(tmp_path, {
        "proc/meminfo": meminfo(32 * GiB),
        "proc/self/mountinfo": V1_MOUNT.replace(" / /sys", " /docker/abc /sys"),
        "proc/self/cgroup": "4:memory:/docker/abc\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{2 * GiB}\n", f"{folder}/memory.usage_in_bytes": f"{GiB}\n",
        f"{folder}/memory.stat": "inactive_file 7\ntotal_inactive_file 4096\n",
    })  # fmt: skip
    group = limits.cgroup_memory(root).value
    assert group is not None
    assert (group.version, group.limit, group.available) == (1, 2 * GiB, GiB + 4096)


def test_cgroup_v1_no_limit_is_told_from_a_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/box"
    root = tree(tmp_path, {
        "proc/self/mountinfo": V1_MOUNT, "proc/self/cgroup": "4:memory:/box\n",
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n", f"{folder}/memory.usage_in_bytes": "5\n",
    })  # fmt: skip
    group = limits.cgroup_memory(root)
    assert group.value is None
    assert group.reason == "no memory cgroup sets a limit"


def test_thp_and_huge_pools(tmp_path: Path) -> None:
    thp, huge = "sys/kernel/mm/transparent_hugepage", "sys/kernel/mm/hugepages/hugepages-2048kB"
    root = tree(tmp_path, {
        f"{thp}/enabled": "always [madvise] never\n", f"{thp}/defrag": "[always] never\n",
        f"{thp}/hpage_pmd_size": f"{512 << 20}\n", f"{huge}/nr_hugepages": "10\n", f"{huge}/free_hugepages": "8\n",
        f"{huge}/resv_hugepages": "3\n",
    })  # fmt: skip
    state = limits.thp(root)
    assert (state.enabled.value, state.defrag.value, state.page_bytes.value) == ("madvise", "always", 512 << 20)
    assert state.shmem.value is None
    assert limits.huge_pools(root).value == (limits.HugePool(2 << 20, 10, 5),)
