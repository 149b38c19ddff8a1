"""How much of a layer-wise copy hides under compute: the recurrence, and the prompt length from which all of it does.

eLLM (DAC 2026, section 2.2.2) argues that a copy of N tokens costs O(N) and their attention O(N^2). With compute
a N + b N^2 and copy c N a layer, compute is the longer one from N = (c - a) / b on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import UsageError


@dataclass(frozen=True, slots=True)
class Hiding:
    """Seconds: ``compute`` alone, ``copy`` alone, ``both`` layer by layer beside each other."""

    compute: float
    copy: float
    both: float

    @property
    def hidden(self) -> float:
        """Share of the copy that made nothing longer, 0..1."""
        return min(1.0, max(0.0, 1.0 - (self.both - self.compute) / self.copy))


def _checked(compute: Sequence[float], copies: Sequence[float]) -> None:
    if len(compute) != len(copies) or not compute or min(*compute, *copies) < 0.0 or sum(copies) <= 0.0:
        raise UsageError(
            "one time a layer for compute and copy", where="hiding", got=(list(compute), list(copies)),
            expected="two lists of one length, not negative, some copy above 0",
        )  # fmt: skip


def offload_time(compute: Sequence[float], copies: Sequence[float]) -> Hiding:
    """Return what the recurrence gives for an offload: layer l is copied once it is computed and l - 1 is copied.

    ``compute`` and ``copies`` are seconds a layer. The last layer's copy has nothing to hide under. Neither side slows
    the other here: what sharing a memory bus costs is for a measurement. Raises UsageError for lists that do not match.
    """
    _checked(compute, copies)
    computed = copied = 0.0
    for work, move in zip(compute, copies, strict=True):
        computed += work
        copied = max(copied, computed) + move
    return Hiding(sum(compute), sum(copies), max(computed, copied))


def fetch_time(compute: Sequence[float], copies: Sequence[float]) -> Hiding:
    """Return what it gives for a fetch: all copies are queued at the start, layer l is computed once it is there.

    The first layer's copy has nothing to hide under. Otherwise like :func:`offload_time`.
    """
    _checked(compute, copies)
    computed = copied = 0.0
    for work, move in zip(compute, copies, strict=True):
        copied += move
        computed = max(computed, copied) + work
    return Hiding(sum(compute), sum(copies), computed)


def fit_compute(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (a, b), neither negative, of seconds = a N + b N^2, least squares of relative residuals.

    Raises UsageError below two different N, or for values that are not positive.
    """
    if len(tokens) != len(seconds) or len(set(tokens)) < 2 or min(*tokens, *seconds) <= 0:
        raise UsageError("a fit of two parameters needs two prompt lengths", where="hiding", got=list(tokens))
    # t / N = a + b N with weights N / t: a plain linear problem in (a, b)
    rows = [(n / t, n * n / t) for n, t in zip(tokens, seconds, strict=True)]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ya, yb = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    a, b = (ya * bb - yb * ab) / determinant, (yb * aa - ya * ab) / determinant
    if a < 0.0:
        return 0.0, yb / bb
    return (ya / aa, 0.0) if b < 0.0 else (a, b)


def crossover(a: float, b: float, c: float) -> float | None:
    """Return the N from which a N + b N^2 of compute is no shorter than c N of copy: 0: always, None: never."""
    if c <= a:
        return 0.0
    return (c - a) / b if b > 0.0 else None
