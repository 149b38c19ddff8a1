"""The executor figures: what they are made of, and what they say without quiet rounds. No ratio is asserted."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from kvbench.errors import VerifyError
from kvbench.replay.executor_trial import Trial
from scripts.figures import executor

SMALL = Trial(6, prompt=40, output=5, machine="h100", layers=2, far_blocks=64, near_tokens=192)
CPU = min(os.sched_getaffinity(0))


def test_a_round_measures_replays_carries_out_and_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "DELAY_SHARE", 1e9)
    quiet = executor.rounds_of(SMALL, 1, [CPU, CPU])
    assert len(quiet) == 1
    executed, simulated, attention, copies = quiet[0]
    assert executed > 0.0
    assert simulated > 0.0
    assert attention > 0.0
    assert copies > 0.0


def test_disturbed_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "DELAY_SHARE", -1.0)
    assert executor.rounds_of(SMALL, 1, [CPU, CPU]) == []


def test_what_is_said_of_them() -> None:
    few = executor.figure(SMALL, [(1.0, 1.0, 0.1, 0.1)] * 2)
    assert few.value is None
    assert few.verdict == "disturbed"
    rounds = [(1.1, 1.0, 0.2, 0.1), (1.0, 1.0, 0.2, 0.1), (1.3, 1.0, 0.2, 0.1)]
    met = executor.figure(SMALL, rounds)
    assert met.value == pytest.approx(1.1)
    assert met.verdict == "met"
    assert met.detail["most"] == pytest.approx(1.3)
    assert executor.figure(SMALL, [(1.3, 1.0, 0.2, 0.1)] * 3).verdict == "missed"


def test_a_wrong_copy_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise VerifyError("a page did not arrive", where="layer 0")

    monkeypatch.setattr(executor, "rounds_of", wrong)
    monkeypatch.setattr(executor, "acquire", lambda *_, **__: nullcontext())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (found,) = executor.figures(1, [SMALL])
    assert found.value is None
    assert found.verdict == "missed"
    assert "did not arrive" in found.note
