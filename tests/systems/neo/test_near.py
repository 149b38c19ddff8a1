"""The paced near side: what stages cost, that they take as long and in order, and what goes wrong in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import median

import pytest

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.model.layers import shape
from kvbench.systems.neo import near as n
from kvbench.systems.neo.pipeline import observed, run_pass
from kvbench.systems.neo.schedule import Batch, Schedule, Stage, asymmetric, forecast, simple
from tests.systems.neo.rigs import Clocked, Idle

OF = shape("llama-3-8b")
LAYERS = 3


def test_a_linear_stage_of_one_token_reads_its_weights() -> None:
    t4 = n.RATES["T4"]
    both = sum(n.stage_seconds(kind, Batch(gpu=1), OF, 1, t4) for kind in ("pr", "po"))
    assert both == pytest.approx(2 * OF.layer_weights / 320e9, rel=1e-3)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    t4 = n.RATES["T4"]
    both = sum(n.stage_seconds(kind, Batch(prefill=4096), OF, 1, t4) for kind in ("pr", "po"))
    assert both == pytest.approx(2 * OF.layer_weights * 4096 / 65e12)


def test_near_decode_reads_its_kv_and_transfers_are_what_neo_ships() -> None:
    a10g = n.RATES["A10G"]
    assert n.load_of("ga", Batch(gpu=4), OF, 1000).nbytes == 4 * 1000 * 4096
    assert n.stage_seconds("ga", Batch(gpu=4), OF, 1000, a10g) == pytest.approx(4 * 1000 * 4096 / 600e9)
    # Llama-3-8B: 12 KiB of q, k, v down and 16 KiB of output up, a layer and request
    assert n.load_of("qkv", Batch(cpu=1), OF, 1000).nbytes == 12 << 10
    assert n.load_of("o", Batch(cpu=1), OF, 1000).nbytes == 16 << 10
    with pytest.raises(UsageError, match="got 'ca'"):
        n.load_of("ca", Batch(cpu=1), OF, 1)


def test_every_preset_names_where_its_numbers_come_from() -> None:
    assert set(n.RATES) == {"T4", "A10G", "H100"}
    assert all(len(rates.source) > 20 and rates.bandwidth > rates.link for rates in n.RATES.values())


@pytest.fixture
def carried() -> list[str]:
    return []


@pytest.fixture
def near(carried: list[str]) -> Iterator[n.PacedNear]:
    with n.PacedNear({}, lambda stage: carried.append(stage.name)) as made:
        yield made


def times(schedule: Schedule, each: float) -> dict[str, float]:
    return {f"{s.kind}{s.batch}": each for s in schedule.stages if s.lane != "cpu"}


def test_stages_take_their_time_in_order(
    near: n.PacedNear, carried: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    order, marks = asymmetric(LAYERS, Batch(8, 2, 4), 1), Clocked()
    held = times(order, 4e-4)
    near.retime(held)
    run_pass(order, near, Idle(), marks)
    line = observed(near, marks.seen)
    for stage in order.stages:
        begin, end = line.spans[stage.name]
        if stage.lane != "cpu":
            assert end - begin == pytest.approx(4e-4, abs=2e-9)
        for name in (*stage.after, *order.inputs(stage)):
            if not name.startswith("ca") and stage.lane != "cpu":  # those are on another clock's zero
                assert line.spans[name][1] <= begin + 1e-9, (name, stage.name)
    assert sorted(carried) == sorted(s.name for s in order.stages if s.kind in ("qkv", "o"))
    assert line.total >= forecast(order, {**held, "ca0": 0.0, "ca1": 0.0}).total - 1e-6
    with capsys.disabled():
        print(f"[paced ends late by {median(near.late) * 1e6:.0f} us, at most {max(near.late) * 1e6:.0f}]", end=" ")


class Meeting:
    """A CPU side that does not end ``ca1`` of a layer before the near side has ended ``po0`` of it."""

    def __init__(self, near: n.PacedNear, batch: int) -> None:
        self.near, self.batch, self.met = near, batch, 0

    def attend(self, batch: int, layer: int) -> None:
        if batch == self.batch:
            self.near.arrived(f"po0[{layer}]")
            self.met += 1


def test_the_near_side_goes_on_while_the_cpu_attends(near: n.PacedNear) -> None:
    order = asymmetric(LAYERS, Batch(8, 2, 4), 1)
    near.retime(times(order, 1e-4))
    far = Meeting(near, 1)
    run_pass(order, near, far, Clocked())
    assert far.met == LAYERS


def test_simple_offloading_does_not(near: n.PacedNear, monkeypatch: pytest.MonkeyPatch) -> None:
    order = simple(1, Batch(8, 2, 4))
    near.retime(times(order, 1e-4))
    monkeypatch.setattr(n, "BACK_S", 0.3)
    with pytest.raises(KvbenchError, match="does not come back"):
        run_pass(order, near, Meeting(near, 0), Clocked())


def test_a_stage_without_its_input_fails_the_pass(near: n.PacedNear) -> None:
    order = simple(LAYERS, Batch(gpu=1, cpu=1))
    bad = order.without("po0[0]", "o0[0]").without("o0[0]", "ca0[0]")
    stages = tuple(s for s in bad.stages if not s.name.startswith(("ca0[0]", "o0[0]")))
    broken = Schedule(order.mode, order.layers, order.batches, stages)
    near.retime(times(order, 1e-5))
    with pytest.raises(VerifyError, match=r"po0\[0\]: ran before its input existed"):
        run_pass(broken, near, Idle(), Clocked())
    run_pass(order, near, Idle(), Clocked())  # the next pass is not disturbed by it


def test_what_fails_in_its_thread_reaches_the_caller() -> None:
    def carry(stage: Stage) -> None:
        raise ZeroDivisionError(stage.name)

    order = simple(1, Batch(cpu=1))
    with n.PacedNear(times(order, 1e-5), carry) as near, pytest.raises(KvbenchError, match="ZeroDivisionError: qkv0"):
        run_pass(order, near, Idle(), Clocked())


def test_what_fails_on_the_cpu_ends_the_pass(near: n.PacedNear) -> None:
    class Broken:
        def attend(self, batch: int, layer: int) -> None:
            raise OSError("no attention")

    order = simple(1, Batch(cpu=1))
    near.retime(times(order, 1e-5))
    with pytest.raises(OSError, match="no attention"):
        run_pass(order, near, Broken(), Clocked())
    run_pass(order, near, Idle(), Clocked())


def test_misuse_is_refused(near: n.PacedNear) -> None:
    order = simple(1, Batch(cpu=1))
    with pytest.raises(UsageError, match="no time for"):
        near.begin(order)
    with pytest.raises(UsageError, match="not a duration"):
        near.retime({"pr0": -1.0})
    near.retime(times(order, 1e-5))
    near.begin(order)
    with pytest.raises(UsageError, match="busy"):
        near.begin(order)
    near.abort()
    near.close()
    near.close()
    with pytest.raises(UsageError, match="cannot begin"):
        near.begin(order)


def test_the_thread_is_pinned_where_asked() -> None:
    cpu = min(os.sched_getaffinity(0))
    with n.PacedNear({}, lambda stage: None, cpu) as near:
        assert near.pin_reason is None
        assert os.sched_getaffinity(near.tid) == {cpu}
    with n.PacedNear({}, lambda stage: None, 1 << 14) as near:
        assert near.pin_reason
