"""The GPU forms of the strata benches on the fake driver, run as the worker runs them."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.result import Result
from kvbench.memory.cuda import portable
from kvbench.timing.gpu_session import GpuSession
from tests.suites.gpu_rig import OPERATION_S, RECORD_S, Rig, good, rig
from tests.transport.paged_rig import tell

KiB = 1 << 10
SIZE = 64 * KiB


@pytest.fixture
def gpu(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(portable, "image_of", lambda kernel, arch: tell(gpu.fake, kernel))
    return gpu


def case(gpu: Rig, name: str, **axes: Value) -> list[Result]:
    return gpu.of("strata", name, **axes)


@pytest.mark.parametrize("direction", ["fetch", "evict"])
@pytest.mark.parametrize(("item", "blocks", "threads"), [(128, "2", "256"), (2 * KiB, "32", "1024"), (24, "1", "1024")])
def test_a_quota_of_blocks(gpu: Rig, direction: str, item: int, blocks: str, threads: str) -> None:
    pages = SIZE // (2 * item)
    rows = good(gpu, case(gpu, "block_quota", item=item, blocks=blocks, threads=threads, direction=direction,
                          bytes=SIZE))  # fmt: skip
    row = rows["bandwidth"]
    assert row.bytes.link == row.bytes.unique == 2 * item * pages
    assert (row.transport, row.rate_of) == ("sm", "link")
    # In virtual time a launch takes an operation: what the clock brackets is that launch, not the flush before it.
    assert row.value is not None
    assert 2 * item * pages / row.value == pytest.approx(OPERATION_S, abs=2 * RECORD_S)
    assert f"x {threads}, rows of {item} B" in (row.kernel or "")
    assert ("narrow_access" in row.flags) == (item == 24)
    assert row.ceilings[0].name in ("sm_1_blocks", "sm_2_blocks")  # of two multiprocessors; one where it has all work
    assert row.ceilings[1].name == ("sm_read" if direction == "fetch" else "sm_write")
    assert [c.kind for c in row.ceilings] == ["measured", "measured", "physical"]
    assert all(c.value for c in row.ceilings[:2])
    assert isinstance(row.detail[f"of_{row.ceilings[1].name}"], float)


def test_the_plateau_is_the_smallest_quota_that_reaches_the_best(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotas are told apart by time alone: here a block brings a sixth, until six of them fill the link."""
    true = GpuSession.__enter__

    def opened(self: GpuSession) -> GpuSession:
        cold = self.clock.cold

        def slower(submit: Any, operations: int = 1, also: Any = ()) -> Any:
            made = cold(submit, operations, also)
            grid: int = getattr(submit.__self__, "grid", 6)

            class Slow:
                def __call__(self, reps: int) -> float:
                    return float(made(reps)) * 6 / min(6, grid)

                def require_resolved(self) -> None:
                    made.require_resolved()

            return Slow()

        self.clock.cold = slower  # type: ignore[method-assign]
        return true(self)

    monkeypatch.setattr(GpuSession, "__enter__", opened)
    row = good(gpu, case(gpu, "block_quota", item=16 * KiB, blocks="plateau", bytes=2048 * KiB))["bandwidth"]
    assert row.detail["plateau_blocks"] == 8
    assert row.detail["grid"] == 8
    assert "no_plateau" not in row.flags
    rates = [row.detail[f"bandwidth_{q}"] for q in (1, 2, 4, 8, 16, 32)]
    assert rates[0] * 2 == pytest.approx(rates[1], rel=0.05)  # type: ignore[operator]


def test_a_quota_that_moves_too_little_leaves_no_number(gpu: Rig) -> None:
    gpu.fake.missing(1)
    (row,) = case(gpu, "block_quota", bytes=SIZE)
    assert (row.status, row.value) == ("failed", None)
    assert "payload check failed" in row.reason


def test_without_a_gpu_or_pages_the_case_is_skipped_and_says_so(
    gpu: Rig, monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    (row,) = case(gpu, "block_quota", item=16 * KiB, bytes=SIZE)
    assert (row.status, row.value) == ("skipped", None)
    assert "2 pages" in row.reason
    with rig(monkeypatch, context, devices=0) as none:
        (row,) = case(none, "block_quota", bytes=SIZE)
    assert (row.status, row.value) == ("skipped", None)
    assert "cuInit" in row.reason


@pytest.mark.parametrize(("layout", "direction"), [("layer_first", "evict"), ("page_head", "fetch")])
@pytest.mark.parametrize("transport", ["ce", "batch", "sm", "staged"])
def test_pages_by_every_transport(gpu: Rig, transport: str, layout: str, direction: str) -> None:
    gpu.fake.set(op_ns=10, byte_ps=1)  # so many operations would take longer than the calls that queue them
    rows = good(gpu, case(gpu, "page_transfer", pair="hbm:pinned", transport=transport, layout=layout, page_tokens=2,
                          direction=direction, bytes=1 << 20))  # fmt: skip
    row = rows["bandwidth"]
    assert row.bytes.link == row.bytes.unique == row.detail["pages"] * 2 * 131072  # type: ignore[operator]
    assert row.transport == transport
    assert row.kernel
