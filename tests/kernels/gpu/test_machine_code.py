"""Reading machine code: widths, bytes in flight, clocks and compiler reports, from short pieces of real output."""

from __future__ import annotations

import pytest

from kvbench.kernels.gpu.machine_code import amd_accesses, amd_resources, ptxas_resources, sass_accesses, sass_of


def sass(*lines: str) -> str:
    text = []
    for k, line in enumerate(lines):
        text.append(line if line.startswith(".L") else f"        /*{16 * k:04x}*/   {line} ;")
    return "\n".join(text)


LOADS = [f"LDG.E.NA.128 R{4 * k}, desc[UR14][R{40 + 2 * k}.64]" for k in range(1, 5)]
STORES = [f"STG.E.EF.128 desc[UR14][R{40 + 2 * k}.64], R{4 * k}" for k in range(1, 5)]
ALTERNATING = [x for pair in zip(LOADS, STORES, strict=True) for x in pair]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*LOADS, *STORES], 64),
        (ALTERNATING, 16),
        ([".L_x_1:", *LOADS, *STORES, "@P0 BRA `(.L_x_1)", ".L_x_2:", *ALTERNATING], 16),  # the worst loop counts
        ([*LOADS[:2], "IADD3 R60, R61, R5, RZ", *LOADS[2:], "IADD3 R60, R60, R16, RZ"], 48),  # R5 is the first load's
        ([*LOADS[:2], "IADD3 R60, R61, R9, RZ", *LOADS[2:]], 32),  # in order: with the second the first has come
        ([*LOADS[:3], "IADD3 R44, R42, R46, RZ", LOADS[3]], 64),  # addresses are no results
        (["LDG.E.64 R4, [R2.64]", "LDG.E R6, [R2.64]"], None),
        (["@!P0 LDG.E.NA.128.CONSTANT.SYS R36, [R36]", "@P2 LDG.E.EF.128.SYS R20, [R48.64+UR16]"], 32),
        (["LDG.E.ENL2.256 R4, R8, desc[UR4][R40.64]"], 32),
    ],
)
def test_in_flight_counts_wide_loads_before_the_first_need(lines: list[str], expected: int | None) -> None:
    assert sass_accesses(sass(*lines)).in_flight == expected


def test_widths_and_local_accesses() -> None:
    got = sass_accesses(sass("LDG.E.U8 R3, [R2.64]", "LDG.E R4, [R2.64]", "STG.E.64 [R2.64], R4", "STL [R1], R9",
                             "@P0 LDL.64 R8, [R1]", "LDS.128 R12, [R3]"))  # fmt: skip
    assert (got.load_bits, got.store_bits, got.wide_loads, got.wide_stores, got.local) == (32, 64, 0, 0, 2)


CHAIN = ["LDG.E.64.STRONG.SM R4, [R2.64]", "LDG.E.64.STRONG.SM R2, [R4.64]"]
WAIT = "ISETP.NE.U32.AND P0, PT, R2, RZ, PT"
CLOCK = "CS2R R12, SR_CLOCKLO"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*CHAIN, WAIT, CLOCK, *CHAIN, WAIT, CLOCK], True),
        ([*CHAIN, WAIT, CLOCK, *CHAIN, CLOCK, WAIT], False),  # the reading does not wait for the last load
        ([*CHAIN, CLOCK, WAIT, *CHAIN, WAIT, CLOCK], False),
        ([*CHAIN, WAIT, CLOCK, CHAIN[0], "LDG.E.64 R2, [R8.64]", WAIT, CLOCK], False),  # independent loads
        ([*CHAIN, WAIT, CLOCK, WAIT, CLOCK], False),  # nothing between
        ([*CHAIN, WAIT, CLOCK], False),
        (CHAIN, None),
    ],
)
def test_timed_wants_clocks_behind_a_dependent_chain(lines: list[str], expected: bool | None) -> None:
    assert sass_accesses(sass(*lines)).timed is expected


def test_ptxas_report_of_two_kernels() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 8 bytes cumulative stack size, 256 bytes smem
ptxas-blackwell info    : Compiling entry function 'b' for 'sm_90a'
ptxas-blackwell info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas-blackwell info    : Used 4 registers, used 0 barriers
"""
    got = ptxas_resources(log)
    assert [(r.registers, r.spill_bytes, r.stack_bytes, r.shared_bytes) for r in got.values()] == [
        (32, 12, 8, 256),
        (4, 0, 0, 0),
    ]
    assert ptxas_resources("no such thing") == {}


def test_a_section_is_found_by_its_whole_name() -> None:
    text = "//---- .text.copy_all ----\n.text.copy_all:\nA\n//---- .text.copy ----\n.text.copy:\nB\n"
    assert "B" in (sass_of(text, "copy") or "")
    assert "A" in (sass_of(text, "copy_all") or "")
    assert sass_of(text, "cop") is None


AMD = """
	global_load_dwordx4 v[4:7], v[2:3], off
	global_load_dwordx4 v[0:3], v[0:1], off
	s_waitcnt lgkmcnt(0)
	global_load_dwordx4 v[8:11], v[0:1], off
	s_waitcnt vmcnt(2)
	global_store_dwordx4 v[40:41], v[4:7], off
	global_load_dword v4, v[2:3], off
	s_waitcnt vmcnt(0)
	scratch_store_dword off, v1, s32
	buffer_store_short v1, v2, s[0:3], 0 offen
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .name: p
        .size: 8
    .group_segment_fixed_size: 512
    .name:           k
    .private_segment_fixed_size: 16
    .sgpr_spill_count: 1
    .symbol:         k.kd
    .vgpr_count:     42
    .vgpr_spill_count: 3
"""


def test_amd_assembly() -> None:
    got = amd_accesses(AMD)
    assert (got.load_bits, got.store_bits, got.wide_loads, got.wide_stores) == (128, 128, 3, 1)
    assert (got.in_flight, got.local) == (48, 1)
    (resources,) = amd_resources(AMD).values()
    assert (resources.registers, resources.spill_bytes, resources.stack_bytes, resources.shared_bytes) == (
        42,
        16,
        16,
        512,
    )
    assert list(amd_resources(AMD)) == ["k"]
