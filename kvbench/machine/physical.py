"""Physical ceilings of host paths, from what the firmware and the bus state. Unknown is an answer; a guess is not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine.probe import ROOT, Fact, read_int, read_text, under
from kvbench.machine.system import hypervisor_flag, virtualisation

_PCI = "/sys/bus/pci/devices"
_DMI_ENTRIES = "/sys/firmware/dmi/entries"
_MEMORY_DEVICE = 17  # SMBIOS 3.7, 7.18 "Memory Device (Type 17)"

# PCI Express Base Specification: GT/s per lane and payload share of the line code (8b/10b, 128b/130b, 242B/256B FLIT)
PCIE_GENERATIONS: dict[int, tuple[float, float]] = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 242 / 256),
}
_KINDS = {"0x0108": "nvme", "0x0300": "gpu", "0x0302": "gpu", "0x1200": "accelerator"}


@dataclass(frozen=True, slots=True)
class PhysicalCeiling:
    """An upper bound by specification. ``value`` is SI in ``unit``, None with the ``reason`` where it is not known."""

    name: str
    unit: str
    value: float | None
    source: str
    reason: str = ""

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ValueError(f"ceiling {self.name} without a value needs a reason")


@dataclass(frozen=True, slots=True)
class PcieLink:
    """One endpoint. ``gen`` and ``width`` are the most that it **and** the port above it can do.

    ``current_*`` is the state now: it drops on an idle link (5 to 2.5 GT/s within seconds) and is never a ceiling.
    """

    address: str
    kind: str
    vendor: str
    gen: int | None
    width: int | None
    current_gen: int | None
    current_width: int | None
    node: int | None


def pcie_bytes_per_s(gen: int, width: int) -> float:
    """Return bytes/s of a link in one direction after line coding. Raises KeyError for an unknown generation."""
    rate, share = PCIE_GENERATIONS[gen]
    return rate * 1e9 * share * width / 8


def c2c_bytes_per_s(links: int, megabytes: float) -> float:
    """Return bytes/s of NVLink-C2C in one direction: ``links`` of ``megabytes`` MB/s each, as NVML counts them.

    NVML names no direction. On GH200 it tells 10 links of 45 GB/s, and NVIDIA's data sheet 450 GB/s each way, 900 in
    all: so a link's number is that of one direction.
    """
    return links * megabytes * 1e6


def pcie_links(root: Path = ROOT) -> tuple[PcieLink, ...]:
    """Return GPUs, accelerators and NVMe drives on the bus, in address order; empty without sysfs."""
    try:
        addresses = sorted(entry.name for entry in under(root, _PCI).iterdir())
    except OSError:
        return ()
    links = []
    for address in addresses:
        base = f"{_PCI}/{address}"
        kind = _KINDS.get((read_text(root, f"{base}/class").value or "")[:6])
        if kind is None:
            continue
        own, port = _maximum(root, base), _maximum(root, _port_above(root, base))
        node = read_int(root, f"{base}/numa_node").value
        links.append(
            PcieLink(
                address=address,
                kind=kind,
                vendor=read_text(root, f"{base}/vendor").value or "unknown",
                gen=_smaller(own[0], port[0]),
                width=_smaller(own[1], port[1]),
                current_gen=_generation(read_text(root, f"{base}/current_link_speed").value),
                current_width=_lanes(root, f"{base}/current_link_width"),
                node=node if node is not None and node >= 0 else None,
            )
        )
    return tuple(links)


def _port_above(root: Path, base: str) -> str:
    """Path of the upstream port: the parent in the device tree that the bus entry links to."""
    device = under(root, base)
    try:
        parent = device.resolve(strict=True).parent
        return "/" + str(parent.relative_to(root.resolve()))
    except (OSError, ValueError):
        return f"{base}/no-port"


def _maximum(root: Path, base: str) -> tuple[int | None, int | None]:
    speed = _generation(read_text(root, f"{base}/max_link_speed").value)
    return speed, _lanes(root, f"{base}/max_link_width")


def _lanes(root: Path, path: str) -> int | None:
    width = read_int(root, path).value
    return width if width is not None and 1 <= width <= 32 else None  # 255 and 0 mean unknown


def _smaller(a: int | None, b: int | None) -> int | None:
    known = [value for value in (a, b) if value is not None]
    return min(known) if known else None


def _generation(text: str | None) -> int | None:
    """``32.0 GT/s PCIe`` -> 5; None for ``Unknown`` and for rates of no generation."""
    match = re.match(r"([0-9.]{1,6}) ?GT/s", text or "")
    if match is None:
        return None
    return next((gen for gen, (rate, _) in PCIE_GENERATIONS.items() if match[1] in (f"{rate:g}", f"{rate:.1f}")), None)


@dataclass(frozen=True, slots=True)
class MemoryModule:
    """A populated DIMM of the firmware's table: transfers/s, data width in bits, and the locator it prints."""

    locator: str
    bank: str
    transfers_per_s: float | None
    width_bits: int | None


def memory_modules(root: Path = ROOT) -> Fact[tuple[MemoryModule, ...]]:
    """Return the populated DIMMs of the SMBIOS table, readable as root only on most systems."""
    try:
        entries = sorted(
            entry.name for entry in under(root, _DMI_ENTRIES).iterdir() if entry.name.startswith(f"{_MEMORY_DEVICE}-")
        )
    except OSError:
        return Fact(None, f"no {_DMI_ENTRIES}: the firmware's memory table cannot be read here")
    modules = []
    for entry in entries:
        path = f"{_DMI_ENTRIES}/{entry}/raw"
        try:
            raw = under(root, path).read_bytes()
        except OSError as error:
            return Fact(None, f"{path}: {error.strerror or error} (root may read it)")
        module = _module(raw)
        if module is not None:
            modules.append(module)
    if not modules:
        return Fact(None, "the firmware's memory table lists no populated module")
    return Fact(tuple(modules), source=_DMI_ENTRIES)


def _module(raw: bytes) -> MemoryModule | None:
    """Parse one type 17 structure; None for an empty slot or a structure too short to tell."""
    if len(raw) < 0x22 or raw[0] != _MEMORY_DEVICE or len(raw) < raw[1]:
        return None
    length = raw[1]

    def word(offset: int) -> int:
        return int.from_bytes(raw[offset : offset + 2], "little") if offset + 2 <= length else 0

    if word(0x0C) == 0:  # size: no module installed
        return None
    strings = raw[length:].split(b"\0")

    def text(offset: int) -> str:
        index = raw[offset] if offset < length else 0
        return strings[index - 1].decode("ascii", "replace") if 0 < index <= len(strings) else ""

    speed = word(0x20)  # configured speed; the rated one (0x15) is what the module could do elsewhere
    if speed == 0xFFFF and length >= 0x5C:
        speed = int.from_bytes(raw[0x58:0x5C], "little") & 0x7FFFFFFF
    width = word(0x0A)  # data width, without the ECC bits
    return MemoryModule(
        locator=text(0x10),
        bank=text(0x11),
        transfers_per_s=speed * 1e6 if speed not in (0, 0xFFFF) else None,
        width_bits=width if width not in (0, 0xFFFF) else None,
    )


_CHANNEL = re.compile(r"CHANNEL[ _]?(?:[A-P]|\d{1,2})", re.IGNORECASE)
_SLOT = re.compile(r"DIMM[ _]?[A-P](?=\d?\b)", re.IGNORECASE)
_SOCKET = re.compile(r"(?:CPU|PROC|NODE|P)[ _]?\d{1,2}", re.IGNORECASE)


def _channel(module: MemoryModule) -> str | None:
    """Return a name for the module's channel, None where the firmware prints none.

    Boards write ``P0 CHANNEL A``, ``P0_Node1_Channel0_Dimm0``, ``CPU1_DIMM_A1``. All text before the channel belongs to
    the name: two channels taken for one would make the ceiling too low and call honest numbers impossible.
    """
    for pattern, text, other in (
        (_CHANNEL, module.bank, module.locator),
        (_CHANNEL, module.locator, module.bank),
        (_SLOT, module.locator, ""),
    ):
        if match := pattern.search(text):
            socket = _SOCKET.search(other)
            return f"{text[: match.end()]}/{socket[0] if socket else ''}".upper()
    return None


def dram_ceiling(root: Path = ROOT) -> PhysicalCeiling:
    """Return bytes/s of all DRAM channels of the machine together: channels x configured speed x 8 bytes.

    Only where every populated module names its channel and speed: counting modules would double a machine with two per
    channel. None in a guest: its firmware table describes a machine that does not exist.
    """
    name, unit, source = "dram", "B/s", "SMBIOS type 17: channels x configured speed x width"
    guest = virtualisation(root).value
    if hypervisor_flag(root).value or (guest is not None and guest != "none"):
        return PhysicalCeiling(name, unit, None, source, "a guest cannot see the memory channels of its host")
    modules = memory_modules(root)
    if modules.value is None:
        return PhysicalCeiling(name, unit, None, source, modules.reason)
    fastest: dict[str, float] = {}
    for module in modules.value:
        channel = _channel(module)
        if channel is None or module.transfers_per_s is None or module.width_bits is None:
            where = module.locator or "without a name"
            return PhysicalCeiling(
                name, unit, None, source, f"module {where!r} does not state channel, speed and width"
            )
        rate = module.transfers_per_s * module.width_bits / 8
        # modules of one channel run at one speed; the table has been seen to differ, and a ceiling takes the larger
        fastest[channel] = max(fastest.get(channel, 0.0), rate)
    return PhysicalCeiling(name, unit, sum(fastest.values()), source)


def link_ceilings(root: Path = ROOT) -> tuple[PhysicalCeiling, ...]:
    """Return one-direction ceilings of the PCIe links, named ``pcie:<kind>@<address>``."""
    ceilings = []
    for link in pcie_links(root):
        name = f"pcie:{link.kind}@{link.address}"
        if link.gen is None or link.width is None:
            reason = "sysfs does not state the link's maximum (usual for virtual devices)"
            ceilings.append(PhysicalCeiling(name, "B/s", None, "sysfs max_link_speed", reason))
        else:
            source = f"sysfs: PCIe gen {link.gen} x{link.width} after line coding, one direction"
            ceilings.append(PhysicalCeiling(name, "B/s", pcie_bytes_per_s(link.gen, link.width), source))
    return tuple(ceilings)


def host_ceilings(root: Path = ROOT) -> tuple[PhysicalCeiling, ...]:
    """Return every physical ceiling of a host path this machine states, the unknown ones with their reason."""
    return (dram_ceiling(root), *link_ceilings(root))
