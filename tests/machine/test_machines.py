"""Whole machines: what every reading of them comes to, with the NVML that belongs to each.

The sources of the values are in tests/fixtures/machine/README.md; a machine without one there is a failure.
"""

from __future__ import annotations

import json
import platform
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvbench.cli import doctor
from kvbench.machine import trial
from kvbench.machine.fingerprint import fingerprint
from kvbench.machine.gpu import Gpus, read_gpus
from kvbench.machine.nvml_devices import read_devices
from kvbench.machine.obstacles import Obstacle
from kvbench.machine.probe import format_cpu_list
from kvbench.machine.topology import read_topology, thp_bytes
from kvbench.memory import tiers
from kvbench.schemas import schema_for
from tests.machine import trees
from tests.machine.conftest import Tree
from tests.machine.fake_nvml import FIXTURES, FakeNvml, load

MIB = 2**20
README = (FIXTURES / "README.md").read_text()
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+|NVIDIA/[\w.-]+, deployments|User Guide|Documentation/|SMBIOS \d")


@dataclass(frozen=True, slots=True)
class Expected:
    """``all_cpus`` are those of threads=all; ``dram`` the NUMA nodes that are memory of the host."""

    cores: int
    all_cpus: str
    llc: int
    llc_known: bool
    dram: tuple[int, ...]
    page: int | None
    thp: int | None
    slug: str
    obstacles: frozenset[str]


MACHINES = {
    "vm": Expected(2, "0-1", 32 * MIB, True, (0,), 4096, None, "amd-25-17-1-s1-n1-c2",
                   frozenset({"memlock", "huge_pages"})),
    "epyc": Expected(8, "0-7", 128 * MIB, True, (0, 1), 4096, None, "amd-25-17-1-s2-n2-c8",
                     frozenset({"thp", "clocksource", "governor", "numa_balancing", "swap"})),
    "haswell": Expected(24, "0-23", 60 * MIB, True, (0, 1), 4096, 2 * MIB, "intel-6-63-2-s2-n2-c24",
                        frozenset({"huge_pages", "governor", "numa_balancing"})),
    "dgx": Expected(112, "0-111", 210 * MIB, True, (0, 1), 4096, 2 * MIB, "intel-6-143-8-s2-n2-c112-8xh100-80gb-hbm3",
                    frozenset({"huge_pages"})),
    "mig": Expected(128, "0-127", 512 * MIB, True, tuple(range(8)), 4096, 2 * MIB,
                    "amd-23-49-0-s2-n8-c128-8xa100-sxm4-40gb",
                    frozenset({"huge_pages", "gpu_mig", "gpu_mig_empty", "gpu_shared_link"})),
    "gh200": Expected(72, "0-71", 114 * MIB, True, (0,), 65536, 512 * MIB, "arm-8-d4f-r0p0-s1-n1-c72-1xgh200-480gb",
                      frozenset({"huge_pages"})),
    "altra": Expected(64, "0-63", 32 * MIB, True, (0,), 4096, 2 * MIB, "arm-8-d0c-r3p1-s1-n1-c64",
                      frozenset({"huge_pages", "memlock"})),
    "container": Expected(2, "0,2", 32 * MIB, False, (), None, None, "intel-6-143-8-s1-nu-c2",
                          frozenset({"cpu_quota"})),
    "wsl": Expected(1, "0", 32 * MIB, False, (), None, None, "intel-6-151-2-s1-nu-c1-1xrtx-2060-super",
                    frozenset({"huge_pages", "clocksource", "swap", "wsl"})),
    "empty": Expected(0, "", 32 * MIB, False, (), None, None, "u-u-u-u-su-nu-cu", frozenset()),
}  # fmt: skip


def nvml_of(name: str) -> FakeNvml | None:
    return FakeNvml(name) if (FIXTURES / f"{name}.nvml.json").exists() else None


def gpus_of(name: str) -> Gpus:
    fake = nvml_of(name)
    return read_gpus(loads=lambda: False) if fake is None else read_gpus(fake)


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_every_machine_is_here_and_names_its_sources() -> None:
    assert set(MACHINES) == set(trees.NAMES)
    sections = dict(part.split("\n", 1) for part in README.split("\n## ")[1:])
    assert set(sections) == set(trees.NAMES)
    assert [name for name, text in sections.items() if name != "empty" and not SOURCE.search(text)] == []
    files = {path.name.split(".")[0] for path in FIXTURES.iterdir() if path.name != "README.md"}
    assert files == set(trees.NAMES) - {"empty"}


@pytest.mark.parametrize("name", trees.NAMES)
def test_a_hundred_calls_give_one_digest(name: str, kept_tree: Tree) -> None:
    root, first = kept_tree(name), gpus_of(name)
    found = {(f.hw_class, f.env_digest) for f in (fingerprint(root, first) for _ in range(99))}
    again = fingerprint(root, gpus_of(name))  # NVML asked anew
    found.add((again.hw_class, again.env_digest))
    assert len(found) == 1
    assert re.fullmatch(rf"{re.escape(MACHINES[name].slug)}-[0-9a-f]{{8}}", again.hw_class)
    text = json.dumps([again.machine, again.env], allow_nan=False)
    assert json.loads(text) == [again.machine, again.env]
    assert "GPU-" not in text


def test_the_split_of_a_board_is_a_setting(kept_tree: Tree) -> None:
    machine = load("mig")
    whole = fingerprint(kept_tree("mig"), read_gpus(FakeNvml(machine)))
    machine["boards"][0]["mig"].pop()
    other = fingerprint(kept_tree("mig"), read_gpus(FakeNvml(machine)))
    assert other.hw_class == whole.hw_class
    assert other.env_digest != whole.env_digest


def test_no_two_machines_share_a_class(kept_tree: Tree) -> None:
    assert len({fingerprint(kept_tree(name), gpus_of(name)).hw_class for name in trees.NAMES}) == len(trees.NAMES)


@pytest.mark.parametrize("name", trees.NAMES)
def test_cores_caches_pages_and_memory_nodes(name: str, kept_tree: Tree) -> None:
    expected, root = MACHINES[name], kept_tree(name)
    found = read_topology(root)
    llc = found.llc()
    assert found.cores == expected.cores
    assert format_cpu_list(tuple(sorted(found.measuring_cpus("all")))) == expected.all_cpus
    assert (llc.bytes, not llc.unknown) == (expected.llc, expected.llc_known)
    assert (found.page_bytes.value, thp_bytes(root).value) == (expected.page, expected.thp)
    dram = [s.tier.node for s in tiers.tiers(root) if s.tier.name == "dram" and s.tier.node is not None and s.available]
    assert tuple(dram) == expected.dram


def test_threads_fill_a_socket_before_the_next(kept_tree: Tree) -> None:
    haswell, dgx, mig = (read_topology(kept_tree(name)) for name in ("haswell", "dgx", "mig"))
    assert (haswell.sockets, dgx.sockets, mig.sockets) == (2, 2, 2)
    assert haswell.measuring_cpus(13) == (*range(12), 12)
    assert dgx.measuring_cpus(57)[-1] == 56
    assert mig.measuring_cpus(32) == tuple(range(32))
    assert dgx.measuring_cpus(113)[-1] == 112  # second threads only after every core has one


def test_memory_of_a_gpu_is_never_dram(kept_tree: Tree) -> None:
    root = kept_tree("gh200")
    assert [node.id for node in read_topology(root).nodes if not node.cpuless] == [0]
    found = {str(state.tier): state.available for state in tiers.tiers(root)}
    assert (found["dram"], found["dram@0"]) == (True, True)
    assert not any(found.get(f"dram@{node}") for node in range(1, 9))
    report = doctor.doctor_report(root, nvml=FakeNvml("gh200"))
    assert "96 GiB of it on nodes without CPUs (GPU or CXL memory: never dram)" in doctor.render_text(report)


@pytest.mark.parametrize("name", trees.NAMES)
def test_doctor_names_the_obstacles_of_each_machine(name: str, kept_tree: Tree) -> None:
    fake = nvml_of(name)
    report = doctor.doctor_report(
        kept_tree(name), nvml=fake, gpus=None if fake is not None else read_gpus(loads=lambda: False)
    )
    expected = MACHINES[name].obstacles | (set() if fake is not None else {"gpu_driver"})
    assert {obstacle.name for obstacle in report.obstacles} == expected
    document: dict[str, Any] = json.loads(json.dumps(doctor.to_document(report), allow_nan=False))
    jsonschema.validate(document, schema_for("kvbench.doctor/1"))
    assert len(document["gpus"]) == len(document["machine"]["gpus"]) == (len(fake.boards) if fake else 0)
    text = doctor.render_text(report)
    assert "GPU-" not in text
    assert all(obstacle.mend in text for obstacle in report.obstacles)
    if fake is not None:
        assert fake.open == 0


def test_doctor_shows_boards_with_their_links_and_ways(kept_tree: Tree) -> None:
    report = doctor.doctor_report(kept_tree("dgx"), nvml=FakeNvml("dgx"))
    document = doctor.to_document(report)
    last = document["gpus"][7]
    assert last["path"]["node"] == 1
    assert len(last["path"]["switches"]) == 1
    assert (last["now"]["gen"], last["now"]["width"], last["now"]["reasons"]) == (5, 16, ["idle"])
    text = doctor.render_text(report)
    assert "gen 5 x16 / gen 5 x16" in text
    assert "NVLink 18 of 18" in text
    assert "8 x NVIDIA H100 80GB HBM3, 80 GiB" in text
    wsl = doctor.render_text(doctor.doctor_report(kept_tree("wsl"), nvml=FakeNvml("wsl")))
    assert "gen 3 x16 / gen 3 x16" in wsl
    assert "? of ? W" in wsl


@pytest.mark.parametrize("fail", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName",
                                  "nvmlDeviceGetFieldValues", "nvmlShutdown"])  # fmt: skip
def test_doctor_goes_on_when_nvml_does_not(fail: str, kept_tree: Tree) -> None:
    for kind in ("NotSupported", "NotFound", "Uninitialized", "GpuIsLost"):
        report = doctor.doctor_report(kept_tree("wsl"), nvml=FakeNvml("wsl", {fail: kind}))
        jsonschema.validate(doctor.to_document(report), schema_for("kvbench.doctor/1"))
        assert doctor.render_text(report)
        names = {o.name for o in report.obstacles} | {u.name for u in report.unchecked}
        assert ("gpu_driver" in names) == (fail in ("nvmlInit", "nvmlDeviceGetCount"))
        assert ("gpu_unreadable" in names) == (fail == "nvmlDeviceGetHandleByIndex")


def test_a_hidden_gpu_is_an_obstacle(kept_tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = doctor.doctor_report(kept_tree("wsl"), nvml=FakeNvml("wsl"))
    assert report.obstacles[0].name == "gpu_visible"
    assert report.obstacles[0].effect == "blocks"


def test_devices_of_each_machine() -> None:
    counts = {name: len(read_devices(fake).found) for name in trees.NAMES if (fake := nvml_of(name)) is not None}
    assert counts == {"dgx": 8, "mig": 8, "gh200": 1, "wsl": 1}


# What Docker and containerd do: mbind ends with EPERM. Written as BPF, loaded in the child before its Python starts.
REFUSES_MBIND = """#!{python}
import ctypes, os, struct, sys
number = {{"x86_64": 237, "aarch64": 235}}[os.uname().machine]
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 1, 0, number), (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)))
kept = ctypes.create_string_buffer(program)
header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(kept)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header):
    sys.exit("no filter here")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no system call number known")
def test_a_container_that_refuses_mbind(tmp_path: Path, kept_tree: Tree) -> None:
    python = tmp_path / "python"
    python.write_text(REFUSES_MBIND.format(python=sys.executable))
    python.chmod(stat.S_IRWXU)
    finding = trial.mbind(read_topology(kept_tree("container")), str(python))
    assert isinstance(finding, Obstacle)
    if "no filter here" in finding.found:
        pytest.skip("this sandbox loads no seccomp filter")
    assert finding.found == "binding memory to node 0 is refused: Operation not permitted"
    assert "SYS_NICE" in finding.mend
