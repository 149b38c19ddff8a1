"""pipeline, offload_minimum, cost_tables and predictor_error, run as the worker runs them, small."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.systems.neo.costs import tables_from_rows
from kvbench.worker import measure_case

SMALL: dict[str, Value] = {"scale": "small", "requests": 6, "context": 64, "prompt": 16, "layers": 2, "near": "T4"}


@pytest.fixture
def two_cpus() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("CPU attention and the near side's thread need a core each")


def find(name: str, patch: pytest.MonkeyPatch, **changed: Any) -> Bench:
    bench = load_suites().find("neo", name)
    for constant, value in changed.items():
        patch.setitem(bench.body.__globals__, constant, value)
    return bench


def run(bench: Bench, worker: Context, /, **axes: Value) -> list[Result]:
    values = {name: declared.smoke[0] for name, declared in bench.axes.items()}
    values |= {name: value for name, value in axes.items() if name in bench.axes}
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    return measure_case(bench, values, worker)


def by_metric(rows: list[Result]) -> dict[str, Result]:
    assert rows[0].status in HAS_VALUE, rows[0].reason
    return {row.metric: row for row in rows}


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize("mode", ["gpu_only", "simple", "symmetric", "asymmetric"])
def test_the_rows_of_a_pipeline(monkeypatch: pytest.MonkeyPatch, context: Context, mode: str) -> None:
    rows = by_metric(run(find("pipeline", monkeypatch), context, **SMALL, mode=mode, offload=50))
    wanted = {"iteration_time", "decode_rate", "predicted_time", "near_idle"}
    if mode != "gpu_only":
        wanted |= {"cpu_idle", "hidden_tokens"}
    if mode in ("symmetric", "asymmetric"):
        wanted |= {"slack_long", "slack_short"}
    assert set(rows) == wanted
    whole = rows["iteration_time"]
    assert {row.basis for name, row in rows.items() if name != "predicted_time"} == {"emulated"}
    assert rows["predicted_time"].basis == "modelled"
    assert whole.value is not None
    assert 0.0 < (rows["near_idle"].value or 0.0) < 1.0
    assert rows["decode_rate"].value == pytest.approx((3 if mode == "gpu_only" else 6) / whole.value)
    decodes = sum(int(part) for word, part in read_batches(whole) if word in ("near", "CPU"))
    assert decodes == (3 if mode == "gpu_only" else 6)
    if mode == "asymmetric":
        half = rows["slack_long"]
        near, cpu = float(half.detail["near"] or 0), float(half.detail["cpu"] or 0)
        assert half.value == pytest.approx((near - cpu) / max(near, cpu))
        assert half.detail["stalls"] == ("cpu" if (half.value or 0.0) >= 0.0 else "near")


def read_batches(row: Result) -> list[tuple[str, str]]:
    texts = [str(value) for name, value in row.detail.items() if name.startswith("batch_")]
    assert texts
    return [(word, count) for text in texts for count, word in (part.split(" ") for part in text.split(" + "))]


@pytest.mark.usefixtures("two_cpus")
def test_a_pass_that_brings_other_numbers_has_no_value(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    from kvbench.systems.neo.far import FarSide

    attend = FarSide.attend
    monkeypatch.setattr(FarSide, "attend", lambda self, batch, layer: attend(self, batch, 0))
    row = run(find("pipeline", monkeypatch), context, **SMALL, mode="asymmetric", offload=50)[0]
    assert (row.status, row.value) == ("failed", None)
    assert "not that of its inputs" in row.reason


@pytest.mark.usefixtures("two_cpus")
def test_the_bottom_of_the_u(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    rows = by_metric(run(find("offload_minimum", monkeypatch), context, **SMALL))
    seen = {int(name[5:]): value for name, value in rows["sweep_time"].detail.items() if name.startswith("time_")}
    assert set(seen) == {0, 25, 50, 100}  # 0, 2, 3 and 6 of 6 decodes
    best = min(seen, key=lambda share: float(seen[share] or 0.0))
    assert rows["best_offload"].value == best
    assert rows["best_time"].value == seen[best]
    assert rows["gain"].value == pytest.approx(float(seen[0] or 0.0) / float(seen[best] or 1.0))
    assert rows["predicted_offload"].basis == "modelled"


@pytest.mark.usefixtures("two_cpus")
def test_tables_are_rebuilt_from_the_rows_the_bench_leaves(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    bench = find("cost_tables", monkeypatch, LEAST_BYTES=1 << 20)
    monkeypatch.setattr(Context, "llc", property(lambda self: 1 << 16))
    cells: list[dict[str, Value]] = [
        {"table": "linr", "near": "T4", "tokens": 16}, {"table": "linr", "near": "T4", "tokens": 1024},
        {"table": "pref", "near": "T4", "tokens": 64}, {"table": "gdec", "near": "T4", "tokens": 1024},
        {"table": "lnch", "near": "T4", "tokens": 16}, {"table": "cdec", "near": "cpu", "tokens": 1024, "threads": 1},
        {"table": "cdec", "near": "cpu", "tokens": 2048, "threads": 1},
    ]  # fmt: skip
    rows = [run(bench, context, **axes)[0] for axes in cells]
    assert all(row.status in HAS_VALUE for row in rows), [row.reason for row in rows]
    assert [row.basis for row in rows] == ["modelled"] * 4 + ["emulated", "measured", "measured"]
    told = [{**row.to_json("run"), "status": "ok"} for row in rows]  # whatever else the machine was doing
    tables = tables_from_rows(told, near="T4", threads=1)
    assert tables.linr.at(16).seconds == rows[0].value
    assert tables.cdec.at(1, 2048).seconds == rows[6].value
    assert tables.lnch == rows[4].value


@pytest.mark.parametrize("split", ["pages", "sequences"])
def test_the_rows_of_a_predictor_error(monkeypatch: pytest.MonkeyPatch, context: Context, split: str) -> None:
    bench = find("predictor_error", monkeypatch, LEAST_BYTES=1 << 20)
    monkeypatch.setattr(Context, "llc", property(lambda self: 1 << 16))
    rows = by_metric(run(bench, context, split=split, requests=4, tokens=512, skew="one_long", threads=1))
    assert set(rows) == {"attention_time", "predicted_time", "predictor_error", "skew_error"}
    whole, told, error = (rows[name].value or 0.0 for name in ("attention_time", "predicted_time", "predictor_error"))
    assert error == pytest.approx(whole / told - 1.0)
    assert rows["attention_time"].detail["longest"] == 408  # four fifths of 508 spare tokens, rounded up, and one


@pytest.mark.parametrize(
    ("mode", "offload", "reason"), [("simple", 5, "are none"), ("gpu_only", 95, "leave none near")]
)
def test_a_share_that_rounds_to_nothing_is_skipped(
    monkeypatch: pytest.MonkeyPatch, context: Context, mode: str, offload: int, reason: str
) -> None:
    rows = run(find("pipeline", monkeypatch), context, **SMALL, mode=mode, offload=offload)
    assert [(row.status, row.value) for row in rows] == [("skipped", None)]
    assert reason in rows[0].reason


def test_a_gpu_that_is_not_here_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    from tests.needs import missing_gpu

    if missing_gpu() is None:
        pytest.skip("there is a GPU")
    gpu = {**SMALL, "near": "gpu"}
    cases = [
        run(find("pipeline", monkeypatch), context, **gpu, mode="asymmetric", offload=50),
        run(find("offload_minimum", monkeypatch), context, **gpu),
        run(find("cost_tables", monkeypatch), context, table="linr", near="gpu", tokens=16),
    ]
    for rows in cases:
        assert [(row.status, row.value) for row in rows] == [("skipped", None)]
        assert len(rows[0].reason) > 10
