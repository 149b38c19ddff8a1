"""Scaling the CPU buffer's logical size by service-level objectives: a pure function of state and observation.

After eLLM (DAC 2026, section 2.3.2): the physical buffer is fixed, a logical size at most as large limits new use.
Violations of TPOT (time per output token) shrink it, which throttles prefills; violations of TTFT (time to first token)
grow it, which admits more. A violation counts as an event when it occurs 3 times within the last 5 scheduling
iterations (the paper's first version said five times within a window); alpha, 2 by default, is the rate of change.

The paper leaves open: the update law (multiply and divide by alpha, or add and subtract steps), the smallest size, what
happens when both objectives are violated, whether there is a pause after a change, and whether violations that have
led to one count again. All five are parameters; their defaults are this file's choice, not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from kvbench.errors import UsageError

Law = Literal["multiply", "add"]
Both = Literal["hold", "shrink", "grow"]
WHERE = "SLO controller"


@dataclass(frozen=True, slots=True)
class Params:
    """``physical`` and ``minimum`` bytes, ``ttft`` and ``tpot`` objectives in seconds, and how the size follows them.

    ``law``: "multiply" grows to size x alpha and shrinks to size / alpha; "add" by alpha x ``step`` bytes either way.
    ``both``: what to do when either objective's events are due in one iteration. ``cooldown``: iterations after a
    change in which there is none. ``forget``: whether a change clears both windows.
    Raises UsageError for values that make no controller.
    """

    physical: int
    ttft: float
    tpot: float
    window: int = 5
    threshold: int = 3
    alpha: float = 2.0
    law: Law = "multiply"
    minimum: int = 1
    step: int = 0
    both: Both = "shrink"
    cooldown: int = 0
    forget: bool = True

    def __post_init__(self) -> None:
        wrong = {
            "physical": self.physical < 1, "ttft": not self.ttft > 0.0, "tpot": not self.tpot > 0.0,
            "window": self.window < 1, "threshold": not 1 <= self.threshold <= self.window,
            "alpha": not 1.0 < self.alpha < float("inf") if self.law == "multiply" else not self.alpha > 0.0,
            "law": self.law not in get_args(Law), "minimum": not 1 <= self.minimum <= self.physical,
            "step": self.law == "add" and self.step < 1, "both": self.both not in get_args(Both),
            "cooldown": self.cooldown < 0,
        }  # fmt: skip
        for name, bad in wrong.items():
            if bad:
                raise UsageError(
                    f"{name} makes no controller", where=WHERE, got=getattr(self, name),
                    expected="physical, ttft, tpot above 0; 1 <= threshold <= window; alpha above 1 (add: above 0); "
                    "1 <= minimum <= physical; with law add a step of 1 or more",
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observation:
    """What one scheduling iteration saw: the worst TTFT and TPOT in it, seconds; None where there was none."""

    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Logical size in bytes, the last iterations' violations (newest last), iterations of pause left."""

    logical: int
    ttft: tuple[bool, ...] = ()
    tpot: tuple[bool, ...] = ()
    pause: int = 0


def controller(state: State, observation: Observation, params: Params) -> State:
    """Return the state after one scheduling iteration; the size stays within minimum..physical."""
    ttft = (*state.ttft, observation.ttft is not None and observation.ttft > params.ttft)[-params.window :]
    tpot = (*state.tpot, observation.tpot is not None and observation.tpot > params.tpot)[-params.window :]
    seen = replace(state, ttft=ttft, tpot=tpot, pause=max(0, state.pause - 1))
    grow, shrink = sum(ttft) >= params.threshold, sum(tpot) >= params.threshold
    if grow and shrink:
        grow, shrink = params.both == "grow", params.both == "shrink"
    if state.pause or grow == shrink:
        return replace(seen, logical=_bounded(state.logical, params))
    logical = _bounded(_moved(state.logical, params, up=grow), params)
    if logical == state.logical:
        return seen  # at a bound: nothing was changed, so nothing is forgotten and no pause begins
    windows: tuple[tuple[bool, ...], tuple[bool, ...]] = ((), ()) if params.forget else (ttft, tpot)
    return State(logical, *windows, params.cooldown)


def _moved(logical: int, params: Params, *, up: bool) -> int:
    if params.law == "multiply":
        return round(logical * params.alpha) if up else round(logical / params.alpha)
    change = round(params.alpha * params.step)
    return logical + change if up else logical - change


def _bounded(logical: int, params: Params) -> int:
    return min(params.physical, max(params.minimum, logical))


def reversals(sizes: list[int]) -> int:
    """Return how often a change of size went the other way than the change before it."""
    changes = [b > a for a, b in pairwise(sizes) if a != b]
    return sum(a != b for a, b in pairwise(changes))
