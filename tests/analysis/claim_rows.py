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
    args = {name: value for name, value in form.args.items() if isinstance(value, float)}
    beside = args.get("plus", 0.0)
    by_rule: Mapping[str, Mapping[str, float]] = {
        "value": {"it": wanted}, "share": {"it": wanted * form.args.get("of", 1.0)},
        "ratio": {"top": wanted, "bottom": 1.0}, "peak_ratio": {"top": wanted, "bottom": 1.0},
        "difference": {"top": wanted + 1.0, "bottom": 1.0}, "largest": {"it": wanted},
        "scaled": {"it": wanted / args.get("by", 1.0)}, "rest": {"it": (1.0 - wanted) * args.get("of", 1.0)},
        "ratio_beside": {"top": wanted * 4.0 * beside - beside, "bottom": 3.0 * beside},
    }  # fmt: skip
    if form.rule == "sustained":
        return _loads(form, wanted)
    return lambda want: by_rule[form.rule][want.name]


def _loads(form: Form, wanted: float) -> Values:
    """Return values on straight lines, `top` failing at ``wanted`` times the load at which `bottom` does."""
    axis, least, most = form.args["axis"], form.args.get("least"), form.args.get("most")
    first = min(float(want.axes[axis]) for want in wants(form, suites()))
    fails = {"bottom": 1.02 * first, "top": 1.02 * first * wanted}

    def value(want: Want) -> float:
        load = float(want.axes[axis]) / fails[want.name]
        return most * load if most is not None else 1.0 - (1.0 - float(least or 0.0)) * load

    return value


def unit_for(claim: Claim, form: Form) -> str:
    """Return the unit of rows from which the rule finds one in the paper's unit."""
    if form.rule == "scaled":
        return "1"
    return claim.numbers[0].unit if form.rule in ("value", "difference", "largest") else "B/s"
