"""A window's disturbances on a GPU, and its link while work runs."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from kvbench.machine.nvml_state import GpuLimits, GpuProbe, GpuReading, LinkWatch, delta, marker, under_load
from tests.machine.fake_nvml import ERRORS, STATE, FakeNvml, load

LIMITS = GpuLimits(5, 16)
QUIET = GpuReading(
    at=10.0, sm_mhz=1980, memory_mhz=1593, reasons=0, slowdown_ns=(0, 0, 0, 0), temperature_c=50, power_w=300.0, gen=5,
    width=16, replays=3,
)  # fmt: skip
LATER = replace(QUIET, at=11.0, temperature_c=60, power_w=650.0)


def test_a_quiet_window_has_no_marks() -> None:
    found = delta(QUIET, LATER, LIMITS, link=True)
    assert (found.wall, found.marks, found.notes) == (1.0, (), ())


@pytest.mark.parametrize(
    ("mark", "change"),
    [("throttled", {"reasons": 0x08}), ("throttled", {"reasons": 0x20}), ("throttled", {"reasons": 0x40}),
     ("throttled", {"reasons": 0x80}), ("throttled", {"slowdown_ns": (0, 0, 1000, 0)}),
     ("power_capped", {"reasons": 4}), ("clock_moved", {"sm_mhz": 1700}), ("clock_moved", {"memory_mhz": 800}),
     ("pcie_downshift", {"gen": 1}),
     ("pcie_downshift", {"width": 8}), ("pcie_replay", {"replays": 4}), ("gpu_lost", {"lost": True})],
)  # fmt: skip
def test_each_disturbance_has_its_mark_and_only_it(mark: str, change: dict[str, Any]) -> None:
    assert delta(QUIET, replace(LATER, **change), LIMITS, link=True).marks == (mark,)


@pytest.mark.parametrize("reasons", [0x1, 0x2, 0x10, 0x100, 0x200])
def test_reasons_that_are_no_fault_mark_nothing(reasons: int) -> None:
    assert delta(QUIET, replace(LATER, reasons=reasons), LIMITS, link=True).marks == ()


def test_a_slowdown_that_was_there_before_is_one_still() -> None:
    assert delta(replace(QUIET, reasons=0x40), LATER, LIMITS, link=True).marks == ("throttled",)


def test_a_power_cap_that_holds_is_how_the_board_runs() -> None:
    found = delta(replace(QUIET, reasons=4), replace(LATER, reasons=5), LIMITS, link=True)
    assert (found.marks, found.notes) == ((), ("power_capped",))


def test_a_link_that_is_not_used_may_idle() -> None:
    idle = replace(LATER, gen=1, width=8, replays=9)
    assert delta(QUIET, idle, LIMITS, link=False).marks == ()
    assert delta(QUIET, idle, replace(LIMITS, c2c=True), link=True).marks == ()  # data go over C2C there
    assert delta(QUIET, replace(LATER, gen=1, width=1), GpuLimits(), link=True).marks == ()  # nothing to hold it to


def test_what_is_not_told_is_none_and_marks_nothing() -> None:
    found = delta(GpuReading(1.0), GpuReading(2.0), LIMITS, link=True)
    assert (found.marks, found.notes) == ((), ())
    assert delta(GpuReading(1.0, slowdown_ns=(None,)), GpuReading(2.0, slowdown_ns=(5,)), LIMITS, link=True).marks == ()


def test_readings_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="older than the first"):
        delta(LATER, QUIET, LIMITS, link=True)


def test_reasons_have_names() -> None:
    assert replace(QUIET, reasons=0x25).reason_words == ("idle", "power_cap", "sw_thermal")
    assert replace(QUIET, reasons=0x400).reason_words == ("bit:0x400",)
    assert replace(QUIET, reasons=None).reason_words == ()


def test_a_machine_is_read_as_it_answers() -> None:
    fake = FakeNvml("dgx")
    with GpuProbe(module=fake) as probe:
        assert (probe.indices, probe.limits[0]) == (tuple(range(8)), GpuLimits(5, 16, False))
        found = probe.snapshot()[7]
        assert probe.processes() == (0,) * 8
    assert (found.sm_mhz, found.memory_mhz, found.reason_words) == (345, 1593, ("idle",))
    assert (found.temperature_c, found.power_w, found.gen, found.width, found.replays) == (34, 95.0, 5, 16, 0)
    assert found.slowdown_ns == (0, 0, 0, 0)
    assert fake.open == 0


def test_only_the_boards_asked_for_are_read() -> None:
    with GpuProbe([6, 2, 99], FakeNvml("dgx")) as probe:
        assert probe.indices == (2, 6)
        assert len(probe.snapshot()) == 2
    with GpuProbe([99], FakeNvml("dgx")) as none:
        assert (none.snapshot(), none.reason) == ((), "the driver lists no such GPU")


def test_the_old_name_of_the_reasons_is_asked_where_the_new_one_is_not_known() -> None:
    with GpuProbe(module=FakeNvml("wsl")) as probe:
        assert probe.snapshot()[0].reason_words == ("idle",)
    machine = load("dgx")
    machine["defaults"]["nvmlDeviceGetCurrentClocksThrottleReasons"] = 4
    with GpuProbe([0], FakeNvml(machine, missing=("nvmlDeviceGetCurrentClocksEventReasons",))) as probe:
        assert probe.snapshot()[0].reasons == 4


@pytest.mark.parametrize("kind", sorted(ERRORS))
@pytest.mark.parametrize("name", STATE)
def test_every_question_may_go_unanswered_alone(name: str, kind: str) -> None:
    fake = FakeNvml("dgx", {name: kind})
    with GpuProbe([0], fake) as probe:
        before, after = probe.snapshot()[0], probe.snapshot()[0]
        probe.processes()
        marks = delta(before, after, probe.limits[0], link=True).marks
    # a board that is lost is never passed off as quiet; whether it is lost only a question that is asked can tell
    asked = name not in ("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetComputeRunningProcesses")
    assert marks == (("gpu_lost",) if kind == "GpuIsLost" and asked else ())
    if kind in ("NotSupported", "FunctionNotFound"):
        assert fake.calls.get(name, 0) <= 2  # once for each clock; never again


def test_a_machine_without_a_driver_has_nothing_to_read() -> None:
    with GpuProbe(loads=lambda: False) as probe:
        assert (probe.snapshot(), probe.links(), probe.processes()) == ((), (), ())
        assert "no NVIDIA driver" in probe.reason
        assert marker(probe, link=True)() == ()


def test_a_lost_board_is_told() -> None:
    machine = load("dgx")
    machine["boards"][1] = {"error": "GpuIsLost"}
    with GpuProbe(module=FakeNvml(machine)) as probe:
        assert [reading.lost for reading in probe.snapshot()] == [False, True, *[False] * 6]
        assert probe.links()[1] == (None, None)


def test_the_marker_tells_what_happened_since_it_was_asked() -> None:
    fake = FakeNvml("dgx")
    with GpuProbe([0, 1], fake) as probe:
        marks = marker(probe, link=True, ignore=("clock_moved",))
        assert marks() == ()
        fake.boards[1]["nvmlDeviceGetCurrentClocksEventReasons"] = 0x40
        fake.boards[0]["nvmlDeviceGetCurrPcieLinkGeneration"] = 1
        fake.boards[0]["nvmlDeviceGetClockInfo"] = {"sm": 1980, "memory": 1593}
        assert set(marks()) == {"throttled", "pcie_downshift"}
        fake.boards[1]["nvmlDeviceGetCurrentClocksEventReasons"] = 0
        fake.boards[0]["nvmlDeviceGetCurrPcieLinkGeneration"] = 5
        assert marks() == ("throttled",)  # at its beginning the window was still slowed
        assert marks() == ()


def test_the_link_is_watched_while_work_runs() -> None:
    fake = FakeNvml("dgx")
    fake.boards[0]["nvmlDeviceGetCurrPcieLinkGeneration"] = 1  # idle before the work begins
    enough = threading.Event()
    with GpuProbe([0, 1], fake) as probe:
        with LinkWatch(probe, 0.001) as watch:
            _until(lambda: watch.looks >= 2, enough)
            fake.boards[0]["nvmlDeviceGetCurrPcieLinkGeneration"] = 5
            seen = watch.looks
            _until(lambda: watch.looks >= seen + 3, enough)
        first, second = watch.results
    assert (first.index, first.gen, first.width, first.downshift) == (0, 5, 16, False)
    assert (second.gen, second.least_gen, second.downshift) == (5, 5, False)
    assert first.looks >= 5


def _until(done: Any, pause: threading.Event) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline, "the watch looks at nothing"
        pause.wait(0.001)


def test_a_watch_ends_with_an_error_of_its_block() -> None:
    with GpuProbe([0], FakeNvml("dgx")) as probe:
        watch = LinkWatch(probe, 60.0)
        with pytest.raises(RuntimeError, match="work"), watch:
            raise RuntimeError("work")
    assert not watch._thread.is_alive()


@pytest.mark.parametrize(
    ("looks", "limits", "expected"),
    [([(5, 16)] * 3, LIMITS, (5, 16, False)), ([(1, 16), (5, 16)], LIMITS, (5, 16, False)),
     ([(2, 16)] * 3, LIMITS, (2, 16, True)),  # public case: hours at gen 2 without any error
     ([(5, 8)] * 3, LIMITS, (5, 8, True)), ([(5, 16), (2, 16), (5, 16)], LIMITS, (5, 16, True)),  # flapping
     ([(5, 16)] * 3, GpuLimits(), (5, 16, None)), ([(5, 16), (1, 16)], GpuLimits(), (5, 16, True)),
     ([(4, 16), (5, 8)], LIMITS, (4, 16, True))],
)  # fmt: skip
def test_a_link_under_load(looks: Any, limits: GpuLimits, expected: tuple[int, int, bool | None]) -> None:
    found = under_load(0, looks, limits)
    assert (found.gen, found.width, found.downshift) == expected
    assert found.looks == len(looks)


@pytest.mark.parametrize(("looks", "reason"), [([], "before the first look"), ([(None, None)] * 3, "does not tell")])
def test_a_link_nobody_saw_is_unknown(looks: Any, reason: str) -> None:
    found = under_load(0, looks, LIMITS)
    assert (found.gen, found.width, found.downshift, found.looks) == (None, None, None, 0)
    assert reason in found.reason
