"""What the rows of a machine say about a claim: which rows count, what was found, and the verdict.

The rules that keep a verdict honest (design 2): only rows of basis measured support a number, and only those of a form
on a GPU; a host form may support a shape or a direction, labelled; a figure that could not be verified in the paper, or
that contradicts another of its own, is never reproduced as a number; rows that are not ok, of resumed runs, or that say
themselves that they are something else do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Literal

from kvbench.analysis.claim_needs import Answer, Fact, answer, machine_facts
from kvbench.analysis.claim_rules import RULES, SLACK, Finding, Point, Points, Undecided
from kvbench.analysis.claims import Cases, Claim, Form, Number
from kvbench.analysis.compare import Loaded
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import Suites
from kvbench.contract.result import Basis, Result, RunInfo
from kvbench.errors import UsageError

Verdict = Literal["REPRODUCED", "DIRECTION ONLY", "NOT REPRODUCED", "CONDITIONS NOT MET", "NOT MEASURED"]
JUDGED: frozenset[Verdict] = frozenset({"REPRODUCED", "DIRECTION ONLY", "NOT REPRODUCED"})
# Such a row is not what its case says: partly answered by a cache, beyond its ceiling, counted by nobody.
BAD_FLAGS = frozenset({"in_llc", "above_ceiling", "copy_not_covering", "not_in_flight", "link_unmeasured"})


@dataclass(frozen=True, slots=True)
class Want:
    """One row a form needs: the case by its digest, and the metric."""

    name: str
    bench: Bench
    axes: Mapping[str, Value]
    digest: str
    metric: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine judged: its class and the facts its claims' needs are held against."""

    hw_class: str
    facts: Mapping[str, Fact]

    @classmethod
    def of(cls, hw_class: str, machine: Mapping[str, object]) -> Machine:
        return cls(hw_class, machine_facts(machine))


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows behind a finding: ``points``, the runs they are of (newest first) and the weakest basis among them."""

    points: tuple[Point, ...]
    runs: tuple[RunInfo, ...]
    basis: Basis


@dataclass(frozen=True, slots=True)
class Check:
    """A claim judged. ``form``: what it was judged by, or would be. ``commands`` measure it where nothing did.

    ``unmet`` are the needs of ``form`` that this machine does not meet or does not tell. ``label`` says what a verdict
    that is no plain measurement on a GPU stands on ("host form", "simulated"); empty for one that is.
    """

    claim: Claim
    verdict: Verdict
    reason: str
    form: Form
    finding: Finding | None = None
    seen: Seen | None = None
    label: str = ""
    unmet: tuple[Answer, ...] = ()
    commands: tuple[str, ...] = ()
    bench_is_here: bool = True


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


def check(claim: Claim, suites: Suites, machine: Machine, runs: Sequence[Loaded]) -> Check:
    """Judge ``claim`` by its first form that ``machine`` allows and ``runs`` (all of that hardware) have rows for."""
    unmet: Check | None = None
    unmeasured: Check | None = None
    for form in claim.forms:
        answers = tuple(found for need in form.needs if not (found := answer(need, machine.facts)).met)
        if answers:
            unmet = unmet or Check(claim, "CONDITIONS NOT MET", _unmet(answers), form, unmet=answers)
            continue
        try:
            wanted, how = wants(form, suites), commands(form, suites)
        except UsageError as error:  # a suite of this installation lacks what the claim names
            unmeasured = unmeasured or Check(claim, "NOT MEASURED", str(error), form, bench_is_here=False)
            continue
        if form.planned:
            reason = "no bench here measures it yet"
            unmeasured = unmeasured or Check(
                claim, "NOT MEASURED", reason, form, commands=how, bench_is_here=_is_here(form.planned, suites)
            )
            continue
        seen, points, missing = gather(wanted, runs)
        if seen is None:
            unmeasured = unmeasured or Check(claim, "NOT MEASURED", missing, form, commands=how)
            continue
        try:
            finding = RULES[form.rule](points, **form.args)
        except Undecided as error:
            unmeasured = unmeasured or Check(claim, "NOT MEASURED", str(error), form, seen=seen, commands=how)
            continue
        verdict, reason = judge(claim, form, finding, seen.basis)
        return Check(claim, verdict, reason, form, finding, seen, label_of(form, seen.basis), commands=how)
    found = unmeasured or unmet
    assert found is not None, f"{claim.id} has no form"  # the loader refuses that
    return found


def _is_here(command: str, suites: Suites) -> bool:
    word = next((word for word in command.split() if "/" in word), "")
    suite, _, bench = word.partition("/")
    return bench in suites.benches.get(suite, {})


def _unmet(answers: Sequence[Answer]) -> str:
    if any(each.found == "no GPU" or (each.need.fact == "gpus" and each.found == "0") for each in answers):
        return "needs a GPU; this machine has none"
    return "; ".join(f"needs {each.need}, here {each.found}" for each in answers)


def label_of(form: Form, basis: Basis) -> str:
    """Return what a verdict stands on where it is not a measurement on a GPU."""
    words = ["host form"] if form.on == "host" else []
    if basis != "measured":
        words.append(basis)
    return ", ".join(words)


def gather(wanted: Sequence[Want], runs: Sequence[Loaded]) -> tuple[Seen | None, Points, str]:
    """Return the rows of ``wanted``, their points by name, and what is missing where a row is.

    All rows are of one environment, the newest that has any; of its groups the newest alone where it has all, otherwise
    for each row the newest group that has it.
    """
    newest = sorted(runs, key=lambda run: (run.info.started_at, run.info.uuid), reverse=True)
    keys = {(want.digest, want.metric) for want in wanted}
    clean: dict[tuple[str, str], list[tuple[Result, RunInfo]]] = {key: [] for key in keys}
    refused: dict[tuple[str, str], str] = {}
    for run in newest:
        for row in run.results:
            key = (row.digest, row.metric)
            if key in keys:
                why = doubt(row, run.info)
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
    text = f"{len(lacking)} of {len(wanted)} rows it needs are missing" if len(wanted) > 1 else "no row of it"
    if reasons:
        text += f"; rows that do not count: {reasons[0]}" + (f" and {len(reasons) - 1} more" if reasons[1:] else "")
    return None, Points({}), text


def _newest_group(rows: Sequence[tuple[Result, RunInfo]]) -> list[tuple[Result, RunInfo]]:
    return [each for each in rows if each[1].group == rows[0][1].group]


def _seen(
    wanted: Sequence[Want], chosen: Mapping[tuple[str, str], Sequence[tuple[Result, RunInfo]]]
) -> tuple[Seen, Points, str]:
    named: dict[str, list[Point]] = {}
    every: dict[tuple[str, str], Point] = {}
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
    basis = next((each for each in bases if each != "measured"), "measured")
    ordered = sorted(infos.values(), key=lambda info: (info.started_at, info.uuid), reverse=True)
    return Seen(tuple(every.values()), tuple(ordered), basis), Points(named), ""


def judge(claim: Claim, form: Form, found: Finding, basis: Basis) -> tuple[Verdict, str]:
    """Return the verdict on what was found and why."""
    if not math.isfinite(found.value):
        return "NOT REPRODUCED", "what was found is no finite number"
    if claim.kind == "shape":
        if found.holds:
            return "REPRODUCED", ""
        return ("DIRECTION ONLY", "it goes that way, but not in that shape") if found.tends else ("NOT REPRODUCED", "")
    way = on_side(claim, found.value)
    if claim.kind == "direction":
        return ("REPRODUCED", "") if way else ("NOT REPRODUCED", f"not {claim.side} {claim.neutral:g} beyond 2 %")
    number = claim.numbers[0]
    if found.unit != number.unit:
        return "NOT REPRODUCED", f"measured in {found.unit}, the paper's number is in {number.unit}"
    assert claim.tolerance is not None  # the loader refuses a number without
    agrees = number_agrees(number, found.value, claim.tolerance)
    if not agrees:
        if way:
            return "DIRECTION ONLY", f"not within {100 * claim.tolerance:.0f} % of the paper's number"
        return "NOT REPRODUCED", f"not within {100 * claim.tolerance:.0f} % of the paper's number"
    for stands_against in (
        "the paper contradicts this number itself" if claim.contradiction else "",
        "the number could not be verified in the paper" if not claim.verified else "",
        f"it agrees, but {basis} rows support no number" if basis != "measured" else "",
        "it agrees, but only a form on a GPU supports this number" if form.on != "gpu" else "",
    ):
        if stands_against:
            return "DIRECTION ONLY", stands_against
    return "REPRODUCED", ""


def on_side(claim: Claim, value: float) -> bool:
    """Return whether ``value`` lies on the claim's side of its neutral value, by 2 % (of it, or absolute at zero)."""
    if claim.side is None or claim.neutral is None:
        return False
    reach = SLACK * (abs(claim.neutral) or 1.0)
    return value > claim.neutral + reach if claim.side == "above" else value < claim.neutral - reach


def number_agrees(number: Number, value: float, tolerance: float) -> bool:
    """Return whether ``value`` is the paper's number: within the tolerance of it, of its range, or of its bound."""
    low, high = number.value, number.value if number.high is None else number.high
    low, high = low - tolerance * abs(low), high + tolerance * abs(high)
    return (number.bound == "at_most" or value >= low) and (number.bound == "at_least" or value <= high)
