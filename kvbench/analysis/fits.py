"""Two-parameter laws of a transfer curve, t = alpha + n/beta and t = max(alpha, n/beta), and whether they hold at all.

Least squares on *relative* (log) residuals: over 4 KiB..1 GiB with 1 % noise an unweighted fit is decided by the
largest sizes and gives alpha from -2.3x to 4.7x, Theil-Sen 0.81x to 1.21x, log residuals within 2 % (findings.md).
The laws differ by a factor 2 at n_half; looped copies that overlap submission with the transfer follow the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Law = Literal["additive", "max"]

MIN_SIZES = 4  # two parameters, and two sizes left to contradict them
RESIDUAL_LIMIT = 0.10  # rms relative
PATTERN_FLOOR = 0.02  # a pattern in residuals below this is real but moves no conclusion
PATTERN_Z = -2.33  # runs test, one-sided 1 %
PATTERN_SIZES = 8
FALL_LIMIT = 0.10  # time may not fall by more than this from one size to the next
IDENTIFIED_SE = 0.25  # relative standard error beyond which a parameter is called not identifiable
ALPHA_SHARE = 0.02  # least share of alpha in the time of the smallest size
WIN_FLOOR = 1e-3  # residuals below this are rounding, and rounding elects no law
BETA_SHARE = 0.50  # least share of n/beta in the time of the largest size: the curve must reach n_half
WIN_RATIO = 0.90  # a law wins when its residual is below this share of the other's


@dataclass(frozen=True, slots=True)
class Fit:
    """One law fitted to one curve. Seconds, bytes (or what ``n`` counts) per second, bytes.

    ``alpha``, ``beta`` and their standard errors are None when the curve does not identify them, ``n_half`` =
    alpha * beta then too. ``residual``: root mean square of the log residuals, a relative error. ``fits`` is False with
    a ``reason`` when the law does not describe the curve: then no parameter may be quoted as a property of the path.
    """

    law: Law
    alpha: float | None
    beta: float | None
    alpha_se: float | None
    beta_se: float | None
    n_half: float | None
    residual: float | None
    points: int
    fits: bool
    reason: str

    def predict(self, size: float) -> float | None:
        """Return the seconds the law gives for ``size``, None unless both parameters are identified."""
        if self.alpha is None or self.beta is None:
            return None
        stream = size / self.beta
        return self.alpha + stream if self.law == "additive" else max(self.alpha, stream)


@dataclass(frozen=True, slots=True)
class Fits:
    """Both laws on one curve. ``winner`` is None where neither is clearly better, or a parameter is not identified."""

    additive: Fit
    maximum: Fit
    winner: Law | None

    @property
    def best(self) -> Fit:
        """The winner's fit; without a winner the additive one (the law of a single, not overlapped transfer)."""
        return self.maximum if self.winner == "max" else self.additive

    @property
    def fits(self) -> bool:
        return self.best.fits


def fit(sizes: ArrayLike, seconds: ArrayLike) -> Fits:
    """Fit both laws to ``seconds``, shape (n,), of moving ``sizes`` bytes, shape (n,); a size may occur more than once.

    Raises ValueError for shapes that differ and for values that are not positive and finite. A curve too short to fit
    gives fits without numbers whose ``reason`` says so.
    """
    n, t = _curve(sizes, seconds, "sizes", "seconds")
    distinct = len(np.unique(n))
    if distinct < MIN_SIZES:
        reason = f"{distinct} sizes, a fit of two parameters needs {MIN_SIZES}"
        return Fits(_unfitted("additive", len(n), reason), _unfitted("max", len(n), reason), None)
    additive, maximum = _finish("additive", n, t, *_additive(n, t)), _finish("max", n, t, *_maximum(n, t))
    winner: Law | None = None
    if _beats(additive, maximum):
        winner = "additive"
    elif _beats(maximum, additive):
        winner = "max"
    return Fits(additive, maximum, winner)


def _beats(one: Fit, other: Fit) -> bool:
    """True when ``one`` has both parameters and clearly the smaller residual: without a bend the laws are one law."""
    if one.alpha is None or one.beta is None or one.residual is None or other.residual is None:
        return False
    return one.residual < WIN_RATIO * max(other.residual, WIN_FLOOR)


def _model(law: Law, n: NDArray[np.float64], alpha: float, slope: float) -> NDArray[np.float64]:
    return alpha + slope * n if law == "additive" else np.maximum(alpha, slope * n)


def _additive(n: NDArray[np.float64], t: NDArray[np.float64]) -> tuple[float, float]:
    """Return (alpha, 1/beta) minimising the squared log residuals (Levenberg-Marquardt in their logarithms)."""
    # Relative but not logarithmic residuals make a linear problem: a start that is off by the noise only.
    start, *_ = np.linalg.lstsq(np.column_stack((1.0 / t, n / t)), np.ones_like(t), rcond=None)
    floor = np.array((1e-6 * float(t.min()), 1e-6 * float((t / n).min())))
    p = np.log(np.maximum(start, floor))
    damping, best = 1e-3, math.inf
    for _ in range(200):
        parts = np.exp(p)
        model = parts[0] + parts[1] * n
        r = np.log(t / model)
        best = float(r @ r)
        jac = np.column_stack((parts[0] / model, parts[1] * n / model))
        normal, gradient = jac.T @ jac, jac.T @ r
        while damping < 1e12:
            # Damped by the identity, not by the diagonal: a parameter the curve does not see has a zero there.
            step = np.linalg.solve(normal + damping * np.eye(2), gradient)
            trial = p + np.clip(step, -2.0, 2.0)
            off = np.log(t / (math.exp(trial[0]) + math.exp(trial[1]) * n))
            if float(off @ off) <= best:
                break
            damping *= 10.0
        else:
            break
        moved = float(np.max(np.abs(trial - p)))
        p, damping = trial, max(damping * 0.1, 1e-12)
        if moved < 1e-12 or bool(np.any(p < -300.0)):
            break
    return math.exp(p[0]), math.exp(p[1])


def _maximum(n: NDArray[np.float64], t: NDArray[np.float64]) -> tuple[float, float]:
    """Return (alpha, 1/beta) of the max law: for each split of the sizes the best parameters are means of logs."""
    log_t, log_rate = np.log(t), np.log(t / n)
    best, found = math.inf, (0.0, 0.0)
    for k in np.flatnonzero(np.diff(n, prepend=0.0, append=math.inf) > 0.0):
        # No size on one side: that parameter is as small as makes it vanish, and is later reported as not identified.
        slope = math.exp(float(log_rate[k:].mean())) if k < len(n) else 1e-6 * float((t / n).min())
        alpha = math.exp(float(log_t[:k].mean())) if k > 0 else 1e-6 * float(t.min())
        off = log_t - np.log(np.maximum(alpha, slope * n))
        if float(off @ off) < best:
            best, found = float(off @ off), (alpha, slope)
    return found


def _finish(law: Law, n: NDArray[np.float64], t: NDArray[np.float64], alpha: float, slope: float) -> Fit:
    model = _model(law, n, alpha, slope)
    r = np.log(t / model)
    if law == "additive":
        jac = np.column_stack((alpha / model, slope * n / model))
    else:
        flat = (alpha >= slope * n).astype(np.float64)
        jac = np.column_stack((flat, 1.0 - flat))
    alpha_se, beta_se = _errors(jac, r)
    alpha_doubt = _doubt(law, n, jac[:, 0], alpha_se, float(jac[0, 0]) >= ALPHA_SHARE, "smallest size already streams")
    beta_doubt = _doubt(law, n, jac[:, 1], beta_se, float(jac[-1, 1]) >= BETA_SHARE, "largest size is still latency")
    a, b = None if alpha_doubt else alpha, None if beta_doubt else 1.0 / slope
    doubts = (("alpha", alpha_doubt), ("beta", beta_doubt))
    reasons = [f"{name} is not identifiable: {doubt}" for name, doubt in doubts if doubt]
    residual = math.sqrt(float(r @ r) / len(r))
    reasons += _misfits(n, t, model, residual)
    return Fit(
        law=law,
        alpha=a,
        beta=b,
        alpha_se=None if a is None or alpha_se is None else alpha_se * a,
        beta_se=None if b is None or beta_se is None else beta_se * b,
        n_half=None if a is None or b is None else a * b,
        residual=residual,
        points=len(n),
        fits=not reasons,
        reason="; ".join(reasons),
    )


def _errors(jac: NDArray[np.float64], r: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return the relative standard errors of alpha and beta; None for one the curve does not see."""
    variance = float(r @ r) / (len(r) - 2)
    (aa, ab), (_, bb) = (jac.T @ jac).tolist()

    def error(own: float, other: float) -> float | None:
        free = own - ab * ab / other if other > 0.0 else own  # what is left once the other parameter has been fitted
        return math.sqrt(variance / free) if free > 1e-12 * own and own > 1e-12 else None

    return error(aa, bb), error(bb, aa)


def _doubt(
    law: Law, n: NDArray[np.float64], share: NDArray[np.float64], error: float | None, reached: bool, end: str
) -> str:
    """Return why the curve does not determine the parameter with ``share`` of the time per point; empty if it does."""
    if error is None or not reached:
        return f"the {end}"
    if error > IDENTIFIED_SE:
        return f"standard error {error:.0%}, limit {IDENTIFIED_SE:.0%}"
    # A single size in one regime of the max law fits that size exactly, whatever the curve is.
    return "one size decides it" if law == "max" and len(np.unique(n[share > 0.5])) < 2 else ""


def _misfits(n: NDArray[np.float64], t: NDArray[np.float64], model: NDArray[np.float64], residual: float) -> list[str]:
    """Return why the law does not describe the curve; empty when it does."""
    sizes = np.unique(n)
    times = np.array([np.median(t[n == size]) for size in sizes])
    misses = np.array([np.median(np.log(t[n == size] / model[n == size])) for size in sizes])
    reasons = []
    falls = np.flatnonzero(times[1:] < (1.0 - FALL_LIMIT) * times[:-1])
    if len(falls):
        i = int(falls[0])
        reasons.append(
            f"time falls from {times[i]:.3g} s at {sizes[i]:.0f} to {times[i + 1]:.3g} s at {sizes[i + 1]:.0f}"
        )
    if residual > RESIDUAL_LIMIT:
        reasons.append(f"residual {residual:.0%}, limit {RESIDUAL_LIMIT:.0%}")
    if residual > PATTERN_FLOOR and len(sizes) >= PATTERN_SIZES and _runs_z(misses) < PATTERN_Z:
        reasons.append("the residuals follow a pattern: the curve has another shape")
    if reasons:
        # Only steps up: below n_half the cost per byte falls by itself, as alpha / n.
        reasons += [
            f"the cost per byte steps up {s.ratio:.2g}x between {s.below:.0f} and {s.above:.0f}"
            for s in find_steps(n, t / n)
            if s.ratio > 1.0
        ]
    return reasons


def _runs_z(values: NDArray[np.float64]) -> float:
    """Return the z-value of the Wald-Wolfowitz runs test on signs; negative when equal signs cluster."""
    signs = values > 0.0
    plus = int(np.count_nonzero(signs))
    minus = len(signs) - plus
    if not plus or not minus:
        return 0.0
    runs = 1 + int(np.count_nonzero(signs[1:] != signs[:-1]))
    both = plus + minus
    mean = 2.0 * plus * minus / both + 1.0
    variance = (mean - 1.0) * (mean - 2.0) / (both - 1.0)
    return (runs - mean) / math.sqrt(variance) if variance > 0.0 else 0.0


def _unfitted(law: Law, points: int, reason: str) -> Fit:
    return Fit(law, None, None, None, None, None, None, points, False, reason)


# Steps and onsets of a curve: what a cache edge, a protocol switch or a saturating queue leaves behind.

STEP_RATIO = 1.25  # least ratio of two plateaus
STEP_SHARP = 0.55  # share of a step that lies between two neighbouring points; a ramp has at most half there
STEP_NOISE = 0.005  # noise floor in log y: curves given with fewer digits would look noise-free
ONSET_RATIO = 1.10
KNEE_RATIO = 2.0  # loaded latency: twice the idle one is the usual knee


@dataclass(frozen=True, slots=True)
class Step:
    """A jump between two plateaus: last x ``below``, first x ``above``, the plateaus' medians and their ratio."""

    below: float
    above: float
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """after / before: above 1 for a rise."""
        return self.after / self.before


@dataclass(frozen=True, slots=True)
class Onset:
    """Where a ramp reaches ``ratio`` x ``base``: ``x`` is interpolated in logs between ``below`` and ``above``."""

    x: float
    below: float
    above: float
    base: float
    ratio: float


def find_steps(x: ArrayLike, y: ArrayLike, min_ratio: float = STEP_RATIO) -> tuple[Step, ...]:
    """Return the steps of ``y`` over ``x``, both shape (n,), positive; a steady ramp has none.

    Least-squares segmentation of log y into plateaus of at least two points with a Potts penalty of 3 sigma^2 log n,
    sigma from the median absolute difference of neighbours; kept are changes by ``min_ratio`` or more of which most
    lies between two neighbouring points.
    """
    px, py = _points(*_curve(x, y, "x", "y"))
    ly = np.log(py)
    if len(ly) < 4:
        return ()
    sigma = max(STEP_NOISE, 1.4826 * float(np.median(np.abs(np.diff(ly)))) / math.sqrt(2.0))
    edges = _segments(ly, 3.0 * sigma * sigma * math.log(len(ly)))
    while len(edges) > 2:  # the weakest change first: its plateau may join either neighbour and change the others
        levels = [float(np.median(ly[a:b])) for a, b in pairwise(edges)]
        jumps = [abs(b - a) for a, b in pairwise(levels)]
        weakest = int(np.argmin(jumps))
        if jumps[weakest] >= math.log(min_ratio):
            break
        del edges[weakest + 1]
    levels = [float(np.median(ly[a:b])) for a, b in pairwise(edges)]
    return tuple(
        Step(float(px[cut - 1]), float(px[cut]), math.exp(low), math.exp(high))
        for cut, (low, high) in zip(edges[1:-1], pairwise(levels), strict=True)
        if (ly[cut] - ly[cut - 1]) / (high - low) >= STEP_SHARP
    )


def onset(
    x: ArrayLike, y: ArrayLike, ratio: float = ONSET_RATIO, *, base: float | None = None, confirm: int = 2
) -> Onset | None:
    """Return where ``y`` reaches ``ratio`` x ``base`` for ``confirm`` points in a row; None if it never does.

    ``base`` defaults to the median of the first three points. A ratio below 1 finds the onset of a fall. With
    ``ratio`` :data:`KNEE_RATIO` on loaded latency over load this is the knee. Raises ValueError for a ratio of 1 or not
    positive and for values that are not positive and finite.
    """
    if not ratio > 0.0 or ratio == 1.0:
        raise ValueError(f"ratio {ratio}, expected a positive number other than 1")
    px, py = _points(*_curve(x, y, "x", "y"))
    level = float(np.median(py[:3])) if base is None else base
    beyond = py >= ratio * level if ratio > 1.0 else py <= ratio * level
    for i in range(len(px) - confirm + 1):
        if beyond[i : i + confirm].all():
            if i == 0:
                return Onset(float(px[0]), float(px[0]), float(px[0]), level, ratio)
            (x0, x1), (y0, y1) = np.log(px[i - 1 : i + 1]), np.log(py[i - 1 : i + 1])
            where = x0 + (x1 - x0) * (math.log(ratio * level) - y0) / (y1 - y0)
            return Onset(math.exp(where), float(px[i - 1]), float(px[i]), level, ratio)
    return None


def _segments(ly: NDArray[np.float64], penalty: float) -> list[int]:
    """Return the edges [0, ..., n] of the best segmentation into constants of at least two points."""
    n = len(ly)
    sums, squares = np.concatenate(([0.0], np.cumsum(ly))), np.concatenate(([0.0], np.cumsum(ly * ly)))
    best, previous = [0.0] + [math.inf] * n, [0] * (n + 1)
    for end in range(2, n + 1):
        for start in range(end - 1):
            total = float(sums[end] - sums[start])
            cost = float(squares[end] - squares[start]) - total * total / (end - start)
            if best[start] + cost + penalty < best[end]:
                best[end], previous[end] = best[start] + cost + penalty, start
    edges = [n]
    while edges[-1]:
        edges.append(previous[edges[-1]])
    return edges[::-1]


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the distinct x with the median y of each."""
    where = np.unique(x)
    return where, np.array([np.median(y[x == w]) for w in where])


def _curve(x: ArrayLike, y: ArrayLike, x_name: str, y_name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both as float64 sorted by x. Raises ValueError for what is no curve."""
    px, py = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if px.ndim != 1 or px.shape != py.shape:
        raise ValueError(f"{x_name} of shape {px.shape} and {y_name} of shape {py.shape}, expected (n,) twice")
    for name, values in ((x_name, px), (y_name, py)):
        if not bool(np.all(np.isfinite(values) & (values > 0.0))):
            raise ValueError(f"{name} must be positive and finite")
    order = np.argsort(px, kind="stable")
    return px[order], py[order]
