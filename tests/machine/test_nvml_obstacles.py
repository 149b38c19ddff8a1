"""Each obstacle of a GPU box is found where it is, absent where it is not, with the boards it is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.machine.gpu import Gpu, Gpus, read_gpus
from kvbench.machine.nvml_devices import read_devices
from kvbench.machine.nvml_obstacles import NOTHING_READ, GpuState, gpu_settings
from kvbench.machine.nvml_state import GpuReading
from kvbench.machine.obstacles import Obstacle, Unchecked
from kvbench.machine.topology import Topology, read_topology
from tests.machine.conftest import Tree
from tests.machine.fake_nvml import FakeNvml
from tests.machine.trees import gpu, write

CUDA = "CUDA_VISIBLE_DEVICES"
NOWHERE = Path("/nonexistent")
H100 = read_gpus(FakeNvml("dgx")).boards[0]
BARE = Topology((), (), (), (), read_topology(NOWHERE).page_bytes)


def found(
    *boards: Gpu, root: Path = NOWHERE, topology: Topology = BARE, state: GpuState = NOTHING_READ,
    environ: Mapping[str, str] | None = None, machine: str = "dgx",
) -> dict[str, Obstacle | Unchecked]:  # fmt: skip
    devices = read_devices(FakeNvml(machine))
    findings = gpu_settings(Gpus(True, boards), topology, root, devices, state, environ or {})
    for finding in findings:
        texts = (finding.found, finding.costs, finding.mend) if isinstance(finding, Obstacle) else (finding.reason,)
        assert all(text and "\n" not in text for text in texts)
    return {finding.name: finding for finding in findings}


def text(finding: Obstacle | Unchecked) -> str:
    assert isinstance(finding, Obstacle)
    return f"{finding.found} | {finding.mend}"


def test_a_healthy_board_and_one_that_says_nothing_have_none() -> None:
    assert found(H100, H100) == {}
    assert found(Gpu("NVIDIA H100")) == {}
    assert gpu_settings(Gpus(False, reason="no driver"), BARE) == []


@pytest.mark.parametrize(
    ("name", "effect", "change", "said"),
    [("gpu_compute_mode", "blocks", {"compute_mode": "prohibited"}, "GPU 1 .*-i 1 -c DEFAULT"),
     ("gpu_mig_empty", "blocks", {"mig": True, "mig_instances": ()}, "GPU 1 .*no instance"),
     ("gpu_power_limit", "distorts", {"power_limit_w": 500.0}, "GPU 1 may draw 500 W.* 700 W .*-i 1 -pl 700"),
     ("gpu_power_limit", "distorts", {"enforced_limit_w": 650.0}, "650 W"),
     ("gpu_persistence", "distorts", {"persistence": False}, "GPU 1 .*-pm 1"),
     ("gpu_nvlink", "limits", {"nvlinks": 17}, "17 of 18 on GPU 1"),
     ("gpu_slot", "limits", {"max_gen": 4}, "GPU 1 .*gen 4 of 5"),
     ("gpu_vgpu", "distorts", {"virtualisation": "vgpu"}, "GPU 1 is a share")],
)  # fmt: skip
def test_settings(name: str, effect: str, change: dict[str, Any], said: str) -> None:
    findings = found(H100, replace(H100, **change))
    assert list(findings) == [name]
    finding = findings[name]
    assert isinstance(finding, Obstacle)
    assert finding.effect == effect
    assert re.search(said, text(finding))


def test_a_limit_at_its_default_or_unknown_is_none() -> None:
    assert found(replace(H100, power_limit_w=None, enforced_limit_w=None)) == {}
    assert found(replace(H100, default_power_limit_w=None, power_limit_w=100.0)) == {}


def test_boards_with_one_fault_are_named_together() -> None:
    off = replace(H100, persistence=False)
    assert "GPU 0, 2" in text(found(off, H100, off)["gpu_persistence"])


def test_mig() -> None:
    boards = read_gpus(FakeNvml("mig")).boards
    findings = found(*boards)
    assert "GPU 0 is split" in text(findings["gpu_mig"])
    assert "--device 0:0" in text(findings["gpu_mig"])
    assert "GPU 1 is in MIG mode" in text(findings["gpu_mig_empty"])
    unlisted = found(replace(H100, mig=True, mig_instances=None))
    assert isinstance(unlisted["gpu_mig"], Unchecked)


def test_a_board_that_does_not_answer() -> None:
    lost = Gpu("unknown", gaps=(("nvmlDeviceGetHandleByIndex", "GPU is lost"),))
    assert "GPU 1 does not answer: GPU is lost" in text(found(H100, lost)["gpu_unreadable"])


def test_state_now() -> None:
    state = GpuState({0: GpuReading(0.0, reasons=0x41), 1: GpuReading(0.0, reasons=0x5)}, {0: 0, 1: 2, 2: None})
    findings = found(H100, H100, state=state)
    assert set(findings) == {"gpu_throttled", "gpu_busy"}
    assert "GPU 0 is slowed down now: hw_thermal" in text(findings["gpu_throttled"])
    assert "2 other process(es) compute on GPU 1" in text(findings["gpu_busy"])


def test_no_near_cpu_in_the_mask(kept_tree: Tree) -> None:
    topology = read_topology(kept_tree("dgx"))
    boards = read_gpus(FakeNvml("dgx")).boards
    assert found(*boards, topology=topology) == {}
    findings = found(*boards, topology=replace(topology, affinity=(0, 1, 112)))
    assert "GPU 4, 5, 6, 7" in text(findings["gpu_far_cpus"])
    assert "taskset -c 56-111,168-223" in text(findings["gpu_far_cpus"])
    assert found(replace(H100, cpus="rubbish"), topology=topology) == {}


def test_a_slow_hop_on_the_way(tmp_path: Path) -> None:
    gpu(tmp_path, "pci0000:00/0000:00:01.0", "1a", "0000:03", "32.0 GT/s PCIe", "0x2330", 0)
    assert found(H100, root=tmp_path) == {}
    write(tmp_path, "/sys/devices/pci0000:00/0000:00:01.0/max_link_speed", "16.0 GT/s PCIe\n")
    assert "gen 4 x16 at 0000:00:01.0" in text(found(H100, root=tmp_path)["gpu_slot"])
    # where data go over C2C the PCIe link is for management, however narrow it is
    assert found(replace(H100, c2c_links=10), root=tmp_path) == {}


def test_boards_that_share_a_link(kept_tree: Tree) -> None:
    boards = read_gpus(FakeNvml("mig")).boards
    said = text(found(*boards, root=kept_tree("mig"))["gpu_shared_link"])
    assert "GPU 0, 1 share one link to the CPU; GPU 2, 3 share" in said
    assert found(*read_gpus(FakeNvml("dgx")).boards, root=kept_tree("dgx")) == {}


@pytest.mark.parametrize(
    ("value", "machine", "effect"),
    [("0,1", "dgx", None), ("", "dgx", "blocks"), ("9", "dgx", "blocks"), ("0,9,1", "dgx", "limits"),
     ("0", "mig", "unchecked"), ("GPU-2", "dgx", None), ("GPU-xyz", "dgx", "blocks")],
)  # fmt: skip
def test_visible_devices(value: str, machine: str, effect: str | None) -> None:
    finding = found(H100, environ={CUDA: value}, machine=machine).get("gpu_visible")
    assert {None: "absent", "unchecked": "unchecked"}.get(effect, effect) == (
        "absent" if finding is None else "unchecked" if isinstance(finding, Unchecked) else finding.effect
    )
