"""Two keys that stay put, and every source that disagrees beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvbench.machine.fingerprint import Fingerprint, canonical, digest, fingerprint
from kvbench.machine.gpu import Gpu, Gpus
from tests.machine.conftest import Tree
from tests.machine.trees import write

H100 = Gpu("NVIDIA H100 80GB HBM3", 85520809984, 5, 16, 18, None, True, False, 700.0, 700.0, True, "abc", "01:00.0")


@pytest.mark.parametrize(
    ("name", "slug"),
    [("vm", "amd-25-17-1-s1-n1-c2"), ("epyc", "amd-25-17-1-s2-n2-c8"), ("gh200", "arm-8-d4f-r0p0-s1-n1-c72"),
     ("container", "intel-6-143-8-s1-nu-c2"), ("wsl", "intel-6-151-2-s1-nu-c1"), ("empty", "u-u-u-u-su-nu-cu")],
)  # fmt: skip
def test_hardware_class_is_readable(tree: Tree, name: str, slug: str) -> None:
    found = fingerprint(tree(name))
    assert re.fullmatch(rf"{re.escape(slug)}-[0-9a-f]{{8}}", found.hw_class)
    assert re.fullmatch("[0-9a-f]{16}", found.env_digest)


def test_no_tree_makes_it_fail_and_all_of_it_is_strict_json(every_tree: Path) -> None:
    found = fingerprint(every_tree)
    assert json.loads(json.dumps([found.machine, found.env], allow_nan=False)) == [found.machine, found.env]
    assert all(name and reason for name, reason in found.gaps)


def test_a_hundred_calls_give_one_digest() -> None:
    calls = [fingerprint(gpus=Gpus(False, reason="none")) for _ in range(100)]
    assert len({(call.hw_class, call.env_digest) for call in calls}) == 1


def test_keys_are_those_of_the_recorded_fields(tree: Tree) -> None:
    found = fingerprint(tree("vm"))
    assert found.hw_class.endswith(digest(found.machine["key"], 8))
    assert found.env_digest == digest(found.env, 16)


VOLATILE = (
    ("/proc/cpuinfo", "2596.128", "3100.001"),
    ("/proc/cpuinfo", "5192.25", "5190.77"),
    ("/proc/meminfo", "24684084", "16684084"),
    ("/proc/meminfo", "24367016", "1"),
    ("/proc/cpuinfo", "AMD EPYC", "AMD EPYC 9654P"),
    ("/proc/sys/kernel/hostname", "guest", "other"),
    ("/proc/sys/kernel/random/boot_id", "11111111", "99999999"),
    ("/proc/pressure/cpu", "3700653", "9900653"),
    ("/proc/stat", "3679", "9999"),
    ("/proc/vmstat", "numa_pages_migrated 7", "numa_pages_migrated 8"),
    ("/sys/devices/system/node/node0/meminfo", "18874368", "20000000"),
    ("/sys/fs/cgroup/cpu/cpu.stat", "nr_throttled 0", "nr_throttled 5"),
    ("/proc/cmdline", "token=secret", "token=other"),
    ("/proc/meminfo", "HugePages_Total:       0", "HugePages_Total:       9"),
)


@pytest.mark.parametrize(("path", "old", "new"), VOLATILE)
def test_what_changes_by_itself_is_in_neither_key(tree: Tree, path: str, old: str, new: str) -> None:
    root = tree("vm")
    before, after = fingerprint(root), _changed(root, path, old, new)
    assert (after.hw_class, after.env_digest) == (before.hw_class, before.env_digest)


SETTINGS = (
    ("/proc/sys/kernel/osrelease", "6.18.44", "6.18.45"),
    ("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise]", "[always] madvise"),
    ("/proc/sys/kernel/numa_balancing", "0", "1"),
    ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc", "kvm-clock"),
    ("/proc/self/status", "Cpus_allowed_list:\t0-1", "Cpus_allowed_list:\t0"),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1", "150000"),
    ("/proc/cmdline", "mitigations=auto", "mitigations=off"),
    ("/proc/cpuinfo", "0x1000065", "0x1000066"),
    ("/proc/swaps", "Priority", "Priority\n/dev/sdb partition 4194304 0 -2"),
)


@pytest.mark.parametrize(("path", "old", "new"), SETTINGS)
def test_a_setting_changes_the_environment_and_not_the_hardware(tree: Tree, path: str, old: str, new: str) -> None:
    root = tree("vm")
    before, after = fingerprint(root), _changed(root, path, old, new)
    assert after.hw_class == before.hw_class
    assert after.env_digest != before.env_digest


def test_hardware_changes_the_class(tree: Tree) -> None:
    root = tree("vm")
    before, after = fingerprint(root), _changed(root, "/proc/cpuinfo", "stepping	: 1", "stepping	: 2")
    assert after.hw_class != before.hw_class


def _changed(root: Path, path: str, old: str, new: str) -> Fingerprint:
    file = root / path.lstrip("/")
    text = file.read_text()
    assert old in text, "the fixture no longer holds what this test changes"
    file.write_text(text.replace(old, new))
    return fingerprint(root)


def test_sources_that_disagree_are_all_kept(tree: Tree) -> None:
    found = {d.fact: d.sources for d in fingerprint(tree("vm")).disagreements}
    assert found["l3_bytes"] == {"sysfs": 32 * 2**20, "cpuinfo cache size": 2**20}
    assert found["memory_bytes"] == {"meminfo": 24684084 * 1024, "sum of node meminfo": 18874368 * 1024}
    clocks = {d.fact: d.sources for d in fingerprint(tree("epyc")).disagreements}["cpu_clock"]
    assert clocks == {
        "cpufreq cpuinfo_max_freq": 3711.914,
        "cpufreq scaling_cur_freq": 1500.0,
        "cpuinfo cpu MHz": 1500.0,
    }


def test_sources_that_agree_are_no_disagreement(tree: Tree) -> None:
    facts = {d.fact for d in fingerprint(tree("epyc")).disagreements}
    assert "memory_bytes" not in facts


def test_boards_are_counted_and_their_settings_are_environment(tree: Tree) -> None:
    root = tree("epyc")
    one = fingerprint(root, Gpus(True, (H100,), "570.1", "12.8"))
    two = fingerprint(root, Gpus(True, (H100, H100), "570.1", "12.8"))
    newer = fingerprint(root, Gpus(True, (H100,), "580.2", "13.0"))
    assert "-1xh100-80gb-hbm3-" in one.hw_class
    assert "-2xh100-80gb-hbm3-" in two.hw_class
    assert newer.hw_class == one.hw_class
    assert newer.env_digest != one.env_digest
    assert one.machine["key"]["gpus"][0] == {  # type: ignore[index,call-overload]
        "name": "NVIDIA H100 80GB HBM3", "memory_gib": 80, "max_gen": 5, "max_width": 16, "nvlink": True, "c2c": None,
        "count": 1,
    }  # fmt: skip


def test_virtualisation_and_container_signs(tree: Tree) -> None:
    env = {name: fingerprint(tree(name)).env for name in ("vm", "epyc", "wsl", "gh200", "container")}
    assert [env[n]["virtualisation"] for n in env] == ["vm:kvm", "none", "wsl", None, "vm"]
    assert [env[n]["container"] for n in env] == [["dockerenv"], [], [], [], ["cgroup:kubepods"]]
    assert env["container"]["cpu_quota"] == 1.5
    assert env["vm"]["cpu_quota"] == "none"
    assert env["wsl"]["cpu_quota"] is None
    assert env["gh200"]["memory_only_nodes"] == list(range(1, 9))
    assert env["vm"]["boot_options"] == ["mitigations=auto", "psi=1"]


def test_hostile_text_stays_data(tmp_path: Path) -> None:
    write(tmp_path, "/proc/cpuinfo", "processor: 0\nvendor_id: \x1b[31m../..\nmodel name: [bold]\ncpu MHz: nan\n")
    found = fingerprint(tmp_path)
    assert re.fullmatch(r"[a-z0-9.+-]+", found.hw_class)


def test_canonical_refuses_what_json_cannot_hold() -> None:
    assert canonical({"b": 1, "a": [None, True]}) == '{"a":[null,true],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))
