"""The GPU part of ``doctor``: one row a board, as text and as JSON. UUIDs appear as hashes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvbench.machine.gpu import Gpu, Gpus
from kvbench.machine.nvml_obstacles import GpuState
from kvbench.machine.nvml_state import GpuReading
from kvbench.machine.topology_pcie import PciePath
from kvbench.units import format_value

HEAD = ("GPU", "memory", "PCIe now / most", "links", "mode", "power limit", "clocks now / most", "near")


def rows(gpus: Gpus, state: GpuState, paths: Mapping[int, PciePath]) -> list[dict[str, Any]]:
    """Return the ``gpus`` list of the document: what each board is, its state now, its way to the CPU."""
    return [_row(i, board, state.readings.get(i), state.processes.get(i), paths.get(i))
            for i, board in enumerate(gpus.boards)]  # fmt: skip


def _row(
    index: int, board: Gpu, now: GpuReading | None, processes: int | None, path: PciePath | None
) -> dict[str, Any]:
    facts = asdict(board)
    facts["gaps"] = [{"name": name, "reason": reason} for name, reason in board.gaps]
    facts["memory_nodes"] = None if board.memory_nodes is None else list(board.memory_nodes)
    facts["mig_instances"] = None if board.mig_instances is None else [asdict(one) for one in board.mig_instances]
    return {
        "index": index,
        **facts,
        "now": None if now is None else {
            "sm_mhz": now.sm_mhz, "memory_mhz": now.memory_mhz, "gen": now.gen, "width": now.width,
            "temperature_c": now.temperature_c, "power_w": now.power_w, "replays": now.replays,
            "reasons": None if now.reasons is None else list(now.reason_words), "lost": now.lost,
            "processes": processes,
        },
        "path": None if path is None else {
            "address": path.address, "node": path.node, "switches": list(path.switches),
            "hops": [asdict(hop) for hop in path.hops], "iommu_group": path.iommu_group, "iommu_type": path.iommu_type,
        },
    }  # fmt: skip


def lines(gpus: Gpus, state: GpuState) -> list[tuple[str, ...]]:
    """Return the rows of the table for reading; what a board does not say is ``?``."""
    return [_line(index, board, state.readings.get(index, GpuReading(0.0))) for index, board in enumerate(gpus.boards)]


def _line(index: int, board: Gpu, now: GpuReading) -> tuple[str, ...]:
    def told(value: object, unit: str = "") -> str:
        return "?" if value is None else f"{value}{unit}"

    links = []
    if board.nvlinks_total:
        links.append(f"NVLink {told(board.nvlinks)} of {board.nvlinks_total}")
    if board.c2c_links:
        links.append(f"C2C {board.c2c_links}")
    mode = [word for word, on in (("MIG", board.mig), ("ECC", board.ecc)) if on]
    if board.mig and board.mig_instances:
        mode[0] = f"MIG {len(board.mig_instances)}"
    limit = board.enforced_limit_w if board.enforced_limit_w is not None else board.power_limit_w
    near = "node " + ",".join(map(str, board.memory_nodes)) if board.memory_nodes else "?"
    return (
        f"{index} {board.name}",
        format_value(board.memory_bytes, "B") if board.memory_bytes else "?",
        f"gen {told(now.gen)} x{told(now.width)} / gen {told(board.max_gen)} x{told(board.max_width)}",
        ", ".join(links) or ("none" if board.nvlinks_total == 0 else "?" if board.nvlinks is None else "none"),
        ", ".join(mode) or ("?" if board.mig is None and board.ecc is None else "-"),
        f"{told(None if limit is None else f'{limit:g}')} of {told(_watts(board.default_power_limit_w))} W",
        f"{told(now.sm_mhz)} / {told(board.max_sm_mhz)} MHz",
        near + (f", memory is node {board.gpu_node}" if board.gpu_node is not None else ""),
    )


def _watts(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"
