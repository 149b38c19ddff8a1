"""What page size costs: one law over a sweep of fragment sizes, the page that reaches 90 %, and steps by name.

A transport that spends c seconds a fragment and moves B bytes a second takes c + S/B for a fragment of S bytes, or
max(c, S/B) where submitting the next overlaps moving this one (Strata 3.1; the form as oracle, c and B refitted here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.analysis.fits import Fit, Law, Step, find_steps, fit

RESIDUAL_LIMIT = 0.15  # rms relative, of one law over all pages
STEP_RATIO = 1.4  # least jump between two plateaus of the measured rate over the law's
REACHED = 0.9
BREAK = 1.25  # beyond what either law allows from one size to the next
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class PageLaw:
    """The better law of a sweep: ``c`` seconds a fragment, ``bandwidth`` bytes a second, relative ``residual`` (rms).

    ``n_half`` = c x B bytes; ``fragment_90`` bytes and ``page_90`` tokens at which the law reaches 90 % of B. All are
    None where the sweep does not determine them, with ``reason``. ``steps`` are jumps in bytes between two fragment
    sizes that no smooth law has: they explain why the law does not hold. ``holds``: residual within 15 %.
    """

    law: Law
    winner: Law | None
    c: float | None
    c_se: float | None
    bandwidth: float | None
    bandwidth_se: float | None
    residual: float | None
    n_half: float | None
    fragment_90: float | None
    page_90: int | None
    measured_page_90: int | None
    steps: tuple[Step, ...]
    points: int
    holds: bool
    reason: str

    @property
    def step_text(self) -> str:
        """The steps in words, empty without one."""
        return "; ".join(
            f"rate x{step.ratio:.2g} between {step.below:.0f} and {step.above:.0f} B" for step in self.steps
        )


def page_law(pages: Sequence[int], fragments: Sequence[float], seconds: Sequence[float]) -> PageLaw:
    """Fit ``seconds`` a fragment over ``fragments`` bytes of ``pages`` tokens, all of shape (n,).

    Raises ValueError for shapes that differ and values that are not positive and finite.
    """
    if len(pages) != len(fragments):
        raise ValueError(f"{len(pages)} pages and {len(fragments)} fragment sizes")
    found = fit(fragments, seconds)
    best: Fit = found.best
    sizes, times = np.asarray(fragments, float), np.asarray(seconds, float)
    rates = sizes / times
    ninety = None
    if best.n_half is not None:
        # additive: S / (S + n_half) = 0.9; max: S / n_half = 0.9
        ninety = best.n_half * (REACHED / (1.0 - REACHED) if best.law == "additive" else REACHED)
    token = float(np.median(sizes / np.asarray(pages, float)))
    steps = _steps(best, sizes, times)
    small = best.residual is not None and best.residual <= RESIDUAL_LIMIT
    reason = best.reason
    if not small and best.residual is not None:
        reason = reason or f"residual {best.residual:.0%} and {'a step' if steps else 'no step'}"
    return PageLaw(
        law=best.law, winner=found.winner, c=best.alpha, c_se=best.alpha_se, bandwidth=best.beta,
        bandwidth_se=best.beta_se, residual=best.residual, n_half=best.n_half, fragment_90=ninety,
        page_90=None if ninety is None else max(1, math.ceil(ninety / token - 1e-9)),
        measured_page_90=_measured(pages, rates, best.beta), steps=steps, points=best.points,
        holds=small, reason=reason,
    )  # fmt: skip


def _measured(pages: Sequence[int], rates: Floats, top: float | None) -> int | None:
    """Return the smallest page from which on every rate is 90 % of ``top``, None where the largest is not."""
    if top is None:
        return None
    found = None
    for page, rate in sorted(zip(pages, rates.tolist(), strict=True), reverse=True):
        if rate < REACHED * top:
            break
        found = page
    return found


def _steps(best: Fit, sizes: Floats, times: Floats) -> tuple[Step, ...]:
    """Return the jumps no law of the two has, and, where there is a law, those of the measured rate over its own."""
    found = {(step.below, step.above): step for step in breaks(sizes, times)}
    predicted = [best.predict(float(size)) for size in sizes]
    if None not in predicted:
        ratio = np.array(predicted, float) / times
        for step in find_steps(sizes, ratio, STEP_RATIO):
            found.setdefault((step.below, step.above), step)
    return tuple(found[key] for key in sorted(found))


def breaks(sizes: Floats, times: Floats) -> tuple[Step, ...]:
    """Return where ``times`` (n,) over rising ``sizes`` (n,) do what neither law can, as steps of the rate.

    In both laws a larger fragment never takes less time, nor more than in proportion. A step is a fall by a quarter
    below both times before it, or a rise by a quarter beyond proportion that the next size confirms.
    """
    order = np.argsort(sizes, kind="stable")
    s, t = sizes[order], times[order]
    rate, found = s / t, []
    for k in range(len(s) - 1):
        fell = min(t[max(0, k - 1)], t[k]) >= BREAK * t[k + 1]
        slower = rate[k] >= BREAK * rate[k + 1] and (k + 2 == len(s) or rate[k] >= BREAK * rate[k + 2])
        if fell or slower:
            found.append(Step(float(s[k]), float(s[k + 1]), float(rate[k]), float(rate[k + 1])))
    return tuple(found)
