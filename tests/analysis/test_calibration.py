"""Noise between runs, the gate replayed on it, and which calibrations still hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from kvbench.analysis.calibration import replay, run_sd, usable
from kvbench.analysis.gate import Rule

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Dated:
    created_at: str
    env: dict[str, Any] = field(default_factory=dict)


def at(days: float, driver: str | None = None) -> Dated:
    return Dated((NOW - timedelta(days=days)).isoformat(), {"gpu": {"driver": driver}})


def test_the_deviation_is_relative() -> None:
    values = np.exp(np.random.default_rng(0).normal(0.0, 0.02, 2000)) * 3e9
    assert run_sd(list(values)) == pytest.approx(0.02, rel=0.1)
    assert run_sd(list(values * 1e-12)) == pytest.approx(run_sd(list(values)))


def test_quiet_runs_raise_no_alarm_and_split_runs_do() -> None:
    rng = np.random.default_rng(1)
    quiet = [list(np.exp(rng.normal(0.0, 0.003, 10))) for _ in range(20)]
    found = replay(quiet, [Rule(0.02, 0.003)] * 20, ["higher"] * 20)
    assert (found.one_look, found.both_looks, found.cases) == (0.0, None, 20)
    torn = [[1.0] * 5 + [1.2] * 5] * 20
    assert replay(torn, [Rule(0.02, 0.003)] * 20, ["lower"] * 20).one_look > 0.0


def test_twenty_runs_replay_both_looks() -> None:
    rng = np.random.default_rng(2)
    noisy = [list(np.exp(rng.normal(0.0, 0.02, 20))) for _ in range(30)]
    found = replay(noisy, [Rule(0.02, 0.02)] * 30, ["higher"] * 30)
    assert found.both_looks is not None
    assert found.both_looks < found.one_look < 0.1


def test_the_same_seed_gives_the_same_answer() -> None:
    medians = [list(np.exp(np.random.default_rng(3).normal(0.0, 0.02, 10)))]
    assert replay(medians, [Rule(0.02, 0.02)], ["higher"]) == replay(medians, [Rule(0.02, 0.02)], ["higher"])


@pytest.mark.parametrize(
    ("found", "driver", "why"),
    [
        (at(1), None, ""), (at(29.9, "550.1"), "550.9", ""), (at(30.1), None, "older than 30 days"),
        (at(1, "550.1"), "570.2", "driver 550, now 570"), (at(1), "550.1", "driver none, now 550"),
        (at(-3), None, "future"),
    ],
)  # fmt: skip
def test_what_no_longer_holds_is_left_out_and_named(found: Dated, driver: str | None, why: str) -> None:
    kept, reason = usable({"case": found}, {"gpu": {"driver": driver}}, NOW)
    assert bool(kept) == (why == "")
    assert why in reason
