"""The GPU forms of gemm and pipeline_depth on the fake driver, run as the worker runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Result
from kvbench.machine import link_profiler
from kvbench.systems.directkv.gpu_operands import Operands
from kvbench.worker import measure_case
from tests.suites.gpu_rig import Rig, good, refused, rig, short_context
from tests.systems.directkv.gemm_rig import told

GPU: dict[str, Value] = {"device": "gpu", "pair": "hbm:pinned", "compute": "simt", "n": 132}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rig]:
    context: Context = short_context(tmp_path)
    with rig(monkeypatch, context) as made:
        told(monkeypatch, made.fake)
        monkeypatch.setattr(link_profiler, "PROGRAM", "no-such-profiler")
        yield made


def case(gpu: Rig, name: str, **axes: Value) -> list[Result]:
    bench = load_suites().find("directkv", name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()}
    values |= {axis: value for axis, value in (GPU | axes).items() if axis in bench.axes}
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    return measure_case(bench, values, gpu.context)


@pytest.mark.parametrize(
    ("method", "ceiling"), [("naive", "B once by direct"), ("cpu_aware", "B once by direct"), ("swap", "B once by ce")]
)
def test_what_a_product_is_held_against(method: str, ceiling: str, gpu: Rig) -> None:
    more: dict[str, Value] = {"tile": "128", "compute": "bf16"} if method == "swap" else {"tile": "64"}
    rows = good(gpu, case(gpu, "gemm", method=method, **more))
    assert set(rows) == {"time", "near_buffer", "error", "link_ratio", "predicted_time"}
    row = rows["time"]
    assert [top.name for top in row.ceilings] == [ceiling, "the product with B near"]
    assert row.bytes.link is None
    once, near = (top.value or 0.0 for top in row.ceilings)
    link = once * float(rows["link_ratio"].detail["predicted"] or 0.0) / (row.bytes.unique or 1)
    assert rows["predicted_time"].value == pytest.approx(max(link, near))
    assert rows["predicted_time"].basis == "modelled"
    assert row.detail["bound"] == ("link" if link > near else "compute")
    assert "between" in rows["link_ratio"].reason
    assert rows["link_ratio"].detail["link_source"] == "bounds"


def test_what_counted_is_named(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_profiler, "profile", lambda words, kernel: (3.0 * 4 * 132 * 132, ""))
    row = good(gpu, case(gpu, "gemm", method="naive", tile="64"))["link_ratio"]
    assert row.value == 1.0  # three rows of tiles
    assert row.detail["link_source"] == "profiler"


def test_a_wrong_product_has_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operands, "error", lambda self: 1.0)
    refused(gpu, case(gpu, "gemm", method="naive", tile="64"), "failed", "the product is wrong")


@pytest.mark.parametrize("depth", [1, 2])
def test_depth(depth: int, gpu: Rig) -> None:
    rows = good(gpu, case(gpu, "pipeline_depth", depth=depth, tile=64))
    assert set(rows) == {"time", "link_ratio"}
    assert rows["time"].detail["stages"] == depth
    assert rows["link_ratio"].value is None
