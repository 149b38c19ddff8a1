"""What the system lets this process have: memory, lockable memory, huge pages. Each value, or None with the reason.

Everything is read from files below ``root``, so a test can hand in another machine's /proc and /sys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvbench.machine.probe import ROOT, Fact

T = TypeVar("T")
UNLIMITED = (1 << 63) - 1
RESERVE_BYTES = 512 << 20  # room for the interpreter, a numba compile and the other processes of a small box
WATCH_FRACTION = 0.5  # while touching, a concurrent eater may take this much of the reserve before we stop


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest memory cgroup above this process, in bytes. ``reclaimable`` is file cache the kernel drops first."""

    version: int
    path: str
    limit: int
    usage: int
    reclaimable: int

    @property
    def available(self) -> int:
        return max(0, self.limit - self.usage + self.reclaimable)


@dataclass(frozen=True, slots=True)
class Thp:
    """Transparent huge pages: the selected modes and the bytes of one huge page."""

    enabled: Fact[str]
    defrag: Fact[str]
    shmem: Fact[str]
    page_bytes: Fact[int]


@dataclass(frozen=True, slots=True)
class HugePool:
    """One size of reserved huge pages, counts of pages; ``free`` excludes pages promised to other mappings."""

    page_bytes: int
    reserved: int
    free: int


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes free by the tightest limit, which ``source`` names, and the ``reserve`` that must stay free of them."""

    free: int
    reserve: int
    source: str

    @property
    def nbytes(self) -> int:
        """Bytes a new buffer may take."""
        return max(0, self.free - self.reserve)


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits at one moment."""

    memlock: Fact[int]
    available: Fact[int]
    cgroup: Fact[CgroupMemory]
    thp: Thp
    huge: Fact[tuple[HugePool, ...]]


def read_text(path: Path) -> Fact[str]:
    """Return a file's text, or None with the reason it could not be read."""
    try:
        return Fact(path.read_text(errors="replace"))
    except OSError as error:
        return Fact(None, f"{path}: {error.strerror or error}")


def _parsed(path: Path, parse: Callable[[str], T]) -> Fact[T]:
    text = read_text(path)
    if text.value is None:
        return Fact(None, text.reason)
    try:
        return Fact(parse(text.value.strip()))
    except (ValueError, IndexError):
        return Fact(None, f"{path}: cannot read {text.value.strip()[:60]!r}")


def memlock(root: Path = ROOT) -> Fact[int]:
    """Return the soft limit of lockable memory in bytes (``UNLIMITED`` when there is none), from /proc/self/limits."""

    def parse(text: str) -> int:
        word = text.split("Max locked memory", 1)[1].split()[0]
        return UNLIMITED if word == "unlimited" else int(word)

    return _parsed(root / "proc/self/limits", parse)


def meminfo(root: Path = ROOT) -> Fact[dict[str, int]]:
    """Return /proc/meminfo with kB fields as bytes."""

    def parse(text: str) -> dict[str, int]:
        fields = (re.match(r"(\S+):\s+(\d+)( kB)?", line) for line in text.splitlines())
        found = {m[1]: int(m[2]) * (1024 if m[3] else 1) for m in fields if m}
        if not found:
            raise ValueError(text)
        return found

    return _parsed(root / "proc/meminfo", parse)


def mem_available(root: Path = ROOT) -> Fact[int]:
    """Return MemAvailable in bytes; kernels before 3.14 lack it, then MemFree + Cached is taken."""
    info = meminfo(root)
    if info.value is None:
        return Fact(None, info.reason)
    if "MemAvailable" in info.value:
        return Fact(info.value["MemAvailable"])
    if "MemFree" in info.value:
        return Fact(info.value["MemFree"] + info.value.get("Cached", 0))
    return Fact(None, f"{root / 'proc/meminfo'}: neither MemAvailable nor MemFree")


def _cgroup_mounts(root: Path) -> list[tuple[int, str, Path]]:
    """Return (version, mounted subtree, mount point) of every mount that can carry memory limits."""
    mounts = []
    for line in (read_text(root / "proc/self/mountinfo").value or "").splitlines():
        left, _, right = line.partition(" - ")
        if len(left.split()) < 5 or len(right.split()) < 3:
            continue
        subtree, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2":
            mounts.append((2, subtree, root / point.lstrip("/")))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts.append((1, subtree, root / point.lstrip("/")))
    return mounts


def _own_cgroups(root: Path) -> dict[int, str]:
    own: dict[int, str] = {}
    for line in (read_text(root / "proc/self/cgroup").value or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[0] == "0" and not parts[1]:
            own[2] = parts[2]
        elif len(parts) == 3 and "memory" in parts[1].split(","):
            own[1] = parts[2]
    return own


def _level(version: int, folder: Path) -> CgroupMemory | None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, usage = (_parsed(folder / n, lambda t: UNLIMITED if t == "max" else int(t)).value for n in names)
    # v1 writes "no limit" as the largest page multiple below 2^63.
    if limit is None or usage is None or limit >= UNLIMITED - (1 << 20):
        return None
    stat = read_text(folder / "memory.stat").value or ""
    found = re.search(rf"^{'total_' if version == 1 else ''}inactive_file (\d+)", stat, re.MULTILINE)
    return CgroupMemory(version, str(folder), limit, usage, int(found[1]) if found else 0)


def cgroup_memory(root: Path = ROOT) -> Fact[CgroupMemory]:
    """Return the level with the least room among this process's memory cgroup and its parents (v1 and v2).

    None with the reason when no level sets a limit or no cgroup can be read.
    """
    own, levels, seen = _own_cgroups(root), [], 0
    for version, subtree, point in _cgroup_mounts(root):
        if version not in own:
            continue
        # In a container the mount often starts below the path /proc/self/cgroup names: what is mounted is what binds.
        inside = own[version].removeprefix(subtree.rstrip("/")) if own[version].startswith(subtree) else ""
        folder = point / inside.lstrip("/")
        if not folder.is_dir() or ".." in inside:
            folder = point
        while True:
            seen += folder.is_dir()
            level = _level(version, folder)
            if level is not None:
                levels.append(level)
            if folder == point or point not in folder.parents:
                break
            folder = folder.parent
    if levels:
        return Fact(min(levels, key=lambda level: level.available))
    return Fact(None, "no memory cgroup sets a limit" if seen else "no memory cgroup is readable")


def _selected(text: str) -> str:
    found = re.search(r"\[(\S+)\]", text)
    if not found:
        raise ValueError(text)
    return found[1]


def thp(root: Path = ROOT) -> Thp:
    """Return the transparent huge page modes of /sys/kernel/mm/transparent_hugepage."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    return Thp(
        enabled=_parsed(folder / "enabled", _selected),
        defrag=_parsed(folder / "defrag", _selected),
        shmem=_parsed(folder / "shmem_enabled", _selected),
        page_bytes=_parsed(folder / "hpage_pmd_size", int),
    )


def huge_pools(root: Path = ROOT) -> Fact[tuple[HugePool, ...]]:
    """Return the reserved huge pages per size, smallest first; empty when the kernel has none."""
    folder = root / "sys/kernel/mm/hugepages"
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return Fact(None, f"{folder}: {error.strerror}")
    pools = []
    for name in names:
        size = re.fullmatch(r"hugepages-(\d+)kB", name)
        counts = [_parsed(folder / name / n, int).value for n in ("nr_hugepages", "free_hugepages", "resv_hugepages")]
        if size and counts[0] is not None and counts[1] is not None:
            pools.append(HugePool(int(size[1]) * 1024, counts[0], max(0, counts[1] - (counts[2] or 0))))
    return Fact(tuple(sorted(pools, key=lambda p: p.page_bytes)))


def read_limits(root: Path = ROOT) -> Limits:
    """Return every limit of this module at this moment."""
    return Limits(memlock(root), mem_available(root), cgroup_memory(root), thp(root), huge_pools(root))


def available_memory(root: Path = ROOT) -> Fact[Available]:
    """Return what a buffer may take now: the least of MemAvailable and the cgroup's room, minus the reserve.

    The reserve is ``RESERVE_BYTES``, or an eighth of a machine or cgroup smaller than eight times that. None only when
    MemAvailable and every cgroup limit are unknown.
    """
    system, group = mem_available(root), cgroup_memory(root)
    info = meminfo(root).value or {}
    options: list[tuple[int, int, str]] = []
    if system.value is not None:
        options.append((system.value, info.get("MemTotal", system.value), "MemAvailable of /proc/meminfo"))
    if group.value is not None:
        options.append((group.value.available, group.value.limit, f"memory cgroup {group.value.path}"))
    if not options:
        return Fact(None, f"{system.reason}; {group.reason}")
    rooms = [Available(free, min(RESERVE_BYTES, size // 8), source) for free, size, source in options]
    return Fact(min(rooms, key=lambda room: room.free - room.reserve))
