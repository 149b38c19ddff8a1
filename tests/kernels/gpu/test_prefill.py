"""Prefill attention and the fused projection for GPUs: arithmetic by the interpreter, machine code by the gates."""

from __future__ import annotations

import pytest

from kvbench.errors import UsageError
from kvbench.kernels.gpu import build, gates
from kvbench.kernels.gpu.arch import arch
from kvbench.kernels.gpu.catalogue import attention_kernels
from kvbench.kernels.gpu.prefill_kernels import GATED, fused_kernel, prefill_kernel, shared_bytes
from tests.kernels.gpu.interpreter import interpreted
from tests.needs import require

FAILING = {"a wrong scale": "error", "a lost key": "error", "keys forgotten between": "error"}


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    return interpreted("interpreted_prefill")


def test_both_orders_and_the_projection_are_float64s(said: dict[str, str | None]) -> None:
    assert {case: text for case, text in said.items() if text is not None and case not in FAILING} == {}
    for order in ("q_outer", "kv_outer"):
        assert {f"{order} bf16", f"{order} one key", f"{order} one query", f"{order} causal"} <= said.keys()
    assert {"fused bf16", "fused one token", "separate width 1"} <= said.keys()


@pytest.mark.parametrize("case", list(FAILING))
def test_what_is_wrong_is_noticed(said: dict[str, str | None], case: str) -> None:
    assert FAILING[case] in (said[case] or "")


def test_the_gates_pass_one_form_of_each() -> None:
    require("triton", build.missing_triton())
    require("triton", None if build.disassembler() else "no nvdisasm (the triton wheel carries one)")
    forms = [prefill_kernel("kv_outer", "bf16", 4, 128), fused_kernel("fused", "bf16", 1, 128)]
    rows = gates.table(forms, [arch("sm_90a")])
    assert [(row.kernel, row.status, row.reason) for row in rows] == [(form.name, "pass", None) for form in forms]
    assert {gate.name for gate in rows[0].gates} == {"spills", "limits", "wide", "math"}
    assert "wgmma" in next(gate.said for gate in rows[0].gates if gate.name == "math")
    assert all(row.load_bits is not None and row.load_bits >= 128 for row in rows)


def test_the_gated_forms_are_in_the_catalogue() -> None:
    assert {form.name for form in GATED} <= attention_kernels().keys()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: prefill_kernel("inside_out", "bf16", 1, 128), "unknown order"),
        (lambda: prefill_kernel("q_outer", "int8", 1, 128), "unknown dtype"),
        (lambda: prefill_kernel("q_outer", "bf16", 0, 128), "query heads a KV head"),
        (lambda: prefill_kernel("q_outer", "bf16", 1, 100), "head_dim"),
        (lambda: prefill_kernel("q_outer", "bf16", 1, 128, rows=48), "not a tile"),
        (lambda: fused_kernel("twice", "bf16", 1, 128), "unknown part"),
    ],
)
def test_a_form_there_is_none_of_is_refused(make: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()  # type: ignore[operator]


def test_the_shared_memory_of_a_block_is_three_tiles() -> None:
    assert shared_bytes(64, 64, 128, "bf16") == 3 * 64 * 128 * 2
