"""CPUs, cores, sockets, NUMA nodes and cache instances as the kernel reports them, and which CPUs measure."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.errors import Unavailable
from kvbench.machine.probe import (
    ROOT,
    Fact,
    format_cpu_list,
    is_live,
    kilobytes,
    parse_cpu_list,
    read_cpu_list,
    read_fields,
    read_int,
    read_size,
    read_text,
)

LLC_UNKNOWN_BYTES = 32 * 2**20  # design 2: what stands in when nothing reports a last-level cache
_CPU_DIR = "/sys/devices/system/cpu"
_NODE_DIR = "/sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Cpu:
    """A logical CPU. ``siblings`` are the logical CPUs of its physical core, itself included."""

    id: int
    siblings: tuple[int, ...]
    socket: int | None
    node: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node. One without CPUs holds GPU, CXL or hot-plugged memory: never plain ``dram`` (design 2)."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None

    @property
    def cpuless(self) -> bool:
        return not self.cpus


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache instance and the logical CPUs that share it. ``bytes`` is None where only its level is reported."""

    level: int
    kind: str
    bytes: int | None
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Llc:
    """Last-level cache reachable from a mask: the sum over distinct instances. ``unknown`` is the flag llc_unknown."""

    bytes: int
    unknown: bool
    instances: int
    reason: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        return ("llc_unknown",) if self.unknown else ()


@dataclass(frozen=True, slots=True)
class Topology:
    """What the kernel reports. ``gaps`` are (what, reason) of everything that could not be read."""

    cpus: tuple[Cpu, ...]
    nodes: tuple[Node, ...]
    caches: tuple[Cache, ...]
    affinity: tuple[int, ...]
    page_bytes: Fact[int]
    gaps: tuple[tuple[str, str], ...] = ()

    @property
    def cores(self) -> int:
        """Physical cores as reported (a guest sees what its host tells)."""
        return len({cpu.siblings for cpu in self.cpus})

    @property
    def sockets(self) -> int | None:
        found = {cpu.socket for cpu in self.cpus if cpu.socket is not None}
        return len(found) or None

    @property
    def threads_per_core(self) -> int:
        return max((len(cpu.siblings) for cpu in self.cpus), default=1)

    def llc(self, affinity: tuple[int, ...] | None = None) -> Llc:
        """Return the last-level cache reachable from ``affinity`` (default: this process's mask)."""
        mask = self.affinity if affinity is None else affinity
        last: set[Cache] = set()
        for cpu in mask:
            own = [c for c in self.caches if cpu in c.cpus and c.kind != "Instruction"]
            top = max(own, key=lambda c: c.level, default=None)
            if top is None or top.level < 2 or top.bytes is None:
                # arm64 guests often list levels without sizes, some hypervisors only a level 1
                known = sum(c.bytes or 0 for c in last)
                return Llc(max(known, LLC_UNKNOWN_BYTES), True, 0, f"no last-level cache size reported for CPU {cpu}")
            last.add(top)
        if not last:
            return Llc(LLC_UNKNOWN_BYTES, True, 0, "empty CPU mask")
        return Llc(sum(c.bytes or 0 for c in last), False, len(last))

    def measuring_cpus(self, threads: int | Literal["all"], affinity: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the CPUs that ``threads`` measuring threads are pinned to, in order.

        One thread per physical core first, node by node, then second siblings; ``all`` is one thread on every physical
        core of the mask: a busy sibling shares the core's load ports and L1, so the rest of the process stays there.
        Raises Unavailable when the mask holds fewer CPUs, ValueError when ``threads`` is below 1.
        """
        mask = set(self.affinity if affinity is None else affinity)
        known = {cpu.id: cpu for cpu in self.cpus}
        cores: dict[tuple[int, ...], list[int]] = {}
        for cpu in sorted(mask):
            cores.setdefault(known[cpu].siblings if cpu in known else (cpu,), []).append(cpu)

        def place(core: list[int]) -> tuple[int, int]:
            node = known[core[0]].node if core[0] in known else None
            return (0 if node is None else node, core[0])

        groups = sorted(cores.values(), key=place)
        if threads == "all":
            return tuple(group[0] for group in groups)
        if threads < 1:
            raise ValueError(f"a measurement has at least one thread, got {threads}")
        depth = max((len(group) for group in groups), default=0)
        order = [group[k] for k in range(depth) for group in groups if k < len(group)]
        if threads > len(order):
            raise Unavailable(
                "not enough CPUs", where=f"threads={threads}", got=len(order),
                expected=f"{threads} in the affinity mask",
                mend="widen the mask (taskset, cpuset, container CPUs) or ask for fewer threads",
            )  # fmt: skip
        return tuple(order[:threads])


def read_topology(root: Path = ROOT) -> Topology:
    """Return the topology under ``root``. Never raises: what is missing is listed in ``gaps``."""
    gaps: list[tuple[str, str]] = []
    nodes = _nodes(root, gaps)
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    cpus = _cpus_from_sysfs(root, node_of) or _cpus_from_cpuinfo(root, node_of, gaps)
    affinity = read_affinity(root)
    if affinity.value is None:
        gaps.append(("affinity", affinity.reason))
    mask = affinity.value or tuple(cpu.id for cpu in cpus)
    if not cpus:
        gaps.append(("cpus", "neither sysfs nor /proc/cpuinfo lists them"))
        cpus = tuple(Cpu(cpu, (cpu,), None, node_of.get(cpu)) for cpu in mask)
    caches = _caches(root, tuple(cpu.id for cpu in cpus))
    if not caches:
        gaps.append(("caches", f"no {_CPU_DIR}/cpu*/cache"))
    page = page_bytes(root)
    if page.value is None:
        gaps.append(("page size", page.reason))
    return Topology(cpus, nodes, caches, mask, page, tuple(gaps))


def topology() -> Topology:
    """Return the topology of this machine, read afresh: the affinity mask may have changed since."""
    return read_topology()


def llc(affinity: tuple[int, ...] | None = None, root: Path = ROOT) -> Llc:
    """Return the last-level cache reachable from ``affinity`` (default: this process's mask)."""
    return read_topology(root).llc(affinity)


def llc_bytes(affinity: tuple[int, ...] | None = None, root: Path = ROOT) -> int:
    """Return :func:`llc` in bytes; use :func:`llc` where the flag ``llc_unknown`` must travel with the number."""
    return llc(affinity, root).bytes


def measuring_cpus(
    threads: int | Literal["all"], affinity: tuple[int, ...] | None = None, root: Path = ROOT
) -> tuple[int, ...]:
    """Return the CPUs to pin to; see :meth:`Topology.measuring_cpus`."""
    return read_topology(root).measuring_cpus(threads, affinity)


def read_affinity(root: Path = ROOT) -> Fact[tuple[int, ...]]:
    """Return the CPUs this process may use, sorted."""
    if is_live(root) and hasattr(os, "sched_getaffinity"):
        return Fact(tuple(sorted(os.sched_getaffinity(0))), source="sched_getaffinity")
    text = read_fields(root, "/proc/self/status").get("Cpus_allowed_list")
    if text is None:
        return Fact(None, "no Cpus_allowed_list in /proc/self/status")
    try:
        return Fact(parse_cpu_list(text), source="/proc/self/status")
    except ValueError as error:
        return Fact(None, f"/proc/self/status: {error}")


def page_bytes(root: Path = ROOT) -> Fact[int]:
    """Return the base page size: 4 KiB is usual, arm64 kernels also use 16 and 64 KiB (and then a THP is 512 MiB)."""
    if is_live(root):
        return Fact(os.sysconf("SC_PAGE_SIZE"), source="sysconf")
    match = re.search(r"^KernelPageSize:\s+(\d+ kB)", read_text(root, "/proc/self/smaps").value or "", re.MULTILINE)
    size = kilobytes(match[1]) if match else None
    return (
        Fact(None, "no KernelPageSize in /proc/self/smaps") if size is None else Fact(size, source="/proc/self/smaps")
    )


def thp_bytes(root: Path = ROOT) -> Fact[int]:
    """Return the size of a transparent huge page: 2 MiB with base pages of 4 KiB, 512 MiB with pages of 64 KiB."""
    size = read_int(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    return size if size.value is None or size.value > 0 else Fact(None, f"{size.source} holds {size.value}")


def _nodes(root: Path, gaps: list[tuple[str, str]]) -> tuple[Node, ...]:
    online = read_cpu_list(root, f"{_NODE_DIR}/online")
    if online.value:
        nodes = []
        for node in online.value:
            cpus = read_cpu_list(root, f"{_NODE_DIR}/node{node}/cpulist").value or ()
            meminfo = read_text(root, f"{_NODE_DIR}/node{node}/meminfo").value or ""
            match = re.search(r"MemTotal:\s+(\d+ kB)", meminfo)
            nodes.append(Node(node, cpus, kilobytes(match[1]) if match else None))
        return tuple(nodes)
    gaps.append(("NUMA nodes", online.reason or f"{_NODE_DIR}/online is empty"))
    return ()


def _cpus_from_sysfs(root: Path, node_of: dict[int, int]) -> tuple[Cpu, ...]:
    online = read_cpu_list(root, f"{_CPU_DIR}/online").value
    if not online:
        return ()
    cpus: dict[int, Cpu] = {}
    for cpu in online:
        if cpu in cpus:
            continue  # a sibling read before: two file reads per core instead of two per thread
        base = f"{root}{_CPU_DIR}/cpu{cpu}/topology"
        # core_cpus_list is the name since Linux 5.3; the older file holds the same list
        siblings = _quick_list(f"{base}/core_cpus_list") or _quick_list(f"{base}/thread_siblings_list")
        if cpu not in siblings:
            return ()
        package = _number(_quick(f"{base}/physical_package_id"))
        for sibling in siblings:
            if sibling in online:
                socket = package if package is not None and package >= 0 else None
                cpus[sibling] = Cpu(sibling, siblings, socket, node_of.get(sibling))
    return tuple(cpus[cpu] for cpu in sorted(cpus))


def _cpus_from_cpuinfo(root: Path, node_of: dict[int, int], gaps: list[tuple[str, str]]) -> tuple[Cpu, ...]:
    found: list[tuple[int, int | None, int | None]] = []
    for block in read_cpuinfo(root):
        number, socket, core = (_number(block.get(key)) for key in ("processor", "physical id", "core id"))
        if number is not None:
            found.append((number, socket, core))
    if found:
        gaps.append(("sysfs topology", "not readable; cores are those /proc/cpuinfo tells"))
    cores: dict[tuple[int | None, int | None], list[int]] = {}
    for number, socket, core in found:
        # without a core id (arm64) every logical CPU counts as a core
        cores.setdefault((socket, core) if core is not None else (None, -1 - number), []).append(number)
    siblings = {number: tuple(sorted(group)) for group in cores.values() for number in group}
    return tuple(Cpu(number, siblings[number], socket, node_of.get(number)) for number, socket, _ in sorted(found))


def read_cpuinfo(root: Path = ROOT) -> list[dict[str, str]]:
    """Return /proc/cpuinfo as one dictionary per block; empty when it cannot be read."""
    return list(_blocks(read_text(root, "/proc/cpuinfo").value or ""))


@functools.lru_cache(maxsize=1)
def _blocks(text: str) -> tuple[dict[str, str], ...]:
    # one fingerprint asks five times, and 256 processors have some 7,000 lines
    blocks = []
    for block in text.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {name.strip(): value.strip() for name, colon, value in pairs if colon}
        if fields:
            blocks.append(fields)
    return tuple(blocks)


def _number(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _caches(root: Path, cpus: tuple[int, ...]) -> tuple[Cache, ...]:
    found: dict[tuple[int, str, tuple[int, ...]], Cache] = {}
    covered: dict[str, set[int]] = {}
    for cpu in cpus:
        base = f"{_CPU_DIR}/cpu{cpu}/cache"
        try:
            indices = sorted(name for name in os.listdir(f"{root}{base}") if name.startswith("index"))
        except OSError:
            continue
        for index in indices:
            if cpu in covered.setdefault(index, set()):
                continue  # the instance was read through another of its CPUs: 256 CPUs stay below 2,000 file reads
            level = _number(_quick(f"{root}{base}/{index}/level"))
            kind = _quick(f"{root}{base}/{index}/type")
            shared = _quick_list(f"{root}{base}/{index}/shared_cpu_list")
            if level is None or kind is None or cpu not in shared:
                continue
            covered[index].update(shared)
            size = read_size(root, f"{base}/{index}/size").value
            found.setdefault((level, kind, shared), Cache(level, kind, size, shared))
    return tuple(found[key] for key in sorted(found))


def _quick(path: str) -> str | None:
    """Read a sysfs attribute without pathlib: a box of 224 CPUs has some 700 of them, and they are read often."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(handle, 1 << 16).decode("utf-8", "replace").strip("\n \0")
    except OSError:
        return None
    finally:
        os.close(handle)


def _quick_list(path: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(_quick(path) or "")
    except ValueError:
        return ()


def describe(topology: Topology) -> str:
    """Return one line: ``2 sockets, 2 NUMA nodes, 16 cores, 32 CPUs (mask 0-31)``."""
    with_cpus = sum(not node.cpuless for node in topology.nodes)
    parts = [
        f"{topology.sockets if topology.sockets is not None else 'unknown'} socket(s)",
        f"{with_cpus or 'unknown'} NUMA node(s)",
        f"{topology.cores} core(s)",
        f"{len(topology.cpus)} CPU(s) (mask {format_cpu_list(topology.affinity)})",
    ]
    return ", ".join(parts)
