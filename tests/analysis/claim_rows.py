"""Rows made for claims: one for every case a form names, with values chosen by the name a rule knows it by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from kvbench.analysis.claim_check import Machine
from kvbench.analysis.claim_needs import FACTS, Fact
from kvbench.analysis.claim_rows import Want, wants
from kvbench.analysis.claims import Claim, Form
from kvbench.contract.discover import Suites, load_suites
from kvbench.contract.result import Result
from tests.analysis.sides import Run
from tests.store.factories import make_run

Values = Callable[[Want], float | None]


@cache
def suites() -> Suites:
    return load_suites()


def row_of(want: Want, value: float | None, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "suite": want.bench.suite, "bench": want.bench.name, "bench_version": want.bench.version,
        "axes": dict(want.axes), "metric": want.metric, "unit": want.bench.unit if want.metric == want.bench.metric
        else "1", "better": "higher", "digest": want.digest, "status": "ok", "value": value, "n": 6,
    }  # fmt: skip
    if value is None:
        values |= {"status": "skipped", "reason": "it is not there"}
    return Result(**(values | changes))


def rows_for(form: Form, values: Values, **changes: Any) -> list[Result]:
    return [row_of(want, values(want), **changes) for want in wants(form, suites())]


def run_of(rows: Sequence[Result], **info: Any) -> Run:
    return Run(make_run(**info), tuple(rows))


def machine_for(form: Form, **changes: Fact) -> Machine:
    """Return a machine that meets the needs of ``form``; ``changes`` replace facts."""
    facts: dict[str, Fact] = dict.fromkeys(FACTS)
    for need in form.needs:
        facts[need.fact] = need.value
    return Machine("made-up", {**facts, **changes})


def agreeing(claim: Claim, form: Form) -> Values:
    """Return values from which the rule finds exactly the paper's number."""
    number = claim.numbers[0]
    wanted = number.value if number.high is None else (number.value + number.high) / 2.0
    by_rule: Mapping[str, Mapping[str, float]] = {
        "value": {"it": wanted}, "share": {"it": wanted * form.args.get("of", 1.0)},
        "ratio": {"top": wanted, "bottom": 1.0}, "difference": {"top": wanted + 1.0, "bottom": 1.0},
    }  # fmt: skip
    return lambda want: by_rule[form.rule][want.name]


def unit_for(claim: Claim, form: Form) -> str:
    """Return the unit of rows from which the rule finds one in the paper's unit."""
    return claim.numbers[0].unit if form.rule in ("value", "difference") else "B/s"
