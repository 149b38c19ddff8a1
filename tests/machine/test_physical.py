"""Ceilings come from what the firmware and the bus state, or are unknown with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.machine.physical import (
    PhysicalCeiling,
    dram_ceiling,
    host_ceilings,
    memory_modules,
    pcie_bytes_per_s,
    pcie_links,
)
from tests.machine.conftest import Tree
from tests.machine.trees import dimm, write

ENTRY = "/sys/firmware/dmi/entries/17-0/raw"
BARE = "processor : 0\nflags : fpu tsc\n"


def test_pcie_rates_are_those_of_the_specification() -> None:
    gb = [round(pcie_bytes_per_s(gen, 16) / 1e9, 2) for gen in range(1, 7)]
    assert gb == [4.0, 8.0, 15.75, 31.51, 63.02, 121.0]


def test_a_link_is_as_fast_as_the_slower_of_board_and_port_and_never_as_its_idle_state(tree: Tree) -> None:
    (link,) = pcie_links(tree("epyc"))
    assert (link.kind, link.gen, link.width) == ("gpu", 4, 16)  # a gen 5 board in a gen 4 slot
    assert (link.current_gen, link.current_width, link.node) == (1, 16, 1)


def test_channels_are_counted_once_however_many_modules_they_hold(tree: Tree) -> None:
    found = dram_ceiling(tree("epyc"))  # five modules on four channels, and an empty slot
    assert found.value == 4 * 4800e6 * 8


def test_a_guest_has_no_dram_ceiling_whatever_its_table_says(tree: Tree) -> None:
    root = tree("vm")
    write(root, ENTRY, dimm("DIMM 0", "P0 CHANNEL A", 3200))
    found = dram_ceiling(root)
    assert found.value is None
    assert "guest" in found.reason


@pytest.mark.parametrize(
    ("first", "second", "channels"),
    [(("DIMM 0", "P0 CHANNEL A"), ("DIMM 0", "P1 CHANNEL A"), 2),
     (("CPU1_DIMM_A1", "BANK 0"), ("CPU1_DIMM_A2", "BANK 1"), 1),
     (("CPU1_DIMM_A1", "BANK 0"), ("CPU2_DIMM_A1", "BANK 8"), 2),
     (("P1-DIMMA1", "P0_Node0_Channel0_Dimm0"), ("P1-DIMMC1", "P0_Node1_Channel0_Dimm0"), 2),
     (("Controller0-ChannelA-DIMM0", "BANK 0"), ("Controller1-ChannelA-DIMM0", "BANK 1"), 2),
     (("CPU0 DIMM_A1", "CHANNEL A"), ("CPU1 DIMM_A1", "CHANNEL A"), 2)],
)  # fmt: skip
def test_two_channels_are_never_taken_for_one(
    tmp_path: Path, first: tuple[str, str], second: tuple[str, str], channels: int
) -> None:
    write(tmp_path, "/proc/cpuinfo", BARE)
    for slot, names in enumerate((first, second)):
        write(tmp_path, f"/sys/firmware/dmi/entries/17-{slot}/raw", dimm(*names, 3200))
    assert dram_ceiling(tmp_path).value == channels * 3200e6 * 8


@pytest.mark.parametrize(
    "raw",
    [dimm("A1", "BANK 0", 3200), dimm("DIMM 0", "P0 CHANNEL A", 0), dimm("DIMM 0", "P0 CHANNEL A", 3200, width=0xFFFF),
     dimm("DIMM 0", "P0 CHANNEL A", 3200, size=0), b"", b"\x11\x5c", bytes([17, 200]) + bytes(40), b"\xff" * 300],
)  # fmt: skip
def test_a_table_that_does_not_state_channel_speed_and_width_gives_no_ceiling(tmp_path: Path, raw: bytes) -> None:
    write(tmp_path, "/proc/cpuinfo", BARE)
    write(tmp_path, ENTRY, raw)
    found = dram_ceiling(tmp_path)
    assert found.value is None
    assert found.reason


def test_the_configured_speed_counts_not_the_rated_one(tmp_path: Path) -> None:
    write(tmp_path, ENTRY, dimm("DIMM 0", "P0 CHANNEL A", 4400))
    modules = memory_modules(tmp_path).value
    assert modules is not None
    assert modules[0].transfers_per_s == 4400e6


@pytest.mark.parametrize("speed", ["Unknown", "", "12.3 GT/s PCIe", "garbage"])
def test_virtual_links_are_unknown(tmp_path: Path, speed: str) -> None:
    base = "/sys/bus/pci/devices/0000:00:05.0"
    write(tmp_path, f"{base}/class", "0x010802\n")
    write(tmp_path, f"{base}/max_link_speed", speed)
    write(tmp_path, f"{base}/max_link_width", "255\n")
    ceiling = next(c for c in host_ceilings(tmp_path) if c.name.startswith("pcie:nvme"))
    assert ceiling.value is None
    assert ceiling.reason


def test_no_tree_makes_it_fail(every_tree: Path) -> None:
    assert all(ceiling.value is None or ceiling.value > 0 for ceiling in host_ceilings(every_tree))


def test_an_unknown_ceiling_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        PhysicalCeiling("x", "B/s", None, "nowhere")
