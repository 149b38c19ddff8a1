"""NVIDIA boards as NVML describes them: what stays put between two readings. Present state: :mod:`nvml_state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbench.machine.nvml import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Asker,
    as_text,
    library_loads,
    use,
    uuid_hash,
)
from kvbench.machine.probe import format_cpu_list

# field ids of nvml.h (NVML_FI_DEV_...)
_NVLINK_SPEED_COMMON = 90  # MB/s of one link that is up
_C2C_LINK_COUNT = 170  # CUDA 12.3 and later, as the two below
_C2C_STATUS = 171  # by link: 1 is up
_C2C_MAX_BW = 172  # by link, MB/s
_MAX_NVLINKS = 36  # Rubin-class boards; NVML answers "invalid argument" beyond what a board has
_MAX_C2C_LINKS = 64  # a count beyond this is no count
_MAX_CPUS = 8192  # CONFIG_NR_CPUS_RANGE_END of the kernel: NVML wants to know how long its answer may be
_MAX_NODES = 1024  # MAX_NUMNODES
_SCOPE_NODE = 0  # NVML_AFFINITY_SCOPE_NODE
_CLOCK_SM, _CLOCK_MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_ADDRESSING = {0: "none", 1: "hmm", 2: "ats"}
_VIRTUALISATION = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host_vgpu", 4: "host_vsga"}


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG device. It has a part of the board's SMs, L2 and memory bandwidth, and shares the link to the host.

    ``slices`` are the compute slices of its GPU instance; ``memory_bytes`` what it may hold.
    """

    gpu_instance: int | None = None
    compute_instance: int | None = None
    name: str | None = None
    slices: int | None = None
    sms: int | None = None
    copy_engines: int | None = None
    memory_bytes: int | None = None
    uuid_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One board. None means that the board or this driver does not say; ``gaps`` holds (call, reason).

    ``max_gen`` and ``max_width`` are what board **and** slot can do, ``own_max_gen`` the board alone; none of them is
    the present state: an idle link drops. ``uuid_hash`` tells boards apart without publishing a serial number.
    ``nvlinks`` are links that are up, ``nvlinks_total`` those the board has; the ``*_mb_s`` are MB/s of one link.
    ``power_limit_w`` is the limit set, ``enforced_limit_w`` the least of all limits that apply, MHz are maxima.
    ``cpus`` (as the kernel writes lists) and ``memory_nodes`` are near the board; ``gpu_node`` is the NUMA node that
    its memory is, where the host sees it as one (GH200: such a node is never ``dram``). ``mig_instances`` is None where
    MIG is on and its devices cannot be listed.
    """

    name: str
    memory_bytes: int | None = None
    max_gen: int | None = None
    max_width: int | None = None
    nvlinks: int | None = None
    c2c_links: int | None = None
    ecc: bool | None = None
    mig: bool | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    persistence: bool | None = None
    uuid_hash: str | None = None
    bus_id: str | None = None
    enforced_limit_w: float | None = None
    own_max_gen: int | None = None
    nvlinks_total: int | None = None
    nvlink_version: int | None = None
    nvlink_mb_s: float | None = None
    c2c_mb_s: float | None = None
    max_sm_mhz: int | None = None
    max_memory_mhz: int | None = None
    memory_bus_bits: int | None = None
    compute_capability: str | None = None
    compute_mode: str | None = None
    addressing: str | None = None
    virtualisation: str | None = None
    cpus: str | None = None
    memory_nodes: tuple[int, ...] | None = None
    gpu_node: int | None = None
    mig_instances: tuple[MigInstance, ...] | None = ()
    gaps: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Gpus:
    """All boards NVML lists, in PCI bus order. ``present`` is None when that cannot be told.

    ``reason`` says why there is no list.
    """

    present: bool | None
    boards: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    reason: str = ""


def read_gpus(nvml: Any = None, loads: Callable[[], bool] = library_loads) -> Gpus:
    """Return the boards of this machine; ``nvml`` stands in for the module pynvml. Never raises."""
    with use(nvml, loads) as found:
        if found.module is None:
            return Gpus(False if found.absent else None, reason=found.reason)
        ask = Asker(found.module)
        driver = ask.text("nvmlSystemGetDriverVersion")
        version = ask.integer("nvmlSystemGetCudaDriverVersion")
        cuda = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
        count = ask.integer("nvmlDeviceGetCount")
        if count is None:
            why = dict(ask.gaps).get("nvmlDeviceGetCount", "not a number")
            return Gpus(None, driver=driver, cuda=cuda, reason=f"nvmlDeviceGetCount: {why}")
        boards = tuple(_board(found.module, index) for index in range(count))
        return Gpus(count > 0, boards, driver, cuda, "" if count else "the driver lists no GPU")


def _board(nvml: Any, index: int) -> Gpu:
    ask = Asker(nvml)
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(name="unknown", gaps=tuple(ask.gaps))
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    ecc, mig = ask("nvmlDeviceGetEccMode", handle), ask("nvmlDeviceGetMigMode", handle)
    persistence = ask.integer("nvmlDeviceGetPersistenceMode", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    pci = ask("nvmlDeviceGetPciInfo", handle)
    up, links = _nvlinks(ask, handle)
    c2c, c2c_mb_s = _c2c(ask, handle)
    cpus = ask.mask("nvmlDeviceGetCpuAffinity", handle, _MAX_CPUS)
    own_node = ask.integer("nvmlDeviceGetNumaNodeId", handle)
    in_mig = _first_is_on(mig)
    return Gpu(
        name=ask.text("nvmlDeviceGetName", handle) or "unknown",
        memory_bytes=_total(memory),
        max_gen=ask.integer("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        max_width=ask.integer("nvmlDeviceGetMaxPcieLinkWidth", handle),
        nvlinks=up,
        c2c_links=c2c,
        ecc=_first_is_on(ecc),
        mig=in_mig,
        power_limit_w=_watts(ask.integer("nvmlDeviceGetPowerManagementLimit", handle)),
        default_power_limit_w=_watts(ask.integer("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        persistence=None if persistence is None else bool(persistence),
        uuid_hash=uuid_hash(ask.text("nvmlDeviceGetUUID", handle)),
        bus_id=as_text(getattr(pci, "busId", None)),
        enforced_limit_w=_watts(ask.integer("nvmlDeviceGetEnforcedPowerLimit", handle)),
        own_max_gen=ask.integer("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        nvlinks_total=links,
        nvlink_version=ask.integer("nvmlDeviceGetNvLinkVersion", handle, 0) if links else None,
        nvlink_mb_s=ask.fields(handle, [_NVLINK_SPEED_COMMON])[0] if up else None,
        c2c_mb_s=c2c_mb_s,
        max_sm_mhz=ask.integer("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM),
        max_memory_mhz=ask.integer("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEMORY),
        memory_bus_bits=ask.integer("nvmlDeviceGetMemoryBusWidth", handle),
        compute_capability=".".join(map(str, capability)) if isinstance(capability, list | tuple) else None,
        compute_mode=_word(ask.integer("nvmlDeviceGetComputeMode", handle), _COMPUTE_MODES),
        addressing=_word(ask.integer("nvmlDeviceGetAddressingMode", handle), _ADDRESSING),
        virtualisation=_word(ask.integer("nvmlDeviceGetVirtualizationMode", handle), _VIRTUALISATION),
        cpus=format_cpu_list(cpus) if cpus else None,
        memory_nodes=ask.mask("nvmlDeviceGetMemoryAffinity", handle, _MAX_NODES, _SCOPE_NODE) or None,
        gpu_node=own_node if own_node is not None and own_node >= 0 else None,  # -1: its memory is no node
        mig_instances=_instances(ask, handle) if in_mig else (),
        gaps=tuple(ask.gaps),
    )


def mig_handles(ask: Asker, handle: Any) -> list[Any] | None:
    """Return the handles of a board's MIG devices (their indices may have holes), None when they cannot be listed."""
    count = ask.integer("nvmlDeviceGetMaxMigDeviceCount", handle)
    name = "nvmlDeviceGetMigDeviceHandleByIndex"
    found = [ask(name, handle, index, ends=(NOT_FOUND, INVALID_ARGUMENT)) for index in range(count or 0)]
    # a refusal (no permission) must not read as "split into nothing"
    return None if count is None or ask.failed(name) else [child for child in found if child is not None]


def _instances(ask: Asker, handle: Any) -> tuple[MigInstance, ...] | None:
    handles = mig_handles(ask, handle)
    return None if handles is None else tuple(_instance(ask, child) for child in handles)


def _instance(ask: Asker, handle: Any) -> MigInstance:
    attributes = ask("nvmlDeviceGetAttributes", handle)

    def attribute(name: str) -> int | None:
        value = getattr(attributes, name, None)
        return int(value) if isinstance(value, int) else None

    size = attribute("memorySizeMB")
    return MigInstance(
        gpu_instance=ask.integer("nvmlDeviceGetGpuInstanceId", handle),
        compute_instance=ask.integer("nvmlDeviceGetComputeInstanceId", handle),
        name=ask.text("nvmlDeviceGetName", handle),
        slices=attribute("gpuInstanceSliceCount"),
        sms=attribute("multiprocessorCount"),
        copy_engines=attribute("sharedCopyEngineCount"),
        memory_bytes=size * 2**20 if size is not None else _total(ask("nvmlDeviceGetMemoryInfo", handle)),
        uuid_hash=uuid_hash(ask.text("nvmlDeviceGetUUID", handle)),
    )


def _nvlinks(ask: Asker, handle: Any) -> tuple[int | None, int | None]:
    """Links up and links there are; None when the first gives no answer (boards without NVLink: "not supported")."""
    up = 0
    for link in range(_MAX_NVLINKS):
        ends = (INVALID_ARGUMENT, NOT_SUPPORTED) if link else ()
        state = ask("nvmlDeviceGetNvLinkState", handle, link, ends=ends)
        if state is None:
            return (None, None) if link == 0 or ask.failed("nvmlDeviceGetNvLinkState") else (up, link)
        up += bool(state)
    return up, _MAX_NVLINKS


def _c2c(ask: Asker, handle: Any) -> tuple[int | None, float | None]:
    """Return the links up between CPU and GPU and the MB/s of the slowest one."""
    count = ask.fields(handle, [_C2C_LINK_COUNT])[0]
    if count is None or not 0 < count <= _MAX_C2C_LINKS:
        return (0 if count == 0 else None), None
    links = range(int(count))
    states = ask.fields(handle, [(_C2C_STATUS, link) for link in links])
    if None in states:
        return int(count), None  # older drivers count the links and say no more
    up = [link for link, state in zip(links, states, strict=True) if state]
    speeds = [speed for speed in ask.fields(handle, [(_C2C_MAX_BW, link) for link in up]) if speed] if up else []
    return len(up), min(speeds, default=None)


def _first_is_on(modes: Any) -> bool | None:
    """Return the current one of NVML's (current, pending) modes."""
    return bool(modes[0]) if isinstance(modes, list | tuple) and modes else None


def _total(memory: Any) -> int | None:
    total = getattr(memory, "total", None)
    return int(total) if isinstance(total, int) and total > 0 else None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _word(value: int | None, words: dict[int, str]) -> str | None:
    return None if value is None else words.get(value, f"unknown:{value}")
