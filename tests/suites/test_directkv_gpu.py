"""The GPU benches of the directkv suite on the fake driver, run as the worker runs them."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Result
from kvbench.machine import link_profiler
from kvbench.systems.directkv import gpu_once
from kvbench.systems.directkv.gpu_gemm import Asked
from kvbench.worker import measure_case
from tests.suites.gpu_rig import Rig, good, refused, rig, short_context
from tests.systems.directkv.gemm_rig import told


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return short_context(tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[Rig]:
    with rig(monkeypatch, context) as made:
        told(monkeypatch, made.fake)
        monkeypatch.setattr(link_profiler, "PROGRAM", "no-such-profiler")
        yield made


def case(gpu: Rig, name: str, **axes: Value) -> list[Result]:
    return gpu.of("directkv", name, **axes)


@pytest.mark.parametrize(("raster", "compute"), [("m_fastest", "simt"), ("swizzle", "simt"), ("n_fastest", "bf16")])
def test_raster(gpu: Rig, raster: str, compute: str) -> None:
    rows = good(gpu, case(gpu, "raster", n=132, tile="64", raster=raster, compute=compute))
    row = rows["time"]
    assert row.bytes.demand == 3 * (row.bytes.unique or 0)  # three rows of tiles
    assert row.bytes.link is None  # nobody counted it
    assert (row.detail["raster"], row.detail["ctas"], row.detail["stages"]) == (raster, 9, 3)
    assert isinstance(row.detail["error"], float)
    assert row.ceilings[0].name == "B read once in place"
    assert f"gemm_{compute}_naive_64_d3 9 x" in (row.kernel or "")
    amplification = rows["amplification"]
    assert (amplification.status, amplification.value) == ("skipped", None)
    assert "between 1 and 3" in amplification.reason
    assert "no-such-profiler is not installed" in amplification.reason
    assert amplification.detail["link_source"] == "bounds"
    by_time = rows["amplification_by_time"]
    assert by_time.basis == "modelled"
    assert by_time.value is not None
    assert by_time.value > 0.0


@pytest.mark.parametrize(("raster", "predicted"), [("columns", 1.0), ("units", 1 + 64 / 132)])
def test_runs_of_the_cpu_aware_order(gpu: Rig, raster: str, predicted: float) -> None:
    """Two multiprocessors share nine tiles: the middle column is read by both of them where single tiles are units."""
    rows = good(gpu, case(gpu, "raster", n=132, tile="64", raster=raster))
    row = rows["time"]
    assert (row.detail["ctas"], row.detail["split"]) == (2, 1 if raster == "columns" else 3)

    assert row.detail["amplification_predicted"] == pytest.approx(predicted)
    assert "amplification_by_time" not in rows
    refused(gpu, case(gpu, "raster", n=132, tile="64", raster="columns_4"), "skipped", "3 tiles", "in 4 parts")


def test_raster_names_what_counted(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_profiler, "profile", lambda words, kernel: (2.0 * 4 * 132 * 132, ""))
    row = good(gpu, case(gpu, "raster", n=132, tile="64"))["amplification"]
    assert (row.value, row.detail["link_source"]) == (2.0, "profiler")


def test_raster_without_a_right_product_has_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.systems.directkv.gemm_rig.image", lambda lib, kernel: wrong(lib, kernel))
    refused(gpu, case(gpu, "raster", n=132, tile="64"), "failed", "the product is wrong")


def wrong(lib: object, kernel: object) -> object:
    from kvbench.memory.cuda.portable import Image

    lib._c.gemm_short(ctypes.c_uint64(1))  # type: ignore[attr-defined]
    return Image(b"FAKE " + kernel.entry.encode(), 0, kernel.shared)  # type: ignore[attr-defined]


def test_raster_skips_what_does_not_fit(gpu: Rig) -> None:
    refused(gpu, case(gpu, "raster", n=132, tile="256", compute="bf16"), "skipped", "no bf16 kernel of that form")


GPU: dict[str, Value] = {"device": "gpu", "pair": "hbm:pinned", "compute": "simt", "n": 132, "tile": "64"}


@pytest.mark.parametrize(("method", "more"), [
    ("naive", {}), ("cpu_aware", {}), ("cpu_aware_pipelined", {"compute": "bf16"}),
    ("swap", {"tile": "128", "staging": 50, "buffering": "single", "n": 260}),
    ("swap", {"tile": "128", "buffering": "double", "n": 260, "compute": "bf16"}),
])  # fmt: skip
def test_gemm(gpu: Rig, method: str, more: dict[str, Value]) -> None:
    rows = good(gpu, case(gpu, "gemm", **(GPU | {"method": method} | more)))
    row = rows["time"]
    assert row.bytes.unique
    assert row.transport == ("ce" if method == "swap" else "direct")
    assert row.ceilings[0].kind == "measured"
    assert rows["link_ratio"].status == "skipped"
    assert (rows["near_buffer"].value == 0.0) == (method != "swap")
    assert rows["error"].value is not None
    assert 0.0 < rows["error"].value < 1e-2


def test_a_resident_product_has_no_link_and_says_why_no_vendor_stands_beside_it(gpu: Rig) -> None:
    rows = good(gpu, case(gpu, "gemm", **(GPU | {"method": "resident", "tile": "128", "compute": "bf16"})))
    assert "stands beside a resident float32 product alone" in str(rows["time"].detail["no_reference"])
    assert (rows["vendor_share"].status, rows["vendor_share"].value) == ("skipped", None)
    assert rows["time"].bytes.link == 0
    assert "nothing crosses" in rows["link_ratio"].reason
    assert rows["near_buffer"].value == 2 * 132 * 136


@pytest.mark.parametrize("mode", ["update", "rerecord", "kernel"])
def test_graph_replay(gpu: Rig, mode: str) -> None:
    rows = good(gpu, case(gpu, "graph_replay", mode=mode, blocks=5, bytes=4096))
    row = rows["step"]
    assert row.bytes.link == 5 * 4096
    assert (row.transport, row.unit) == ("sm" if mode == "kernel" else "ce", "s")
    assert set(rows) == {"step", "change_time", "replay_time"}
    assert all(r.value is not None and r.value > 0.0 for r in rows.values())


def test_graph_replay_of_stale_addresses_has_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.systems.directkv.gpu_replay.CopyGraph.update", lambda self: None)
    refused(
        gpu, case(gpu, "graph_replay", mode="update", blocks=5, bytes=4096), "failed", "another block than was asked"
    )


def test_graph_replay_needs_a_driver_with_its_calls(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    with rig(monkeypatch, context, driver_version=11080) as made:
        told(monkeypatch, made.fake)
        refused(made, case(made, "graph_replay", mode="kernel", blocks=5, bytes=4096), "skipped", "CUDA 12.0")


def test_on_a_host_both_are_skipped_with_the_reason(context: Context) -> None:
    for name in ("raster", "graph_replay"):
        bench = load_suites().find("directkv", name)
        (row,) = measure_case(bench, {axis: declared.smoke[0] for axis, declared in bench.axes.items()}, context)
        assert (row.status, row.value) == ("skipped", None)
        assert "no GPU here" in row.reason


def test_the_profilers_child_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    words = gpu_once.words(Asked(8, 8, 8, "naive", tile=64), 0, 1)
    assert words[0] == sys.executable
    assert json.loads(words[-1])["asked"]["tile"] == 64
    assert gpu_once.main(words[-1:]) == 3
    assert "gpu_once: CUDA: no NVIDIA driver" in capsys.readouterr().err
