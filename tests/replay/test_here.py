"""The machine ``this``: which rows count, what they become, and what falls back to a preset."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.errors import NoData, UsageError
from kvbench.replay.here import WANTED, here
from kvbench.replay.machine import NUMBERS, Machine, preset

RUNS = {"aaaaaaaa-1": "2026-01-02T10:00:00Z", "bbbbbbbb-2": "2026-02-03T10:00:00Z"}
BYTES = 1 << 30


def row(bench: str, metric: str, value: float | None, run: str = "aaaaaaaa-1", **axes: Any) -> dict[str, Any]:
    suite, name = bench.split("/")
    return {
        "run": run, "suite": suite, "bench": name, "bench_version": 1, "metric": metric, "value": value, "axes": axes,
        "status": "ok", "basis": "measured", "flags": [],
    }  # fmt: skip


def read(value: float, run: str = "aaaaaaaa-1", **axes: Any) -> dict[str, Any]:
    return row(
        "ladder/host_bandwidth",
        "bandwidth",
        value,
        run,
        **{"op": "read", "threads": "all", "pages": "thp", "bytes": BYTES, **axes},
    )


def link(value: float, direction: str, transport: str, metric: str = "bandwidth") -> dict[str, Any]:
    axes: dict[str, Any] = {
        "pair": "hbm:pinned",
        "direction": direction,
        "transport": transport,
        "pieces": 1,
        "bytes": BYTES,
    }
    return row("ladder/link", metric, value, **axes)


def interference(value: float, victim: str, quota: int) -> dict[str, Any]:
    axes: dict[str, Any] = {"form": "gpu", "victim": victim, "transport": "sm", "quota": quota, "fragment": 65536}
    return row("strata/interference", "victim_slowdown", value, **axes)


def test_a_number_says_where_it_was_measured_or_which_preset_it_is() -> None:
    found = here([read(30e9), read(34e9, "bbbbbbbb-2")], RUNS)
    numbers = found.machine.numbers
    assert set(numbers) == set(NUMBERS)
    assert numbers["host_bandwidth"].value == 32e9
    assert numbers["host_bandwidth"].source == "run bbbbbbbb, 2026-02-03, ladder/host_bandwidth bandwidth"
    assert numbers["hbm"].value == preset("h200")["hbm"]
    assert numbers["hbm"].source.startswith("preset h200, not measured here: ")
    assert found.measured() == ("host_bandwidth",)
    assert Machine.from_json(found.machine.to_json()) == found.machine


def test_rows_that_do_not_count() -> None:
    odd = [
        {**read(1.0), "status": "suspect"}, {**read(2.0), "basis": "emulated"}, {**read(3.0), "flags": ["in_llc"]},
        read(4.0, op="copy"), read(5.0, threads=1), read(6.0, bytes=1 << 20), {**read(7.0), "value": None},
    ]  # fmt: skip
    assert here([*odd, read(30e9)], RUNS).machine["host_bandwidth"] == 30e9
    assert here([read(20e9, bytes=BYTES // 2), read(30e9)], RUNS).machine["host_bandwidth"] == 30e9
    with pytest.raises(NoData, match=r"nothing that costs are made of.*kvbench run ladder"):
        here(odd, RUNS)


def test_what_is_reached_has_no_further_share() -> None:
    rows = [
        row("ladder/device_bandwidth", "bandwidth", 4e12, op="read", cache="cold", bytes=BYTES),
        row("neo/gemm_contrast", "flops", 1e12, device="gpu", dtype="bf16", tokens=64),
        row("neo/gemm_contrast", "flops", 6e14, device="gpu", dtype="bf16", tokens=4096),
        row(
            "neo/decode_attention",
            "bandwidth",
            24e9,
            device="cpu",
            impl="kvbench",
            dtype="bf16",
            group=4,
            threads="all",
        ),
        read(30e9),
    ]
    machine = here(rows, RUNS).machine
    assert (machine["hbm"], machine["hbm_share"], machine["flops"], machine["flops_share"]) == (4e12, 1.0, 6e14, 1.0)
    assert machine["attention_share"] == 1.0
    assert machine["cpu_share"] == pytest.approx(0.8)


def test_the_link_its_calls_and_both_directions() -> None:
    law: dict[str, Any] = {"pair": "hbm:pinned", "direction": "fetch", "bytes": BYTES}
    call: dict[str, Any] = {"driver": "cuda", "chunk_bytes": 2 << 20, "count": 32, "order": "scattered", "threads": 1}
    found = here(
        [
            link(50e9, "fetch", "ce"), link(48e9, "evict", "ce"), link(40e9, "fetch", "sm"),
            link(36e9, "fetch", "direct"), link(40e9, "both", "ce", "fetch_bandwidth"),
            link(40e9, "both", "ce", "evict_bandwidth"),
            row("strata/page_law", "per_fragment", 3e-6, transport="ce", **law),
            row("strata/page_law", "per_fragment", 4e-7, transport="batch", **law),
            row("ellm/vmm_calls", "call_time", 1e-6, op="map", **call),
            row("ellm/vmm_calls", "call_time", 3e-5, op="set_access", **call),
            row("ellm/vmm_calls", "call_time", 2e-5, op="unmap", **call),
            # one call for all 32 chunks: not what a chunk costs
            row("ellm/vmm_calls", "call_time", 9e-4, op="unmap", **{**call, "order": "contiguous"}),
        ],
        RUNS,
    )  # fmt: skip
    machine = found.machine
    names = ("link_in", "link_out", "sm_copy", "direct_read", "ce_call", "batch_call", "unmap_chunk")
    assert [machine[name] for name in names] == [50e9, 48e9, 40e9, 36e9, 3e-6, 4e-7, 2e-5]
    assert machine["map_chunk"] == pytest.approx(3.1e-5)
    assert machine["link_duplex"] == pytest.approx((1.25 + 1.2) / 2)
    assert found.contention.link_duplex == machine["link_duplex"]


def test_interference_becomes_contention_at_the_quota_that_serves() -> None:
    rows = [read(30e9), interference(0.04, "gemm", 2), interference(0.4, "gemm", 32), interference(-0.01, "reader", 2)]
    found = here(rows, RUNS).contention
    assert found.compute_link == pytest.approx(1.04)
    assert (found.hbm_link, found.cpu_link) == (1.0, 1.0)
    assert found.sources["compute_link"].startswith("run aaaaaaaa")
    assert found.sources["cpu_link"].startswith("1.0: no measured factor")


def table(name: str, near: str, tokens: int, value: float) -> dict[str, Any]:
    axes: dict[str, Any] = {
        "table": name,
        "near": near,
        "tokens": tokens,
        "requests": 1,
        "model": "llama-3-8b",
        "threads": "all",
    }
    return row("neo/cost_tables", "stage_time", value, **axes)


def test_tables_of_this_model_answer_and_others_get_rooflines() -> None:
    rows = [read(30e9), table("lnch", "gpu", 1, 1e-4), *(table("cdec", "cpu", n, n * 1e-6) for n in (16, 1024))]
    rows += [table(name, "gpu", n, n * 1e-6) for name in ("linr", "pref", "gdec") for n in (16, 1024)]
    found = here(rows, RUNS)
    assert found.costs("llama-3-8b").linear(1024).seconds == pytest.approx(1024e-6)
    other = found.costs("opt-13b")
    assert other.tables is None
    assert list(other.notes) == ["no cost tables of this model measured here: rooflines"]


def test_an_unknown_fallback_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown machine"):
        here([read(30e9)], RUNS, fallback="h300")


def test_every_bench_and_metric_asked_for_exists() -> None:
    from kvbench.contract.discover import load_suites

    known = {f"{bench.suite}/{bench.name}": bench for bench in load_suites().select([])}
    for wanted in WANTED.values():
        bench = known[wanted.bench]
        assert wanted.metric in {bench.metric, *bench.extra_metrics}, wanted
        assert {*wanted.axes, wanted.largest} <= {*bench.axes}, wanted
