"""Quotas of both cgroup versions, wherever the limit sits on the way up."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.machine.cgroup import container_signs, cpu_quota, memory_limit, throttle_file
from tests.machine.conftest import Tree
from tests.machine.trees import write


def test_a_container_sees_its_own_group_at_the_mount(tree: Tree) -> None:
    root = tree("container")
    quota = cpu_quota(root).value
    assert quota is not None
    assert (quota.value, quota.source) == (1.5, "/sys/fs/cgroup/cpu.max")
    limit = memory_limit(root).value
    assert limit is not None
    assert limit.value == 4 * 2**30
    assert throttle_file(root) == "/sys/fs/cgroup/cpu.stat"
    assert container_signs(root) == ("cgroup:kubepods",)


def test_no_limit_is_known_and_differs_from_unknown(tree: Tree) -> None:
    for name in ("vm", "epyc"):
        quota = cpu_quota(tree(name)).value
        assert quota is not None
        assert quota.value is None
    unknown = cpu_quota(tree("empty"))
    assert unknown.value is None
    assert unknown.reason


def test_the_tightest_ancestor_binds(tmp_path: Path) -> None:
    write(tmp_path, "/proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "/sys/fs/cgroup/cgroup.controllers", "cpu memory")
    write(tmp_path, "/sys/fs/cgroup/a/cpu.max", "50000 100000\n")
    write(tmp_path, "/sys/fs/cgroup/a/b/cpu.max", "400000 100000\n")
    write(tmp_path, "/sys/fs/cgroup/a/b/memory.max", "max\n")
    quota, limit = cpu_quota(tmp_path).value, memory_limit(tmp_path).value
    assert quota is not None
    assert limit is not None
    assert (quota.value, quota.source) == (0.5, "/sys/fs/cgroup/a/cpu.max")
    assert limit.value is None


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_version_1_quota(tmp_path: Path, folder: str) -> None:
    write(tmp_path, "/proc/self/cgroup", "4:memory:/\n3:cpu,cpuacct:/docker/abc\n")
    write(tmp_path, f"/sys/fs/cgroup/{folder}/cpu.cfs_quota_us", "250000\n")
    write(tmp_path, f"/sys/fs/cgroup/{folder}/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    quota, limit = cpu_quota(tmp_path).value, memory_limit(tmp_path).value
    assert quota is not None
    assert limit is not None
    assert quota.value == 2.5
    assert limit.value is None
    assert container_signs(tmp_path) == ("cgroup:docker",)


@pytest.mark.parametrize("text", ["", "max", "x 100000", "100000 0", "-5 100000", "1" * 40])
def test_broken_limits_are_not_taken(tmp_path: Path, text: str) -> None:
    write(tmp_path, "/proc/self/cgroup", "0::/../../x\nrubbish\n")
    write(tmp_path, "/sys/fs/cgroup/cgroup.controllers", "cpu")
    write(tmp_path, "/sys/fs/cgroup/cpu.max", text)
    quota = cpu_quota(tmp_path)
    assert quota.value is None or quota.value.value is None
