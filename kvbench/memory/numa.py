"""NUMA nodes: which exist, what they hold, where a page is, and binding memory to one.

A node without CPUs (HBM of a GH200, CXL memory) is never ``dram``.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbench.machine.probe import ROOT, Fact, parse_cpu_list
from kvbench.memory import libc
from kvbench.memory.limits import read_text

QUERY_PAGES = 1 << 20  # pages asked per histogram: 4 GiB of 4 KiB pages exactly, evenly spaced ones beyond


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node: its CPUs (empty: a memory-only node), total and free memory in bytes (None: unknown)."""

    number: int
    cpus: tuple[int, ...]
    memory: int | None
    free: int | None

    @property
    def is_dram(self) -> bool:
        """True when the node has CPUs and does not report to be without memory."""
        return bool(self.cpus) and self.memory != 0


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def nodes(root: Path = ROOT) -> Fact[tuple[Node, ...]]:
    """Return the nodes of /sys/devices/system/node by number; None with the reason when /sys does not say."""
    folder = root / "sys/devices/system/node"
    found = []
    for path in sorted(folder.glob("node[0-9]*")) if folder.is_dir() else ():
        cpus, memory = read_text(path / "cpulist"), read_text(path / "meminfo").value or ""
        if cpus.value is None:
            return Fact(None, cpus.reason)
        try:
            node = Node(
                int(path.name[4:]), parse_cpu_list(cpus.value), _field(memory, "MemTotal"), _field(memory, "MemFree")
            )
        except ValueError:
            return Fact(None, f"{path / 'cpulist'}: cannot read {cpus.value[:60]!r}")
        found.append(node)
    if not found:
        return Fact(None, f"{folder}: no nodes listed")
    return Fact(tuple(sorted(found, key=lambda n: n.number)))


def dram_nodes(root: Path = ROOT) -> Fact[tuple[Node, ...]]:
    """Return the nodes that may be called ``dram``; None with the reason when unknown."""
    every = nodes(root)
    return every if every.value is None else Fact(tuple(n for n in every.value if n.is_dram))


def bind(address: int, nbytes: int, node: int) -> Fact[bool]:
    """Ask that pages of a range not touched yet come from ``node`` only.

    True: accepted. False with the reason: the kernel refused the request itself (no such node). None with the reason:
    the call is not allowed or not there (EPERM under a container's seccomp filter, ENOSYS), so placement is left to
    the kernel.
    """
    try:
        libc.mbind(address, nbytes, libc.MPOL_BIND, (node,))
    except OSError as error:
        unknown = error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS)
        return Fact(None if unknown else False, error.strerror or str(error))
    return Fact(True)


@contextmanager
def memory_policy(node: int) -> Iterator[Fact[bool]]:
    """Within the block, pages this thread touches first come from ``node`` only; yields what :func:`bind` returns."""
    try:
        mode, before = libc.get_mempolicy()
        libc.set_mempolicy(libc.MPOL_BIND, (node,))
    except OSError as error:
        unknown = error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS)
        yield Fact(None if unknown else False, error.strerror or str(error))
        return
    try:
        yield Fact(True)
    finally:
        libc.set_mempolicy(mode, before)


def node_of(address: int) -> Fact[int]:
    """Return the node holding the page of ``address``; None with the reason when it is not present or unknown."""
    page = libc.base_page_bytes()
    try:
        status = int(libc.page_nodes(np.array([address // page * page], np.uint64))[0])
    except OSError as error:
        return Fact(None, error.strerror or str(error))
    return Fact(status) if status >= 0 else Fact(None, f"no page there (errno {-status})")


def histogram(address: int, nbytes: int) -> Fact[dict[int, int]]:
    """Return node -> bytes of a page-aligned range by ``move_pages``, absent pages left out.

    Ranges beyond ``QUERY_PAGES`` pages are sampled at even spacing and scaled to the whole.
    """
    page = libc.base_page_bytes()
    pages = max(1, nbytes // page)
    step = -(-pages // QUERY_PAGES)
    addresses = address + np.arange(0, pages, step, dtype=np.uint64) * np.uint64(page)
    try:
        status = libc.page_nodes(addresses)
    except OSError as error:
        return Fact(None, error.strerror or str(error))
    numbers, counts = np.unique(status[status >= 0], return_counts=True)
    scale = nbytes / addresses.size
    return Fact({int(n): round(int(c) * scale) for n, c in zip(numbers, counts, strict=True)})
