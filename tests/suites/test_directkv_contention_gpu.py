"""The GPU form of near_contention on the fake driver: the copy is under way all the time, or there is no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Result
from kvbench.memory.cuda.device import Stream
from kvbench.systems.directkv import gpu_near_copy
from kvbench.systems.directkv.gpu_gemm import GpuGemm
from kvbench.systems.directkv.gpu_operands import Operands
from kvbench.systems.strata.overlap_beside import Beside, Window
from kvbench.timing.events import Blocker
from kvbench.worker import measure_case
from tests.suites.gpu_rig import OPERATION_S, Rig, good, refused, rig, short_context
from tests.systems.directkv.gemm_rig import told

TIMES = 20  # operations behind the product: the fake knows no time but that of an operation
BLOCKS_FOR = gpu_near_copy.blocks_for


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return short_context(tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[Rig]:
    with rig(monkeypatch, context) as made:
        told(monkeypatch, made.fake)
        made_as_told = GpuGemm.__init__
        once = GpuGemm.submit

        def longer(self: GpuGemm, *arguments: Any, **more: Any) -> None:
            made_as_told(self, *arguments, **more)
            self.operations += TIMES

        def often(self: GpuGemm, stream: Stream) -> None:
            once(self, stream)
            for _ in range(TIMES):
                stream.copy(self.operands.c.copy_address, self.operands.c.copy_address, 16)

        monkeypatch.setattr(GpuGemm, "__init__", longer)
        monkeypatch.setattr(GpuGemm, "submit", often)
        # Nor do more blocks copy faster there: any number is as good as asked for.
        monkeypatch.setattr(gpu_near_copy, "blocks_for", lambda wanted, rate_of, most: (2, rate_of(2)))
        yield made


def case(gpu: Rig, **axes: Value) -> list[Result]:
    first: dict[str, Value] = {"device": "gpu", "pair": "hbm:pinned", "n": 132, "tile": 64}
    return gpu.of("directkv", "near_contention", **(first | axes))


METHODS = ("resident", "swap", "naive", "cpu_aware", "cpu_aware_pipelined")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_beside_a_copy(gpu: Rig, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Window] = []
    true = Beside.both

    def both(self: Beside, stream: Stream, passes: int) -> Window:
        seen.append(true(self, stream, passes))
        return seen[-1]

    monkeypatch.setattr(Beside, "both", both)
    rows = good(gpu, case(gpu, method=method, **({"tile": 128} if method in ("swap", "resident") else {})))
    row = rows["time"]
    assert set(rows) == {"time", "slowdown", "copy_rate"}
    taken = [window for window in seen if window.covered and window.passes]
    assert len(taken) >= row.n
    assert row.value is not None
    assert max(TIMES * OPERATION_S, min(window.work for window in taken)) <= row.value
    assert row.value <= max(window.work for window in taken)
    assert row.ceilings[0].name == "the same without the copy"
    assert rows["slowdown"].value == pytest.approx(row.value / (row.ceilings[0].value or 1.0))
    assert rows["slowdown"].value == pytest.approx(1.0, rel=0.1)  # streams of the fake do not disturb each other
    assert row.transport == {"resident": None, "swap": "ce"}.get(method, "direct")
    assert row.bytes.link == (0 if method == "resident" else None)
    detail = row.detail
    assert detail["copy_ctas"] == 2
    assert "link_copy 2 x" in str(detail["copy_kernel"])
    assert detail["copy_wanted"] == pytest.approx(0.5 * float(detail["copy_alone"] or 0.0))
    copied = rows["copy_rate"].value or 0.0
    assert copied == pytest.approx(float(detail["copy_rate_alone"] or 0.0), rel=0.1)
    assert "in_l2" not in row.flags


@pytest.mark.parametrize(
    "found",
    [Window(1e-5, 9e-6, 3, False), Window(1e-5, 0.0, 0, True), Window(1e-5, 4e-6, 3, True)],
    ids=["ended early", "no whole pass", "kept waiting"],
)
def test_a_copy_that_did_not_run_all_the_time_leaves_no_number(
    gpu: Rig, monkeypatch: pytest.MonkeyPatch, found: Window
) -> None:
    monkeypatch.setattr(Beside, "both", lambda self, stream, passes: found)
    refused(gpu, case(gpu), "failed", "the copy was not under way all the time", "5 void samples")


def test_passes_are_added_until_the_copy_covers_the_product(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    true, asked = Beside.both, list[int]()

    def both(self: Beside, stream: Stream, passes: int) -> Window:
        asked.append(passes)
        return true(self, stream, passes if len(asked) > 2 else 2)

    monkeypatch.setattr(Beside, "both", both)
    row = good(gpu, case(gpu))["time"]
    assert asked[1] == asked[0] + asked[0] // 2
    assert row.detail["copy_missed"] == 2


def all_but_one(self: gpu_near_copy.NearSlice, stream: Stream) -> None:
    if self._number != 1:
        self._whole.launches[self._number].submit(stream)


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (lambda patch, gpu: patch.setattr(Operands, "error", lambda self: 1.0), "the product is wrong"),
        (lambda patch, gpu: gpu.fake.missing(16), "device memory copy"),
        (lambda patch, gpu: patch.setattr(gpu_near_copy.NearSlice, "submit", all_but_one), "near copy"),
    ],
    ids=["product", "whole copy", "slice"],
)
def test_wrong_results_have_no_number(
    gpu: Rig, monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[pytest.MonkeyPatch, Rig], None], words: str
) -> None:
    spoilt(monkeypatch, gpu)
    (row,) = case(gpu, share=5)  # slices of a twentieth: several of them
    assert (row.status, row.value) == ("failed", None)
    assert words in row.reason
    assert gpu.fake.live() == {}


def test_queueing_that_waited_for_the_device_has_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Beside.both

    def both(self: Beside, stream: Stream, passes: int) -> Window:
        monkeypatch.setattr(Blocker, "late", property(lambda self: True))
        return true(self, stream, passes)

    monkeypatch.setattr(Beside, "both", both)
    refused(gpu, case(gpu), "failed", "queueing waited for the device")


def test_everything_is_queued_behind_the_blocker(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Armed first, released last: what runs between is not what the host takes to queue it."""
    order: list[str] = []
    for owner, name in ((Blocker, "arm"), (Blocker, "release"), (gpu_near_copy.NearSlice, "submit"),
                        (GpuGemm, "submit")):  # fmt: skip
        true = getattr(owner, name)

        def noted(self: Any, *rest: Any, said: str = f"{owner.__name__}.{name}", true: Any = true) -> None:
            order.append(said)
            true(self, *rest)

        monkeypatch.setattr(owner, name, noted)
    true_both = Beside.both

    def both(self: Beside, stream: Stream, passes: int) -> Window:
        order.clear()
        found = true_both(self, stream, passes)
        assert order == ["Blocker.arm", *["NearSlice.submit"] * passes, "GpuGemm.submit", "Blocker.release"]
        return found

    monkeypatch.setattr(Beside, "both", both)
    good(gpu, case(gpu))


def test_a_rate_that_no_blocks_have_is_skipped(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_near_copy, "blocks_for", BLOCKS_FOR)
    refused(gpu, case(gpu), "skipped", "no number of blocks copies at that rate", "ask for another share")


def test_a_product_whose_copies_do_not_fit_the_queue_is_skipped(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_near_copy, "blocks_for", lambda wanted, rate_of, most: (1, 1000.0 * rate_of(1)))
    refused(gpu, case(gpu), "skipped", "more than may be queued")


def test_operands_that_stay_in_the_l2_are_flagged(gpu: Rig) -> None:
    gpu.fake.set(l2_bytes=1 << 17)
    assert "in_l2" in good(gpu, case(gpu))["slowdown"].flags


def test_without_a_gpu_it_is_skipped_and_says_so(context: Context) -> None:
    bench = load_suites().find("directkv", "near_contention")
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()}
    (row,) = measure_case(bench, values | {"device": "gpu", "pair": "hbm:pinned"}, context)
    assert (row.status, row.value) == ("skipped", None)
    assert "no GPU here" in row.reason
