"""What GPU traps conclude from numbers: recorded ones of public reports where there are any, and made ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.machine.gpu import Gpu, Gpus, MigInstance
from kvbench.machine.nvml_state import GpuLimits, LinkUnderLoad
from kvbench.machine.topology_pcie import Hop, PciePath
from kvbench.timing.traps import gpu_board, gpu_clock, gpu_memory
from kvbench.timing.traps.record import Finding
from kvbench.units import MiB

H100 = Gpu(
    "NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, max_gen=5, max_width=16, ecc=True, mig=False, power_limit_w=700.0,
    default_power_limit_w=700.0, enforced_limit_w=700.0, persistence=True, max_memory_mhz=2619, memory_bus_bits=5120,
)  # fmt: skip

# (what, finding, verdict, words of the reason)
CASES: list[tuple[str, Finding, str, str]] = [
    ("T7 direct", gpu_memory.judge_pinned(2, [0.01, 0.02], "pageable"), "pass", ""),
    ("T7 staged", gpu_memory.judge_pinned(2, [0.98, 0.97], "pageable"), "fail", "it is staged"),
    ("T7 not pinned", gpu_memory.judge_pinned(1, [0.01, 0.02], "pageable"), "fail", "something else"),
    ("T7 all pinned", gpu_memory.judge_pinned(2, [0.01, 0.02], "pinned"), "fail", "ordinary memory"),
    ("T8 all", gpu_memory.judge_arrivals(201, 201, "copies"), "pass", ""),
    ("T8 one late", gpu_memory.judge_arrivals(200, 201, "copies"), "fail", "1 of 201"),
    ("T8 none made", gpu_memory.judge_arrivals(0, 0, "copies"), "fail", "0 of 0"),
    ("T9 both", gpu_memory.judge_overwritten(True, True), "pass", ""),
    ("T9 unguarded", gpu_memory.judge_overwritten(False, True), "fail", "later"),
    ("T9 unnoticed", gpu_memory.judge_overwritten(True, False), "fail", "does not notice"),
    # flashinfer PR 2213 is of this kind: a set in the L2 beats the memory behind it
    ("T10 memory", gpu_clock.judge_beyond(2.9e12, 2.8e12, 200 * MiB), "pass", ""),
    ("T10 cache", gpu_clock.judge_beyond(5.5e12, 2.9e12, 200 * MiB), "fail", "1.90 x faster"),
    ("T11 flushed", gpu_clock.judge_flush(14e-6, 7e-6, 25 * MiB), "pass", ""),
    ("T11 not flushed", gpu_clock.judge_flush(7e-6, 7e-6, 25 * MiB), "fail", "a flush changes nothing"),
    # cccl PR 7391: 6.17 us alone without a blocker, 2.00 us as one of many
    ("T17 gaps", gpu_clock.judge_gaps(6.17e-6, 2.00e-6, 0.5e-6), "fail", "3.09 x"),
    ("T17 none", gpu_clock.judge_gaps(20.4e-6, 20.0e-6, 0.5e-6), "pass", ""),
    ("T17 grain", gpu_clock.judge_gaps(2.8e-6, 2.0e-6, 0.5e-6), "pass", ""),
    ("T18 room", gpu_clock.judge_queue(2.0e-6, 2.1e-6, 500, refused=True), "pass", ""),
    ("T18 full", gpu_clock.judge_queue(2.0e-6, 9e-6, 500, refused=True), "fail", "the queue is full below 500"),
    ("T18 unlimited", gpu_clock.judge_queue(2.0e-6, 2.1e-6, 500, refused=False), "fail", "are not refused"),
    ("T20 refused", gpu_clock.judge_escapes(2, 2), "pass", ""),
    ("T20 escaped", gpu_clock.judge_escapes(1, 2), "fail", "is not timed"),
    ("T26 there", gpu_memory.judge_host_placement(1 << 20, (1 << 20) + 9, 1 << 20, (1 << 20) + 9), "pass", ""),
    ("T26 elsewhere", gpu_memory.judge_host_placement(4096, 1 << 20, 1 << 20, 1 << 20), "fail", "another node"),
    # sglang 37285: 20.4 GiB became 32
    ("T26 rounded", gpu_memory.judge_host_placement(1 << 20, 1 << 21, 1 << 20, 1 << 20), "fail", "were made for"),
    ("T27 apart", gpu_memory.judge_separate([0, 4096, 1 << 20], 4096), "pass", ""),
    ("T27 overlap", gpu_memory.judge_separate([0, 4095, 1 << 20], 4096), "fail", "share memory"),
    ("T35 plain", gpu_memory.judge_combined({"register": 20e9, "hostalloc": 18e9}, 21e9), "pass", ""),
    ("T35 combined", gpu_memory.judge_combined({"register": 20e9, "hostalloc": 0.4e9}, 21e9), "fail", "crawls"),
    ("T35 uncached", gpu_memory.judge_combined({"register": 5e9}, 21e9), "fail", "crawls"),
    # nvbandwidth 42: A100, GPU threads on host memory: 25.1 GB/s at 1 GiB, 16.5 at 20 GiB
    ("T36 falls off", gpu_clock.judge_fall_off(25.1e9, 16.5e9), "fail", "0.66 of it"),
    ("T36 holds", gpu_clock.judge_fall_off(2.9e12, 2.85e12), "pass", ""),
    ("T37 both", gpu_clock.judge_both(0.98, False, 128, 128), "pass", ""),
    ("T37 one alone", gpu_clock.judge_both(0.45, False, 128, 128), "fail", "ran alone"),
    ("T37 told", gpu_clock.judge_both(0.45, True, 128, 128), "pass", ""),
    ("T37 half", gpu_clock.judge_both(0.98, False, 64, 128), "fail", "not of both"),
    ("T37 silent", gpu_clock.judge_both(None, False, 128, 128), "unknown", "does not tell"),
    ("T38 right", gpu_memory.judge_labels(6, 6), "pass", ""),
    ("T38 swapped", gpu_memory.judge_labels(5, 6), "fail", "another's name"),
    ("T41 heard", gpu_clock.judge_error(["raised", "raised"], 0), "pass", ""),
    ("T41 swallowed", gpu_clock.judge_error(["number", "1e-06", "raised"], 0), "fail", "swallowed"),
    ("T41 once", gpu_clock.judge_error(["raised", "number", "0.0"], 0), "fail", "swallowed"),
    ("T41 never began", gpu_clock.judge_error([], 1), "unknown", "could not begin"),
    ("T47 apart", gpu_memory.judge_first_copy(1.3e-3, 1.2e-3), "pass", ""),
    # dynamo 13710: pinning takes about 0.34 s a GiB, a copy 20 ms
    ("T47 inside", gpu_memory.judge_first_copy(0.36, 0.02), "fail", "pinning is in it"),
    ("T54 waited", gpu_clock.judge_waited(10.2e-3, 10.1e-3, 4e-6), "pass", ""),
    # LMCache 1755: 4.58 GB in 14 ms
    ("T54 submit", gpu_clock.judge_waited(14e-3, 5.7, 14e-3), "fail", "only the submit"),
    ("T56 moved", gpu_memory.judge_migration(30e-3, 1e-3), "pass", ""),
    ("T56 coherent", gpu_memory.judge_migration(1.05e-3, 1e-3), "unknown", "no slower"),
    ("T62 exact", gpu_memory.judge_free(1000 * MiB, 936 * MiB, 1000 * MiB, 64 * MiB), "pass", ""),
    ("T62 stale", gpu_memory.judge_free(1000 * MiB, 1000 * MiB, 1000 * MiB, 64 * MiB), "fail", "stale"),
    ("T62 leak", gpu_memory.judge_free(1000 * MiB, 936 * MiB, 936 * MiB, 64 * MiB), "fail", "did not come back"),
    ("T15 default", gpu_board.judge_power([H100]), "pass", ""),
    ("T15 capped", gpu_board.judge_power([H100, replace(H100, enforced_limit_w=350.0)]), "fail", "350 of 700 W"),
    ("T15 cold", gpu_board.judge_power([replace(H100, persistence=False)]), "fail", "persistence mode"),
    ("T15 silent", gpu_board.judge_power([Gpu("x")]), "unknown", "no board tells"),
    ("T42 sheet", gpu_board.judge_peaks([H100]), "pass", ""),
    ("T42 bus", gpu_board.judge_peaks([replace(H100, memory_bus_bits=6144)]), "fail", "+20"),
    ("T42 new", gpu_board.judge_peaks([replace(H100, name="NVIDIA Z900")]), "unknown", "Z900"),
    ("T42 silent", gpu_board.judge_peaks([Gpu("NVIDIA H100")]), "unknown", "no clock"),
    ("T43 apart", gpu_board.judge_ecc(Gpus(True, (H100,)), "a", "b"), "pass", ""),
    ("T43 one key", gpu_board.judge_ecc(Gpus(True, (H100,)), "a", "a"), "fail", "one environment digest"),
    ("T43 silent", gpu_board.judge_ecc(Gpus(True, (replace(H100, ecc=None),)), "a", "b"), "unknown", "does not tell"),
    ("T44 whole", gpu_board.judge_whole([H100, replace(H100, mig=None)]), "pass", ""),
    ("T44 split", gpu_board.judge_whole([H100, replace(H100, mig=True, mig_instances=(MigInstance(),))]), "fail",
     "GPU 1 is split"),
    ("T44 slice", gpu_board.judge_whole([Gpu("NVIDIA H100 MIG 1g.10gb")]), "unknown", "no board tells"),
]  # fmt: skip


@pytest.mark.parametrize(("finding", "verdict", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_numbers_and_what_they_mean(finding: Finding, verdict: str, words: str) -> None:
    assert finding.verdict == verdict, finding
    assert words in finding.reason


def way(*hops: tuple[int, int]) -> PciePath:
    made = tuple(Hop(f"0000:0{n}:00.0", gen, width) for n, (gen, width) in enumerate(hops))
    return PciePath("0000:02:00.0", made, 0, 12, "DMA-FQ")


def test_a_slow_slot_is_the_ceiling() -> None:
    good = gpu_board.judge_way({0: way((5, 16), (5, 16))}, [H100], None)
    assert good.verdict == "pass"
    assert "IOMMU DMA-FQ" in good.notes[0]
    slow = gpu_board.judge_way({0: way((5, 16), (5, 16)), 1: way((3, 16), (5, 16))}, [H100, H100], "vm:kvm")
    assert slow.verdict == "fail"
    assert "guest (vm:kvm)" in slow.notes[1]
    assert slow.found is not None
    assert slow.found.label == "slowest hop to GPU 1"
    over_c2c = gpu_board.judge_way({0: way((1, 1), (5, 16))}, [replace(H100, c2c_links=1)], None)
    assert over_c2c.verdict == "unknown"


@pytest.mark.parametrize(
    ("seen", "limits", "verdict", "words"),
    [
        (LinkUnderLoad(0, 5, 16, 5, 16, False, 9), GpuLimits(5, 16), "pass", ""),
        (LinkUnderLoad(0, 1, 16, 1, 16, True, 9), GpuLimits(5, 16), "fail", "gen 1 x16"),
        (LinkUnderLoad(0, 5, 8, 5, 8, True, 9), GpuLimits(5, 16), "fail", "x8"),
        (LinkUnderLoad(0, 5, 16, 3, 16, True, 9), GpuLimits(5, 16), "fail", "gen 3"),
        (LinkUnderLoad(0, reason="the window ended"), GpuLimits(5, 16), "unknown", "the window ended"),
        (LinkUnderLoad(0, 1, 1, 1, 1, True, 9), GpuLimits(5, 16, c2c=True), "unknown", "C2C"),
    ],
)
def test_a_link_is_judged_by_its_state_under_load(
    seen: LinkUnderLoad, limits: GpuLimits, verdict: str, words: str
) -> None:
    finding = gpu_board.judge_link(seen, limits, (1, 16))
    assert (finding.verdict, words in finding.reason) == (verdict, True), finding


def test_ecc_is_part_of_the_environment() -> None:
    """The real fingerprint, asked for this machine with an H100 whose ECC is on and off."""
    gpus = Gpus(True, (H100,))
    digests = {gpu_board._env(gpus), gpu_board._env(gpu_board._other_ecc(gpus))}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("board", "sheet"),
    [
        (replace(H100, name="NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30, max_memory_mhz=1215), 1555e9),
        (replace(H100, name="NVIDIA A100 80GB PCIe", max_memory_mhz=1512), 1935e9),
        (replace(H100, name="NVIDIA A100-SXM4-80GB", max_memory_mhz=1593), 2039e9),
        (replace(H100, name="NVIDIA L4", memory_bytes=23 << 30, max_memory_mhz=6251, memory_bus_bits=192), 300e9),
        (replace(H100, name="NVIDIA L40S", memory_bytes=45 << 30), None),
        (replace(H100, name="NVIDIA GH200 480GB", memory_bytes=95 << 30, memory_bus_bits=6144), 4000e9),
    ],
)
def test_a_board_has_the_sheet_of_its_own_model(board: Gpu, sheet: float | None) -> None:
    assert gpu_board.sheet_of(board) == sheet
    if sheet is not None:
        assert gpu_board.judge_peaks([board]).verdict == "pass"
