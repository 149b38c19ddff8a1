"""The rows a claim is judged by: which cases its form names, which stored rows of them count, and what measures them.

Rows that are not ok, of resumed runs, canaries, and rows that say themselves that they are something else do not count.
All rows of one judgement are of one environment: numbers before and after a new driver are not one machine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from kvbench.analysis.claim_rules import Point, Points
from kvbench.analysis.claims import Cases, Form
from kvbench.analysis.compare import Loaded
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import Suites
from kvbench.contract.result import Basis, Result, RunInfo
from kvbench.errors import UsageError
from kvbench.units import counted

Key = tuple[str, str]  # case digest, metric
# Such a row is not what its case says: partly answered by a cache, beyond its ceiling, counted by nobody.
BAD_FLAGS = frozenset(
    {
        "in_llc", "above_ceiling", "copy_not_covering", "not_in_flight", "link_unmeasured", "file_in_memory",
        "cache_not_dropped", "cache_unknown", "link_below_unique",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Want:
    """One row a form needs: the case by its digest, and the metric."""

    name: str
    bench: Bench
    axes: Mapping[str, Value]
    digest: str
    metric: str


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows behind a finding: ``points``, the runs they are of (newest first) and the weakest basis among them."""

    points: tuple[Point, ...]
    runs: tuple[RunInfo, ...]
    basis: Basis


def wants(form: Form, suites: Suites) -> tuple[Want, ...]:
    """Return the rows ``form`` needs. Raises UsageError when a case does not exist in ``suites``."""
    found: list[Want] = []
    for cases in form.cases:
        suite, _, name = cases.bench.partition("/")
        bench = suites.find(suite, name)
        if cases.metric not in (bench.metric, *bench.extra_metrics):
            raise UsageError("no such metric", where=cases.bench, got=cases.metric)
        for axes in combinations(cases, bench):
            found.append(Want(cases.name, bench, axes, bench.case(axes).digest, cases.metric))
    return tuple(found)


def combinations(cases: Cases, bench: Bench) -> Iterator[dict[str, Value]]:
    """Yield the axis values of ``cases``, those not named at their quick value. Raises UsageError."""
    unknown = set(cases.axes) - set(bench.axes)
    if unknown:
        raise UsageError("no such axis", where=cases.bench, got=sorted(unknown)[0], expected=" ".join(bench.axes))
    lists: list[tuple[Value, ...]] = []
    for name, axis in bench.axes.items():
        values = tuple(axis.parse(text, f"{cases.bench} {name}") for text in cases.axes.get(name, ()))
        values = values or axis.values("quick")
        if name not in cases.axes and len(values) != 1:
            raise UsageError("this axis has several quick values", where=cases.bench, got=name, expected="a value")
        lists.append(values)
    for chosen in product(*lists):
        axes = dict(zip(bench.axes, chosen, strict=True))
        if bench.where is not None and not bench.where(axes):
            raise UsageError("no such case", where=cases.bench, got=str(axes))
        yield axes


def commands(form: Form, suites: Suites) -> tuple[str, ...]:
    """Return the shell commands that measure ``form``, one a bench: its axes together, those at quick left out."""
    if form.planned:
        return (form.planned,)
    found: dict[str, dict[str, dict[Value, None]]] = {}
    for want in wants(form, suites):
        named = found.setdefault(f"{want.bench.suite}/{want.bench.name}", {name: {} for name in want.bench.axes})
        for name, chosen in want.axes.items():
            named[name][chosen] = None
    lines = []
    for bench, axes in found.items():
        words = [f"kvbench run {bench}"]
        declared = suites.find(*bench.split("/")).axes
        for name, values in axes.items():
            if set(values) != set(declared[name].values("quick")):
                words.append(f"-a {name}={','.join(declared[name].format(each) for each in values)}")
        lines.append(" ".join(words))
    return tuple(lines)


def doubt(row: Result, run: RunInfo) -> str:
    """Return why ``row`` does not count; empty where it does."""
    if row.is_canary:
        return "a canary"
    if run.resumed:
        return "its run was resumed"
    if row.status != "ok":
        return row.status + (f": {row.reason}" if row.reason else "")
    if row.value is None or not math.isfinite(row.value):
        return "no value"
    bad = sorted(BAD_FLAGS.intersection(row.flags))
    return f"flagged {', '.join(bad)}" if bad else ""


def gather(wanted: Sequence[Want], runs: Sequence[Loaded]) -> tuple[Seen | None, Points, str]:
    """Return the rows of ``wanted``, their points by name, and what is missing where a row is.

    All rows are of one environment, the newest that has any; of its groups the newest alone where it has all, otherwise
    for each row the newest group that has it.
    """
    newest = sorted(runs, key=lambda run: (run.info.started_at, run.info.uuid), reverse=True)
    keys = {(want.digest, want.metric) for want in wanted}
    clean: dict[Key, list[tuple[Result, RunInfo]]] = {key: [] for key in keys}
    refused: dict[Key, str] = {}
    for run in newest:
        primary: dict[str, Result] = {}
        for row in run.results:
            key = (row.digest, row.metric)
            first = primary.setdefault(row.digest, row)
            if key in keys:
                why = doubt(row, run.info)
                if not why and first.status in ("invalid", "failed"):
                    why = f"its case is {first.status}"
                if why:
                    refused.setdefault(key, why)
                else:
                    clean[key].append((row, run.info))
    there = [info for rows in clean.values() for _, info in rows]
    there.sort(key=lambda info: (info.started_at, info.uuid), reverse=True)
    for environment in dict.fromkeys(info.env_digest for info in there):
        here = {key: [each for each in rows if each[1].env_digest == environment] for key, rows in clean.items()}
        if not all(here.values()):
            continue
        group = next(info.group for info in there if info.env_digest == environment)
        alone = {key: [each for each in rows if each[1].group == group] for key, rows in here.items()}
        chosen = alone if all(alone.values()) else {key: _newest_group(rows) for key, rows in here.items()}
        return _seen(wanted, chosen)
    lacking = [want for want in wanted if not clean[want.digest, want.metric]]
    if not lacking:
        return None, Points({}), "its rows are of different environments"
    reasons = [refused[key] for want in lacking if (key := (want.digest, want.metric)) in refused]
    texts = []
    if len(lacking) > len(reasons):
        texts.append(f"{len(lacking) - len(reasons)} of {counted(len(wanted), 'row')} it needs not there")
    if reasons:
        texts.append(f"{counted(len(reasons), 'row')} of it not counted ({reasons[0]})")
    return None, Points({}), "; ".join(texts)


def _newest_group(rows: Sequence[tuple[Result, RunInfo]]) -> list[tuple[Result, RunInfo]]:
    return [each for each in rows if each[1].group == rows[0][1].group]


def _seen(wanted: Sequence[Want], chosen: Mapping[Key, Sequence[tuple[Result, RunInfo]]]) -> tuple[Seen, Points, str]:
    named: dict[str, list[Point]] = {}
    every: dict[Key, Point] = {}
    for want in wanted:
        key = (want.digest, want.metric)
        rows = chosen[key]
        if key not in every:
            values = [row.value for row, _ in rows if row.value is not None]
            newest = rows[0][0]
            low, high = (min(values), max(values)) if len(values) > 1 else (newest.low, newest.high)
            every[key] = Point(newest, float(median(values)), low, high, tuple(info.uuid for _, info in rows))
        named.setdefault(want.name, []).append(every[key])
    infos = {info.uuid: info for rows in chosen.values() for _, info in rows}
    bases = [row.basis for rows in chosen.values() for row, _ in rows]
    basis: Basis = next((each for each in bases if each != "measured"), "measured")
    ordered = sorted(infos.values(), key=lambda info: (info.started_at, info.uuid), reverse=True)
    return Seen(tuple(every.values()), tuple(ordered), basis), Points(named), ""
