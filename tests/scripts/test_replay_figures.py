"""The replay figures: what they are made of, and what they say when a child gives nothing. No rate is asserted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.figures import replay
from scripts.figures.processes import Done


def test_speed_and_memory_come_from_children_that_finish_every_request() -> None:
    speed, memory = replay.speed(200), replay.memory(300)
    assert (speed.low, memory.high) == (2000.0, 1.0)
    assert speed.value is not None
    assert speed.value > 0
    assert "200 requests of 4" in speed.note
    assert memory.value is not None
    assert 0 < memory.value < 1
    assert memory.verdict == "met"


def test_a_child_that_fails_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "CHILD", "raise SystemExit('no costs')")
    for figure in (replay.speed(10), replay.memory(10)):
        assert (figure.value, figure.verdict, figure.note) == (None, "missed", "exit code 1: no costs")


def test_requests_that_do_not_finish_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "CHILD", 'print(\'{"finished": 3, "cpu": 1, "wall": 1}\')')
    assert replay.speed(10).note == "3 of 10 requests finished"
    assert replay.memory(10).value is None


def test_a_child_without_end_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(words: object, limit: float) -> Done:
        raise subprocess.TimeoutExpired("child", limit)

    monkeypatch.setattr(replay, "run", late)
    assert replay.speed(10).note == "did not end within 600 s"


def test_digests_of_other_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_pythons", lambda minor: iter((sys.executable,)))
    other = sys.version_info[1] + 1
    same = replay.digests(6, (other,))
    assert (same.value, same.verdict, same.of) == (1, "met", 1)
    told = iter(["aa", "bb"])
    monkeypatch.setattr(replay, "_digest", lambda program, count: next(told))
    assert replay.digests(6, (other,)).verdict == "missed"
    monkeypatch.setattr(replay, "_digest", lambda program, count: "!no module")
    none = replay.digests(6, (other,))
    assert (none.value, none.verdict) == (None, "no target")
    assert none.note == f"not run: 3.{other}: no module"
