"""The runs of one side as one row a case: what a report tabulates and draws when a case was measured several times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvbench.analysis.compare import Loaded
from kvbench.contract.result import Bytes, Ceiling, Result
from kvbench.report.table import SHOWABLE

# What may stand for the case, best first; rows of a later kind count only where there is none of an earlier one.
_KINDS = (("ok", "suspect"), ("tainted",), ("invalid",))


@dataclass(frozen=True, slots=True)
class Pooled:
    """A case and metric on one side.

    ``row.value`` is the geometric mean of the run medians (of one run: its median). ``row.low`` and ``row.high`` are
    the 95 % interval within the run when one run counts, else the lowest and highest run median. ``runs`` count in the
    value, ``of`` have a row. ``statuses``: how many rows have which status. ``primary``: first row of its case.
    """

    side: int
    row: Result
    runs: int
    of: int
    statuses: Mapping[str, int]
    primary: bool

    @property
    def drawable(self) -> bool:
        """Whether a chart may place the value: there is one, it is not invalid, and it is no number only a file has."""
        value = self.row.value
        return value is not None and self.row.status != "invalid" and (value == 0 or showable(value))

    @property
    def marked(self) -> bool:
        """Whether the value must be told apart from a clean one."""
        return self.row.status not in ("ok", "suspect")


def showable(value: float) -> bool:
    """Return whether ``value`` can be scaled and squared; no machine gives others, only a file can."""
    return 1 / SHOWABLE < abs(value) < SHOWABLE


def pool(side: int, runs: Sequence[Loaded], *, canaries: bool = False) -> list[Pooled]:
    """Return the rows of ``runs`` (one side), one a case and metric, in the order they were first measured."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    first: dict[tuple[str, str], str] = {}
    seen: dict[tuple[str, str], int] = {}
    without: list[Result] = []
    for run in runs:
        for row in run.results:
            if row.is_canary != canaries:
                continue
            first.setdefault((run.info.uuid, row.digest), row.metric)
            seen.setdefault((row.digest, row.metric), len(seen))
            if row.value is None:
                without.append(row)
                continue
            # A word that stands for another number, or another basis or count of bytes, is another thing.
            words = tuple(sorted((name, repr(value)) for name, value in row.resolved.items()))
            key = (row.digest, row.metric, row.unit, row.better, row.basis, row.rate_of, words)
            groups.setdefault(key, []).append(row)
    for row in without:  # it often knows neither what words stand for nor what a rate counts
        same = next((key for key in groups if key[:2] == (row.digest, row.metric)), (row.digest, row.metric))
        groups.setdefault(same, []).append(row)
    primary = {(digest, metric) for (_, digest), metric in first.items()}
    ordered = sorted(groups.values(), key=lambda rows: seen[rows[0].digest, rows[0].metric])
    return [_pooled(side, rows, (rows[0].digest, rows[0].metric) in primary) for rows in ordered]


def reading_order(pooled: Pooled) -> tuple[tuple[bool, int | float, str], ...]:
    """Return the key that sorts rows by their axes, in the order the bench declares them: numbers, then words."""
    return tuple(
        (isinstance(value, str), value if isinstance(value, int | float) else 0, str(value))
        for value in pooled.row.axes.values()
    )


def _pooled(side: int, rows: Sequence[Result], primary: bool) -> Pooled:
    statuses: Counter[str] = Counter(row.status for row in rows)
    kept: Sequence[Result] = ()
    for kind in _KINDS:
        kept = [row for row in rows if row.status in kind and row.value is not None]
        if kept:
            break
    left = _left_out(rows, kept)
    if not kept:
        failed = next((row for row in rows if row.status == "failed"), rows[0])
        return Pooled(side, _said(failed, failed.reason), 0, len(rows), statuses, primary)
    one = next((row for row in kept if row.status != "ok"), kept[0])
    reason = "; ".join(filter(None, (one.reason, left)))
    if len(kept) == 1:
        return Pooled(side, _said(one, reason), 1, len(rows), statuses, primary)
    values = [row.value for row in kept if row.value is not None]
    ceilings, fraction = _ceilings(kept)
    made = kept[0].with_(
        value=centre(values), low=min(values), high=max(values), n=sum(row.n for row in kept),
        kept=sum(row.kept for row in kept), status=one.status, reason=reason, ceilings=ceilings, fraction=fraction,
        seconds=_mean([row.seconds for row in kept]), flags=tuple(dict.fromkeys(f for row in kept for f in row.flags)),
        kernel=_same([row.kernel for row in kept]), transport=_same([row.transport for row in kept]),
        bytes=kept[0].bytes if len({row.bytes for row in kept}) == 1 else Bytes(), detail={}, samples=(), stop=None,
    )  # fmt: skip
    return Pooled(side, made, len(kept), len(rows), statuses, primary)


def _said(row: Result, reason: str) -> Result:
    return row.with_(reason=reason, samples=())


def centre(values: Sequence[float]) -> float:
    """Return the geometric mean of run medians; their median where one is not positive."""
    if all(showable(value) and value > 0.0 for value in values):
        mean = math.exp(fmean(math.log(value) for value in values))
        return min(max(mean, min(values)), max(values))  # rounding must not put it outside what it is a mean of
    return median(values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return centre(known) if len(known) == len(values) else None


def _same(words: Sequence[str | None]) -> str | None:
    return " / ".join(sorted({word for word in words if word is not None})) or None


def _ceilings(rows: Sequence[Result]) -> tuple[tuple[Ceiling, ...], float | None]:
    """Return the ceilings all runs have, each a mean, and the mean fraction; none where the first one differs."""
    names = [[(c.name, c.kind, c.source) for c in row.ceilings] for row in rows]
    if any(other != names[0] for other in names[1:]):
        return (), None
    made = tuple(
        Ceiling(name, _mean([row.ceilings[i].value for row in rows]), kind, source)
        for i, (name, kind, source) in enumerate(names[0])
    )
    return made, _mean([row.fraction for row in rows])


def _left_out(rows: Sequence[Result], kept: Sequence[Result]) -> str:
    counted = {id(row) for row in kept}
    out = [row for row in rows if id(row) not in counted]
    if not out or not kept:
        return ""
    counts = Counter(row.status for row in out)
    return "left out: " + ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
