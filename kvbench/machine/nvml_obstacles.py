"""What stands between the GPUs of this machine and a trustworthy number; boards with the same fault are named together.

Settings and topology only, beside :mod:`kvbench.machine.obstacles`, plus the state now where a probe could read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine.gpu import Gpu, Gpus
from kvbench.machine.nvml_devices import VISIBLE, Devices, visible
from kvbench.machine.nvml_state import SLOWDOWN, GpuReading
from kvbench.machine.obstacles import Finding, Obstacle, Unchecked
from kvbench.machine.probe import ROOT, parse_cpu_list
from kvbench.machine.topology import Topology
from kvbench.machine.topology_pcie import PciePath, pcie_path, shared_ports, sysfs_address


@dataclass(frozen=True, slots=True)
class GpuState:
    """The boards now, by NVML index: readings, and how many processes compute on each; empty where nothing was read."""

    readings: Mapping[int, GpuReading]
    processes: Mapping[int, int | None]


NOTHING_READ = GpuState({}, {})


def gpu_settings(
    gpus: Gpus, topology: Topology, root: Path = ROOT, devices: Devices | None = None, state: GpuState = NOTHING_READ,
    environ: Mapping[str, str] = os.environ,
) -> list[Obstacle | Unchecked]:  # fmt: skip
    """Return the findings about ``gpus``; none where there are no boards (that there are none is another check's)."""
    if not gpus.boards:
        return []
    boards = dict(enumerate(gpus.boards))
    ways = board_paths(gpus, root)
    checks: tuple[Callable[[], Finding], ...] = (
        lambda: _unreadable(boards),
        lambda: _hidden(devices, environ),
        lambda: _prohibited(boards),
        lambda: _mig_empty(boards),
        lambda: _mig(boards),
        lambda: _power_limit(boards),
        lambda: _persistence(boards),
        lambda: _throttled(state),
        lambda: _busy(state),
        lambda: _far_cpus(boards, topology),
        lambda: _slot(boards, ways),
        lambda: _shared(ways),
        lambda: _nvlinks_down(boards),
        lambda: _guest(boards),
    )
    return [finding for finding in (check() for check in checks) if finding is not None]


def board_paths(gpus: Gpus, root: Path = ROOT) -> dict[int, PciePath]:
    """Return {NVML index: way to the CPU} of the boards that sysfs shows."""
    found = {}
    for index, board in enumerate(gpus.boards):
        address = sysfs_address(board.bus_id or "", root)
        path = pcie_path(address, root) if address else None
        if path is not None:
            found[index] = path
    return found


def _gpus(indices: Iterable[int]) -> str:
    return "GPU " + ", ".join(map(str, indices))


def _unreadable(boards: Mapping[int, Gpu]) -> Finding:
    hit = {i: dict(b.gaps)["nvmlDeviceGetHandleByIndex"] for i, b in boards.items()
           if "nvmlDeviceGetHandleByIndex" in dict(b.gaps)}  # fmt: skip
    if not hit:
        return None
    return Obstacle(
        "gpu_unreadable", "blocks", f"{_gpus(hit)} does not answer: {', '.join(sorted(set(hit.values())))}",
        "it can neither be described nor measured", "sudo dmesg | grep -i xid, then reset it or reboot",
    )  # fmt: skip


def _hidden(devices: Devices | None, environ: Mapping[str, str]) -> Finding:
    if devices is None or VISIBLE not in environ:
        return None
    left = visible(devices, environ)
    if left.value is None:
        return Unchecked("gpu_visible", left.reason)
    entries = environ[VISIBLE].count(",") + 1 if environ[VISIBLE].strip() else 0
    if left.value and len(left.value) == entries:
        return None
    if left.value:
        return Obstacle(
            "gpu_visible", "limits", f"entry {len(left.value) + 1} of {VISIBLE} names no device here",
            "CUDA ends the list there: the later entries are hidden as well",
            f"unset {VISIBLE}, or name one of: {devices.describe()}",
        )  # fmt: skip
    return Obstacle(
        "gpu_visible", "blocks", f"{VISIBLE} hides every GPU", "GPU cases are skipped",
        f"unset {VISIBLE}, or name one of: {devices.describe()}",
    )  # fmt: skip


def _prohibited(boards: Mapping[int, Gpu]) -> Finding:
    hit = [i for i, b in boards.items() if b.compute_mode == "prohibited"]
    if not hit:
        return None
    return Obstacle(
        "gpu_compute_mode", "blocks", f"{_gpus(hit)} is in compute mode prohibited", "no program may compute on it",
        f"sudo nvidia-smi -i {','.join(map(str, hit))} -c DEFAULT",
    )  # fmt: skip


def _mig_empty(boards: Mapping[int, Gpu]) -> Finding:
    empty = [i for i, b in boards.items() if b.mig and b.mig_instances == ()]
    if not empty:
        return None
    return Obstacle(
        "gpu_mig_empty", "blocks", f"{_gpus(empty)} is in MIG mode and has no instance", "CUDA finds no device on it",
        f"sudo nvidia-smi -i {','.join(map(str, empty))} -mig 0 (or: sudo nvidia-smi mig -cgi 0 -C)",
    )  # fmt: skip


def _mig(boards: Mapping[int, Gpu]) -> Finding:
    unknown = [i for i, b in boards.items() if b.mig and b.mig_instances is None]
    if unknown:
        return Unchecked("gpu_mig", f"{_gpus(unknown)} is in MIG mode and its instances cannot be listed (root may)")
    split = [i for i, b in boards.items() if b.mig and b.mig_instances]
    if not split:
        return None
    return Obstacle(
        "gpu_mig", "limits", f"{_gpus(split)} is split into MIG instances",
        "an instance has a part of the SMs, L2 and memory bandwidth; its neighbours share the link to the host",
        f"sudo nvidia-smi -i {','.join(map(str, split))} -mig 0, or choose one: kvbench run --device {split[0]}:0",
    )  # fmt: skip


def _power_limit(boards: Mapping[int, Gpu]) -> Finding:
    hit: list[int] = []
    for index, board in boards.items():
        limits = [w for w in (board.power_limit_w, board.enforced_limit_w) if w is not None]
        if limits and board.default_power_limit_w is not None and min(limits) < board.default_power_limit_w:
            hit.append(index)
    if not hit:
        return None
    first = boards[hit[0]]
    least = min(w for w in (first.power_limit_w, first.enforced_limit_w) if w is not None)
    return Obstacle(
        "gpu_power_limit", "distorts",
        f"{_gpus(hit)} may draw {least:g} W, less than its default of {first.default_power_limit_w:g} W",
        "clocks fall sooner under load: the numbers are not those of the board as it is sold",
        f"sudo nvidia-smi -i {','.join(map(str, hit))} -pl {first.default_power_limit_w:g}",
    )  # fmt: skip


def _persistence(boards: Mapping[int, Gpu]) -> Finding:
    hit = [i for i, b in boards.items() if b.persistence is False]
    if not hit:
        return None
    return Obstacle(
        "gpu_persistence", "distorts", f"persistence mode of {_gpus(hit)} is off",
        "the driver forgets the board between two programs: starts take seconds and clocks begin low",
        "sudo nvidia-smi -pm 1",
    )  # fmt: skip


def _throttled(state: GpuState) -> Finding:
    hit = [i for i, reading in state.readings.items() if (reading.reasons or 0) & SLOWDOWN]
    if not hit:
        return None
    words = sorted({word for i in hit for word in state.readings[i].reason_words} - {"idle"})
    return Obstacle(
        "gpu_throttled", "distorts", f"{_gpus(hit)} is slowed down now: {', '.join(words)}",
        "samples are marked throttled, and cases end tainted", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    )  # fmt: skip


def _busy(state: GpuState) -> Finding:
    hit = [i for i, count in state.processes.items() if count]
    if not hit:
        return None
    total = sum(state.processes[i] or 0 for i in hit)
    return Obstacle(
        "gpu_busy", "distorts", f"{total} other process(es) compute on {_gpus(hit)}",
        "copies and kernels share the board and its link with them",
        "nvidia-smi --query-compute-apps=gpu_uuid,pid,name --format=csv, and stop what is there",
    )  # fmt: skip


def _far_cpus(boards: Mapping[int, Gpu], topology: Topology) -> Finding:
    far = []
    for index, board in boards.items():
        try:
            near = set(parse_cpu_list(board.cpus or ""))
        except ValueError:
            continue
        if near and topology.affinity and not near & set(topology.affinity):
            far.append(index)
    if not far:
        return None
    return Obstacle(
        "gpu_far_cpus", "distorts", f"no CPU of the affinity mask is near {_gpus(far)}",
        "host memory touched here is across the socket link: a public pair of numbers is 3.8 against 12.2 GB/s",
        f"taskset -c {boards[far[0]].cpus} kvbench run ...",
    )  # fmt: skip


def _slot(boards: Mapping[int, Gpu], ways: Mapping[int, PciePath]) -> Finding:
    hit: dict[int, str] = {}
    for index, board in boards.items():
        if board.c2c_links:  # its PCIe link is for management: data go over C2C
            continue
        way = ways.get(index)
        own = way.hops[-1].bytes_per_s if way else None
        slowest = way.narrowest if way else None
        if own is not None and slowest is not None and (slowest.bytes_per_s or own) < own:
            hit[index] = f"gen {slowest.gen} x{slowest.width} at {slowest.address}"
        elif board.own_max_gen is not None and board.max_gen is not None and board.max_gen < board.own_max_gen:
            hit[index] = f"gen {board.max_gen} of {board.own_max_gen}"
    if not hit:
        return None
    return Obstacle(
        "gpu_slot", "limits",
        f"the way to {_gpus(hit)} is slower than the board: {', '.join(sorted(set(hit.values())))}",
        "transfers end at the slowest hop, however fast the board's own link is",
        "another slot, riser or firmware setting (lspci -vv shows LnkCap of every port)",
    )  # fmt: skip


def _shared(ways: Mapping[int, PciePath]) -> Finding:
    of = {path.address: index for index, path in ways.items()}
    groups = [[of[address] for address in devices] for devices in shared_ports(ways.values()).values()]
    if not groups:
        return None
    return Obstacle(
        "gpu_shared_link", "limits", "; ".join(f"{_gpus(group)} share one link to the CPU" for group in groups),
        "measured together they get a part each; one alone gets all of it",
        "measure them one at a time: kvbench run --device N",
    )  # fmt: skip


def _nvlinks_down(boards: Mapping[int, Gpu]) -> Finding:
    hit = [i for i, b in boards.items() if b.nvlinks and b.nvlinks_total and b.nvlinks < b.nvlinks_total]
    if not hit:
        return None
    counts = ", ".join(f"{boards[i].nvlinks} of {boards[i].nvlinks_total} on GPU {i}" for i in hit)
    return Obstacle(
        "gpu_nvlink", "limits", f"NVLinks are down: {counts} are up", "GPU to GPU bandwidth is lower by their share",
        "nvidia-smi nvlink -s, and the fabric manager's log",
    )  # fmt: skip


def _guest(boards: Mapping[int, Gpu]) -> Finding:
    hit: Sequence[int] = [i for i, b in boards.items() if b.virtualisation == "vgpu"]
    if not hit:
        return None
    return Obstacle(
        "gpu_vgpu", "distorts", f"{_gpus(hit)} is a share of a board (vGPU)",
        "other guests use the same board and do not show here", "measure on a machine that has the whole board",
    )  # fmt: skip
