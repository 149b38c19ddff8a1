"""The way from a GPU to its CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.machine.physical import pcie_bytes_per_s
from kvbench.machine.topology_pcie import Hop, pcie_path, shared_ports, sysfs_address
from tests.machine.conftest import Tree
from tests.machine.trees import gpu, write


def test_a_switch_is_two_ports_between_the_cpu_and_the_board(kept_tree: Tree) -> None:
    found = pcie_path("0000:8a:00.0", kept_tree("dgx"))
    assert found is not None
    assert [hop.address for hop in found.hops] == ["0000:80:01.0", "0000:88:00.0", "0000:89:0a.0", "0000:8a:00.0"]
    assert (found.root_port, found.switches, found.node) == ("0000:80:01.0", ("0000:88:00.0",), 1)
    assert {hop.bytes_per_s for hop in found.hops} == {pcie_bytes_per_s(5, 16)}


def test_a_board_without_a_switch(tree: Tree) -> None:
    found = pcie_path("0000:01:00.0", tree("epyc"))
    assert found is not None
    assert (found.root_port, found.switches, found.node) == ("0000:00:01.0", (), 1)
    assert found.narrowest == Hop("0000:00:01.0", 4, 16)  # a gen 5 board in a gen 4 slot


def test_boards_below_one_port_share_its_link(kept_tree: Tree) -> None:
    def ways(machine: str, *buses: str) -> dict[str, tuple[str, ...]]:
        found = (pcie_path(f"0000:{bus}:00.0", kept_tree(machine)) for bus in buses)
        return shared_ports(path for path in found if path is not None)

    assert list(ways("mig", "07", "0f", "47", "4e", "87").values()) == [
        ("0000:07:00.0", "0000:0f:00.0"), ("0000:47:00.0", "0000:4e:00.0")
    ]  # fmt: skip
    assert ways("dgx", "1a", "1b", "4a", "4b", "8a") == {}


def test_a_narrow_port_of_the_switch_is_the_narrowest_hop(tmp_path: Path) -> None:
    gpu(tmp_path, "pci0000:00/0000:00:01.0", "05", "0000:03", "32.0 GT/s PCIe", "0x2330", 0)
    port = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    write(tmp_path, "/sys/devices/pci0000:00/0000:00:01.0/max_link_width", "8\n")
    found = pcie_path("0000:05:00.0", tmp_path)
    assert found is not None
    assert found.narrowest == Hop("0000:00:01.0", 5, 8)
    (port / "max_link_width").write_text("255\n")  # unknown: never taken for a number
    again = pcie_path("0000:05:00.0", tmp_path)
    assert again is not None
    assert again.hops[0] == Hop("0000:00:01.0", 5, None)
    assert again.narrowest is not None
    assert again.narrowest.width == 16


def test_the_iommu_group_is_read(tmp_path: Path) -> None:
    gpu(tmp_path, "pci0000:00/0000:00:01.0", "05", "0000:03", "16.0 GT/s PCIe", "0x20b0", -1)
    write(tmp_path, "/sys/kernel/iommu_groups/17/type", "DMA-FQ\n")
    board = next((tmp_path / "sys/devices").rglob("0000:05:00.0"))
    (board / "iommu_group").symlink_to(tmp_path / "sys/kernel/iommu_groups/17")
    found = pcie_path("0000:05:00.0", tmp_path)
    assert found is not None
    assert (found.iommu_group, found.iommu_type, found.node) == (17, "DMA-FQ", None)


@pytest.mark.parametrize("speed", ["Unknown", "", "1.2.3 GT/s", "12.3 GT/s PCIe"])
def test_a_speed_of_no_generation_is_unknown(tmp_path: Path, speed: str) -> None:
    gpu(tmp_path, "pci0000:00/0000:00:01.0", "05", "0000:03", speed, "0x20b0", 0)
    found = pcie_path("0000:05:00.0", tmp_path)
    assert found is not None
    assert found.narrowest is None


def test_nvml_and_the_kernel_write_addresses_differently(kept_tree: Tree, tmp_path: Path) -> None:
    root = kept_tree("dgx")
    assert sysfs_address("00000000:1A:00.0", root) == "0000:1a:00.0"
    assert sysfs_address("00000000:FF:00.0", root) is None
    assert sysfs_address("rubbish", root) is None
    assert sysfs_address("", root) is None
    # a guest of a cloud: the domain has 32 bits in NVML, the kernel shows the lower 16 (NVIDIA/nvidia-docker#1316)
    write(tmp_path, "/sys/bus/pci/devices/cfdd:00:00.0/class", "0x030200")
    assert sysfs_address("03F8CFDD:00:00.0", tmp_path) == "cfdd:00:00.0"


def test_without_sysfs_there_is_no_way(tree: Tree) -> None:
    assert pcie_path("0000:01:00.0", tree("empty")) is None
    write(tree("container"), "/sys/bus/pci/devices/0000:01:00.0/class", "0x030200")  # a copy without the links
