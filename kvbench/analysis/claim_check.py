"""What the rows of a machine say about a claim: what was found, and the verdict.

The rules that keep a verdict honest (design 2): only rows of basis measured support a number, and only those of a form
on a GPU; a host form may support a shape or a direction, labelled; a figure that could not be verified in the paper, or
that contradicts another of its own, is never reproduced as a number. Which rows count: :mod:`claim_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.analysis.claim_needs import Answer, Fact, answer, machine_facts
from kvbench.analysis.claim_rows import Seen, commands, gather, wants
from kvbench.analysis.claim_rules import RULES, SLACK, Finding, Undecided
from kvbench.analysis.claims import Claim, Form, Number
from kvbench.analysis.compare import Loaded
from kvbench.contract.discover import Suites
from kvbench.contract.result import Basis
from kvbench.errors import UsageError

Verdict = Literal["REPRODUCED", "DIRECTION ONLY", "NOT REPRODUCED", "CONDITIONS NOT MET", "NOT MEASURED"]
JUDGED: frozenset[Verdict] = frozenset({"REPRODUCED", "DIRECTION ONLY", "NOT REPRODUCED"})


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine judged: its class and the facts its claims' needs are held against."""

    hw_class: str
    facts: Mapping[str, Fact]

    @classmethod
    def of(cls, hw_class: str, machine: Mapping[str, object]) -> Machine:
        return cls(hw_class, machine_facts(machine))


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


def check(claim: Claim, suites: Suites, machine: Machine, runs: Sequence[Loaded]) -> Check:
    """Judge ``claim`` by its first form that ``machine`` allows and ``runs`` (all of that hardware) have rows for."""
    unmet: Check | None = None
    unmeasured: list[Check] = []
    for form in claim.forms:
        answers = tuple(found for need in form.needs if not (found := answer(need, machine.facts)).met)
        if answers:
            unmet = unmet or Check(claim, "CONDITIONS NOT MET", _unmet(answers), form, unmet=answers)
            continue
        try:
            wanted, how = wants(form, suites), commands(form, suites)
        except UsageError as error:  # a suite of this installation lacks what the claim names
            unmeasured.append(Check(claim, "NOT MEASURED", str(error), form, bench_is_here=False))
            continue
        if form.planned:
            reason = "no bench here measures it yet"
            here = _is_here(form.planned, suites)
            unmeasured.append(Check(claim, "NOT MEASURED", reason, form, commands=how, bench_is_here=here))
            continue
        seen, points, missing = gather(wanted, runs)
        if seen is None:
            unmeasured.append(Check(claim, "NOT MEASURED", missing, form, commands=how))
            continue
        try:
            finding = RULES[form.rule](points, **form.args)
            if not math.isfinite(finding.value):
                raise Undecided("what was found is no finite number")
        except Undecided as error:
            unmeasured.append(Check(claim, "NOT MEASURED", str(error), form, seen=seen, commands=how))
            continue
        verdict, reason = judge(claim, form, finding, seen.basis)
        return Check(claim, verdict, reason, form, finding, seen, label_of(form, seen.basis), commands=how)
    if unmeasured:
        # of several forms the one that came furthest: rows that say nothing, rows that do not count, no rows
        return max(unmeasured, key=lambda each: (each.seen is not None, "not counted" in each.reason))
    assert unmet is not None, f"{claim.id} has no form"  # the loader refuses that
    return unmet


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
    if form.on == "gpu":
        return "" if basis == "measured" else basis
    return "host form" if basis == "measured" else f"host form, {basis}" if form.on == "host" else basis


def judge(claim: Claim, form: Form, found: Finding, basis: Basis) -> tuple[Verdict, str]:
    """Return the verdict on what was found and why."""
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
    if not agrees or (claim.side is not None and not way):
        off = "not within" if not agrees else f"not {claim.side} {claim.neutral:g}, though within"
        off = f"{off} {100 * claim.tolerance:.0f} % of the paper's number"
        if not way and basis == "simulated":
            return "NOT MEASURED", f"{off}, but simulated rows refute no number"
        return "DIRECTION ONLY" if way else "NOT REPRODUCED", off
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
