"""The two keys of design 7: ``hw_class`` from stable hardware fields, ``env_digest`` from settings that move numbers.

Neither holds a reading that changes by itself: bogomips, clocks and free memory in a key have split histories.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbench.machine.gpu import Gpu, Gpus, read_gpus
from kvbench.machine.probe import ROOT, is_live, kilobytes, read_fields, read_int, read_size, read_text
from kvbench.machine.system import Json, system_facts
from kvbench.machine.topology import Topology, read_cpuinfo, read_topology

_SC_LEVEL3_CACHE_SIZE = 194  # bits/confname.h of glibc; Python has no name for it
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel", "HygonGenuine": "hygon", "CentaurHauls": "centaur"}
# arm64 "CPU implementer" codes: MIDR_EL1, Arm Architecture Reference Manual
_IMPLEMENTERS = {
    0x41: "arm", 0x42: "broadcom", 0x43: "cavium", 0x46: "fujitsu", 0x48: "hisilicon", 0x4E: "nvidia",
    0x51: "qualcomm", 0x61: "apple", 0x6D: "microsoft", 0xC0: "ampere",
}  # fmt: skip
_ISA = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16",
    "amx_tile", "clflushopt", "constant_tsc", "nonstop_tsc", "asimd", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One fact that sources tell differently; all of them are kept, none is believed over the others."""

    fact: str
    unit: str
    sources: dict[str, int | float]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What this box is (``machine``) and how it is set (``env``), JSON-ready, and the keys made from them.

    ``machine["key"]`` holds exactly the fields behind ``hw_class``; ``machine["facts"]`` those that are worth keeping
    but change with time or configuration (RAM, caches, names). ``gaps`` are (what, reason) of what could not be read.
    """

    hw_class: str
    machine: dict[str, Json]
    env_digest: str
    env: dict[str, Json]
    disagreements: tuple[Disagreement, ...]
    gaps: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CpuModel:
    """Vendor, family, model and stepping as text, None where /proc/cpuinfo does not say; ``name`` is for reading."""

    vendor: str | None
    family: str | None
    model: str | None
    stepping: str | None
    name: str | None


def cpu_model(root: Path = ROOT) -> CpuModel:
    """Return the CPU model of /proc/cpuinfo, x86 or arm64; cores of several kinds are joined with ``+``."""
    blocks = read_cpuinfo(root)

    def every(key: str) -> str | None:
        values = {block[key] for block in blocks if block.get(key)}
        return "+".join(sorted(values)) or None

    name = every("model name")
    vendor: str | None
    if implementer := every("CPU implementer"):
        try:
            vendor = _IMPLEMENTERS.get(int(implementer, 16), implementer)
        except ValueError:
            vendor = implementer
        part, variant, revision = every("CPU part"), every("CPU variant"), every("CPU revision")
        stepping = f"r{(variant or '?').removeprefix('0x')}p{revision or '?'}"
        return CpuModel(vendor, every("CPU architecture"), part and part.removeprefix("0x"), stepping, name)
    vendor_id = every("vendor_id")
    vendor = _VENDORS.get(vendor_id, vendor_id) if vendor_id else None
    return CpuModel(vendor, every("cpu family"), every("model"), every("stepping"), name)


def canonical(value: Json) -> str:
    """Return the one JSON text of ``value`` that digests are made from."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Json, digits: int) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:digits]


def fingerprint(root: Path = ROOT, gpus: Gpus | None = None) -> Fingerprint:
    """Return the fingerprint of the machine under ``root``. Never raises; what cannot be read is in ``gaps``.

    Call it in the parent process before any thread is pinned: the affinity mask is part of the environment.
    ``gpus`` stands in for what NVML says; a copied tree has none.
    """
    topology = read_topology(root)
    if gpus is None:
        gpus = (
            read_gpus() if is_live(root) else Gpus(None, reason="NVML answers for this machine, not for a copied tree")
        )
    model = cpu_model(root)
    key = _hardware_key(model, topology, gpus.boards)
    env, env_gaps = system_facts(topology, root)
    env["gpu"] = _gpu_settings(gpus)
    disagreements = tuple(_disagreements(topology, root))
    gaps = [*topology.gaps, *env_gaps]
    gaps += [(name, "/proc/cpuinfo does not say") for name in ("vendor", "family", "model") if not getattr(model, name)]
    if gpus.reason:
        gaps.append(("gpu", gpus.reason))
    for index, board in enumerate(gpus.boards):
        gaps += [(f"gpu {index} {call}", reason) for call, reason in board.gaps]
    machine: dict[str, Json] = {
        "key": key,
        "facts": _facts(model, topology, gpus, root),
        "disagreements": [{"fact": d.fact, "unit": d.unit, "sources": dict(d.sources)} for d in disagreements],
    }
    return Fingerprint(hw_class_of(key), machine, env_digest_of(env), env, disagreements, tuple(gaps))


def hw_class_of(key: dict[str, Json]) -> str:
    """Return the ``hw_class`` of a machine with the fields ``key``. Raises KeyError for one that is not there."""
    return f"{_slug(key)}-{digest(key, 8)}"


def env_digest_of(env: dict[str, Json]) -> str:
    """Return the key of an environment."""
    return digest(env, 16)


def _hardware_key(model: CpuModel, topology: Topology, boards: tuple[Gpu, ...]) -> dict[str, Json]:
    counted = Counter(
        (
            board.name,
            # rounded: ECC and the driver take megabytes of it, which is a setting and not another board
            None if board.memory_bytes is None else round(board.memory_bytes / 2**30),
            board.max_gen,
            board.max_width,
            # whether, not how many: a link that is down is a fault of this box and must show within one class
            None if board.nvlinks is None else board.nvlinks > 0,
            None if board.c2c_links is None else board.c2c_links > 0,
        )
        for board in boards
    )
    names = ("name", "memory_gib", "max_gen", "max_width", "nvlink", "c2c")
    gpus: list[Json] = [
        {**dict(zip(names, group, strict=True)), "count": count}
        for group, count in sorted(counted.items(), key=lambda item: repr(item[0]))
    ]
    nodes = sum(not node.cpuless for node in topology.nodes)  # a driver setting adds nodes that are GPU memory
    return {
        "cpu_vendor": model.vendor,
        "cpu_family": model.family,
        "cpu_model": model.model,
        "cpu_stepping": model.stepping,
        "sockets": topology.sockets,
        "numa_nodes": nodes or None,
        "cores": topology.cores or None,
        "gpus": gpus,
    }


def _slug(key: dict[str, Json]) -> str:
    def word(value: Json) -> str:
        text = re.sub(r"[^a-z0-9.+]+", "-", str(value).lower()).strip("-")[:24]
        return text if value is not None and text else "u"

    parts = [word(key[name]) for name in ("cpu_vendor", "cpu_family", "cpu_model", "cpu_stepping")]
    parts += [f"{tag}{word(key[name])}" for tag, name in (("s", "sockets"), ("n", "numa_nodes"), ("c", "cores"))]
    gpus = key["gpus"] if isinstance(key["gpus"], list) else []
    for gpu in gpus[:2]:
        if isinstance(gpu, dict):
            parts.append(f"{gpu['count']}x{word(re.sub('(?i)nvidia|geforce|tesla', '', str(gpu['name'])))}")
    return "-".join(parts)


def _gpu_settings(gpus: Gpus) -> Json:
    boards: list[Json] = [
        {
            "ecc": b.ecc,
            "mig": b.mig,
            # how a board is split decides what one part of it has
            "mig_instances": None
            if b.mig_instances is None
            else [[one.slices, one.sms, one.memory_bytes] for one in b.mig_instances],
            "power_limit_w": b.power_limit_w,
            "persistence": b.persistence,
            "addressing": b.addressing,
        }
        for b in gpus.boards
    ]
    return {"driver": gpus.driver, "cuda": gpus.cuda, "boards": boards}


def _facts(model: CpuModel, topology: Topology, gpus: Gpus, root: Path) -> dict[str, Json]:
    blocks = read_cpuinfo(root)
    flags = (blocks[0].get("flags") or blocks[0].get("Features") or "").split() if blocks else []
    llc = topology.llc()
    caches = Counter((cache.level, cache.kind, cache.bytes) for cache in topology.caches)
    dmi = {
        name: read_text(root, f"/sys/class/dmi/id/{name}").value
        for name in ("sys_vendor", "product_name", "board_name", "bios_version")
    }
    return {
        "cpu_name": model.name,
        "isa": [name for name in _ISA if name in flags],
        "threads_per_core": topology.threads_per_core,
        "cpus": len(topology.cpus),
        "llc_bytes": llc.bytes,
        "llc_unknown": llc.unknown,
        "caches": [
            {"level": level, "kind": kind, "bytes": size, "instances": count}
            for (level, kind, size), count in sorted(caches.items(), key=repr)
        ],
        "nodes": [
            {"id": node.id, "cpus": len(node.cpus), "memory_bytes": node.memory_bytes} for node in topology.nodes
        ],
        "memory_bytes": kilobytes(read_fields(root, "/proc/meminfo").get("MemTotal")),
        "dmi": dict(dmi),
        # through JSON: what is kept must read back equal, and the records hold tuples
        "gpus": json.loads(json.dumps([{k: v for k, v in asdict(b).items() if k != "gaps"} for b in gpus.boards])),
    }


def _disagreements(topology: Topology, root: Path) -> list[Disagreement]:
    blocks = read_cpuinfo(root)
    first = blocks[0] if blocks else {}
    l3: dict[str, int | float] = {}
    for cpu in topology.affinity[:1]:
        for index in range(8):
            base = f"/sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            size = read_size(root, f"{base}/size").value
            if size is not None and read_int(root, f"{base}/level").value == 3:
                l3["sysfs"] = size
    if is_live(root) and (reported := _sysconf_l3()) is not None:
        l3["sysconf"] = reported
    if (size := kilobytes(first.get("cache size", "").replace("KB", "kB"))) is not None:
        l3["cpuinfo cache size"] = size

    memory: dict[str, int | float] = {}
    if (total := kilobytes(read_fields(root, "/proc/meminfo").get("MemTotal"))) is not None:
        memory["meminfo"] = total
    sizes = [node.memory_bytes for node in topology.nodes]
    if sizes and all(size is not None for size in sizes):
        memory["sum of node meminfo"] = sum(size or 0 for size in sizes)

    clock: dict[str, int | float] = {}
    for name in ("cpuinfo_max_freq", "base_frequency", "scaling_cur_freq"):
        khz = read_int(root, f"/sys/devices/system/cpu/cpu0/cpufreq/{name}").value
        if khz is not None:
            clock[f"cpufreq {name}"] = khz / 1000
    if match := re.fullmatch(r"\d{1,5}(\.\d{1,6})?", first.get("cpu MHz", "")):
        clock["cpuinfo cpu MHz"] = float(match[0])

    cpus: dict[str, int | float] = {}
    if blocks:
        cpus["cpuinfo"] = sum("processor" in block for block in blocks)
    if topology.cpus:
        cpus["sysfs online"] = len(topology.cpus)
    candidates = (
        ("l3_bytes", "B", l3, 0.0),
        ("memory_bytes", "B", memory, 0.02),  # the kernel keeps a percent or so for itself
        ("cpu_clock", "MHz", clock, 0.02),
        ("logical_cpus", "1", cpus, 0.0),
    )
    return [
        Disagreement(fact, unit, sources)
        for fact, unit, sources, tolerance in candidates
        if sources and max(sources.values()) > min(sources.values()) * (1 + tolerance)
    ]


def _sysconf_l3() -> int | None:
    """glibc's L3 (CPUID): on one guest it says 320 MB where sysfs says 32; memcpy thresholds follow it."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return None
    try:
        return os.sysconf(_SC_LEVEL3_CACHE_SIZE) or None
    except (OSError, ValueError):
        return None
