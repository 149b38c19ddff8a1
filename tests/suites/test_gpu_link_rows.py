"""What a row of ``link`` says beside its number: ceilings, where pages were, and that a file holds the bytes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Bytes, Ceiling, Result
from kvbench.errors import UsageError
from kvbench.machine.gpu import Gpu
from kvbench.memory.cuda.buffers import pinned
from kvbench.memory.cuda.device import Stream
from kvbench.memory.file import ScratchFile
from kvbench.timing import gpu_session
from kvbench.transport import gpu_link
from kvbench.transport.gpu_link import Link, peak_of
from kvbench.transport.gpu_staged import Staged, StagedWrite
from tests.suites.gpu_rig import PEAK, Rig, device, good, refused, rig

KiB = 1 << 10
EVICT: dict[str, Value] = {"pair": "hbm:file", "alloc": "plain", "transport": "staged", "direction": "evict"}
MANAGED: dict[str, Value] = {"pair": "hbm:managed", "alloc": "plain", "transport": "direct", "direction": "fetch"}


# -- ceilings ----------------------------------------------------------------------------------------------------------


def test_the_ceiling_is_one_large_copy_in_the_same_directions() -> None:
    small = Link("pinned", "ce", "both", 4096, pieces=16, how="hostalloc", node=1, pages="4k", seed=3)
    peak = peak_of(small)
    assert peak == replace(small, nbytes=gpu_link.PEAK_BYTES, pieces=1, seed=1003)
    assert peak_of(replace(small, pieces=1)) is not None
    assert peak_of(replace(small, pieces=1, nbytes=gpu_link.PEAK_BYTES)) is None
    assert peak_of(replace(small, pieces=16, nbytes=1 << 30)) is not None
    for far, transport in (("pinned", "sm"), ("pinned", "direct"), ("pageable", "ce"), ("managed", "ce")):
        found = peak_of(Link(far, transport, "fetch", 1 << 40))  # type: ignore[arg-type]
        assert found == Link("pinned", "ce", "fetch", gpu_link.PEAK_BYTES, seed=1001)
    assert peak_of(Link("file", "staged", "evict", 4096)) is None


@pytest.mark.parametrize(("direction", "lanes"), [("fetch", 1), ("both", 2)])
def test_a_small_copy_is_held_against_the_large_one(gpu: Rig, direction: str, lanes: int) -> None:
    gpu.fake.forget()
    row = good(gpu, gpu.case("link", direction=direction, bytes=16 * KiB, pieces=16))["bandwidth"]
    first, law = row.ceilings
    assert (first.name, first.kind, first.source) == ("ce_128KiB", "measured", "interleaved with the case")
    assert law.kind == "physical"
    assert first.value is not None
    assert row.value is not None
    assert row.fraction == pytest.approx(row.value / first.value)
    copies = [call.args[2] for call in gpu.fake.trace() if call.name == "cuMemcpyAsync"]
    assert copies.count(PEAK) >= 3 * lanes  # as often as the case has samples


def test_the_largest_copy_has_no_measured_ceiling(gpu: Rig) -> None:
    row = good(gpu, gpu.case("link", direction="fetch", bytes=PEAK))["bandwidth"]
    assert [ceiling.kind for ceiling in row.ceilings] == ["physical"]
    assert row.detail["no_reference"] == "the case itself is the largest fragment"


def test_without_room_for_the_large_copy_the_case_still_has_its_number(
    monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    with rig(monkeypatch, context, pin_limit=PEAK // 2) as gpu:
        row = good(gpu, gpu.case("link", direction="fetch", bytes=16 * KiB))["bandwidth"]
    assert "could not be had" in str(row.detail["no_reference"])
    assert [ceiling.kind for ceiling in row.ceilings] == ["physical"]


def test_a_reference_that_moves_something_else_leaves_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = gpu_link.open_lanes

    def spoilt(service: Any, kernels: Any, enter: Any, link: Link) -> Any:
        lanes = opened(service, kernels, enter, link)
        if link.nbytes == PEAK:
            lanes[0].mover.calls._loop.rows[:, 2] -= 1  # type: ignore[attr-defined]
        return lanes

    monkeypatch.setattr(gpu_link, "open_lanes", spoilt)
    refused(gpu, gpu.case("link", direction="fetch", bytes=16 * KiB), "failed", "payload check failed")


@pytest.mark.parametrize(
    ("board", "directions", "expected"),
    [
        (Gpu("GH200", c2c_links=10, c2c_mb_s=45000.0), 1, 450e9),
        (Gpu("GH200", c2c_links=10, c2c_mb_s=45000.0), 2, 900e9),
        (Gpu("GH200", c2c_links=10), 1, None), (None, 1, None),
    ],
)  # fmt: skip
def test_the_law_of_nvlink_c2c_is_what_nvml_says_of_its_links(
    board: Gpu | None, directions: int, expected: float | None
) -> None:
    body = load_suites().find("ladder", "link").body

    class Session:
        def link_ceiling(self, count: int) -> Ceiling:
            return Ceiling("nvlink-c2c", None, "physical", "not told")

        def board(self) -> tuple[None, Gpu | None]:
            return None, board

    found = body.__globals__["physical"](Session(), directions)
    assert (found.name, found.kind, found.value) == ("nvlink-c2c", "physical", expected)
    assert found.source


def test_pcie_keeps_its_own_law(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Ceiling("pcie", 63e9, "physical", "gen 5 x16")
    monkeypatch.setattr(gpu_session.GpuSession, "link_ceiling", lambda self, directions: given)
    row = good(gpu, gpu.case("link", direction="fetch", bytes=PEAK))["bandwidth"]
    assert row.ceilings == (given,)


# -- managed pages -----------------------------------------------------------------------------------------------------


def test_managed_rows_say_which_pass_they_are_of(gpu: Rig) -> None:
    """T56: pages the first pass moved are local to the second."""
    rows = good(gpu, gpu.case("link", **MANAGED, bytes=64 * KiB))
    first, second = rows["bandwidth"], rows["second_pass"]
    assert str(first.detail["pass"]).startswith("first")
    assert second.value is not None
    assert (second.unit, second.bytes.unique, second.rate_of) == ("B/s", 64 * KiB, "unique")
    assert first.seconds is not None
    assert second.seconds is not None
    assert first.detail["first_over_second"] == pytest.approx(first.seconds / second.seconds, abs=1e-4)
    assert first.detail["pages"] in ("moved", "stayed, or had moved before")
    assert "second_pass" not in good(gpu, gpu.case("link", direction="fetch", bytes=64 * KiB))


@pytest.mark.parametrize(("slower", "pages"), [(50.0, "moved"), (1.0, "stayed, or had moved before")])
def test_pages_that_move_are_told_from_pages_that_stay(slower: float, pages: str) -> None:
    """T56 on faked numbers: a first pass of 50 s against 1 s, and passes alike."""
    body = load_suites().find("ladder", "link").body
    notes: dict[str, object] = {}
    done: list[str] = []
    state = {"host": True}

    class Context_:
        seed = 1

    class Measure_:
        context = Context_()

        def note(self, name: str, value: object) -> None:
            notes[name] = value

        def rows(self) -> list[Result]:
            return [row]

    def timed(reps: int) -> float:
        taken = slower if state["host"] else 1.0
        state["host"] = False
        done.append(f"{taken:g}")
        return taken * reps

    def prepare() -> None:
        state["host"] = True
        done.append("prepare")

    row = Result("ladder", "link", 1, {}, "second_pass", "B/s", "higher", "0" * 64, "ok", value=1.0)

    def sampled(measure: object, session: object, metric: str, run: Any, **_: object) -> None:
        nonlocal row
        row = row.with_(metric=metric, seconds=run(1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.timing.gpu_rows.add_sampled", sampled)
        body.__globals__["second_pass"](Measure_(), None, timed, prepare, slower, Bytes(unique=64))
    assert done == ["prepare", f"{slower:g}", "1"]  # brought back, the pass that moves them untimed, then the timed one
    assert row.seconds == 1.0
    assert notes["pages"] == pages
    assert notes["first_over_second"] == slower


# -- GPU to file -------------------------------------------------------------------------------------------------------


def test_a_file_holds_what_the_gpu_held(gpu: Rig) -> None:
    row = good(gpu, gpu.case("link", **EVICT, bytes=9 << 20))["bandwidth"]
    assert "fdatasync" in (row.kernel or "")
    assert row.ceilings[0].name == "file_write_alone"
    assert row.transport == "staged"
    assert row.bytes.unique == 9 << 20
    assert row.bytes.link is None


@pytest.mark.parametrize("fault", ["short", "lost", "elsewhere", "sync"])
def test_a_write_that_did_not_happen_leaves_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    true = os.pwritev

    def write(fd: int, parts: list[memoryview], at: int) -> int:
        if fault == "short" and at >= 4 << 20:
            return 0
        if fault == "lost" and at >= 4 << 20:
            return len(parts[0])
        return true(fd, parts, 0 if fault == "elsewhere" else at)

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", write)
    if fault == "sync":
        monkeypatch.setattr(os, "fdatasync", fails)
    said = {"short": "a write ended early", "sync": "writing it failed"}.get(fault, "payload check failed")
    rows = gpu.case("link", **EVICT, bytes=6 << 20)
    refused(gpu, rows, "skipped" if fault == "sync" else "failed", said)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_buffer_is_not_filled_again_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slots: int
) -> None:
    chunk = 64 * KiB
    monkeypatch.setattr(gpu_link, "STAGE_BYTES", chunk)
    monkeypatch.setattr(gpu_link, "STAGES", slots)
    with device() as (lib, service), ExitStack() as stack:
        link = Link("file", "staged", "evict", 7 * chunk + 4096, scratch=tmp_path)
        (lane,) = gpu_link.open_lanes(service, None, stack.enter_context, link)  # type: ignore[arg-type]
        lib.set(op_ns=0)
        with Stream(service.device) as stream:
            for _ in range(2):
                lane.mover.submit(stream)
                lane.check()
                lane.spoil()
            before = stream.queued
            assert isinstance(lane.mover, Staged)
            lane.mover.alone(stream)
            assert stream.queued == before + 1
        assert lane.mover.operations == 16


def test_other_buffers_than_staging_ones_are_refused(tmp_path: Path) -> None:
    with device() as (_, service), ScratchFile(8192, tmp_path) as file, pinned(service, 6000) as odd:
        for buffers in ([], [odd]):
            with pytest.raises(UsageError, match="not staging buffers"):
                StagedWrite(service.device, file, 0, buffers)
