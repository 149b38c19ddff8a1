"""The GPU forms of gemm and pipeline_depth on the fake driver, run as the worker runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Ceiling, Result, Status
from kvbench.machine import link_profiler
from kvbench.memory.cuda.device import Stream
from kvbench.systems.directkv import gpu_ceilings
from kvbench.systems.directkv.gpu_gemm import GpuGemm
from kvbench.systems.directkv.gpu_operands import Operands
from kvbench.transport.gpu_lane import Lane
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
    return gpu.of("directkv", name, **{axis: value for axis, value in (GPU | axes).items() if axis in bench.axes})


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
    monkeypatch.setattr(Operands, "error", lambda self, c=None: 1.0)
    refused(gpu, case(gpu, "gemm", method="naive", tile="64"), "failed", "the product is wrong")


@pytest.mark.parametrize("depth", [1, 2])
def test_depth(depth: int, gpu: Rig) -> None:
    rows = good(gpu, case(gpu, "pipeline_depth", depth=depth, tile=64))
    assert set(rows) == {"time", "link_ratio"}
    assert rows["time"].detail["stages"] == depth
    assert rows["link_ratio"].value is None


# -- what bounds a row -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["naive", "cpu_aware", "cpu_aware_pipelined"])
def test_the_ceilings_are_bounds_whatever_the_l2_keeps(gpu: Rig, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The first is B once, not what the algebra says crosses; the second the very launch with B near."""
    made: list[GpuGemm] = []
    true = GpuGemm.__init__

    def kept(self: GpuGemm, *arguments: Any, **more: Any) -> None:
        true(self, *arguments, **more)
        made.append(self)

    monkeypatch.setattr(GpuGemm, "__init__", kept)
    asked: list[int] = []
    read = gpu_ceilings.reader

    def reader(service: Any, kernels: Any, enter: Any, nbytes: int, *rest: Any) -> Lane:
        asked.append(nbytes)
        return read(service, kernels, enter, nbytes, *rest)

    monkeypatch.setattr(gpu_ceilings, "reader", reader)
    row = good(gpu, case(gpu, "gemm", method=method, tile="64"))["time"]
    far, near = made
    assert asked == [far.traffic.unique]
    assert far.traffic.link >= far.traffic.unique
    assert (far.asked, far.form.entry, far.grid, far.split) == (near.asked, near.form.entry, near.grid, near.split)
    assert (far.operands.b.tier, near.operands.b.tier) == ("pinned", "hbm")
    assert (near.traffic.link, near.traffic.demand, near.traffic.b_read) == (0, 0, far.traffic.demand)
    assert near.staging_bytes == near.operands.b_bytes
    assert row.fraction == pytest.approx((row.ceilings[0].value or 0.0) / (row.value or 1.0))


class Vendor:
    """cuBLAS on the fake device: a product by float64 and then ``operations`` that leave it as it is."""

    operations, factor = 1, 1.0

    def __init__(self, gpu: Rig) -> None:
        self._gpu = gpu

    def __enter__(self) -> Vendor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def gemm32(
        self, stream: ctypes.c_void_p, shape: tuple[int, int, int], a: tuple[int, int], b: tuple[int, int],
        c: tuple[int, int],
    ) -> None:  # fmt: skip
        m, n, k = shape
        fake = self._gpu.fake
        left, right, out = (
            np.frombuffer(fake.peek(at, 4 * rows * pitch), np.float32).reshape(rows, pitch)
            for (at, pitch), rows in ((a, k), (b, n), (c, n))
        )
        out = out.copy()
        out[:, :m] = self.factor * (right[:, :k].astype(np.float64) @ left[:, :m].astype(np.float64))
        fake.poke(c[0], out.tobytes())
        for _ in range(self.operations):
            self._gpu.drivers[-1].call("cuMemcpyAsync", c[0], c[0], 16, stream)


def beside(gpu: Rig, monkeypatch: pytest.MonkeyPatch, operations: int, factor: float = 1.0) -> list[Result]:
    """Run a resident product that takes five operations beside a vendor's of ``operations``."""
    vendor = Vendor(gpu)
    vendor.operations, vendor.factor = operations, factor
    monkeypatch.setattr(gpu_ceilings, "Cublas", lambda: vendor)
    once = GpuGemm.__init__, GpuGemm.submit

    def longer(self: GpuGemm, *arguments: Any, **more: Any) -> None:
        once[0](self, *arguments, **more)
        self.operations += 4

    def submit(self: GpuGemm, stream: Stream) -> None:
        once[1](self, stream)
        for _ in range(4):
            stream.copy(self.operands.c.copy_address, self.operands.c.copy_address, 16)

    monkeypatch.setattr(GpuGemm, "__init__", longer)
    monkeypatch.setattr(GpuGemm, "submit", submit)
    return case(gpu, "gemm", method="resident", tile="128")


def test_a_resident_product_far_below_the_vendors_is_suspect(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = good(gpu, beside(gpu, monkeypatch, operations=3))
    share, row = rows["vendor_share"], rows["time"]
    assert row.ceilings[0].name == "cuBLAS fp32, no TF32"
    assert share.value == pytest.approx(0.6, abs=0.02)
    assert row.status == ("tainted" if share.status == "tainted" else "suspect")  # a busy machine comes first
    assert "0.8 expected" in row.reason


class Rows:
    """What a bench adds to a case, kept."""

    def __init__(self) -> None:
        self.suspects, self.extras = list[str](), list[dict[str, Any]]()

    def suspect(self, reason: str) -> None:
        self.suspects.append(reason)

    def extra(self, metric: str, value: float | None, **more: Any) -> None:
        self.extras.append({"metric": metric, "value": value, **more})


@pytest.mark.parametrize("before", ["ok", "tainted"])
@pytest.mark.parametrize(("seconds", "below"), [(1.0, False), (1.25, False), (1.26, True), (2.0, True)])
def test_what_stands_beside_the_vendor(gpu: Rig, seconds: float, before: Status, below: bool) -> None:
    (row,) = case(gpu, "raster", n=4, tile="256", compute="bf16")  # any row
    top = Ceiling("cuBLAS fp32, no TF32", 1.0, "measured", "in turns")
    rows = Rows()
    function = load_suites().find("directkv", "gemm").body.__globals__["beside_vendor"]
    function(rows, row.with_(value=seconds, status=before, reason="marked", n=3, ceilings=(top,)))
    (share,) = rows.extras
    assert (share["metric"], share["status"]) == ("vendor_share", before)
    assert share["value"] == pytest.approx(1.0 / seconds)
    assert len(rows.suspects) == below


def test_a_resident_product_near_the_vendors_is_not(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = good(gpu, beside(gpu, monkeypatch, operations=5))
    assert rows["vendor_share"].value == pytest.approx(1.0, abs=0.02)
    assert rows["time"].status in ("ok", "tainted")


def test_a_vendor_that_rounds_its_inputs_is_no_ceiling(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What TF32 leaves of a float32 product is off by more than float32 sums are."""
    refused(gpu, beside(gpu, monkeypatch, operations=5, factor=1.0003), "failed", "the vendor's product is not float32")


# -- gemm_winner -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 64])
def test_a_round_of_all_methods(gpu: Rig, m: int) -> None:
    rows = good(gpu, case(gpu, "gemm_winner", tile="64", m=m))
    row = rows["round_time"]
    assert set(rows) == {"round_time", "winner_time", "predicted_time", "regret"}
    names = ("swap", "swap_double", "naive", "cpu_aware", "cpu_aware_pipelined")
    seconds = {name: float(row.detail[f"seconds_{name}"] or 0.0) for name in names}
    told = {name: float(row.detail[f"predicted_{name}"] or 0.0) for name in names}
    assert min(*seconds.values(), *told.values()) > 0.0
    assert row.value == pytest.approx(sum(seconds.values()), rel=0.05)
    best, chosen = min(seconds, key=seconds.__getitem__), min(told, key=told.__getitem__)
    assert (row.detail["winner"], row.detail["predicted_winner"]) == (best, chosen)
    assert rows["regret"].value == pytest.approx(seconds[chosen] / seconds[best])
    assert rows["winner_time"].value == pytest.approx(seconds[best])
    assert rows["predicted_time"].basis == "modelled"
    assert rows["predicted_time"].value == pytest.approx(told[chosen])
    assert row.detail["agree"] == (seconds[chosen] <= 1.05 * seconds[best])
    assert all(f"gemm_simt_{word}" in (row.kernel or "") for word in ("naive_64_d3", "aware_64_d1", "aware_64_d2"))


def test_a_round_with_a_wrong_product_has_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operands, "error", lambda self, c=None: float(self.place == "far"))
    refused(gpu, case(gpu, "gemm_winner", tile="64"), "failed", "the product is wrong")


def test_a_round_whose_link_reader_reads_too_little_has_no_number(gpu: Rig) -> None:
    gpu.fake.missing(16)
    refused(gpu, case(gpu, "gemm_winner", tile="64"), "failed", "not every byte was read")


def test_a_round_needs_a_gpu(tmp_path: Path) -> None:
    bench = load_suites().find("directkv", "gemm_winner")
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()}
    (row,) = measure_case(bench, values | {"device": "gpu", "pair": "hbm:pinned"}, short_context(tmp_path))
    assert (row.status, row.value) == ("skipped", None)
    assert "no GPU here" in row.reason
