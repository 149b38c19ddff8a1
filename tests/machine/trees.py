"""Fake /proc and /sys trees: text files of tests/fixtures/machine, and the repetitive parts of sysfs generated."""

from __future__ import annotations

import struct
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "machine"
NAMES = ("vm", "epyc", "grace", "container", "wsl", "empty")


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
    if name == "grace":
        write(root, "/sys/devices/system/cpu/online", "0-3\n")
        for n in range(4):
            own = str(n)
            cpu(root, n, own, 0, {0: (1, "Data", "64K", own), 2: (2, "Unified", "1024K", own),
                                  3: (3, "Unified", "116736K", "0-3")})  # fmt: skip
    return root
