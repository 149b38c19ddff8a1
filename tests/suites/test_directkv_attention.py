"""The attention benches of the directkv suite: host forms at small sizes, GPU forms on the fake driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.systems.directkv.gpu_attention import LayerSwap
from kvbench.worker import measure_case
from tests.needs import missing_numa, require
from tests.suites.gpu_rig import Rig, rig, short_context
from tests.systems.directkv.far_rig import FarKernels, far_kernels


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return short_context(tmp_path)


def case(context: Context, name: str, /, **axes: Value) -> dict[str, Result]:
    """Run one case at its first smoke values but for ``axes``; return its rows by metric. Skips without a far file."""
    bench = load_suites().find("directkv", name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    rows = measure_case(bench, values, context)
    if rows[0].status == "skipped" and "file system" in rows[0].reason:
        pytest.skip(rows[0].reason)
    return {row.metric: row for row in rows}


def good(rows: dict[str, Result], metric: str) -> Result:
    row = rows[metric]
    assert row.status in HAS_VALUE - {"invalid"}, row.reason
    assert row.n >= 3
    return row


@pytest.mark.parametrize("method", ["in_place", "stream", "near"])
def test_decode_over_a_file(context: Context, method: str) -> None:
    rows = case(context, "decode_attention", pair="dram:file", method=method, kv_heads=1, context=1 << 13)
    row = good(rows, "bandwidth")
    assert (row.rate_of, row.basis) == ("unique", "measured")
    assert row.bytes.demand == (0 if method == "near" else row.bytes.unique)
    if method == "near":
        assert row.bytes.link == 0
    elif row.bytes.link is not None:
        assert row.bytes.link == pytest.approx(row.bytes.unique, rel=0.1)
    assert row.ceilings[0].kind == "measured"
    held = rows["near_buffer"]
    assert held.status == "skipped" or held.value is not None
    if held.value is not None:
        assert (held.value == 0) == (method == "in_place")


def test_prefill_names_winner_prediction_and_bytes(context: Context) -> None:
    rows = case(context, "prefill_order", pair="dram:file", queries=33, keys=130, block_q=16, block_kv=32, group=2)
    row = good(rows, "pass_time")
    detail = row.detail
    assert {detail["winner"], detail["predicted_winner"]} <= {"q_outer", "kv_outer", "swap"}
    assert isinstance(detail["agrees"], bool)
    for order in ("q_outer", "kv_outer", "swap", "near"):
        assert detail[f"near_{order}"] == detail[f"near_{order}_algebra"]
        assert isinstance(detail[f"predicted_{order}"], float)
    assert detail["link_near"] == 0
    assert rows["link_ratio"].value == pytest.approx(1.0, abs=0.2)  # a stray page of the process counts at this size
    assert {"q_outer_time", "swap_time", "near_time", "near_buffer"} <= rows.keys()
    assert row.bytes.near == detail["near_kv_outer_algebra"]


@pytest.mark.parametrize("tokens", [1, 40])
def test_fused_rows(context: Context, tokens: int) -> None:
    rows = case(context, "fused_projection", pair="dram:file", tokens=tokens, width=32, kv_heads=1, tile=16)
    row = good(rows, "pass_time")
    assert row.bytes.unique == tokens * 128 * 4
    assert rows["link_ratio"].value == 1.0
    assert rows["predicted_gain"].basis == "modelled"
    assert rows["separate_time"].value == pytest.approx((rows["gain"].value or 0.0) * (row.value or 0.0), rel=0.5)
    assert row.detail["link_separate"] == row.detail["link_separate_algebra"]


def test_a_node_that_is_not_there_is_a_skip_with_its_reason(context: Context) -> None:
    require("no second node", None if missing_numa() else "this machine has a second NUMA node")
    more: dict[str, dict[str, Value]] = {
        "decode_attention": {"method": "swap"}, "prefill_order": {}, "fused_projection": {}
    }  # fmt: skip
    for bench, axes in more.items():
        (row,) = case(context, bench, pair="dram@0:dram@1", **axes).values()
        assert (row.status, row.value) == ("skipped", None)
        assert "dram@1" in row.reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[tuple[Rig, FarKernels]]:
    with rig(monkeypatch, context) as made:
        kernels = far_kernels(monkeypatch, made.fake)
        init = LayerSwap.__init__

        def eager(self: LayerSwap, device: Any, sources: Any, slots: Any, nbytes: int, work: Any, *others: Any) -> None:
            """References run where a launch is queued, so the bytes its copy will bring are put there first."""

            def after(layer: int, each: Any) -> Any:
                def run(stream: Any) -> None:
                    made.fake.poke(slots[layer % 2], made.fake.peek(sources[layer], nbytes).tobytes())
                    each(stream)

                return run

            init(self, device, sources, slots, nbytes, [after(n, each) for n, each in enumerate(work)], *others)

        monkeypatch.setattr(LayerSwap, "__init__", eager)
        yield made, kernels


@pytest.mark.parametrize("method", ["in_place", "swap", "near"])
def test_decode_on_a_gpu(gpu: tuple[Rig, FarKernels], monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    import kvbench.systems.directkv.gpu_attention as module

    opened = module.open_far_decode
    monkeypatch.setattr(module, "PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(module, "open_far_decode", lambda *a, **k: opened(*a, **{**k, "least_bytes": 1 << 16}))
    rows = case(gpu[0].context, "decode_attention", pair="hbm:pinned", method=method, kv_heads=1, context=96)
    row = good(rows, "bandwidth")
    assert row.bytes.demand == (0 if method == "near" else row.bytes.unique)
    assert (rows["near_buffer"].value == 0) == (method == "in_place")
    assert row.ceilings[0].name.startswith("HBM read" if method == "near" else "full-grid SM read")
    if method != "near":
        assert row.detail["link_source"] == "bounds"
        assert row.detail["link_low"] == row.bytes.unique
    assert gpu[0].fake.live() == {}


def test_prefill_on_a_gpu(gpu: tuple[Rig, FarKernels], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.systems.directkv.gpu_attention.PROBE_BYTES", 1 << 16)
    axes: dict[str, Value] = {"queries": 20, "keys": 40, "block_q": 16, "block_kv": 16, "group": 2}
    rows = case(gpu[0].context, "prefill_order", pair="hbm:pinned", **axes)
    row = good(rows, "pass_time")
    assert row.bytes.unique == row.bytes.demand == 2 * 40 * 2 * 128 * 2
    assert row.detail["demand_q_outer"] == 4 * (row.bytes.unique or 0)  # two tiles of queries, two heads
    assert {"q_outer_time", "swap_time", "near_time"} <= rows.keys()
    assert gpu[0].fake.live() == {}
    (refused,) = case(gpu[0].context, "prefill_order", pair="hbm:pinned", **{**axes, "block_kv": 256}).values()
    assert (refused.status, refused.value) == ("skipped", None)
    assert "fits" in refused.reason


def test_fused_on_a_gpu(gpu: tuple[Rig, FarKernels]) -> None:
    axes: dict[str, Value] = {"tokens": 20, "width": 16, "kv_heads": 1}
    rows = case(gpu[0].context, "fused_projection", pair="hbm:pinned", **axes)
    row = good(rows, "pass_time")
    assert row.bytes.unique == row.bytes.demand == 20 * 128 * 2
    assert "separate_time" in rows
    gpu[1].kept = False
    (wrong,) = case(gpu[0].context, "fused_projection", pair="hbm:pinned", **axes).values()
    assert wrong.status == "failed"
    assert "wrong" in wrong.reason
