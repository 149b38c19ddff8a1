"""Which GPUs to measure: what there is, what CUDA_VISIBLE_DEVICES leaves, and what ``--device`` chooses of that.

UUIDs are read here and handed to CUDA; they are never stored or printed in full (records keep their hash).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import UsageError
from kvbench.machine.gpu import mig_handles
from kvbench.machine.nvml import Asker, library_loads, use, uuid_hash
from kvbench.machine.probe import Fact
from kvbench.machine.topology import Topology

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
ALL = "all"
_SCOPE_NODE = 0  # NVML_AFFINITY_SCOPE_NODE
_MAX_NODES = 1024
_SHOWN = 8  # UUID characters that are shown: enough to choose by, too few to tell the serial number of a board
# "MIG-GPU-<uuid of the board>/<GPU instance>/<compute instance>": the name of MIG devices before driver 470
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]+)/([0-9]{1,4})/([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Device:
    """Something CUDA can run on: a board, or one MIG instance of a board.

    ``index`` is NVML's, in PCI bus order as ``kvbench doctor`` lists them; ``mig`` the instance's place on its board.
    ``board`` is the hash of the **board's** UUID: instances share its link, power and clocks. ``nodes`` are the NUMA
    nodes near it.
    """

    index: int
    name: str
    uuid: str = field(repr=False)
    board: str | None = None
    mig: int | None = None
    instance: tuple[int, int] | None = None
    board_uuid: str = field(default="", repr=False)
    nodes: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        """``0`` for a board, ``0:1`` for an instance on it."""
        return str(self.index) if self.mig is None else f"{self.index}:{self.mig}"

    @property
    def short_uuid(self) -> str:
        kind, dash, rest = self.uuid.partition("-")
        return f"{kind}-{rest[:_SHOWN]}" if dash else "no UUID"

    @property
    def cuda_id(self) -> str:
        """The entry of CUDA_VISIBLE_DEVICES that names it; its index needs CUDA_DEVICE_ORDER=PCI_BUS_ID."""
        return self.uuid or str(self.index)

    @property
    def lock(self) -> str:
        """Name of the lock on the whole board."""
        return f"gpu-{self.board}" if self.board else f"gpu-index{self.index}"

    def describe(self) -> str:
        return f"{self.id} = {self.name} ({self.short_uuid})"


@dataclass(frozen=True, slots=True)
class Devices:
    """Everything CUDA could run on. ``reason`` says why there is nothing, or what could not be listed."""

    found: tuple[Device, ...] = ()
    reason: str = ""

    def describe(self) -> str:
        """Return what there is on one line."""
        return ", ".join(device.describe() for device in self.found) or f"no GPU ({self.reason})"


def read_devices(nvml: Any = None, loads: Callable[[], bool] = library_loads) -> Devices:
    """Return the devices of this machine; ``nvml`` stands in for the module pynvml. Never raises.

    A board in MIG mode is not among them (CUDA cannot run on it), its instances are.
    """
    with use(nvml, loads) as opened:
        if opened.module is None:
            return Devices(reason=opened.reason)
        found: list[Device] = []
        problems: list[str] = []
        ask = Asker(opened.module)
        count = ask.integer("nvmlDeviceGetCount")
        for index in range(count or 0):
            _add(Asker(opened.module), index, found, problems)
        if not count:
            problems.append(f"nvmlDeviceGetCount: {ask.gaps[0][1]}" if ask.gaps else "the driver lists no GPU")
        return Devices(tuple(found), "; ".join(problems))


def _add(ask: Asker, index: int, found: list[Device], problems: list[str]) -> None:
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        problems.append(f"GPU {index}: {ask.gaps[0][1]}")
        return
    name = ask.text("nvmlDeviceGetName", handle) or "unknown"
    uuid = ask.text("nvmlDeviceGetUUID", handle) or ""
    nodes = ask.mask("nvmlDeviceGetMemoryAffinity", handle, _MAX_NODES, _SCOPE_NODE) or ()
    board = uuid_hash(uuid)
    mode = ask("nvmlDeviceGetMigMode", handle)
    if not (isinstance(mode, list | tuple) and mode and mode[0]):
        found.append(Device(index, name, uuid, board, board_uuid=uuid, nodes=nodes))
        return
    children = mig_handles(ask, handle)
    if not children:
        why = "cannot be listed" if children is None else "are none"
        problems.append(f"GPU {index} is in MIG mode and its instances {why}")
    for place, child in enumerate(children or ()):
        own = ask.text("nvmlDeviceGetUUID", child)
        if not own:
            problems.append(f"GPU {index}: instance {place} tells no UUID")
            continue
        ids = ask.integer("nvmlDeviceGetGpuInstanceId", child), ask.integer("nvmlDeviceGetComputeInstanceId", child)
        instance = (ids[0], ids[1]) if ids[0] is not None and ids[1] is not None else None
        label = ask.text("nvmlDeviceGetName", child) or f"{name} MIG"
        found.append(Device(index, label, own, board, place, instance, uuid, nodes))


def visible(devices: Devices, environ: Mapping[str, str] = os.environ) -> Fact[tuple[Device, ...]]:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves, in its order. Entries are opaque: never assumed numbers.

    Rules of the CUDA C++ Programming Guide ("CUDA Environment Variables"): unset leaves all; the list ends at the first
    entry that names nothing; a UUID may be shortened while it is unambiguous. No value, with the reason, where an entry
    cannot be mapped to a board: indices count in CUDA's order, which is the bus order (NVML's) only with
    CUDA_DEVICE_ORDER=PCI_BUS_ID or, as drivers do it, on boards of one model.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return Fact(devices.found, source="all")
    chosen: list[Device] = []
    for entry in (part.strip() for part in text.split(",")):
        if re.fullmatch(r"[0-9]{1,4}", entry):
            if len({device.name for device in devices.found}) > 1 and environ.get(ORDER) != "PCI_BUS_ID":
                return Fact(None, f"{VISIBLE} counts in an order of CUDA's own; export {ORDER}=PCI_BUS_ID", VISIBLE)
            if any(device.mig is not None for device in devices.found):
                return Fact(None, f"{VISIBLE} counts boards while MIG is on; name MIG-<uuid> in it", VISIBLE)
            named = [device for device in devices.found if device.index == int(entry)]
        else:
            named = _by_uuid(entry, devices.found)
        if len(named) != 1:
            break
        if named[0] in chosen:
            return Fact(None, f"{VISIBLE} names a device twice: CUDA then shows none", VISIBLE)
        chosen += named
    return Fact(tuple(chosen), source=VISIBLE)


def _by_uuid(entry: str, devices: Sequence[Device]) -> list[Device]:
    """Return the devices whose UUID begins with ``entry``; the kind (GPU-, MIG-) must be part of it."""
    if match := _OLD_MIG.fullmatch(entry):
        ids = (int(match[2]), int(match[3]))
        return [d for d in devices if d.instance == ids and d.board_uuid.startswith(match[1])]
    if not re.match(r"(GPU|MIG)-[0-9A-Za-z]", entry):
        return []
    return [device for device in devices if device.uuid and device.uuid.startswith(entry)]


def choose(
    spec: str | None, devices: Devices, environ: Mapping[str, str] = os.environ, where: str = "--device"
) -> tuple[Device, ...]:
    """Return the devices ``spec`` names: indices (``0``, MIG ``0:1``), UUID prefixes, or ``all``; None means all.

    Only visible ones can be chosen. Raises UsageError on one line that lists what there is: for an unknown, ambiguous,
    hidden or repeated device, for a board in MIG mode, and for any ``spec`` on a machine without a GPU.
    """
    left = visible(devices, environ)
    if spec is None:
        return left.value or ()
    there = f"one of: {devices.describe()}; or {ALL}"
    if not devices.found:
        raise UsageError(
            "there is no GPU here", where=where, got=spec, expected="no --device on a machine without one",
            mend=f"{devices.reason}; kvbench doctor shows what stands in the way",
        )  # fmt: skip
    if left.value is None:
        raise UsageError("the visible GPUs are unknown", where=where, got=environ.get(VISIBLE), mend=left.reason)
    if not left.value:
        raise UsageError(
            f"{VISIBLE} hides every GPU", where=where, got=environ.get(VISIBLE), expected=there, mend=f"unset {VISIBLE}"
        )
    chosen: list[Device] = []
    for word in (part.strip() for part in spec.split(",")):
        named = list(left.value) if word == ALL else [_one(word, devices, where, there)]
        for device in named:
            if device not in left.value:
                raise UsageError(
                    f"that device is hidden by {VISIBLE}", where=where, got=word,
                    expected=f"one of: {', '.join(d.describe() for d in left.value)}", mend=f"unset {VISIBLE}",
                )  # fmt: skip
            if device in chosen:
                raise UsageError("device given twice", where=where, got=word)
            chosen.append(device)
    return tuple(chosen)


def _one(word: str, devices: Devices, where: str, there: str) -> Device:
    if re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,4})?", word):
        found = [device for device in devices.found if device.id == word]
        on_board = [device for device in devices.found if device.mig is not None and str(device.index) == word]
        if not found and on_board:
            raise UsageError(
                "that board is split into MIG instances", where=where, got=word,
                expected=f"one of: {', '.join(device.describe() for device in on_board)}",
            )  # fmt: skip
    else:
        found = _by_uuid(word, devices.found)
    if len(found) != 1:
        raise UsageError("ambiguous device" if found else "unknown device", where=where, got=word, expected=there)
    return found[0]


@contextlib.contextmanager
def only(devices: Sequence[Device], environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let CUDA of this process's children see exactly ``devices``, in this order, for the length of the block."""
    before = {name: environ.get(name) for name in (VISIBLE, ORDER)}
    environ[VISIBLE] = ",".join(device.cuda_id for device in devices)
    environ[ORDER] = "PCI_BUS_ID"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


def paths(devices: Sequence[Device], topology: Topology) -> tuple[tuple[Device, int], ...]:
    """Return every pair of a device and a NUMA node of host memory: what ``run`` visits by default (GPUs x nodes).

    Nodes without CPUs are left out: they are GPU or CXL memory and never ``dram``. A machine that tells no nodes has
    node 0.
    """
    nodes = tuple(node.id for node in topology.nodes if not node.cpuless and node.memory_bytes != 0) or (0,)
    return tuple((device, node) for device in devices for node in nodes)


@dataclass(frozen=True, slots=True)
class Visit:
    """One GPU of a run's plan: its number as CUDA counts it in the workers, and the values of the axis ``node`` there:
    ``near``, which is the GPU's own node, then each other one by its number."""

    device: int
    nodes: tuple[str, ...]


def visits(devices: Sequence[Device], topology: Topology) -> tuple[Visit, ...]:
    """Return what a run visits by default: the :func:`paths` of ``devices`` in the words of a case's axes.

    The nearest node keeps its word, so that a case means the same on every machine. Where NVML does not name exactly
    one, every node also comes by its number. MIG: CUDA shows one instance to a process, so only the first is visited.
    """
    found = []
    shown = devices[:1] if any(device.mig is not None for device in devices) else devices
    for number, device in enumerate(shown):
        nodes = [node for _, node in paths([device], topology)]
        own = device.nodes if len(device.nodes) == 1 else ()
        others = [str(node) for node in nodes if node not in own] if len(nodes) > 1 else []
        found.append(Visit(number, ("near", *others)))
    return tuple(found)


@contextlib.contextmanager
def bus_order(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let CUDA of this process's children count boards as NVML does, for the length of the block.

    Its own order is the fastest first: on boards of several models its device 1 would be another one than NVML's.
    """
    before = environ.get(ORDER)
    environ[ORDER] = "PCI_BUS_ID"
    try:
        yield
    finally:
        if before is None:
            environ.pop(ORDER, None)
        else:
            environ[ORDER] = before
