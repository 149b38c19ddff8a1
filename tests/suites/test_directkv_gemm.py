"""The host benches of the product with B far, run as the worker runs them: what a row holds, and what is skipped."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.machine.probe import Fact
from kvbench.systems.directkv import host_rig, host_store
from kvbench.worker import measure_case

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="products and loads need a CPU each")

HOST: dict[str, Value] = {"device": "cpu", "pair": "dram:file", "compute": "fp32", "n": 160, "tile": "64"}
MODELLED = {"predicted_time", "unique_bytes", "demand_bytes", "near_bytes"}


def find(name: str) -> Bench:
    return load_suites().find("directkv", name)


def run(bench: Bench, context: Context, **axes: Value) -> list[Result]:
    values = {name: declared.smoke[0] for name, declared in bench.axes.items()}
    values |= {name: value for name, value in (HOST | axes).items() if name in bench.axes}
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    return measure_case(bench, values, context)


def by_metric(rows: list[Result]) -> dict[str, Result]:
    assert rows[0].status in HAS_VALUE, rows[0].reason
    return {row.metric: row for row in rows}


@pytest.mark.parametrize("method", ["swap", "naive", "cpu_aware", "cpu_aware_pipelined"])
def test_the_rows_of_a_product(method: str, context: Context) -> None:
    tile = "128" if method == "swap" else "64"
    rows = by_metric(run(find("gemm"), context, method=method, tile=tile))
    assert set(rows) == {"time", "link_ratio", "near_buffer", "predicted_time", "error"}
    first = rows["time"]
    assert first.bytes.unique == 160 * 160 * 4
    assert first.bytes.link is not None
    assert rows["link_ratio"].value == 1.0
    assert first.detail["bound"] in ("link", "compute")
    assert [ceiling.kind for ceiling in first.ceilings] == ["measured"]
    assert rows["predicted_time"].basis == "modelled"
    assert rows["near_buffer"].detail["predicted"] is not None
    assert 0.0 < (rows["error"].value or 0.0) < 1e-5
    if method == "naive":
        assert first.bytes.demand == 3 * 160 * 160 * 4


def test_b_near_crosses_nothing(context: Context) -> None:
    rows = by_metric(run(find("gemm"), context, method="resident", tile="128"))
    assert rows["time"].bytes.link == 0
    assert rows["time"].ceilings == ()
    assert (rows["link_ratio"].status, rows["link_ratio"].value) == ("skipped", None)
    assert rows["near_buffer"].value == 160 * 160 * 4


def test_non_square_and_degenerate_shapes(context: Context) -> None:
    for m, n, k in ((1, 70, 33), (150, 1, 40), (70, 65, 1)):
        rows = by_metric(run(find("gemm"), context, method="cpu_aware", m=m, n=n, k=k))
        assert rows["time"].bytes.unique == 4 * n * k
        assert rows["link_ratio"].value == 1.0


def test_without_a_counter_there_are_no_link_bytes(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "probe_counter", lambda file: Fact(False, "read_bytes grew by 0"))
    rows = by_metric(run(find("gemm"), context, method="naive"))
    assert rows["time"].bytes.link is None
    assert "link_unmeasured" in rows["time"].flags
    assert "grew by 0" in str(rows["time"].detail["link_reason"])
    assert rows["time"].detail["asked_bytes"] > 0  # type: ignore[operator]
    assert rows["link_ratio"].value is None
    for name, words in (("pipeline_depth", {"tile": 64}), ("near_contention", {"tile": 64, "method": "naive"})):
        row = by_metric(run(find(name), context, **words))["time"]
        assert row.bytes.link is None
        assert "link_unmeasured" in row.flags
        assert "grew by 0" in str(row.detail["link_reason"])
    for name in ("traffic", "amplification"):
        row = run(find(name), context, method="naive", tile=64)[0]
        assert (row.status, row.value) == ("skipped", None)
        assert "not measured" in row.reason


def test_memory_beside_the_copy_says_why_it_has_no_link_bytes(context: Context) -> None:
    for name in ("gemm", "pipeline_depth", "near_contention"):
        tile: Value = "64" if name == "gemm" else 64
        words: dict[str, Value] = {} if name == "pipeline_depth" else {"method": "cpu_aware"}
        row = by_metric(run(find(name), context, pair="dram:dram", tile=tile, **words))["time"]
        assert row.bytes.link is None
        assert "link_unmeasured" in row.flags
        assert "no counter" in str(row.detail["link_reason"])


def test_the_row_of_a_swap_names_its_share(context: Context) -> None:
    words: dict[str, Value] = {"method": "swap", "tile": "128", "n": 320}
    rows = by_metric(run(find("gemm"), context, staging=50, **words))
    share = float(rows["time"].detail["staged_share"] or 0.0)
    assert share == pytest.approx(128 / 320, rel=0.02)
    near = rows["near_buffer"]
    assert near.value == near.detail["predicted"] == 128 * 320 * 4
    assert "page tables" in str(near.detail["counted_by"])
    row = run(find("gemm"), context, staging=50, method="swap", tile="128", n=129)[0]
    assert (row.status, row.value) == ("skipped", None)
    assert "at least 100 %" in row.reason


def test_scratch_space_is_what_is_stored() -> None:
    axes: dict[str, Value] = {
        "device": "cpu", "pair": "dram:file", "compute": "fp32", "n": 64, "m": 0, "k": 0, "staging": 100,
        "buffering": "single", "depth": 2, "method": "naive", "cache": 1, "workers": 1, "order": "m_fastest",
        "share": 1,
    }  # fmt: skip
    tiny = {"traffic": 1, "amplification": 1, "near_contention": 1, "pipeline_depth": 2}
    for name, stores in tiny.items():
        disk = find(name).disk
        assert disk is not None
        assert disk(axes | {"tile": 4}) == stores * 256 * 4096  # a page a tile, not 64 bytes
        assert disk(axes | {"tile": 4, "device": "gpu", "pair": "hbm:pinned"}) == 0
    disk = find("gemm").disk
    assert disk is not None
    assert disk(axes | {"tile": "64"}) == 4 * 4096
    assert disk(axes | {"tile": "64", "method": "resident"}) == disk(axes | {"tile": "64", "pair": "dram:dram"}) == 0
    disk = find("traffic").disk
    assert disk is not None
    for beyond in ({"k": 1 << 40}, {"m": 1 << 33}, {"n": 10240, "tile": 64}, {"n": 8192, "k": 1 << 20, "tile": 8}):
        assert disk(axes | {"tile": 4} | beyond) == 0


@pytest.mark.parametrize("name", ["traffic", "amplification", "pipeline_depth", "near_contention"])
def test_more_loads_than_the_time_allows_do_not_begin(name: str, context: Context) -> None:
    ahead = name == "pipeline_depth"
    words: dict[str, Value] = {"n": 2048, "m": 1, "depth": 2} if ahead else {"n": 320, "method": "naive"}
    row = run(find(name), context, tile=4, **words)[0]
    assert row.value is None if name != "traffic" else row.basis == "modelled"
    assert "larger tiles" in (str(row.detail["not_run"]) if name == "traffic" else row.reason)
    assert "loads a pass" in (str(row.detail["not_run"]) if name == "traffic" else row.reason)


def test_memory_as_the_far_tier(context: Context) -> None:
    rows = by_metric(run(find("gemm"), context, method="naive", pair="dram:dram"))
    assert rows["time"].bytes.link is None
    assert rows["time"].transport == "staged"


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"n": 1 << 33, "method": "naive"}, "32-bit"),
        ({"pair": "dram@0:dram@1"}, "node"),
        ({"method": "swap", "tile": "128", "staging": 25, "n": 256}, "smaller than a tile column"),
        ({"method": "swap", "tile": "128", "buffering": "double", "n": 100}, "smaller than a tile column"),
        ({"device": "gpu", "pair": "hbm:pinned", "compute": "simt"}, "GPU"),
    ],
)
def test_what_does_not_run_says_why(axes: dict[str, Value], says: str, context: Context) -> None:
    if axes.get("pair") == "dram@0:dram@1" and len(context.topology.nodes) > 1:
        pytest.skip("this machine has two nodes")
    row = run(find("gemm"), context, **({"method": "cpu_aware", "tile": "128"} | axes))[0]
    assert row.status in ("skipped", "failed"), row
    assert row.value is None
    assert says in row.reason
    assert "\n" not in row.reason


def test_one_core_is_too_few(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(context.topology), "measuring_cpus", lambda self, threads, affinity=None: (0,))
    row = run(find("gemm"), context, method="naive")[0]
    assert row.status == "skipped"
    assert "core each" in row.reason


def test_winner_and_prediction(context: Context) -> None:
    rows = by_metric(run(find("gemm_winner"), context, n=160))
    assert set(rows) == {"round_time", "winner_time", "regret", "predicted_time"}
    detail = rows["round_time"].detail
    names = ("swap", "swap_double", "naive", "cpu_aware", "cpu_aware_pipelined")
    times = {name: float(detail[f"seconds_{name}"] or 0.0) for name in names}
    assert detail["winner"] == min(times, key=times.__getitem__)
    assert rows["winner_time"].value == pytest.approx(min(times.values()))
    forecast = {name: float(detail[f"predicted_{name}"] or 0.0) for name in names}
    assert detail["predicted_winner"] == min(forecast, key=forecast.__getitem__)
    regret = times[str(detail["predicted_winner"])] / min(times.values())
    assert rows["regret"].value == pytest.approx(regret)
    assert detail["agree"] is (regret <= 1.05)
    assert detail["agree_strictly"] is (detail["winner"] == detail["predicted_winner"])


def test_traffic_counts_and_models(context: Context) -> None:
    rows = by_metric(run(find("traffic"), context, n=100, tile=64, method="naive"))
    assert rows["link_bytes"].value == 2 * (64 * 64 * 4 + 2 * 12288 + 8192)  # 36 x 64 and 36 x 36 floats, padded
    assert rows["link_ratio"].value == 1.0
    assert {row.basis for name, row in rows.items() if name in MODELLED} == {"modelled"}
    huge = by_metric(run(find("traffic"), context, n=1 << 33, tile=128, method="naive"))
    assert huge["link_bytes"].value == float((1 << 26) * 4 * (1 << 66))
    assert huge["link_bytes"].basis == "modelled"
    assert "32-bit" in str(huge["link_bytes"].detail["not_run"])
    assert "link_ratio" not in huge


def test_amplification_is_measured_and_modelled(context: Context) -> None:
    rows = by_metric(run(find("amplification"), context, n=256, tile=64, method="naive", cache=1 << 20))
    assert rows["amplification"].value == rows["predicted_amplification"].value == 4.0
    assert rows["cached_amplification"].value == 1.0
    assert rows["cache_hits"].value == 0.75
    once = by_metric(run(find("amplification"), context, n=256, tile=64, method="cpu_aware"))
    assert once["amplification"].value == 1.0
    row = run(find("amplification"), context, n=10240, tile=64)[0]
    assert row.status == "skipped"
    assert "too many to walk" in row.reason


@pytest.mark.parametrize("depth", [1, 3])
def test_depth_changes_no_bytes(depth: int, context: Context) -> None:
    rows = by_metric(run(find("pipeline_depth"), context, n=160, tile=64, depth=depth))
    assert set(rows) == {"time", "gain", "predicted_time", "overlap", "link_ratio"}
    assert rows["link_ratio"].value == 1.0
    overlap = rows["overlap"].value
    assert overlap is not None
    assert 0.0 <= overlap <= 1.0
    if depth == 1:
        assert overlap == 0.0


def test_overlap_is_counted_in_nanoseconds() -> None:
    overlapped = find("pipeline_depth").body.__globals__["overlapped"]
    loads = np.array([[0, 10], [10, 30], [40, 50]], np.int64)
    products = np.array([[10, 20], [25, 45]], np.int64)
    assert overlapped(loads, products) == (10 + 5 + 5) / 40
    assert overlapped(loads, np.zeros((0, 2), np.int64)) == 0.0


def test_a_copy_beside_the_product(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = find("near_contention")
    monkeypatch.setitem(bench.body.__globals__, "COPY_BYTES", 4 << 20)
    rows = by_metric(run(bench, context, n=160, tile=64, method="cpu_aware", share=50))
    assert set(rows) == {"time", "slowdown", "copy_rate"}
    assert min(row.value or 0.0 for row in rows.values()) > 0.0
    assert rows["time"].detail["copy_wanted"] == pytest.approx(0.5 * float(rows["time"].detail["copy_alone"] or 0.0))
    if len(context.topology.measuring_cpus("all")) < 3:
        row = run(bench, context, n=160, tile=64, method="cpu_aware_pipelined")[0]
        assert row.status == "skipped"
        assert "core each" in row.reason


def test_profiles_have_the_cases_they_should() -> None:
    gemm = find("gemm")
    for profile, most in (("smoke", 5), ("quick", 9)):
        cases = [case for case in gemm.cases(profile) if case.axes["device"] == "cpu"]  # type: ignore[arg-type]
        assert 0 < len(cases) <= most
        assert {case.axes["method"] for case in cases} == set(gemm.axes["method"].legal)
        assert all(a.digest != b.digest for a, b in pairwise(cases))


def test_a_wrong_product_leaves_no_number(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(self: Any, piece: Any, b: Any) -> None:
        whole(self, piece, b)
        if self._memory is not None:
            self._memory.array(np.float32)[0] += 50.0

    whole = host_store.FarStore._write
    monkeypatch.setattr(host_store.FarStore, "_write", spoilt)
    row = run(find("gemm"), context, method="cpu_aware", pair="dram:dram")[0]
    assert (row.status, row.value) == ("failed", None)
    assert "the product is wrong" in row.reason
    assert host_rig.BLOCK == 4096
