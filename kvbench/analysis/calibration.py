"""What A/A runs say about noise: the spread of run medians, and how often the gate would cry wolf (design 11)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import stdev
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvbench.analysis.gate import RUNS, Rule, flagged, look

if TYPE_CHECKING:
    from kvbench.contract.result import Better

LEAST_RUNS = 10
MAX_AGE = timedelta(days=30)
SPLITS = 200  # random halves of the same runs; all of C(10, 5) = 252 are alike


class Dated(Protocol):
    """A stored calibration: when, and in which environment."""

    @property
    def created_at(self) -> str: ...
    @property
    def env(self) -> Mapping[str, Any]: ...


K = TypeVar("K")
D = TypeVar("D", bound=Dated)


def run_sd(medians: Sequence[float]) -> float:
    """Return the relative standard deviation between runs, of the logarithms. Raises ValueError below two runs."""
    return stdev(math.log(value) for value in medians)


@dataclass(frozen=True, slots=True)
class Replay:
    """The gate's first look on random halves of A/A runs: the share of cases each split flagged, on average.

    ``one_look``: measured. ``both_looks``: measured on disjoint quarters from 20 runs on, else None: a second look at
    the same runs would share their luck. ``splits`` of ``cases`` cases.
    """

    one_look: float
    both_looks: float | None
    cases: int
    splits: int


def replay(
    medians: Sequence[Sequence[float]], rules: Sequence[Rule], better: Sequence[Better], *, seed: int = 0
) -> Replay:
    """Replay the gate on A/A runs: ``medians`` holds the run medians of every case, at least ten each."""
    draw = random.Random(seed)
    looks = both = confirmed = 0
    for _ in range(SPLITS):
        for values, rule, direction in zip(medians, rules, better, strict=True):
            dealt = draw.sample(list(values), len(values))
            first = look(dealt[:RUNS], dealt[RUNS : 2 * RUNS], direction)
            hit = flagged(first, rule)
            looks += hit
            if len(dealt) >= 4 * RUNS:
                both += 1
                confirmed += hit and flagged(
                    look(dealt[2 * RUNS : 3 * RUNS], dealt[3 * RUNS : 4 * RUNS], direction), rule
                )
    total = SPLITS * len(medians)
    return Replay(looks / total if total else 0.0, confirmed / both if both else None, len(medians), SPLITS)


def usable(found: Mapping[K, D], env: Mapping[str, Any], now: datetime | None = None) -> tuple[dict[K, D], str]:
    """Return the calibrations the gate may use in the environment ``env``, and why others were left out ('' if none).

    Older than 30 days, from the future, or under another driver major they say nothing about today's noise.
    """
    now = now or datetime.now(UTC)
    kept: dict[K, D] = {}
    reasons: dict[str, int] = {}
    for key, each in found.items():
        age = now - datetime.fromisoformat(each.created_at)
        majors = driver_major(each.env), driver_major(env)
        if majors[0] != majors[1]:
            why = f"taken under driver {majors[0] or 'none'}, now {majors[1] or 'none'}"
        elif age > MAX_AGE:
            why = f"older than {MAX_AGE.days} days"
        elif age < -timedelta(days=1):
            why = "dated in the future"
        else:
            kept[key] = each
            continue
        reasons[why] = reasons.get(why, 0) + 1
    return kept, "; ".join(f"{count} {why}" for why, count in reasons.items())


def driver_major(env: Mapping[str, Any]) -> str | None:
    """Return the major number of the GPU driver in the environment's facts, None without one."""
    gpu = env.get("gpu")
    driver = gpu.get("driver") if isinstance(gpu, dict) else None
    return str(driver).split(".")[0] if driver else None
