"""``copy_pages``: every pair of layouts under the interpreter, and the gates of its machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.kernels.gpu import build, gates
from kvbench.kernels.gpu.arch import arch
from kvbench.kernels.gpu.catalogue import PAGE_THREADS, page_tile, pages_kernel
from kvbench.kernels.gpu.machine_code import amd_resources
from tests.kernels.gpu.interpreter import interpreted
from tests.needs import require

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    return interpreted("interpreted_paged")


def test_every_pair_of_layouts_arrives_byte_by_byte(said: dict[str, str | None]) -> None:
    assert {case: text for case, text in said.items() if text is not None and case != "stray"} == {}
    assert sum("-byte elements" in case for case in said) == 4 * 4 * 3
    assert sum(case.startswith("by ") for case in said) == 8
    assert {
        "no pairs",
        "far i32",
        "far i64",
        "one layer of three",
        "rows longer than a tile",
        "many tiles",
    } <= said.keys()


def test_a_page_outside_the_pool_is_noticed(said: dict[str, str | None]) -> None:
    assert said["stray"] == "a canary died"


def test_the_gates_pass_for_both_numbers_of_threads_and_indices() -> None:
    require("triton", build.missing_triton())
    require("triton", None if build.disassembler() else "no nvdisasm (the triton wheel carries one)")
    wide = [pages_kernel(256, True, "i32"), pages_kernel(2048, True, threads=256)]
    narrow = pages_kernel(24, True, width=8)
    rows = gates.table([*wide, narrow], [arch(n) for n in ("sm_75", "sm_90a", "gfx942")])
    assert [f"{r.kernel} {r.arch}: {r.reason}" for r in rows if r.status != "pass"] == []
    assert len(rows) == 9
    # Without a limit of registers of its own, ptxas spills here for a third block (Triton 3.9, sm_80).
    (long,) = gates.table([pages_kernel(64 << 10, True, threads=256)], [arch("sm_80")])
    assert (long.status, long.spill_bytes) == ("pass", 0), long.reason
    for row in rows:
        if row.kernel == narrow.name:
            assert (row.load_bits, row.store_bits) == (64, 64)
            continue
        assert (row.load_bits, row.store_bits, row.spill_bytes) == (128, 128, 0)
        assert row.in_flight is not None
        assert row.in_flight >= 64 << 10


def test_a_tile_holds_64_kib_and_narrow_ones_what_the_same_registers_hold() -> None:
    for both in (True, False):
        for size in (16, 80, 256, 2048, 1152, 1 << 20):
            rows, words = page_tile(size, both)
            assert 4 * rows * words * (2 if both else 1) == 64 << 10
            assert rows == 1 or words * 4 < 2 * size
        for width in (8, 4, 2, 1):
            rows, words = page_tile(24 * width, both, width)
            assert rows * words * (2 if both else 1) == 8192
    for size, width in ((24, 16), (0, 16), (10, 4), (16, 3), (-16, 16)):
        with pytest.raises(UsageError, match="not a row of whole accesses"):
            page_tile(size, True, width)
    assert PAGE_THREADS == (256, 512, 1024)
    with pytest.raises(UsageError, match="not a number of threads"):
        pages_kernel(256, True, threads=128)


AMD = """
amdhsa.kernels:
  - .args: []
    .group_segment_fixed_size: 0
    .name:           k
    .private_segment_fixed_size: {private}
    .sgpr_spill_count: 39
    .symbol:         k.kd
    .vgpr_count:     85
    .vgpr_spill_count: 0
"""


@pytest.mark.parametrize(("private", "spilled"), [(0, 0), (16, 156)])
def test_scalar_registers_in_lanes_of_vector_registers_are_no_spill_to_memory(private: int, spilled: int) -> None:
    assert amd_resources(AMD.format(private=private))["k"].spill_bytes == spilled
