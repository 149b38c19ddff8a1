"""layer_overlap, overlap_onset and interference, run as the worker runs them: on the host, and on the fake GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.kernels.background import Background, Stretch
from kvbench.measure import Measure
from kvbench.memory.cuda import portable
from kvbench.systems.strata import overlap_probe
from kvbench.systems.strata.overlap import HostOverlap
from kvbench.worker import measure_case
from tests.suites.gpu_rig import OPERATION_S, Rig
from tests.transport.paged_rig import tell

KIB = 1 << 10
TINY: dict[str, Value] = {"tokens": 128, "page_tokens": 32, "ratio": 4}


@pytest.fixture
def gpu(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(portable, "image_of", lambda kernel, arch: tell(gpu.fake, kernel))
    return gpu


def find(name: str, patch: pytest.MonkeyPatch, **changed: Any) -> Bench:
    """Return the bench with constants of its module changed: sizes for this test."""
    bench = load_suites().find("strata", name)
    for constant, value in changed.items():
        patch.setitem(bench.body.__globals__, constant, value)  # type: ignore[attr-defined]
    return bench


def run(bench: Bench, context: Context, **axes: Value) -> list[Result]:
    values = {name: declared.smoke[0] for name, declared in bench.axes.items()}
    values |= {name: value for name, value in axes.items() if name in bench.axes}
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    return measure_case(bench, values, context)


def by_metric(rows: list[Result]) -> dict[str, Result]:
    assert rows[0].status in HAS_VALUE, rows[0].reason
    return {row.metric: row for row in rows}


@pytest.fixture
def two_cpus() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the two sides need a CPU each")


@pytest.mark.usefixtures("two_cpus")
def test_the_rows_of_an_overlap_on_the_host(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    rows = by_metric(run(find("layer_overlap", monkeypatch), context, **TINY))
    assert set(rows) == {"pass_time", "stall", "stall_share", "predicted_stall"}
    stall, share, whole = (rows[name].value or 0.0 for name in ("stall", "stall_share", "pass_time"))
    assert 0.0 < stall < 100 * whole
    assert 0.0 < share < 1.0
    assert (rows["stall"].basis, rows["predicted_stall"].basis) == ("measured", "modelled")
    detail = rows["pass_time"].detail
    assert detail["new_tokens"] == 32
    assert detail["fragment_bytes"] == 64 * KIB
    assert detail["load_slowdown"] is not None
    assert rows["pass_time"].ceilings[0].name in ("loading alone", "computing alone")


@pytest.mark.usefixtures("two_cpus")
def test_the_onset_names_its_ratios_and_shares(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    bench = find("overlap_onset", monkeypatch, SWEEPS={"coarse": (1, 8, 64)})
    rows = by_metric(run(bench, context, **TINY))
    assert set(rows) == {"sweep_time", "onset", "predicted_onset", "balance"}
    detail = rows["sweep_time"].detail
    assert detail["ratios"] == "1+8+64"
    assert all(0.0 < float(detail[f"stall_share_{ratio}"] or 0.0) < 1.0 for ratio in (1, 8, 64))
    for name in ("onset", "predicted_onset", "balance"):
        row = rows[name]
        assert (row.value is not None and 1.0 <= row.value <= 64.0) or (row.status == "skipped" and row.reason)


@pytest.mark.usefixtures("two_cpus")
def test_a_layer_read_too_early_leaves_no_number(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    fine = HostOverlap._pass

    def early(self: HostOverlap, schedule: Any, *sides: Any) -> Any:
        found = fine(self, schedule, *sides)
        self._results[0, 0, 1] -= 1
        return found

    monkeypatch.setattr(HostOverlap, "_pass", early)
    (row,) = run(find("layer_overlap", monkeypatch), context, **TINY)
    assert (row.status, row.value) == ("failed", None)
    assert "before it had arrived" in row.reason


@pytest.mark.parametrize(
    ("axes", "words"), [({"ratio": 256}, "no new token"), ({"tokens": 96}, "whole pages"), ({"tokens": 130}, "pages")]
)
def test_cases_without_meaning_are_skipped(
    monkeypatch: pytest.MonkeyPatch, context: Context, axes: dict[str, Value], words: str
) -> None:
    (row,) = run(find("layer_overlap", monkeypatch), context, **TINY | axes)
    assert row.status == "skipped"
    assert words in row.reason


@pytest.mark.parametrize("transport", ["ce", "batch", "sm"])
def test_the_rows_of_an_overlap_on_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Rig, transport: str) -> None:
    monkeypatch.setattr(overlap_probe, "BESIDE_SECONDS", 0.0)
    bench = find("layer_overlap", monkeypatch, LAYER_FLOPS=1e4)
    rows = by_metric(run(bench, gpu.context, form="gpu", transport=transport, **TINY))
    assert set(rows) == {"pass_time", "stall", "stall_share", "predicted_stall"}
    assert rows["pass_time"].transport == transport
    assert rows["pass_time"].detail["queued_ahead"] == (1 if transport == "ce" else 32)
    assert gpu.fake.live() == {}


# -- interference ------------------------------------------------------------------------------------------------------

SMALL = {"GEMM_N": 64, "READ_BYTES": 1 << 21, "COPY_BYTES": 1 << 21, "COPY_ALONE_SECONDS": 0.002}


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize("victim", ["gemm", "reader"])
def test_a_copy_beside_a_victim_on_the_host(monkeypatch: pytest.MonkeyPatch, context: Context, victim: str) -> None:
    bench = find("interference", monkeypatch, **SMALL)
    rows = by_metric(run(bench, context, victim=victim, quota=1))
    assert set(rows) == {"victim_time", "victim_slowdown", "copy_bandwidth", "copy_alone", "copy_slowdown"}
    main = rows["victim_time"]
    assert main.ceilings[0].name == "victim alone"
    slowdown = rows["victim_slowdown"].value
    assert slowdown == pytest.approx((main.value or 0.0) / (main.ceilings[0].value or 1.0) - 1.0)
    assert (rows["copy_bandwidth"].value or 0.0) > 0.0
    assert (main.transport, "copy" in str(main.detail["copy_kernel"])) == ("cpu", True)


def test_without_a_copy_the_victim_is_held_against_itself(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    rows = by_metric(run(find("interference", monkeypatch, **SMALL), context, victim="gemm", quota=0))
    assert rows["victim_slowdown"].value is not None
    assert list(rows) == ["victim_time", "victim_slowdown"]  # there is no copy to have rows
    assert rows["victim_time"].transport is None


def test_layers_that_memory_does_not_hold_are_skipped_before_any_is_touched(
    monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    monkeypatch.setattr(Measure, "sources", lambda *_, **__: pytest.fail("memory was touched"))
    (row,) = run(find("layer_overlap", monkeypatch), context, tokens=1 << 20, page_tokens=32)  # two pools of 128 GiB
    assert row.status == "skipped"
    assert "of host memory" in row.reason


@pytest.mark.usefixtures("two_cpus")
def test_samples_without_a_copy_all_the_time_are_void(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    stop = Background.stop

    def early(self: Background) -> Stretch:
        found = stop(self)
        return Stretch(found.began, found.began, found.copied)

    monkeypatch.setattr(Background, "stop", early)
    (row,) = run(find("interference", monkeypatch, **SMALL), context, victim="gemm", quota=1)
    assert (row.status, row.value) == ("failed", None)
    assert "not under way" in row.reason


def test_more_copiers_than_cpus_are_skipped(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    (row,) = run(find("interference", monkeypatch, **SMALL), context, victim="reader", quota=4096)
    assert row.status == "skipped"
    assert "CPUs" in row.reason


@pytest.mark.parametrize(("transport", "quota"), [("sm", 0), ("sm", 2), ("ce", 1)])
def test_a_copy_beside_a_reader_on_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Rig, transport: str, quota: int) -> None:
    bench = find("interference", monkeypatch, GPU_READ_BYTES=1 << 16, GPU_COPY_BYTES=16 * KIB, VICTIM_SECONDS=20e-6)
    found = run(bench, gpu.context, form="gpu", victim="reader", transport=transport, quota=quota)
    rows = by_metric(found)
    detail = rows["victim_time"].detail
    assert (detail["ctas"], detail["victim_ctas"]) == (quota, 8)
    assert detail["victim_repeats"] == 20
    assert rows["victim_time"].value == pytest.approx(OPERATION_S, rel=0.2)
    assert detail["launch_order"]
    assert ("copy_slowdown" in rows) == (quota > 0)
    assert all(row.value is not None for row in found)
    assert gpu.fake.live() == {}


def test_a_product_without_cublas_is_skipped(monkeypatch: pytest.MonkeyPatch, gpu: Rig) -> None:
    from kvbench.kernels.gpu import cublas

    monkeypatch.setattr(cublas, "libraries", lambda: ["/nowhere/libcublas.so.13"])
    bench = find("interference", monkeypatch, GPU_COPY_BYTES=64 * KIB)
    (row,) = run(bench, gpu.context, form="gpu", victim="gemm", transport="sm", quota=1)
    assert row.status == "skipped"
    assert "cuBLAS" in row.reason
    assert gpu.fake.live() == {}
