"""T15, T42, T43, T44, T45, T46: is the board as a whole, as set and as linked what its numbers are held against?"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvbench.machine.fingerprint import fingerprint
from kvbench.machine.gpu import Gpu, Gpus
from kvbench.machine.nvml_obstacles import board_paths
from kvbench.machine.nvml_state import GpuLimits, LinkUnderLoad, LinkWatch
from kvbench.machine.physical import PCIE_GENERATIONS, pcie_bytes_per_s
from kvbench.machine.system import virtualisation
from kvbench.machine.topology_pcie import PciePath
from kvbench.memory.cuda.buffers import hbm, pinned
from kvbench.timing.traps.gpu_bed import boards, gpu
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import MiB

PEAK_SLACK = 0.03  # traps.md T42
LOAD_S = 0.5
# Memory bandwidth of makers' data sheets, B/s; by words of the name and GiB of memory, the first that fits.
PEAKS: tuple[tuple[str, tuple[int, int], float], ...] = (
    (r"V100", (0, 64), 900e9), (r"A100", (0, 48), 1555e9), (r"A100.*PCI", (49, 99), 1935e9),
    (r"A100", (49, 99), 2039e9), (r"L4\b", (0, 99), 300e9), (r"A10\b", (0, 99), 600e9), (r"4090", (0, 99), 1008e9),
    (r"GH200", (90, 99), 4000e9),
    (r"H100.*PCI", (0, 90), 2039e9), (r"H100", (0, 90), 3350e9), (r"H200", (0, 200), 4800e9),
)  # fmt: skip


def power_and_persistence() -> Finding:
    """T15: the power limit in force against the board's default; and whether the driver stays between programs."""
    return judge_power(boards().boards)


def judge_power(found: Sequence[Gpu]) -> Finding:
    """Judge the board whose limit is lowest against its default."""
    threshold = "not below its default, and persistence mode is on"
    limits = [
        (min(w for w in (b.power_limit_w, b.enforced_limit_w) if w is not None), b.default_power_limit_w, i)
        for i, b in enumerate(found)
        if b.default_power_limit_w and not (b.power_limit_w is None and b.enforced_limit_w is None)
    ]
    if not limits:
        return unknown("no board tells its power limits", threshold)
    watts, default, index = min(limits, key=lambda each: each[0] / each[1])
    off = [str(i) for i, board in enumerate(found) if board.persistence is False]
    wrong = [f"GPU {index} may draw {watts:g} of {default:g} W"] if watts < default else []
    wrong += [f"persistence mode of GPU {', '.join(off)} is off: the first of each run begins cold"] if off else []
    mend = f"sudo nvidia-smi -i {index} -pl {default:g}" if watts < default else "sudo nvidia-smi -pm 1"
    return check(
        not wrong, Number(f"power limit of GPU {index}", watts, "W"), Number("its default", default, "W"), threshold,
        "; ".join(wrong), mend=mend if wrong else "",
    )  # fmt: skip


def stated_peak() -> Finding:
    """T42: memory bandwidth out of the driver's clock and bus width, against the data sheet."""
    return judge_peaks(boards().boards)


def peak_of(board: Gpu) -> float | None:
    """Return 2 x memory clock x bus width, B/s; None where NVML does not tell both."""
    if not board.max_memory_mhz or not board.memory_bus_bits:
        return None
    return 2e6 * board.max_memory_mhz * board.memory_bus_bits / 8


def sheet_of(board: Gpu) -> float | None:
    """Return the data sheet's memory bandwidth, B/s; None for a board that is not in the table."""
    gib = (board.memory_bytes or 0) / 2**30
    return next(
        (rate for words, (low, high), rate in PEAKS if re.search(words, board.name) and low <= gib <= high), None
    )


def judge_peaks(found: Sequence[Gpu]) -> Finding:
    """Judge the board that is farthest from its data sheet."""
    threshold = f"within {PEAK_SLACK:.0%}"
    known = [(a, b, board.name) for board in found if (a := peak_of(board)) and (b := sheet_of(board))]
    if not known:
        names = ", ".join(sorted({board.name for board in found}))
        return unknown(f"no data sheet, or no clock and bus width, is known of {names}", threshold)
    driver, sheet, name = max(known, key=lambda each: abs(each[0] / each[1] - 1.0))
    return check(
        abs(driver / sheet - 1.0) <= PEAK_SLACK, Number(f"{name} by the driver", driver, "B/s"),
        Number("by its data sheet", sheet, "B/s"), threshold,
        f"they differ by {driver / sheet - 1.0:+.1%}: one is wrong, and with it every fraction of a ceiling",
        mend="hold rows against the measured ceiling, and report this board",
    )  # fmt: skip


def ecc_modes() -> Finding:
    """T43: boards whose ECC mode is on record; and that the same machine with ECC changed is another environment."""
    gpus = boards()
    return judge_ecc(gpus, _env(gpus), _env(_other_ecc(gpus)))


def _other_ecc(gpus: Gpus) -> Gpus:
    return replace(gpus, boards=tuple(replace(board, ecc=not board.ecc) for board in gpus.boards))


def _env(gpus: Gpus) -> str:
    return fingerprint(gpus=gpus).env_digest


def judge_ecc(gpus: Gpus, digest: str, changed: str) -> Finding:
    """Judge the boards, and the environment digests of this machine and of the same one with ECC the other way."""
    told = sum(board.ecc is not None for board in gpus.boards)
    wrong = [] if digest != changed else ["results with and without ECC have one environment digest: they are compared"]
    threshold = "all of them, and another mode is another environment"
    found, expected = (
        Number("boards with a known ECC mode", told, "boards"),
        Number("boards", len(gpus.boards), "boards"),
    )
    if not wrong and told < len(gpus.boards):
        return unknown(
            "a board does not tell whether ECC is on (boards without it never do)", threshold, found, expected
        )
    modes = ", ".join("on" if board.ecc else "off" for board in gpus.boards if board.ecc is not None)
    return check(not wrong, found, expected, threshold, "; ".join(wrong), f"ECC {modes or 'unknown'}")


def whole_boards() -> Finding:
    """T44: boards that are whole; a MIG instance has a part of SMs, L2 and bandwidth."""
    return judge_whole(boards().boards)


def judge_whole(found: Sequence[Gpu]) -> Finding:
    """Judge which of the boards are split, by what NVML says."""
    threshold = "all of them, or rows are held against a part of the board"
    silent = [i for i, board in enumerate(found) if board.mig is None]
    split = [i for i, board in enumerate(found) if board.mig]
    whole, total = len(found) - len(split), len(found)
    numbers = Number("boards that are whole", whole, "boards"), Number("boards", total, "boards")
    if not split and len(silent) == total and any("MIG" in board.name for board in found):
        return unknown("no board tells whether MIG is on", threshold, *numbers)
    note = f"{len(silent)} of {total} have no MIG" if silent else ""
    return check(
        not split, *numbers, threshold,
        f"GPU {', '.join(map(str, split))} is split (MIG): ceilings of the board are not those of an instance",
        *((note,) if note else ()), mend=f"sudo nvidia-smi -i {','.join(map(str, split))} -mig 0" if split else "",
    )  # fmt: skip


def way_to_the_cpu() -> Finding:
    """T45: the slowest hop between board and CPU against the board's own link; with IOMMU, switches and guest."""
    gpus = boards()
    return judge_way(board_paths(gpus), gpus.boards, virtualisation().value)


def judge_way(ways: Mapping[int, PciePath], found: Sequence[Gpu], guest: str | None) -> Finding:
    """Judge the way of the board with the slowest hop against that board's own link; ``guest``: what it runs in."""
    threshold = "no hop slower than the board"
    known = [
        (slow.bytes_per_s, own.bytes_per_s, index, way)
        for index, way in ways.items()
        if not found[index].c2c_links
        and (slow := way.narrowest)
        and slow.bytes_per_s
        and (own := way.hops[-1]).bytes_per_s
    ]
    if not known:
        return unknown("sysfs does not show the way to a board, or its data go over C2C", threshold)
    slowest, own_rate, index, way = min(known, key=lambda each: (each[0] or 0.0) / (each[1] or 1.0))
    notes = [f"GPU {index}: {len(way.switches)} switch(es), IOMMU {way.iommu_type or 'not seen'}"]
    notes += [f"guest ({guest}): the host's part of the way does not show"] if guest not in (None, "none") else []
    return check(
        (slowest or 0.0) >= (own_rate or 0.0), Number(f"slowest hop to GPU {index}", slowest or 0.0, "B/s"),
        Number("its own link", own_rate or 0.0, "B/s"), threshold,
        "the slot or a switch is slower than the board: its rate is the ceiling, not the board's", *notes,
    )  # fmt: skip


def link_under_load(nbytes: int = 64 * MiB) -> Finding:
    """T46: the link's rate while copies ran, by its generation and width then, against the most it can be."""
    with gpu() as session, hbm(session.service, nbytes) as near, pinned(session.service, nbytes) as far:
        probe, _ = session.board()
        if not probe.limits:
            return unknown(session.board_reason or "NVML does not tell the link", "the most it can be, seen under load")
        end = time.monotonic() + LOAD_S
        with LinkWatch(probe) as watch:
            while time.monotonic() < end:
                for _ in range(8):
                    session.clock.stream.copy(near.copy_address, far.copy_address, nbytes)
                session.clock.stream.synchronize()
        idle = probe.links()[0]
        return judge_link(watch.results[0], probe.limits[0], idle)


def judge_link(seen: LinkUnderLoad, limits: GpuLimits, idle: tuple[int | None, int | None]) -> Finding:
    """Judge a link under load against what board and slot can do; ``idle``: generation and width after the load."""
    threshold = "the most it can be, seen under load"
    if limits.c2c:
        return unknown("data go over C2C: the PCIe link is for management", threshold)
    rates = [
        pcie_bytes_per_s(gen, width) if gen in PCIE_GENERATIONS and width else None
        for gen, width in ((seen.gen, seen.width), (limits.gen, limits.width))
    ]
    if rates[0] is None or rates[1] is None:
        return unknown(seen.reason or "NVML does not tell generation and width of the link", threshold)
    return check(
        rates[0] >= rates[1] and not seen.downshift,
        Number(f"gen {seen.gen} x{seen.width} under load", rates[0], "B/s"),
        Number(f"gen {limits.gen} x{limits.width} at most", rates[1], "B/s"), threshold,
        f"the link falls to gen {seen.least_gen} x{seen.least_width} under load, or never reaches its best",
        f"after the load gen {idle[0]} x{idle[1]}; {seen.looks} looks",
        mend="check seat, riser and firmware (lspci -vv: LnkSta against LnkCap)",
    )  # fmt: skip
