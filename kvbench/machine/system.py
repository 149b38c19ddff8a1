"""Settings of the running system that move numbers: kernel, governor, page policy, virtualisation, libraries.

Only what stays put between two readings: the env key is a digest over these facts.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from kvbench.machine.cgroup import container_signs, cpu_quota
from kvbench.machine.probe import (
    ROOT,
    Fact,
    format_cpu_list,
    is_live,
    read_choice,
    read_fields,
    read_flag,
    read_int,
    read_text,
    under,
)
from kvbench.machine.topology import Topology, read_cpuinfo

LIBRARIES = (
    "numpy", "scipy", "numba", "llvmlite", "torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings",
    "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12",
)  # fmt: skip
# boot options that move numbers; the rest of the command line may hold addresses and tokens and is never kept
_BOOT_OPTIONS = re.compile(
    r"(mitigations|isolcpus|nohz|nohz_full|rcu_nocbs|transparent_hugepage|hugepages|hugepagesz|default_hugepagesz"
    r"|numa_balancing|idle|processor\.max_cstate|intel_idle\.max_cstate|intel_pstate|amd_pstate|iommu|intel_iommu"
    r"|amd_iommu|iommu\.passthrough|iommu\.strict|psi|nosmt|clocksource|tsc|preempt|cpuidle\.off|init_on_alloc"
    r"|init_on_free)(=[\w.,:+-]{0,80})?"
)

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


def governors(root: Path = ROOT) -> Fact[tuple[str, ...]]:
    """Return the distinct cpufreq governors of all CPUs."""
    base = under(root, "/sys/devices/system/cpu/cpufreq")
    try:
        policies = sorted(entry.name for entry in base.iterdir() if entry.name.startswith("policy"))
    except OSError:
        policies = []
    if not policies:
        return Fact(None, "no cpufreq policy: in a guest the host decides, elsewhere no driver is loaded")
    found = {read_text(root, f"/sys/devices/system/cpu/cpufreq/{name}/scaling_governor").value for name in policies}
    known = tuple(sorted(governor for governor in found if governor))
    return Fact(known, source="cpufreq") if known else Fact(None, "cpufreq policies without a readable governor")


def boost(root: Path = ROOT) -> Fact[bool]:
    """Return whether turbo clocks are allowed."""
    no_turbo = read_flag(root, "/sys/devices/system/cpu/intel_pstate/no_turbo")
    if no_turbo.value is not None:
        return Fact(not no_turbo.value, source=no_turbo.source)
    return read_flag(root, "/sys/devices/system/cpu/cpufreq/boost")


def hypervisor_flag(root: Path = ROOT) -> Fact[bool]:
    """Return whether this is a guest as far as the CPU tells; arm64 has no such flag."""
    blocks = read_cpuinfo(root)
    flags = blocks[0].get("flags") if blocks else None
    if flags is not None:
        return Fact("hypervisor" in flags.split(), source="/proc/cpuinfo flags")
    if read_text(root, "/sys/hypervisor/type").value:
        return Fact(True, source="/sys/hypervisor/type")
    return Fact(None, "this CPU reports no hypervisor flag")


def is_wsl(root: Path = ROOT) -> bool:
    """Return whether the kernel is the one of the Windows Subsystem for Linux."""
    return "microsoft" in (read_text(root, "/proc/sys/kernel/osrelease").value or "").lower()


def virtualisation(root: Path = ROOT) -> Fact[str]:
    """Return ``none``, ``wsl``, ``vm`` or ``vm:<name>``; the name only where a source gives one."""
    if is_wsl(root):
        return Fact("wsl", source="/proc/sys/kernel/osrelease")
    vendor = " ".join(
        read_text(root, f"/sys/class/dmi/id/{name}").value or "" for name in ("sys_vendor", "product_name")
    ).lower()
    clocks = (read_text(root, "/sys/devices/system/clocksource/clocksource0/available_clocksource").value or "").split()
    xen = read_text(root, "/sys/hypervisor/type").value
    names = (
        ("kvm", "kvm-clock" in clocks or "kvm" in vendor or "qemu" in vendor),
        ("hyperv", "virtual machine" in vendor and "microsoft" in vendor),
        ("vmware", "vmware" in vendor),
        ("xen", xen == "xen"),
    )
    name = next((name for name, found in names if found), None)
    flag = hypervisor_flag(root)
    if flag.value or name:
        return Fact(f"vm:{name}" if name else "vm", source=flag.source or "DMI, clock sources")
    return Fact("none", source=flag.source) if flag.value is False else Fact(None, flag.reason)


def microcode(root: Path = ROOT) -> Fact[str]:
    blocks = read_cpuinfo(root)
    value = blocks[0].get("microcode") if blocks else None
    return Fact(value, source="/proc/cpuinfo") if value else Fact(None, "/proc/cpuinfo names no microcode")


def swap_on(root: Path = ROOT) -> Fact[bool]:
    text = read_text(root, "/proc/swaps")
    return (
        Fact(None, text.reason) if text.value is None else Fact(len(text.value.splitlines()) > 1, source="/proc/swaps")
    )


def psi_available(root: Path = ROOT) -> bool:
    """Return whether pressure stall information can be read (compiled in and not switched off with psi=0)."""
    return (read_text(root, "/proc/pressure/cpu").value or "").startswith("some")


def boot_options(root: Path = ROOT) -> Fact[tuple[str, ...]]:
    """Return the boot options that move numbers, sorted."""
    line = read_text(root, "/proc/cmdline")
    if line.value is None:
        return Fact(None, line.reason)
    return Fact(tuple(sorted({word for word in line.value.split() if _BOOT_OPTIONS.fullmatch(word)})), source="cmdline")


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the installed versions that move numbers, without importing anything."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES: indices as they are, opaque ids (GPU-..., MIG-...) hashed."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or re.fullmatch(r"[0-9, ]*", value):
        return value
    return "hash:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _bare(fact: Fact[str] | Fact[int] | Fact[bool]) -> Json:
    return fact.value


def system_facts(topology: Topology, root: Path = ROOT) -> tuple[dict[str, Json], list[tuple[str, str]]]:
    """Return (env facts, what could not be read with the reason). Every value is stable between two readings."""
    quota, governor, options = cpu_quota(root), governors(root), boot_options(root)
    quota_value: Json = None
    if quota.value is not None:
        quota_value = "none" if quota.value.value is None else round(quota.value.value, 3)
    status = read_fields(root, "/proc/self/status")
    thp = "/sys/kernel/mm/transparent_hugepage"
    clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    single: dict[str, Fact[str] | Fact[int] | Fact[bool]] = {
        "kernel": read_text(root, "/proc/sys/kernel/osrelease"),
        "cpufreq_driver": read_text(root, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"),
        "boost": boost(root),
        "smt": read_text(root, "/sys/devices/system/cpu/smt/control"),
        "thp": read_choice(root, f"{thp}/enabled"),
        "thp_defrag": read_choice(root, f"{thp}/defrag"),
        "thp_shmem": read_choice(root, f"{thp}/shmem_enabled"),
        "numa_balancing": read_int(root, "/proc/sys/kernel/numa_balancing"),
        "autogroup": read_flag(root, "/proc/sys/kernel/sched_autogroup_enabled"),
        "overcommit": read_int(root, "/proc/sys/vm/overcommit_memory"),
        "clocksource": read_text(root, clock),
        "virtualisation": virtualisation(root),
        "microcode": microcode(root),
        "swap": swap_on(root),
        "page_bytes": topology.page_bytes,
    }
    gaps = [(name, fact.reason) for name, fact in single.items() if fact.value is None]
    many = (("governor", governor.value, governor.reason), ("boot_options", options.value, options.reason))
    gaps += [(name, reason) for name, value, reason in many if value is None]
    if quota.value is None:
        gaps.append(("cpu_quota", quota.reason))
    env: dict[str, Json] = {name: _bare(fact) for name, fact in single.items()}
    env |= {
        "governor": None if governor.value is None else list(governor.value),
        "boot_options": None if options.value is None else list(options.value),
        "cpu_quota": quota_value,
        "container": list(container_signs(root)),
        "affinity": format_cpu_list(topology.affinity),
        "mems_allowed": status.get("Mems_allowed_list"),
        # GPU memory on a coherent link and CXL show up here; which do depends on driver and settings
        "memory_only_nodes": [node.id for node in topology.nodes if node.cpuless],
        "psi": psi_available(root),
    }
    if is_live(root):
        env |= {
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "libc": " ".join(platform.libc_ver()).strip() or None,
            "libraries": dict(library_versions()),
            "cuda_visible_devices": visible_devices(),
        }
    return env, gaps
