"""vmm_calls, remap and stride_cost as the worker runs them: on the host, on the fake driver, and where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.kernels.gather import variants
from kvbench.worker import measure_case
from tests.suites import gpu_rig

MIB = 1 << 20


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return gpu_rig.short_context(tmp_path)


def case(context: Context, name: str, **axes: Value) -> list[Result]:
    """Run one case of ellm/``name`` at its first smoke values but for ``axes``."""
    bench = load_suites().find("ellm", name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    return measure_case(bench, values, context)


def good(rows: list[Result], *metrics: str) -> dict[str, Result]:
    assert [row.metric for row in rows] == list(metrics)
    assert all(row.status in HAS_VALUE - {"invalid"} and row.value for row in rows), [row.reason for row in rows]
    return {row.metric: row for row in rows}


def refused(rows: list[Result], status: str, words: str) -> None:
    assert [(row.status, row.value) for row in rows] == [(status, None)]
    assert words in rows[0].reason
    assert "\n" not in rows[0].reason


@pytest.mark.parametrize("op", ["reserve", "map", "set_access", "unmap", "release", "free"])
def test_host_calls(context: Context, op: str) -> None:
    rows = good(
        case(context, "vmm_calls", op=op, chunk_bytes=MIB // 4, count=4), "call_time", "call_p99", "time_per_mib"
    )
    primary = rows["call_time"]
    calls = 1 if op in ("set_access", "unmap") else 4
    assert primary.detail["calls"] == calls
    assert primary.value is not None
    assert rows["time_per_mib"].value == pytest.approx(primary.value * calls)
    assert rows["call_p99"].n >= 3 * calls


def test_scattered_chunks_take_a_call_each(context: Context) -> None:
    rows = good(
        case(context, "vmm_calls", op="set_access", order="scattered", chunk_bytes=MIB // 4, count=4),
        "call_time", "call_p99", "time_per_mib",
    )  # fmt: skip
    assert rows["call_time"].detail["calls"] == 4


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"op": "create"}, "makes no call"),
        ({"chunk_bytes": 6000}, "granularity off the page size"),
        ({"threads": 2, "count": 1}, "fewer than one a thread"),
        ({"chunk_bytes": 1 << 40, "count": 1}, "of host memory"),
        ({"driver": "cuda"}, "no GPU here"),
    ],
)
def test_calls_that_cannot_be_made_are_skipped_in_one_line(
    context: Context, axes: dict[str, Value], words: str
) -> None:
    refused(case(context, "vmm_calls", **axes), "skipped", words)


@pytest.mark.parametrize("op", ["reserve", "create", "map", "set_access", "unmap", "release", "free"])
def test_calls_of_the_driver(context: Context, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    with gpu_rig.rig(monkeypatch, context) as gpu:
        rows = case(context, "vmm_calls", driver="cuda", op=op, chunk_bytes=2 * MIB, count=4)
        found = good(rows, "call_time", "call_p99", "time_per_mib")
        assert (found["call_time"].kernel or "").startswith("cuMem")
        assert found["call_time"].detail["granularity"] == 2 * MIB
        assert gpu.fake.live() == {}


def test_a_chunk_below_the_granularity_of_the_gpu_is_skipped(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_rig.rig(monkeypatch, context) as gpu:
        refused(case(context, "vmm_calls", driver="cuda", chunk_bytes=64 << 10), "skipped", "granularity off")
        assert gpu.fake.live() == {}


def test_a_driver_out_of_memory_skips_the_case_and_leaves_nothing(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpu_rig.rig(monkeypatch, context) as gpu:
        gpu.fake.fail(3, 2, call="cuMemCreate")
        refused(case(context, "vmm_calls", driver="cuda", count=4), "skipped", "cuMemCreate number 2")
        assert gpu.fake.live() == {}


@pytest.mark.parametrize(
    ("bench", "axes", "call"),
    [
        ("vmm_calls", {"op": "map"}, "cuMemMap"), ("vmm_calls", {"op": "reserve"}, "cuMemAddressReserve"),
        ("remap", {"way": "cold"}, "cuMemSetAccess"), ("remap", {"way": "plain"}, "cuMemAlloc_v2"),
    ],
)  # fmt: skip
def test_a_device_error_is_a_failed_case_and_ends_the_worker(
    context: Context, monkeypatch: pytest.MonkeyPatch, bench: str, axes: dict[str, Value], call: str
) -> None:
    with gpu_rig.rig(monkeypatch, context) as gpu:
        # the session allocates a few buffers of its own before the bench does
        gpu.fake.fail(8 if call == "cuMemAlloc_v2" else 1, 700, call=call, sticky=True)
        refused(case(context, bench, driver="cuda", count=8, **axes), "failed", "ILLEGAL_ADDRESS")
        assert context.poisoned


@pytest.mark.parametrize("way", ["cold", "created", "plain"])
def test_remap_on_the_host(context: Context, way: str) -> None:
    rows = good(case(context, "remap", way=way, chunk_bytes=MIB // 4, count=4), "ready_time", "back_time", "bare_time")
    ready, bare = rows["ready_time"].value, rows["bare_time"].value
    assert ready is not None
    assert bare is not None
    assert bare < ready * 4


@pytest.mark.parametrize("way", ["cold", "created", "plain"])
def test_remap_on_the_driver(context: Context, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    with gpu_rig.rig(monkeypatch, context) as gpu:
        rows = case(context, "remap", driver="cuda", way=way, chunk_bytes=2 * MIB, count=4)
        good(rows, "ready_time", "back_time", "bare_time")
        assert gpu.fake.live() == {}


def test_torch_without_cuda_is_skipped(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_rig.rig(monkeypatch, context) as gpu:
        rows = case(context, "remap", driver="cuda", way="torch", count=2)
        assert [row.status for row in rows] == ["skipped"]
        assert "torch" in rows[0].reason
        assert gpu.fake.live() == {}


@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_stride_cost_reads_each_byte_once(context: Context, layout: str) -> None:
    rows = good(
        case(context, "stride_cost", layout=layout, bytes=4 * MIB, layers=4, threads=1, pages="4k"), "bandwidth"
    )
    row = rows["bandwidth"]
    assert (row.bytes.link, row.bytes.unique) == (4 * MIB, 4 * MIB)
    assert row.detail["stride"] == 4096 * (4 if layout == "strided" else 1)
    assert row.ceilings[0].name == "sequential read"
    assert row.detail["ceiling_variant"] in {"stream", *variants("read", 4096)}  # no fewer choices than the case has


def test_stride_cost_needs_blocks_and_whole_lines(context: Context) -> None:
    refused(case(context, "stride_cost", bytes=MIB, layers=1024, threads=1), "skipped", "no stride to see")
    refused(case(context, "stride_cost", fragment=100, threads=1), "skipped", "multiple of 64")
