"""Fake /proc and /sys trees: text files of tests/fixtures/machine, and the repetitive parts of sysfs generated."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "machine"
NAMES = ("vm", "epyc", "haswell", "dgx", "mig", "gh200", "altra", "container", "wsl", "empty")


def write(root: Path, path: str, content: str | bytes) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content if isinstance(content, bytes) else content.encode())


def unpack(root: Path, name: str) -> Path:
    """Write the tree ``name`` below ``root``: sections ``=== /path`` with content, or ``=== /path -> target``."""
    for section in (FIXTURES / f"{name}.tree").read_text().split("=== ")[1:]:
        head, _, body = section.partition("\n")
        path, arrow, target = head.partition(" -> ")
        if arrow:
            link = root / path.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        else:
            write(root, path, body)
    return root


def cpu(root: Path, number: int, siblings: str, package: int, caches: dict[int, tuple[int, str, str, str]]) -> None:
    """Write sysfs of one CPU; ``caches``: index -> (level, type, size, shared_cpu_list)."""
    base = f"/sys/devices/system/cpu/cpu{number}"
    write(root, f"{base}/topology/core_cpus_list", f"{siblings}\n")
    write(root, f"{base}/topology/physical_package_id", f"{package}\n")
    for index, (level, kind, size, shared) in caches.items():
        for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            write(root, f"{base}/cache/index{index}/{name}", f"{value}\n")


def cpuinfo(root: Path, count: int, block: Callable[[int], str]) -> None:
    """Write /proc/cpuinfo of ``count`` processors and the list of those online."""
    write(root, "/proc/cpuinfo", "\n".join(f"processor\t: {n}\n{block(n)}" for n in range(count)))
    write(root, "/sys/devices/system/cpu/online", f"0-{count - 1}\n")


def x86(vendor: str, family: int, model: int, stepping: int, name: str) -> str:
    return (
        f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\n"
        f"stepping\t: {stepping}\nflags\t\t: fpu tsc ht constant_tsc nonstop_tsc avx avx2 fma\n"
    )


def arm(part: str, variant: str, revision: str, features: str) -> str:
    return (
        f"Features\t: fp asimd {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: {variant}\n"
        f"CPU part\t: {part}\nCPU revision\t: {revision}\n"
    )


def gpu(root: Path, port: str, bus: str, upstream: str, speed: str, device: str, node: int) -> None:
    """Write a GPU at bus ``bus`` behind a switch: ``port`` below /sys/devices, upstream and downstream port, board."""
    way = (port, f"{upstream}:00.0", f"{upstream[:5]}{int(upstream[5:], 16) + 1:02x}:{int(bus, 16) % 32:02x}.0")
    board = "/".join(("/sys/devices", *way, f"0000:{bus}:00.0"))
    for depth in range(1, 4):
        bridge = "/".join(("/sys/devices", *way[:depth]))
        write(root, f"{bridge}/class", "0x060400\n")
        write(root, f"{bridge}/max_link_speed", f"{speed}\n")
        write(root, f"{bridge}/max_link_width", "16\n")
    for name, value in (
        ("class", "0x030200"), ("vendor", "0x10de"), ("device", device), ("max_link_speed", speed),
        ("max_link_width", "16"), ("current_link_speed", speed), ("current_link_width", "16"), ("numa_node", node),
    ):  # fmt: skip
        write(root, f"{board}/{name}", f"{value}\n")
    link = root / f"sys/bus/pci/devices/0000:{bus}:00.0"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"../../..{board.removeprefix('/sys')}")


def dimm(locator: str, bank: str, speed: int, size: int = 0x4000, width: int = 64) -> bytes:
    """Return one SMBIOS type 17 structure with its strings (speed in MT/s, size in MiB, 0: empty slot)."""
    body = bytearray(0x5C)
    body[0], body[1] = 17, 0x5C
    struct.pack_into("<HHH", body, 0x08, min(width + 8, 0xFFFF), width, size)
    body[0x10], body[0x11] = 1, 2
    struct.pack_into("<H", body, 0x15, speed + 800)  # rated speed: must not be the one that is used
    struct.pack_into("<H", body, 0x20, speed)
    return bytes(body) + locator.encode() + b"\0" + bank.encode() + b"\0\0"


def build(root: Path, name: str) -> Path:
    """Return the complete tree ``name`` written below ``root``."""
    if name == "empty":
        return root
    unpack(root, name)
    if name == "vm":
        write(root, "/sys/devices/system/cpu/online", "0-1\n")
        for n in range(2):
            own = str(n)
            cpu(root, n, own, 0, {0: (1, "Data", "32K", own), 1: (1, "Instruction", "32K", own),
                                  2: (2, "Unified", "1024K", own), 3: (3, "Unified", "32768K", "0-1")})  # fmt: skip
    if name == "epyc":  # two sockets of four cores, two threads each, an L3 for every two cores
        write(root, "/sys/devices/system/cpu/online", "0-15\n")
        for n in range(16):
            core = n % 8
            siblings = f"{core},{core + 8}"
            first = core // 2 * 2
            shared = f"{first}-{first + 1},{first + 8}-{first + 9}"
            cpu(root, n, siblings, core // 4, {0: (1, "Data", "32K", siblings), 2: (2, "Unified", "1024K", siblings),
                                               3: (3, "Unified", "32768K", shared)})  # fmt: skip
        for slot, (socket, channel) in enumerate((s, c) for s in (0, 1) for c in "AB"):
            raw = dimm("DIMM 0", f"P{socket} CHANNEL {channel}", 4800)
            write(root, f"/sys/firmware/dmi/entries/17-{slot}/raw", raw)
        write(root, "/sys/firmware/dmi/entries/17-4/raw", dimm("DIMM 1", "P0 CHANNEL A", 4800))
        write(root, "/sys/firmware/dmi/entries/17-5/raw", dimm("DIMM 1", "P0 CHANNEL B", 0, size=0))
    if name in GENERATED:
        GENERATED[name](root)
    return root


def _haswell(root: Path) -> None:
    lines = x86("GenuineIntel", 6, 63, 2, "Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz")
    cpuinfo(root, 24, lambda n: f"{lines}physical id\t: {n // 12}\ncore id\t\t: {n % 12}\n")
    for n in range(24):
        own, shared = str(n), ("0-11", "12-23")[n // 12]
        cpu(root, n, own, n // 12, {0: (1, "Data", "32K", own), 2: (2, "Unified", "256K", own),
                                    3: (3, "Unified", "30720K", shared)})  # fmt: skip


def _dgx(root: Path) -> None:
    """Two sockets of 56 cores with two threads each; every GPU has a PCIe switch of its own."""
    lines = x86("GenuineIntel", 6, 143, 8, "Intel(R) Xeon(R) Platinum 8480C")
    cpuinfo(root, 224, lambda n: f"{lines}physical id\t: {n % 112 // 56}\ncore id\t\t: {n % 56}\n")
    for n in range(224):
        core = n % 112
        own, shared = f"{core},{core + 112}", ("0-55,112-167", "56-111,168-223")[core // 56]
        cpu(root, n, own, core // 56, {2: (2, "Unified", "2048K", own), 3: (3, "Unified", "107520K", shared)})
    for node, domain, buses in ((0, "00", "1a 1b 4a 4b"), (1, "80", "8a 8b ca cb")):
        for place, bus in enumerate(buses.split()):
            port = f"pci0000:{domain}/0000:{domain}:0{place + 1}.0"
            gpu(root, port, bus, f"0000:{int(bus, 16) - 2:02x}", "32.0 GT/s PCIe", "0x2330", node)


def _mig(root: Path) -> None:
    """Two sockets of 64 cores, four nodes each, an L3 for every four cores; two GPUs below each PCIe switch."""
    lines = x86("AuthenticAMD", 23, 49, 0, "AMD EPYC 7742 64-Core Processor")
    cpuinfo(root, 256, lambda n: f"{lines}physical id\t: {n % 128 // 64}\ncore id\t\t: {n % 64}\n")
    for n in range(256):
        core = n % 128
        own, first = f"{core},{core + 128}", core // 4 * 4
        shared = f"{first}-{first + 3},{first + 128}-{first + 131}"
        cpu(root, n, own, core // 64, {2: (2, "Unified", "512K", own), 3: (3, "Unified", "16384K", shared)})
    for node, domain, buses in ((3, "00", "07 0f"), (1, "40", "47 4e"), (7, "80", "87 90"), (5, "b0", "b7 bd")):
        for bus in buses.split():
            upstream = f"0000:{int(domain, 16) + 1:02x}"
            gpu(root, f"pci0000:{domain}/0000:{domain}:01.1", bus, upstream, "16.0 GT/s PCIe", "0x20b0", node)


def _gh200(root: Path) -> None:
    cpuinfo(root, 72, lambda _: arm("0xd4f", "0x0", "0", "sve sve2 bf16 i8mm"))
    for n in range(72):
        cpu(root, n, str(n), 0, {0: (1, "Data", "64K", str(n)), 2: (2, "Unified", "1024K", str(n)),
                                 3: (3, "Unified", "116736K", "0-71")})  # fmt: skip


def _altra(root: Path) -> None:
    cpuinfo(root, 64, lambda _: arm("0xd0c", "0x3", "1", "asimdhp ssbs"))
    for n in range(64):
        cpu(root, n, str(n), 0, {0: (1, "Data", "64K", str(n)), 2: (2, "Unified", "1024K", str(n)),
                                 3: (3, "Unified", "32768K", "0-63")})  # fmt: skip


GENERATED: dict[str, Callable[[Path], None]] = {
    "haswell": _haswell, "dgx": _dgx, "mig": _mig, "gh200": _gh200, "altra": _altra
}  # fmt: skip
