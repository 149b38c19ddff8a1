"""qkvo_vs_kv and swap_out as the worker runs them: host memory, a file, the fake driver."""

from __future__ import annotations

from functools import cache

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.worker import measure_case
from tests.suites.gpu_rig import Rig, rig

KiB = 1 << 10


@cache
def find(name: str) -> Bench:
    return load_suites().find("neo", name)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sweeps; 1,024 tokens of 16 requests are 64 MiB."""
    for name in ("qkvo_vs_kv", "swap_out"):
        told = find(name).body.__globals__
        monkeypatch.setitem(told["SWEEPS"], "coarse", (2, 4, 16, 32, 64))
        monkeypatch.setitem(told["ROUNDS"], "smoke", 2)
        monkeypatch.setitem(told, "FLUSH_LLC", 1)
        monkeypatch.setitem(told, "LAYERS", 3)


def case(context: Context, name: str, **axes: Value) -> dict[str, Result]:
    """Run one case at its first smoke values but for ``axes``."""
    bench = find(name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | {"threads": 1} | axes
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    rows = measure_case(bench, values, context)
    assert rows[0].status in HAS_VALUE - {"invalid"} or rows[0].status == "skipped", rows[0].reason
    return {row.metric: row for row in rows}


@pytest.mark.parametrize(("copies", "fragments"), [("coalesced", 2), ("scattered", 8)])
@pytest.mark.parametrize("pair", ["dram:dram", "dram:file"])
def test_shipping_and_its_crossover(context: Context, pair: str, copies: str, fragments: int) -> None:
    rows = case(context, "qkvo_vs_kv", pair=pair, copies=copies, requests=4)
    ship = rows["ship_time"]
    assert ship.bytes.link == ship.bytes.unique == 4 * 28 * KiB
    assert ship.detail["ship_fragments"] == fragments
    assert ship.detail["token_bytes"] == 4 * KiB
    assert (rows["byte_crossover"].value, rows["byte_crossover"].basis) == (7.0, "modelled")
    found = rows["crossover"]
    assert {f"kv_{n}_s" for n in (2, 4, 16, 32, 64)} <= found.detail.keys()
    if found.value is not None:
        assert 2.0 < found.value <= 64.0
    else:
        assert "tokens" in found.reason
    assert (rows["advantage"].value, rows["advantage"].reason) == (None, "the sweep ends at 64 tokens")
    for row in rows.values():
        assert (row.value is not None) == (row.status in HAS_VALUE)
        assert row.value is not None or row.reason


@pytest.mark.parametrize("pair", ["dram:dram", "dram:file"])
def test_a_prefill_leaves_layer_by_layer(context: Context, pair: str) -> None:
    rows = case(context, "swap_out", pair=pair, tokens=32)
    row = rows["bandwidth"]
    assert row.bytes.link == 3 * 32 * 4 * KiB
    assert row.detail["fragments"] == 3 * 2 * 2
    assert [c.name for c in row.ceilings] == ["all layers in one go"]
    assert row.value is not None
    assert rows["layer_time"].value == pytest.approx(row.bytes.link / row.value / 3)


def test_half_a_page_is_skipped_and_says_why(context: Context) -> None:
    row = case(context, "swap_out", tokens=40)["bandwidth"]
    assert (row.status, row.reason) == ("skipped", "40 tokens are no whole pages of 16")


def test_the_crossover_is_where_the_kv_takes_as_long(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    """Times by design: 3 us fixed and 1 us a token against a shipping of 9 us is 6 tokens."""
    told = find("qkvo_vs_kv").body.__globals__
    monkeypatch.setitem(told["SWEEPS"], "coarse", (2, 4, 8, 16))

    def times(link: object, legs: list[object], rounds: int, seed: int) -> tuple[list[float], float]:
        return [9e-6, *(3e-6 + n * 1e-6 for n in (2, 4, 8, 16))], 0.0

    monkeypatch.setitem(told, "in_turns", times)
    rows = case(context, "qkvo_vs_kv", requests=2)
    assert rows["crossover"].value == pytest.approx(6.0, rel=0.05)
    assert rows["crossover"].status == "ok"
    assert rows["kv_per_token"].value == pytest.approx(0.5e-6, rel=0.02)  # a token of one of two requests
    monkeypatch.setitem(told, "in_turns", lambda *given: ([1e-6, 5e-6, 7e-6, 11e-6, 19e-6], 0.0))
    row = case(context, "qkvo_vs_kv", requests=2)["crossover"]
    assert (row.status, row.value) == ("skipped", None)
    assert "already at 2 tokens" in row.reason
    monkeypatch.setitem(told, "in_turns", lambda *given: ([1.0, 5e-6, 7e-6, 11e-6, 19e-6], 0.2))
    rows = case(context, "qkvo_vs_kv", requests=2)
    assert rows["crossover"].reason == "never up to 16 tokens"
    assert (rows["kv_per_token"].status, rows["kv_per_token"].reason) == ("tainted", "20% of the passes were disturbed")


def test_scratch_is_announced(context: Context) -> None:
    for name, axes in (("qkvo_vs_kv", {"requests": 16}), ("swap_out", {"tokens": 512})):
        disk = find(name).disk
        assert disk is not None
        given: dict[str, Value] = {"pair": "dram:file", "model": "Llama-3-8B", "page_tokens": 16, **axes}
        assert disk(given) > 8 << 20
        assert disk({**given, "pair": "dram:dram"}) == 0


@pytest.mark.parametrize("copies", ["coalesced", "scattered"])
def test_shipping_over_the_link_of_a_gpu(gpu: Rig, copies: str) -> None:
    rows = case(gpu.context, "qkvo_vs_kv", pair="hbm:pinned", copies=copies, requests=4)
    ship = rows["ship_time"]
    assert ship.value is not None, ship.reason
    assert ship.transport == "ce"
    assert ship.bytes.link == 4 * 28 * KiB
    assert "kv_64_s" in rows["crossover"].detail
    assert case(gpu.context, "swap_out", pair="hbm:pinned", copies=copies, tokens=32)["bandwidth"].value is not None
    assert gpu.fake.live() == {}


def test_without_a_gpu_the_case_says_so(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    with rig(monkeypatch, context, devices=0) as none:
        row = case(none.context, "qkvo_vs_kv", pair="hbm:pinned")["ship_time"]
    assert (row.status, row.value) == ("skipped", None)
    assert "cuInit" in row.reason
