"""Decode attention for GPUs: arithmetic under the interpreter, machine code by the gates, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.kernels.gpu import build, gates
from kvbench.kernels.gpu.arch import arch
from kvbench.kernels.gpu.catalogue import GpuKernel, attention_kernels
from kvbench.kernels.gpu.decode_kernels import BYTES, merge_kernel, split_kernel, stages_of, tile_of
from kvbench.kernels.gpu.machine_code import sass_of
from kvbench.memory.cuda.portable import SHARED_LIMIT, scratch_arguments
from tests.kernels.gpu.interpreter import interpreted
from tests.needs import require

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    return interpreted("interpreted_decode")


def test_split_and_merge_are_the_models_attention(said: dict[str, str | None]) -> None:
    assert {case: text for case, text in said.items() if text is not None and case not in FAILING} == {}
    assert {f"ragged {dtype}" for dtype in BYTES} <= said.keys()
    assert {"far, tiles over pages", "far, tiles in a page"} <= said.keys()
    assert {f"length {count}" for count in (4095, 4096, 4097)} <= said.keys()
    assert {"an exact table", "scores of 1e4", "LSE 0", "merge of 0 and -3", "merge of nothing"} <= said.keys()


FAILING = {
    "stray": "a canary died",
    "a wrong scale": "error",
    "a token too many": "error",
}


@pytest.mark.parametrize("case", list(FAILING))
def test_what_is_wrong_is_noticed(said: dict[str, str | None], case: str) -> None:
    assert FAILING[case] in (said[case] or "")


def needs_compiler() -> None:
    require("triton", build.missing_triton())
    require("triton", None if build.disassembler() else "no nvdisasm (the triton wheel carries one)")


def test_the_gates_pass_one_form_an_assembler() -> None:
    needs_compiler()
    forms = [split_kernel("bf16", 4, 128, 16), merge_kernel(4, 128)]
    rows = gates.table(forms, [arch(n) for n in ("sm_75", "sm_90a", "gfx942")])
    assert [f"{r.kernel} {r.arch}: {r.reason}" for r in rows if r.status != "pass"] == []
    assert len(rows) == 6
    for row in rows:
        assert (row.spill_bytes, row.load_bits) == (0, 128)
        assert (row.dynamic_shared or 0) + (row.static_shared or 0) <= SHARED_LIMIT


def test_two_tiles_are_under_way_before_the_first_product() -> None:
    """Copies into shared memory name no register to wait for, so the in_flight gate cannot count them."""
    needs_compiler()
    kernel = split_kernel("bf16", 4, 128, 16)
    (built,) = build.triton([(kernel, arch("sm_90a"))])
    code = sass_of(built.sass or "", kernel.entry)
    assert code is not None, built.reason
    before = code[: re.search(r"\bHG?MMA\b", code).start()]  # type: ignore[union-attr]
    copies = re.findall(r"\bLDGSTS\.\S*\b128\b", before)
    assert 16 * len(copies) * kernel.block >= 32 << 10
    assert scratch_arguments(kernel, built.assembly or "") <= 2  # raises where the driver's launch would not fit
    assert built.dynamic_shared <= SHARED_LIMIT


@pytest.mark.parametrize("kernel", attention_kernels().values(), ids=lambda k: k.name)
def test_arguments_and_constants_are_those_of_the_source(kernel: GpuKernel) -> None:
    found = re.search(rf"def {kernel.entry}\(([^)]*)\):", kernel.text())
    assert found
    names = [part.split(":")[0].strip() for part in found[1].split(",") if part.strip()]
    assert names == [*(a.name for a in kernel.arguments), *(n for n, _ in kernel.constants)]
    assert len(kernel.types) == len(kernel.arguments)
    assert kernel.reference is not None


def test_tiles_hold_16_kib_where_a_dot_lets_them() -> None:
    for dtype, size in BYTES.items():
        for dim in (64, 80, 96, 128, 256):
            tile = tile_of(dtype, dim)
            padded = 2 * size * (64 if dim == 64 else 128 if dim <= 128 else 256)
            assert tile * padded == (32 << 10 if (dtype, dim) == ("fp32", 256) else 16 << 10)
            assert (stages_of(dtype, 4, dim) < 5) == ((dtype, dim) == ("fp32", 256))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fp8", 4, 128, 16), "unknown dtype, got 'fp8'"),
        (("bf16", 17, 128, 16), "query heads a KV head, got 17"),
        (("bf16", 4, 260, 16), "head_dim, got 260"),
        (("bf16", 4, 68, 16), "head_dim, got 68"),
        (("bf16", 4, 128, 0), "page size, got 0"),
    ],
)
def test_what_it_cannot_take_is_refused(arguments: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split_kernel(*arguments)
