"""Two or more measurements side by side: what may be compared, what changed, and how sure that is (design 11).

A side is one or several runs. Rows are matched by case digest and metric, so a case means the same on both; the effect
is a ratio of geometric means of run medians. Across hardware a number may be another thing on each side: such rows are
compared as fractions of their ceilings, or not at all, and say why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, Protocol

from kvbench.analysis.effect import LEAST_RUNS, MARGIN, Effect, Verdict, effect, margin, verdict
from kvbench.contract.result import Better, Result, RunInfo, Scalar

Comparable = Literal["comparable", "normalised", "incomparable"]
Compares = Literal["value", "fraction"]
Key = tuple[str, str]  # case digest, metric

CLEAN = frozenset({"ok", "suspect"})
BALANCE_ROWS = 10  # fewer rows than this lean to one side by chance
BALANCE_LEVEL = 0.01


class Loaded(Protocol):
    """A run with its rows, canaries included."""

    @property
    def info(self) -> RunInfo: ...
    @property
    def results(self) -> tuple[Result, ...]: ...


@dataclass(frozen=True, slots=True)
class Side:
    """One thing compared: ``name`` as the user gave it, and its runs, oldest first. All are of one hardware class."""

    name: str
    runs: tuple[Loaded, ...]

    @property
    def hw_class(self) -> str:
        return self.runs[0].info.hw_class

    @property
    def env(self) -> str:
        return self.runs[0].info.env_digest


@dataclass(frozen=True, slots=True)
class Row:
    """A case and metric on side ``side`` (1 for the second given) against the first.

    ``a`` and ``b``: geometric means of the run medians in ``unit``, None without a value. ``ratio`` is b / a of what
    ``compares`` names, with its 99 % interval. ``differs``: what is not the same on both sides. ``reason`` for people.
    """

    side: int
    suite: str
    bench: str
    axes: Mapping[str, Scalar]
    metric: str
    unit: str
    better: Better
    a: float | None
    b: float | None
    runs_a: int
    runs_b: int
    fraction_a: float | None
    fraction_b: float | None
    ceiling: str | None
    compares: Compares
    ratio: float | None
    low: float | None
    high: float | None
    margin: float
    verdict: Verdict
    comparable: Comparable
    differs: tuple[str, ...]
    reason: str

    @property
    def loss(self) -> float:
        """How much worse b is, as a fraction of time; 0 without a ratio."""
        if self.ratio is None:
            return 0.0
        rising = self.compares == "value" and self.better == "lower"
        return (self.ratio if rising else 1.0 / self.ratio) - 1.0


@dataclass(frozen=True, slots=True)
class Against:
    """Side ``index`` held against the first: its rows, what is only on one side, and what differs about the machines.

    ``hardware`` and ``environment``: field, value on the first side, value here. ``moved``: canaries that moved beyond
    the margin on the same hardware, which taints everything. ``balance``: a warning when nearly all rows lean one way;
    ``profiles``: one when they were not measured at the same profile.
    """

    index: int
    rows: tuple[Row, ...]
    missing: tuple[Result, ...]
    extra: tuple[Result, ...]
    hardware: tuple[tuple[str, str, str], ...]
    environment: tuple[tuple[str, str, str], ...]
    canaries: tuple[Row, ...]
    moved: tuple[str, ...]
    balance: str
    profiles: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """``sides`` as given, and every side but the first against it. ``verdict``: the one word for all of it."""

    sides: tuple[Side, ...]
    against: tuple[Against, ...]
    verdict: Verdict = field(default="NO_DATA")

    @property
    def rows(self) -> Iterator[Row]:
        for other in self.against:
            yield from other.rows

    @property
    def matched(self) -> int:
        """Rows that have a value on both sides."""
        return sum(row.a is not None and row.b is not None for row in self.rows)


def compare(sides: Sequence[Side]) -> Comparison:
    """Hold every side against the first. Raises ValueError for fewer than two sides or a side without a run."""
    if len(sides) < 2 or not all(side.runs for side in sides):
        raise ValueError("a comparison needs two sides with a run each")
    first = sides[0]
    against = tuple(_against(index, first, other) for index, other in enumerate(sides[1:], 1))
    return Comparison(tuple(sides), against, _overall([row for other in against for row in other.rows]))


def _overall(rows: Sequence[Row]) -> Verdict:
    counts = Counter(row.verdict for row in rows)
    order: tuple[Verdict, ...] = ("SLOWER", "TAINTED", "INCONCLUSIVE", "FASTER", "SAME", "INCOMPARABLE")
    if not any(row.a is not None and row.b is not None for row in rows):
        return "INCOMPARABLE" if counts["INCOMPARABLE"] else "NO_DATA"
    return next((word for word in order if counts[word]), "NO_DATA")


def _against(index: int, first: Side, other: Side) -> Against:
    same_hardware = first.hw_class == other.hw_class
    ours, theirs = _collect(first, canaries=False), _collect(other, canaries=False)
    guard_a, guard_b = _collect(first, canaries=True), _collect(other, canaries=True)
    canaries = tuple(_row(index, guard_a[key], guard_b[key], same_hardware) for key in guard_a if key in guard_b)
    moved = tuple(
        f"{row.bench} {row.ratio:.3f}x" for row in canaries
        if same_hardware and row.ratio is not None and row.verdict in ("FASTER", "SLOWER")
    )  # fmt: skip
    rows = [_row(index, ours[key], theirs[key], same_hardware) for key in ours if key in theirs]
    left = {key: found for key, found in ours.items() if key not in theirs}
    right = {key: found for key, found in theirs.items() if key not in ours}
    for key, twin in _twins(left, right):
        rows.append(_other_version(index, left.pop(key), right.pop(twin)))
    if moved:
        rows = [_tainted(row, moved) for row in rows]
    return Against(
        index, tuple(rows), tuple(found[0] for found in left.values()), tuple(found[0] for found in right.values()),
        tuple(differences(_key(first), _key(other))), tuple(differences(_env(first), _env(other))),
        canaries, moved, _balance(rows) if same_hardware else "", _profiles(first, other),
    )  # fmt: skip


def _profiles(*sides: Side) -> str:
    """Return a warning when runs of several profiles meet: a smoke run's median has another spread."""
    named = ["+".join(sorted({run.info.profile for run in side.runs})) for side in sides]
    return "" if len(set(named)) == 1 and "+" not in named[0] else f"profiles differ: {' against '.join(named)}"


def _key(side: Side) -> Mapping[str, Any]:
    found = side.runs[0].info.machine.get("key")
    return found if isinstance(found, dict) else side.runs[0].info.machine


def _env(side: Side) -> Mapping[str, Any]:
    return side.runs[0].info.env


def differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted field, value in a, value in b) where two fact trees differ; an absent field reads ``-``."""
    for name in sorted({*a, *b}):
        left, right = a.get(name, "-"), b.get(name, "-")
        if isinstance(left, dict) and isinstance(right, dict):
            yield from differences(left, right, f"{prefix}{name}.")
        elif left != right:
            yield f"{prefix}{name}", str(left), str(right)


def _collect(side: Side, *, canaries: bool) -> dict[Key, list[Result]]:
    """Return the rows of every case and metric, one a run, in the order of the first run that has it."""
    found: dict[Key, list[Result]] = {}
    for run in side.runs:
        for row in run.results:
            if row.is_canary == canaries:
                found.setdefault((row.digest, row.metric), []).append(row)
    return found


def _twins(left: Mapping[Key, list[Result]], right: Mapping[Key, list[Result]]) -> Iterator[tuple[Key, Key]]:
    """Yield keys of the same case by other versions of its bench: digests differ, so they never match by themselves."""

    def identity(row: Result) -> tuple[object, ...]:
        axes = tuple(sorted((name, type(value).__name__, value) for name, value in row.axes.items()))
        return row.suite, row.bench, axes, row.metric

    known = {identity(found[0]): key for key, found in right.items()}
    for key, found in list(left.items()):
        twin = known.pop(identity(found[0]), None)
        if twin is not None:
            yield key, twin


def _other_version(index: int, a: Sequence[Result], b: Sequence[Result]) -> Row:
    text = f"version {a[0].bench_version} against {b[0].bench_version}"
    return _made(index, a, b, "INCOMPARABLE", "incomparable", ("bench_version",), f"the bench has changed: {text}")


def _row(index: int, a: Sequence[Result], b: Sequence[Result], same_hardware: bool) -> Row:
    differs, incomparable, normalised = _differs(a, b, same_hardware)
    if incomparable:
        return _made(index, a, b, "INCOMPARABLE", "incomparable", differs, incomparable)
    comparable: Comparable = "normalised" if normalised else "comparable"
    clean_a, clean_b = _clean(a), _clean(b)
    reasons = [text for side, rows, kept in (("a", a, clean_a), ("b", b, clean_b)) if (text := _left(side, rows, kept))]
    if not _valued(a) or not _valued(b):
        return _made(index, a, b, "NO_DATA", comparable, differs, "; ".join(reasons) or "no value on one side")
    if not clean_a or not clean_b or (reasons and min(len(clean_a), len(clean_b)) < LEAST_RUNS):
        return _made(index, a, b, "TAINTED", comparable, differs, "; ".join(reasons), found=_effect(a, b, normalised))
    found = _effect(clean_a, clean_b, normalised)
    if found is None:
        return _made(index, a, b, "INCONCLUSIVE", comparable, differs, f"{normalised}; no common ceiling to hold it to")
    least = min(found.runs_a, found.runs_b)
    word = verdict(found, margin_of((*clean_a, *clean_b)))
    if normalised:
        reasons.append(normalised)
    if least < LEAST_RUNS:
        reasons.append(f"{least} run{'s' if least != 1 else ''} a side, {LEAST_RUNS} are needed")
    return _made(index, clean_a, clean_b, word, comparable, differs, "; ".join(reasons), found=found)


def _differs(a: Sequence[Result], b: Sequence[Result], same_hardware: bool) -> tuple[tuple[str, ...], str, str]:
    """Return the fields that differ, why the rows are incomparable, and why they must be normalised ('' where not)."""
    one, two = a[0], b[0]
    differs: list[str] = []
    incomparable = normalised = ""
    for name in ("unit", "better", "basis"):
        if getattr(one, name) != getattr(two, name):
            differs.append(name)
            incomparable = incomparable or f"{name} {getattr(one, name)} against {getattr(two, name)}"
    if one.basis == two.basis and one.basis != "measured":
        incomparable = incomparable or f"{one.basis}, not measured"
    for name in ("rate_of", "transport", "kernel"):
        if getattr(one, name) != getattr(two, name):
            differs.append(name)
    if one.rate_of != two.rate_of:
        incomparable = incomparable or f"the rate counts {one.rate_of} against {two.rate_of} bytes"
    cached = [any("in_llc" in row.flags for row in rows) for rows in (a, b)]
    if cached[0] != cached[1]:
        differs.append("in_llc")
        incomparable = incomparable or "one side is partly served by its caches"
    for name in sorted({*one.resolved, *two.resolved}):
        left, right = one.resolved.get(name), two.resolved.get(name)
        if left != right:
            differs.append(name)
            normalised = normalised or f"{name} is {left} against {right}"
    if not same_hardware:
        differs.append("hw_class")
    return tuple(dict.fromkeys(differs)), incomparable, normalised


def _clean(rows: Sequence[Result]) -> list[Result]:
    return [row for row in rows if row.status in CLEAN and row.value is not None and row.value > 0.0]


def _valued(rows: Sequence[Result]) -> list[Result]:
    """Return the rows with a value that is one; an ``invalid`` value is none."""
    return [row for row in rows if row.status != "invalid" and row.value is not None and row.value > 0.0]


def _left(side: str, rows: Sequence[Result], kept: Sequence[Result]) -> str:
    """Return what was left out of a side and why."""
    out = [row for row in rows if row not in kept]
    if not out:
        return ""
    counts = Counter(row.status if row.status not in CLEAN else "without value" for row in out)
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    why = next((row.reason for row in out if row.status != "tainted" and row.reason), "")
    return f"{side}: {text}" + (f" ({why})" if why else "")


def _effect(a: Sequence[Result], b: Sequence[Result], normalised: str) -> Effect | None:
    a, b = _valued(a), _valued(b)
    if not normalised:
        return effect(
            [row.value for row in a if row.value], [row.value for row in b if row.value], a[0].better
        )  # fmt: skip
    if _ceiling(a) is None or _ceiling(a) != _ceiling(b):
        return None
    # a fraction of a ceiling is better the higher it is, whatever the metric
    shares = [[row.fraction for row in rows if row.fraction] for rows in (a, b)]
    return effect(shares[0], shares[1], "higher") if all(shares) else None


def _ceiling(rows: Sequence[Result]) -> str | None:
    names = {row.ceilings[0].name if row.ceilings and row.fraction else None for row in rows}
    return names.pop() if len(names) == 1 else None


def margin_of(rows: Iterable[Result]) -> float:
    """Return the fraction of time that is nothing for ``rows``: that of the shortest timed window among them."""
    return max((margin(window(row), events=by_events(row)) for row in rows), default=MARGIN)


def window(row: Result) -> float | None:
    """Return the seconds of one timed sample of ``row``, all its passes together; None when the row does not say."""
    reps, spent, share = (row.detail.get(name) for name in ("reps", "sampled_seconds", "window_share"))
    taken = row.n + int(row.detail.get("gated") or 0)
    if not isinstance(spent, int | float) or not isinstance(share, int | float) or not reps or taken < 1:
        return None
    return float(spent * share / taken)


def by_events(row: Result) -> bool:
    """Return whether the device's events timed ``row``."""
    return "device" in row.axes and row.axes["device"] != "cpu"


def _made(
    index: int, a: Sequence[Result], b: Sequence[Result], word: Verdict, comparable: Comparable,
    differs: tuple[str, ...], reason: str, *, found: Effect | None = None,
) -> Row:  # fmt: skip
    one = a[0]
    centres = [_centre([row.value for row in _valued(rows)]) for rows in (a, b)]
    shares = [_centre([row.fraction for row in _valued(rows)]) for rows in (a, b)]
    fraction = comparable == "normalised"
    return Row(
        side=index, suite=one.suite, bench=one.bench, axes=one.axes, metric=one.metric, unit=one.unit,
        better=one.better, a=centres[0], b=centres[1], runs_a=len(a), runs_b=len(b),
        fraction_a=shares[0], fraction_b=shares[1], ceiling=_ceiling(_valued(a)) if _valued(a) else None,
        compares="fraction" if fraction else "value", ratio=found.ratio if found else None,
        low=found.low if found else None, high=found.high if found else None, margin=margin_of((*a, *b)), verdict=word,
        comparable=comparable, differs=differs, reason=reason,
    )  # fmt: skip


def _centre(values: Sequence[float | None]) -> float | None:
    logs = [math.log(value) for value in values if value is not None and value > 0.0]
    return math.exp(fmean(logs)) if logs else None


def _tainted(row: Row, moved: Sequence[str]) -> Row:
    if row.verdict in ("INCOMPARABLE", "NO_DATA"):
        return row
    return replace(row, verdict="TAINTED", reason="; ".join(filter(None, (f"canaries moved: {moved[0]}", row.reason))))


def _balance(rows: Sequence[Row]) -> str:
    """Return a warning when nearly all rows lean one way: code seldom does that, an environment does."""
    losses = [row.loss for row in rows if row.ratio is not None and row.ratio != 1.0]
    if len(losses) < BALANCE_ROWS:
        return ""
    worse = sum(loss > 0.0 for loss in losses)
    most = max(worse, len(losses) - worse)
    # two-sided binomial tail of so many leaning the same way
    tail = sum(math.comb(len(losses), k) for k in range(most, len(losses) + 1)) / 2.0 ** (len(losses) - 1)
    if tail >= BALANCE_LEVEL:
        return ""
    side = "slower" if worse == most else "faster"
    return f"{most} of {len(losses)} rows are {side} on b: one-sided drift speaks for the environment, not the code"
