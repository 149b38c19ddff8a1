"""What stands between this machine and a trustworthy number: what was found, what it costs, the command that mends it.

The checks here read settings under ``root``; those that try something out are in :mod:`kvbench.machine.trial`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.machine.cgroup import cpu_quota
from kvbench.machine.gpu import Gpus
from kvbench.machine.physical import pcie_links
from kvbench.machine.probe import ROOT, read_choice, read_fields, read_int, read_text
from kvbench.machine.system import governors, is_wsl, swap_on
from kvbench.machine.topology import Topology
from kvbench.units import GiB, format_bytes

Effect = Literal["blocks", "distorts", "limits"]

MEMLOCK_ENOUGH = GiB  # the largest buffer of the ladder
_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h: with it the memlock limit does not bind
_NVIDIA = "0x10de"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_CLOCK = "/sys/devices/system/clocksource/clocksource0"
# clock sources the kernel reads without leaving user space; all others cost a system call and often a device access
_FAST_CLOCKS = ("tsc", "arch_sys_counter", "riscv_clocksource", "timebase")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """``effect``: it ``blocks`` a tier or method, ``distorts`` numbers, or ``limits`` what can be asked for."""

    name: str
    effect: Effect
    found: str
    costs: str
    mend: str


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A check that could not be made, and why: neither an obstacle nor its absence."""

    name: str
    reason: str


Finding = Obstacle | Unchecked | None


def memlock(root: Path = ROOT) -> Finding:
    line = next(
        (
            t
            for t in (read_text(root, "/proc/self/limits").value or "").splitlines()
            if t.startswith("Max locked memory")
        ),
        None,
    )
    words = line.split() if line else []
    if len(words) < 4 or not (words[3] == "unlimited" or words[3].isdigit()):
        return Unchecked("memlock", "no readable 'Max locked memory' in /proc/self/limits")
    if words[3] == "unlimited" or int(words[3]) >= MEMLOCK_ENOUGH:
        return None
    try:
        if int(read_fields(root, "/proc/self/status").get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
            return None
    except ValueError:
        return Unchecked("memlock", "CapEff in /proc/self/status is not a number")
    return Obstacle(
        "memlock", "limits", f"{format_bytes(int(words[3]))} of memory may be locked",
        "larger locked or registered host buffers are refused",
        "ulimit -l unlimited (needs 'memlock unlimited' in /etc/security/limits.conf; docker run --ulimit memlock=-1)",
    )  # fmt: skip


def thp(root: Path = ROOT) -> Finding:
    mode = read_choice(root, _THP)
    if mode.value is None:
        return Unchecked("thp", mode.reason)
    if mode.value != "never":
        return None
    return Obstacle(
        "thp", "blocks", "transparent huge pages are off (never)",
        "pages=thp is skipped; one thread read 37 % more from huge pages than from 4 KiB ones on a Zen 4 guest",
        f"echo madvise | sudo tee {_THP}",
    )  # fmt: skip


def huge_pages(root: Path = ROOT) -> Finding:
    fields = read_fields(root, "/proc/meminfo")
    total = fields.get("HugePages_Total")
    if total is None or not total.isdigit():
        return Unchecked("huge_pages", "no HugePages_Total in /proc/meminfo")
    if int(total):
        return None
    return Obstacle(
        "huge_pages", "blocks", f"no huge pages of {fields.get('Hugepagesize', 'the default size')} are reserved",
        "pages=huge is skipped", "sudo sysctl vm.nr_hugepages=640",
    )  # fmt: skip


def clocksource(root: Path = ROOT) -> Finding:
    current = read_text(root, f"{_CLOCK}/current_clocksource")
    if current.value is None:
        return Unchecked("clocksource", current.reason)
    if current.value in _FAST_CLOCKS:
        return None
    available = (read_text(root, f"{_CLOCK}/available_clocksource").value or "").split()
    best = next((clock for clock in _FAST_CLOCKS if clock in available), None)
    return Obstacle(
        "clocksource", "distorts", f"the clock source is {current.value}",
        "reading the clock may cost a system call and may step: short blocks read long",
        f"echo {best} | sudo tee {_CLOCK}/current_clocksource" if best
        else "give the guest an invariant TSC, or boot with tsc=reliable where the TSC is known to be synchronous",
    )  # fmt: skip


def quota(root: Path = ROOT, cpus: int = 1) -> Finding:
    """``cpus``: how many CPUs the affinity mask holds; a quota of that many can never bind."""
    limit = cpu_quota(root)
    if limit.value is None:
        return Unchecked("cpu_quota", limit.reason)
    if limit.value.value is None or limit.value.value >= cpus:
        return None
    return Obstacle(
        "cpu_quota", "distorts", f"{limit.value.source} allows {limit.value.value:g} of {cpus} CPUs",
        "more busy threads than that are stopped for the rest of every period (100 ms as a rule)",
        "docker run without --cpus (Kubernetes: no cpu limit), or taskset to as many CPUs as the quota allows",
    )  # fmt: skip


def numa_balancing(root: Path = ROOT, nodes: int = 1) -> Finding:
    setting = read_int(root, "/proc/sys/kernel/numa_balancing")
    if setting.value is None:
        return Unchecked("numa_balancing", setting.reason) if nodes > 1 else None
    if setting.value == 0 or nodes < 2:  # with one node there is nowhere to move a page
        return None
    return Obstacle(
        "numa_balancing", "distorts", "automatic NUMA balancing is on",
        "pages move between nodes during a measurement, and page faults are injected to find out which",
        "sudo sysctl kernel.numa_balancing=0",
    )  # fmt: skip


def governor(root: Path = ROOT) -> Finding:
    found = governors(root)
    if found.value is None:
        return Unchecked("governor", found.reason)
    if found.value == ("performance",):
        return None
    return Obstacle(
        "governor", "distorts", f"the CPU frequency governor is {', '.join(found.value)}",
        "clocks ramp up during a measurement and differ from run to run",
        "sudo cpupower frequency-set -g performance",
    )  # fmt: skip


def gpu_driver(root: Path = ROOT, gpus: Gpus | None = None) -> Finding:
    if gpus is None or gpus.present:
        return None
    if gpus.present is None:
        return Unchecked("gpu_driver", gpus.reason)
    on_bus = [link.address for link in pcie_links(root) if link.vendor == _NVIDIA]
    if on_bus:
        found = f"an NVIDIA device is on the bus ({', '.join(on_bus[:4])}) but {gpus.reason}"
        mend = "install the NVIDIA driver; in a container: docker run --gpus all (NVIDIA Container Toolkit on the host)"
    else:
        found = f"no NVIDIA device on the bus; {gpus.reason}"
        mend = "run on a machine with an NVIDIA GPU; in a container of one: docker run --gpus all"
    return Obstacle(
        "gpu_driver", "blocks", found, "hbm, pinned, pageable and managed do not exist: GPU cases are skipped", mend
    )


def wsl(root: Path = ROOT) -> Finding:
    if not is_wsl(root):
        return None
    return Obstacle(
        "wsl", "limits", "this is the Windows Subsystem for Linux",
        "pinned allocations beyond 0.5 to 1 GB have failed with a sticky CUDA error; the host's load does not show",
        "measure under Linux on the hardware itself",
    )  # fmt: skip


def swap(root: Path = ROOT) -> Finding:
    on = swap_on(root)
    if on.value is None:
        return Unchecked("swap", on.reason)
    if not on.value:
        return None
    return Obstacle(
        "swap", "distorts", "swap is on",
        "pages of a large buffer may be on a disk when they are read", "sudo swapoff -a",
    )  # fmt: skip


def settings(root: Path, topology: Topology, gpus: Gpus) -> list[Obstacle | Unchecked]:
    """Return the findings of every check of this module, obstacles and checks that could not be made."""
    nodes = sum(not node.cpuless for node in topology.nodes)
    checks: tuple[Callable[[], Finding], ...] = (
        lambda: gpu_driver(root, gpus),
        lambda: memlock(root),
        lambda: thp(root),
        lambda: huge_pages(root),
        lambda: numa_balancing(root, nodes),
        lambda: governor(root),
        lambda: clocksource(root),
        lambda: quota(root, len(topology.affinity)),
        lambda: swap(root),
        lambda: wsl(root),
    )
    return [finding for finding in (check() for check in checks) if finding is not None]
