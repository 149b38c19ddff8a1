"""Shape parameters of curves on two sides: alpha, beta and n-half travel across machines, one size's GB/s does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.analysis.compare import Loaded, Side
from kvbench.analysis.curves import Curve, curves_of
from kvbench.analysis.effect import Effect, effect

if TYPE_CHECKING:
    from kvbench.analysis.fits import Fit

Parameter = Literal["alpha", "beta", "n_half"]
UNITS: dict[Parameter, str] = {"alpha": "s", "beta": "B/s", "n_half": "B"}
MIN_FIT_POINTS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """One parameter of one curve on both sides; a side is None where the law does not fit or identify it in all runs.

    ``reason`` says why a side has none. ``curve`` is the first side's.
    """

    curve: Curve
    parameter: Parameter
    unit: str
    a: float | None
    b: float | None
    effect: Effect | None
    reason: str


def shapes(first: Side, other: Side) -> list[Shape]:
    """Return the parameters of every bandwidth curve both sides have, in the order of the first."""
    ours, theirs = _fits(first.runs), _fits(other.runs)
    found: list[Shape] = []
    for key, (curve, fits_a) in ours.items():
        if key not in theirs:
            continue
        fits_b = theirs[key][1]
        for name, unit in UNITS.items():
            a, b = _values(fits_a, name), _values(fits_b, name)
            both = effect(a, b, "higher" if name == "beta" else "lower") if a and b else None
            reason = "; ".join(
                f"{side}: {_why(fits)}" for side, values, fits in (("a", a, fits_a), ("b", b, fits_b)) if not values
            )
            found.append(Shape(curve, name, unit, _mean(a), _mean(b), both, reason))
    return found


def _fits(runs: Sequence[Loaded]) -> dict[tuple[object, ...], tuple[Curve, list[Fit]]]:
    from kvbench.analysis.fits import fit

    found: dict[tuple[object, ...], tuple[Curve, list[Fit]]] = {}
    for run in runs:
        for curve in curves_of(row for row in run.results if not row.is_canary):
            points = curve.points()
            if curve.rows[0].unit != "B/s" or len({size for size, _ in points}) < MIN_FIT_POINTS:
                continue
            best = fit([n for n, _ in points], [t for _, t in points]).best
            found.setdefault(curve.key, (curve, []))[1].append(best)
    return found


def _values(fits: Sequence[Fit], name: Parameter) -> list[float]:
    """Return the parameter of every run, or nothing when one run does not give it: a mean of the rest is a choice."""
    values: list[float] = []
    for each in fits:
        value = getattr(each, name) if each.fits else None
        if value is None or value <= 0.0:
            return []
        values.append(value)
    return values


def _mean(values: Sequence[float]) -> float | None:
    return effect(values, values, "higher").a if values else None


def _why(fits: Sequence[Fit]) -> str:
    bad = [each for each in fits if not each.fits]
    return bad[0].reason if bad else "not identified by these sizes"
