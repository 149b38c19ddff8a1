"""The product with B far: Triton's arithmetic under the interpreter, machine code by the gates, what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels.gpu import build, gates
from kvbench.kernels.gpu.arch import ARCHS, arch
from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.kernels.gpu.gemm_kernels import (
    DEPTHS,
    GATED,
    ORDERS,
    SHAPES,
    error_bound,
    groups_kernel,
    require_fit,
    shared_bytes,
    simt_kernel,
    tensor_kernel,
)
from kvbench.kernels.gpu.machine_code import sass_of
from kvbench.memory.cuda.portable import scratch_arguments
from tests.kernels.gpu.interpreter import interpreted
from tests.needs import require

FAILING = {"padding of B": "error", "a row of K too few": "error"}


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    return interpreted("interpreted_gemm")


def test_triton_products_are_right_at_every_edge(said: dict[str, str | None]) -> None:
    assert {case: text for case, text in said.items() if text is not None and case not in FAILING} == {}
    assert {f"{c} {o} (130, 70, 1)" for c in ("tf32", "bf16") for o in ORDERS} <= said.keys()
    assert {"raster 1", "raster 2", "split 2", "split 3", "more programs than tiles"} <= said.keys()


@pytest.mark.parametrize("case", list(FAILING))
def test_what_is_wrong_is_noticed(said: dict[str, str | None], case: str) -> None:
    assert FAILING[case] in (said[case] or "")


def needs(*forms: str) -> None:
    if "cuda" in forms:
        require("nvrtc", build.missing_nvrtc())
    if "triton" in forms:
        require("triton", build.missing_triton())
    require("triton", None if build.disassembler() else "no nvdisasm (the triton wheel carries one)")


def passed(rows: list[gates.Row]) -> None:
    assert [f"{r.kernel} {r.arch}: {r.reason}" for r in rows if r.status != "pass"] == []
    for row in rows:
        assert (row.load_bits, row.store_bits, row.spill_bytes) == (128, 128, 0)
        assert {"spills", "limits", "wide", "math"} <= {g.name for g in row.gates}


def test_simt_forms_pass_their_gates() -> None:
    needs("cuda")
    passed(gates.table([simt_kernel("naive", 64)], [arch("sm_75")]))
    (deep,) = gates.table([simt_kernel("aware", 128, 3)], [arch("sm_90a")])
    passed([deep])
    assert deep.dynamic_shared == 217_088 == shared_bytes("aware", 128, 3)


def test_tensor_forms_pass_their_gates_one_assembler_each() -> None:
    needs("triton")
    passed(gates.table([tensor_kernel("bf16", "naive", 64, 3)], [arch("sm_90a")]))
    form = tensor_kernel("tf32", "aware", 64)
    (built,) = build.triton([(form, arch("sm_80"))])
    passed([gates.check(form, arch("sm_80"), built)])
    assert scratch_arguments(form, built.assembly or "") <= 2  # raises where the driver's launch would not fit


def test_the_groups_compile_to_three_parts_that_meet_at_barriers() -> None:
    needs("triton")
    form, target = groups_kernel(64, 2), arch("sm_90a")
    (built,) = build.triton([(form, target)])
    row = gates.check(form, target, built)
    assert (row.status, row.reason, row.spill_bytes) == ("pass", None, 0)
    code = sass_of(built.sass or "", form.entry) or ""
    # the multiprocessor's copy engine loads A and B, stores the first step of C and adds the others
    assert {name: bool(re.search(name, code)) for name in ("UTMALDG", "UTMASTG", "UTMAREDG", "HGMMA", "SYNCS")} == \
        dict.fromkeys(("UTMALDG", "UTMASTG", "UTMAREDG", "HGMMA", "SYNCS"), True)  # fmt: skip
    ptx = built.assembly or ""
    waits = ptx.count("mbarrier.try_wait.parity")
    assert waits >= 6  # empty and full of B, of A and of C
    # One thread arrives for the four consumer warps: all must have got there, so a barrier of theirs comes first.
    consumer = ptx[ptx.index("wgmma.fence") :]
    arrivals = [m.start() for m in re.finditer(r"mbarrier\.arrive\.shared", consumer)]
    assert len(arrivals) >= 2
    for at in arrivals:
        before = consumer[:at]
        assert before.rfind("bar.sync") > max(before.rfind("mbarrier.arrive.shared"), before.rfind("wgmma.wait_group"))


def test_a_claim_of_the_wrong_instruction_fails_its_gate() -> None:
    needs("cuda")
    form = simt_kernel("naive", 64)
    claims = replace(form, demand=replace(form.demand, math="tensor"))
    (row,) = gates.table([claims], [arch("sm_80")])
    assert "math: multiplies by ffma, mma asked for" in (row.reason or "")


def test_one_narrow_load_fails_the_gate() -> None:
    """Where a kernel says that every load is wide, a single other one is a far operand read in small pieces."""
    needs("triton")
    form = tensor_kernel("bf16", "naive", 64)
    loose = replace(form, arguments=tuple(replace(a, align=1) if a.name == "b" else a for a in form.arguments))
    (row,) = gates.table([loose], [arch("sm_90a")])
    assert "wide: widest load 128 bit, widest store 128 bit, " in (row.reason or "")
    assert "loads below 128 bit" in (row.reason or "")


def test_what_does_not_fit_says_how_much_and_what_does() -> None:
    with pytest.raises(
        Unavailable, match=r"282624 bytes of shared memory a block.*at most 232448 bytes.*tile 128 depth 3"
    ):
        require_fit("aware", 128, 4, arch("sm_90a"))
    with pytest.raises(Unavailable, match=r"on sm_75.*86016 bytes.*what fits: tile 64 depth 1"):
        require_fit("aware", 128, 1, arch("sm_75"))
    with pytest.raises(Unavailable, match="no asynchronous copies"):
        require_fit("naive", 64, 2, arch("sm_75"))
    require_fit("aware", 128, 3, arch("sm_90a"))
    with pytest.raises(UsageError, match="tile: no kernel of that tile, got 100, expected 64, 128, 256"):
        simt_kernel("naive", 100)
    with pytest.raises(UsageError, match="depth of the pipeline"):
        simt_kernel("naive", 64, 5)
    with pytest.raises(UsageError, match="loop order"):
        simt_kernel("clever", 64)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"would spill, got 'aware, tile 128, depth 2'"):
        tensor_kernel("bf16", "aware", 128, 2)
    with pytest.raises(UsageError, match="not a matrix instruction"):
        tensor_kernel("simt", "aware", 128)


def test_only_what_fits_is_compiled_for_an_architecture() -> None:
    for order in ORDERS:
        for tile in SHAPES:
            for depth in DEPTHS:
                form = simt_kernel(order, tile, depth)
                for name in form.archs:
                    assert form.shared <= ARCHS[name].shared_limit
                    require_fit(order, tile, depth, arch(name))
    assert all(k.archs for k in GATED)
    assert len({k.name for k in GATED}) == len(GATED)


def test_each_form_is_another_text_and_digest() -> None:
    forms: list[GpuKernel] = [simt_kernel(o, t) for o in ORDERS for t in SHAPES]
    assert len({f.digest() for f in forms}) == len({f.text() for f in forms}) == len(forms)
    assert forms[0].text().startswith("#define ENTRY kvbench_gemm_naive_64_d1\n")


def test_dimensions_beyond_32_bits_are_refused() -> None:
    form = simt_kernel("naive", 64)
    with pytest.raises(UsageError, match="m: out of range"):
        form.check(16, 16, 16, 1 << 31, 1, 1, 4, 4, 4, 1, 0)
    assert error_bound("simt", 10000) == pytest.approx(1e-4)
