"""The way from a device to its CPU: bridges and switches, the narrowest hop, who shares it, and its IOMMU group."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine.physical import PCIE_GENERATIONS, pcie_bytes_per_s
from kvbench.machine.probe import ROOT, read_int, read_text, under

_PCI = "/sys/bus/pci/devices"
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Hop:
    """A port or device on the way. ``gen`` and ``width`` are the most **it** can do, None where sysfs does not say."""

    address: str
    gen: int | None
    width: int | None

    @property
    def bytes_per_s(self) -> float | None:
        """One direction, after line coding."""
        return None if self.gen is None or self.width is None else pcie_bytes_per_s(self.gen, self.width)


@dataclass(frozen=True, slots=True)
class PciePath:
    """``hops`` go from the root port to the device itself. ``iommu_group`` and ``iommu_type`` are the kernel's.

    ``node`` is the NUMA node of the device, None where the firmware tells none.
    """

    address: str
    hops: tuple[Hop, ...]
    node: int | None
    iommu_group: int | None = None
    iommu_type: str | None = None

    @property
    def root_port(self) -> str | None:
        """The port on the CPU, None for a device that hangs on the root bus itself (usual in guests)."""
        return self.hops[0].address if len(self.hops) > 1 else None

    @property
    def switches(self) -> tuple[str, ...]:
        """Upstream ports of the switches on the way; a switch is an upstream port and a downstream port below it."""
        return tuple(hop.address for hop in self.hops[1:-1:2])

    @property
    def narrowest(self) -> Hop | None:
        """The slowest hop on the way; None where no hop states its speed."""
        known = [hop for hop in self.hops if hop.bytes_per_s is not None]
        return min(known, key=lambda hop: hop.bytes_per_s or 0.0, default=None)


def sysfs_address(bus_id: str, root: Path = ROOT) -> str | None:
    """Return the sysfs name of NVML's ``00000000:18:00.0``, None when no device has it.

    NVML writes a domain of 32 bits, the kernel one of at least 16; guests of some clouds use all 32.
    """
    match = re.fullmatch(r"([0-9A-Fa-f]{1,8}):([0-9A-Fa-f]{1,2}):([0-9A-Fa-f]{1,2})\.([0-7])", bus_id)
    if match is None:
        return None
    domain, bus, device = (int(match[group], 16) for group in (1, 2, 3))
    for short in (domain, domain & 0xFFFF):
        address = f"{short:04x}:{bus:02x}:{device:02x}.{match[4]}"
        if under(root, f"{_PCI}/{address}").exists():
            return address
    return None


def pcie_path(address: str, root: Path = ROOT) -> PciePath | None:
    """Return the way to the device with the sysfs name ``address``, None when there is none."""
    try:
        place = under(root, f"{_PCI}/{address}").resolve(strict=True).relative_to(root.resolve())
    except (OSError, ValueError):
        return None
    functions = [depth for depth, part in enumerate(place.parts) if _FUNCTION.fullmatch(part)]
    hops = tuple(_hop(root, "/" + "/".join(place.parts[: depth + 1])) for depth in functions)
    if not hops:
        return None
    node = read_int(root, f"{_PCI}/{address}/numa_node").value
    group = _group(root, f"{_PCI}/{address}/iommu_group")
    kind = None if group is None else read_text(root, f"/sys/kernel/iommu_groups/{group}/type").value
    return PciePath(address, hops, node if node is not None and node >= 0 else None, group, kind)


def _hop(root: Path, directory: str) -> Hop:
    speed = re.match(r"([0-9.]{1,6}) ?GT/s", read_text(root, f"{directory}/max_link_speed").value or "")
    told = speed[1].removesuffix(".0") if speed else ""
    gens = [gen for gen, (rate, _) in PCIE_GENERATIONS.items() if told == f"{rate:g}"]
    width = read_int(root, f"{directory}/max_link_width").value
    return Hop(
        directory.rsplit("/", 1)[1],
        gens[0] if gens else None,
        width if width is not None and 1 <= width <= 32 else None,  # 0 and 255 mean unknown
    )


def _group(root: Path, path: str) -> int | None:
    try:
        name = os.readlink(under(root, path)).rsplit("/", 1)[-1]
    except OSError:
        return None
    return int(name) if name.isascii() and name.isdigit() else None


def shared_ports(paths: Iterable[PciePath]) -> dict[str, tuple[str, ...]]:
    """Return {root port: devices below it} where more than one of ``paths`` goes through the same port.

    Their transfers share that port's link: measured together they get a part each.
    """
    below: dict[str, list[str]] = {}
    for path in paths:
        if path.root_port is not None:
            below.setdefault(path.root_port, []).append(path.address)
    return {port: tuple(devices) for port, devices in sorted(below.items()) if len(devices) > 1}
