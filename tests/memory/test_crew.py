"""Threads of a crew: together, accountable, gone after close."""

from __future__ import annotations

import os
import threading

import pytest

from kvbench.errors import Unavailable
from kvbench.memory.crew import Crew


def test_every_member_runs_once_a_pass() -> None:
    done: list[int] = []
    crew = Crew(3, done.append)
    assert crew.run_pass() >= 0
    assert sorted(done) == [0, 1, 2]
    crew.run_pass()
    assert len(done) == 6
    assert len(set(crew.tids)) == 3
    crew.close()
    crew.close()
    assert not any(t.native_id in crew.tids for t in threading.enumerate())


def test_an_error_reaches_the_caller_and_the_crew_goes_on() -> None:
    broken = [True]

    def body(index: int) -> None:
        if index == 1 and broken[0]:
            raise ZeroDivisionError("in a thread")

    crew = Crew(2, body)
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        crew.run_pass()
    broken[0] = False
    assert crew.run_pass() >= 0
    crew.close()


def test_an_interrupt_while_waiting_stops_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    started, release = threading.Event(), threading.Event()

    def body(_index: int) -> None:
        started.set()
        release.wait(5)

    crew = Crew(1, body)

    wait = crew._end.wait

    def interrupted() -> int:
        if threading.current_thread() is not threading.main_thread():
            return wait()
        started.wait(5)
        release.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(crew._end, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        crew.run_pass()
    assert crew.stopping
    assert not any(t.native_id in crew.tids for t in threading.enumerate())


def test_pins_hold_or_are_reported() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    seen: dict[int, set[int]] = {}
    crew = Crew(2, lambda i: seen.__setitem__(i, os.sched_getaffinity(0)), cpus)
    crew.run_pass()
    crew.close()
    assert crew.pinned
    assert seen == {i: {cpus[i % len(cpus)]} for i in range(2)}
    lost = Crew(1, lambda _i: None, [100_000])
    lost.run_pass()
    lost.close()
    assert not lost.pinned


def test_too_many_threads_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Unavailable, match="ulimit -u"):
        Crew(2, lambda _i: None)
