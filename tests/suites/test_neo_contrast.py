"""gemm_contrast, beside_copies and the GPU form of decode_attention as the worker runs them; GPUs are the fake's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.kernels.gpu import cublas
from kvbench.memory.cuda.device import Stream
from kvbench.model import layers
from kvbench.systems.strata import overlap_victim
from kvbench.worker import measure_case
from tests.attention.decode_rig import Decoder, decoder
from tests.needs import missing_module, require
from tests.suites.gpu_rig import Rig, rig

MIB = 1 << 20


@cache
def find(name: str) -> Bench:
    return load_suites().find("neo", name)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of each model's heads, one short sequence, a megabyte of KV whatever the caches hold."""
    true = layers.shape
    monkeypatch.setattr(layers, "shape", lambda name: true(name, "small"))
    for name in ("gemm_contrast", "beside_copies", "decode_attention"):
        told = find(name).body.__globals__
        monkeypatch.setitem(told, "LEAST_BYTES", MIB)
        monkeypatch.setitem(told, "BATCH", 2)
        monkeypatch.setitem(told, "CONTEXT", 256)
    # by name: the module loads numba, which pytest's collection does without
    work = importlib.import_module("kvbench.attention.cpu_work")
    monkeypatch.setattr(work, "layers_for", lambda shape, lengths, least: 2)


def case(known: Context, name: str, /, **axes: Value) -> dict[str, Result]:
    """Run one case at its first smoke values but for ``axes``."""
    bench = find(name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    if "device" in values or values["threads"] == "all":
        values["threads"] = "all" if values.get("device") == "gpu" else 1
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    return {row.metric: row for row in measure_case(bench, values, known)}


def good(rows: dict[str, Result], primary: str) -> Result:
    row = rows[primary]
    assert row.status in HAS_VALUE - {"invalid"}, row.reason
    assert row.value is not None
    return row


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_product_of_cores_beside_their_bandwidth(context: Context, dtype: str) -> None:
    require("torch", missing_module("torch"))
    rows = case(context, "gemm_contrast", device="cpu", dtype=dtype, tokens=8)
    row = good(rows, "flops")
    assert row.detail["weight_bytes"] == (4 if dtype == "fp32" else 2) * 512 * 1792
    assert ("sgemm" if dtype == "fp32" else "mm bf16") in (row.kernel or "")
    read, attention = good(rows, "read_bandwidth").value, good(rows, "attention_bandwidth")
    assert attention.ceilings[0].name == "sequential read"
    assert attention.fraction is not None
    assert read is not None
    assert row.value is not None
    assert rows["balance"].value == pytest.approx(row.value / read)
    assert rows["balance"].detail["attention_flop_per_byte"] == 4.0  # a query head of a KV head each, in 16 bit
    assert "gemm_ratio" not in rows


def test_attention_beside_a_paced_copy(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(context.topology.cpus) < 2:
        pytest.skip("one CPU: the copy needs one of its own")
    monkeypatch.setitem(find("beside_copies").body.__globals__, "PIECE", 1 << 12)  # a pass here takes some 100 us
    rows = case(context, "beside_copies", copies="host_stand_in", rate=1)
    row = good(rows, "bandwidth")
    assert "stand_in" in row.flags
    assert row.ceilings[0].name == "the same attention alone"
    assert "paced to 1 GB/s" in str(row.detail["copy_kernel"])
    copied = rows["copy_bandwidth"].value
    assert copied is not None
    # what a pause left undone is caught up with in the next window
    assert 0.0 < copied < 40e9
    alone = row.ceilings[0].value
    assert alone is not None
    assert row.value is not None
    assert rows["slowdown"].value == pytest.approx(alone / row.value - 1.0)


def test_a_copy_that_does_not_arrive_leaves_no_number(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(context.topology.cpus) < 2:
        pytest.skip("one CPU: the copy needs one of its own")
    paced: Any = find("beside_copies").body.__globals__["PacedCopies"]
    true = paced.start

    def start(self: Any) -> None:
        true(self)
        self._source = ~self._source  # what is compared is another than what was copied

    monkeypatch.setattr(paced, "start", start)
    row = case(context, "beside_copies", copies="host_stand_in", rate=1)["bandwidth"]
    assert (row.status, row.value) == ("failed", None)
    assert "a copy did not arrive" in row.reason


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("gemm_contrast", {"device": "gpu"}),
        ("beside_copies", {"copies": "h2d_d2h", "rate": 0}),
        ("decode_attention", {"device": "gpu"}),
    ],
)
def test_without_a_gpu_the_case_says_so(
    context: Context, monkeypatch: pytest.MonkeyPatch, name: str, axes: dict[str, Value]
) -> None:
    with rig(monkeypatch, context, devices=0) as none:
        rows = case(none.context, name, **axes)
    (row,) = rows.values()
    assert (row.status, row.value) == ("skipped", None)
    assert "cuInit" in row.reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[tuple[Rig, Decoder]]:
    with rig(monkeypatch, context) as made:
        yield made, decoder(monkeypatch, made.fake)


def test_decode_attention_on_a_gpu(gpu: tuple[Rig, Decoder]) -> None:
    made, ran = gpu
    rows = case(made.context, "decode_attention", device="gpu", batch=2, context=200, kv_heads=2)
    row = good(rows, "bandwidth")
    assert row.bytes.unique == 200 * 2 * 2 * 2 * 128 * 2 * int(str(row.detail["layers"]))
    assert row.rate_of == "unique"
    assert row.ceilings[0].name == "HBM read of the same memory"
    assert row.ceilings[0].value is not None
    assert "decode_bf16_g4_d128_p16" in (row.kernel or "")
    assert {"decode_split"} <= set(ran.ran)
    assert rows["flops"].value is not None
    assert made.fake.live() == {}


def test_a_gpu_that_loses_a_token_leaves_no_number(gpu: tuple[Rig, Decoder]) -> None:
    made, ran = gpu
    ran.lost = 1
    row = case(made.context, "decode_attention", device="gpu", batch=1, context=200, kv_heads=1)["bandwidth"]
    assert (row.status, row.value) == ("failed", None)
    assert "attention is wrong" in row.reason


def test_copies_over_the_link_beside_attention_on_cores(
    gpu: tuple[Rig, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = gpu
    told = find("beside_copies").body.__globals__
    monkeypatch.setitem(told, "LINK_COPY", 64 << 10)
    # The fake copies at once: that copies were still under way is for a real link to say.
    monkeypatch.setattr(Stream, "idle", property(lambda self: False))
    rows = case(made.context, "beside_copies", copies="h2d_d2h", rate=0)
    good(rows, "bandwidth")
    assert "both directions" in str(rows["bandwidth"].detail["copy_kernel"])
    assert rows["copy_bandwidth"].value is not None
    monkeypatch.setattr(Stream, "idle", property(lambda self: True))
    row = case(made.context, "beside_copies", copies="h2d_d2h", rate=0)["bandwidth"]
    assert (row.status, row.value) == ("failed", None)
    assert "the copies ended before the attention" in row.reason


class Product:
    """A stand-in for the product by cuBLAS: one launch, and a check that it was made."""

    kernel, flops = "product", 1e6

    def __init__(self, library: object, service: Any, enter: Any, seed: int, shape: tuple[int, int, int]) -> None:
        self.asked.append(shape)
        self._made = 0
        self._memory = service.stream, service._scratch

    asked: list[tuple[int, int, int]] = []  # noqa: RUF012

    def submit(self, stream: Stream) -> None:
        stream.set_bytes(self._memory[1], 0, 64)
        self._made += 1

    def spoil(self) -> None:
        self._made = 0

    def check(self) -> None:
        assert self._made


def test_a_gpu_against_cores(gpu: tuple[Rig, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch", missing_module("torch"))
    made, _ = gpu

    class Library:
        def __enter__(self) -> Library:
            return self

        def __exit__(self, *failure: object) -> None: ...

    monkeypatch.setattr(cublas, "Cublas", Library)
    monkeypatch.setattr(overlap_victim, "Gemm", Product)
    rows = case(made.context, "gemm_contrast", device="gpu", tokens=8, threads="all")
    good(rows, "flops")
    assert Product.asked[-1] == (1792, 8, 512)
    for metric in ("attention_bandwidth", "read_bandwidth", "balance"):
        assert rows[metric].value is not None, rows[metric].reason
    for metric, rate in (("gemm_ratio", rows["flops"].value), ("bandwidth_ratio", rows["attention_bandwidth"].value)):
        row = rows[metric]
        assert row.detail["gpu_rate"] == pytest.approx(rate)
        assert row.value == pytest.approx(row.detail["gpu_rate"] / row.detail["cpu_rate"])  # type: ignore[operator]
    assert made.fake.live() == {}
