"""How often the gate and the history are wrong: their own code on series drawn with a known truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvbench.analysis.changes import changes
from kvbench.analysis.effect import MARGIN
from kvbench.analysis.gate import BASELINE_SPLIT, RUNS, Rule, flagged, halves, judge, look
from scripts.figures.record import Figure
from scripts.figures.record import judge as met

GATE_TRIALS = 20_000
HISTORY_TRIALS = 1_000
LOSS = 0.05  # of throughput
POINTS, NEAR = 200, 5
STEP = 0.05
Draw = Callable[[int], NDArray[np.float64]]


def gate(trials: int, seed: int) -> Iterator[Figure]:
    """Yield false alarms of unchanged cases and findings of a planted loss, for fresh sides and a stored baseline."""
    for cv, most, least in ((0.01, 0.001, 0.99), (0.02, 0.003, 0.90)):
        for stored in (False, True):
            how = f"stored baseline of {BASELINE_SPLIT}" if stored else f"{RUNS} fresh runs a side"
            name = f"CV {cv:.0%}, {how}"
            rng = np.random.default_rng([seed, int(cv * 100), stored])
            share, once = _alarms(rng, trials, cv, stored, 1.0)
            yield _figure("gate", f"false alarms, {name}", share, None, most, f"one look {once:.2%}, of {trials}")
            share, once = _alarms(rng, max(trials // 10, 1), cv, stored, 1.0 - LOSS)
            yield _figure("gate", f"-{LOSS:.0%} found, {name}", share, least, None, f"one look {once:.2%}")


def _alarms(rng: np.random.Generator, trials: int, cv: float, stored: bool, level: float) -> tuple[float, float]:
    """Return the shares of cases reported as regressions, and flagged by the first look."""
    rule = Rule(MARGIN, cv)
    spread = math.sqrt(math.log1p(cv * cv))

    def runs(count: int, centre: float) -> Sequence[float]:
        return list(centre * np.exp(rng.normal(0.0, spread, count)))

    alarms = firsts = 0
    for _ in range(trials):
        sides = halves(runs(BASELINE_SPLIT, 1.0)) if stored else (runs(RUNS, 1.0), None)
        first = look(sides[0], runs(RUNS, level), "higher")
        second = None
        firsts += flagged(first, rule)
        if first.loss > rule.threshold:
            second = look(sides[1] if sides[1] is not None else runs(RUNS, 1.0), runs(RUNS, level), "higher")
        alarms += judge(first, rule, second).outcome == "regression"
    return alarms / trials, firsts / trials


def history(trials: int, seed: int, cv: float = 0.02) -> Iterator[Figure]:
    """Yield false change points of series without a step, and where a step is found in series with one."""
    rng = np.random.default_rng([seed, 7])
    noise: Draw = lambda n: np.exp(rng.normal(0.0, cv, n))  # noqa: E731
    kinds: tuple[tuple[str, Draw, float], ...] = (
        ("clean", noise, 0.005),
        (
            "5 % outliers",
            lambda n: noise(n) * np.where(rng.random(n) < 0.05, 1.0 + rng.exponential(0.3, n), 1.0),
            0.005,
        ),
        ("2 % drift", lambda n: noise(n) * np.linspace(1.0, 1.02, n), 0.08),
    )
    for name, draw, most in kinds:
        wrong = sum(bool(changes(draw(POINTS))) for _ in range(trials))
        yield _figure("history", f"series with a false change, {name}", wrong / trials, None, most, f"of {trials}")
    located = 0
    for _ in range(trials):
        at = int(rng.integers(POINTS // 4, 3 * POINTS // 4))
        series = noise(POINTS)
        series[at:] *= 1.0 + STEP
        located += any(abs(change.index - at) <= NEAR for change in changes(series))
    yield _figure(
        "history", f"a {STEP:.0%} step found within {NEAR} points", located / trials, 0.95, None, f"of {trials}"
    )


def _figure(group: str, name: str, value: float, low: float | None, high: float | None, note: str) -> Figure:
    return Figure(group, name, "share", value, low, high, met(value, low, high, disturbed=False), note)
