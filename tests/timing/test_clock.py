"""The host clock: its quantum on fine and coarse sources, and the detection of a clock that runs backwards."""

from __future__ import annotations

import itertools

import pytest

from kvbench.timing import clock


def test_quantum_of_this_machine_reports_both_parts() -> None:
    found = clock.measure_quantum(500)
    assert found.step_ns > 0
    assert found.cost_ns >= 0.0
    assert found.ns == max(found.step_ns, found.cost_ns)
    assert found.seconds == pytest.approx(found.ns * 1e-9)


def test_quantum_is_measured_once() -> None:
    assert clock.quantum() is clock.quantum()


def test_coarse_clock_is_limited_by_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = itertools.count()
    monkeypatch.setattr(clock, "now_ns", lambda: next(reads) // 10 * 1_000)
    found = clock.measure_quantum(200)
    assert (found.step_ns, found.cost_ns, found.ns) == (1_000, 0.0, 1_000.0)


def test_clock_that_stands_still_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = itertools.count()
    monkeypatch.setattr(clock, "now_ns", lambda: next(reads) // 1_000 * 4_000_000)
    assert clock.measure_quantum(100).ns == 4_000_000.0


def test_slow_reads_are_the_quantum_of_a_fine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = itertools.accumulate(itertools.cycle((300, 301, 1, 302)))
    monkeypatch.setattr(clock, "now_ns", lambda: next(steps))
    found = clock.measure_quantum(400)
    assert found.step_ns == 1
    assert found.ns == found.cost_ns > 299


def test_backward_clock_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter([0, 10, 20, 5, 15, 400, 410])
    monkeypatch.setattr(clock, "now_ns", lambda: next(stamps))
    found = clock.check_monotonic(7)
    assert not found.ok
    assert (found.backward, found.worst_back_ns, found.longest_gap_ns) == (1, 15, 385)


def test_host_clock_is_monotonic() -> None:
    assert clock.check_monotonic(1_000).ok
