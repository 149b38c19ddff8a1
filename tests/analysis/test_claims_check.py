"""Verdicts: which rows count, what may support a number, and that nothing else ever does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.analysis.claim_check import JUDGED, Check, Machine, check, judge, number_agrees, on_side
from kvbench.analysis.claim_rows import Want, doubt
from kvbench.analysis.claim_rules import Finding
from kvbench.analysis.claims import Cases, Claim, Form, Number, load_claims
from kvbench.contract.discover import Suites
from kvbench.contract.result import BASES, Basis, Ceiling, Result
from kvbench.report.claims_text import claims_text, verdict_text
from tests.analysis.claim_rows import agreeing, machine_for, rows_for, run_of, suites, unit_for
from tests.store.factories import at, make_run

CLAIMS = {claim.id: claim for claim in load_claims()}
NUMBERS = [(claim, form) for claim in CLAIMS.values() for form in claim.forms if claim.kind == "number" and form.cases]
SHAPES = [(claim, form) for claim in CLAIMS.values() for form in claim.forms if claim.kind != "number" and form.cases]
SHARE = CLAIMS["strata-memcpy-share-pcie5"]
LAYOUT = CLAIMS["strata-layout-for-free"]
ON_GPU = SHARE.forms[0]


def judged(claim: Claim, form: Form, rows: list[Result], **facts: Any) -> Check:
    return check(claim, suites(), machine_for(form, **facts), [run_of(rows)])


def names(pair: tuple[Claim, Form]) -> str:
    return f"{pair[0].id}-{pair[1].on}"


@pytest.mark.parametrize(("claim", "form"), NUMBERS, ids=map(names, NUMBERS))
def test_the_papers_own_number_is_reproduced_by_measured_rows_on_a_gpu_only(claim: Claim, form: Form) -> None:
    unit = unit_for(claim, form)
    for basis in BASES:
        found = judged(claim, form, rows_for(form, agreeing(claim, form), unit=unit, basis=basis))
        honest = form.on == "gpu" and basis == "measured" and claim.verified and not claim.contradiction
        assert found.verdict == ("REPRODUCED" if honest else "DIRECTION ONLY"), basis
        assert found.finding is not None
        assert found.finding.unit == claim.numbers[0].unit

    def a_million_times(want: Want) -> float:
        return (agreeing(claim, form)(want) or 1.0) * (1.0 if want.name == "bottom" else 1e6)

    far = judged(claim, form, rows_for(form, a_million_times, unit=unit))
    if form.rule == "sustained":  # a load beyond all that were measured is no number
        assert far.verdict == "NOT MEASURED"
        return
    way = claim.side == "above" or claim.numbers[0].bound == "at_least"
    assert far.verdict == ("DIRECTION ONLY" if way else "NOT REPRODUCED")
    played = judged(claim, form, rows_for(form, a_million_times, unit=unit, basis="simulated"))
    assert played.verdict == ("DIRECTION ONLY" if way else "NOT MEASURED")
    assert played.finding == far.finding


def test_every_verdict_on_a_number() -> None:
    def verdict(rate: float, **facts: Any) -> str:
        return judged(SHARE, ON_GPU, rows_for(ON_GPU, lambda _: rate, unit="B/s"), **facts).verdict

    assert verdict(0.22 * 64e9) == "REPRODUCED"
    assert verdict(0.4 * 64e9) == "DIRECTION ONLY"  # still far below the link, but not by as much
    assert verdict(0.9 * 64e9) == "NOT REPRODUCED"
    assert verdict(0.22 * 64e9, pcie_gen=4.0) == "CONDITIONS NOT MET"
    assert verdict(0.22 * 64e9, c2c=None) == "CONDITIONS NOT MET"
    assert judged(SHARE, ON_GPU, []).verdict == "NOT MEASURED"


def test_what_is_not_met_or_not_measured_says_which_and_how() -> None:
    found = judged(SHARE, ON_GPU, [], pcie_gen=4.0)
    assert found.reason == "needs pcie_gen == 5, here 4"
    assert judged(SHARE, ON_GPU, [], gpus=0.0).reason == "needs a GPU; this machine has none"
    assert judged(SHARE, ON_GPU, [], pcie_width=None).reason == "needs pcie_width == 16, here not known"
    found = judged(SHARE, ON_GPU, [])
    assert found.commands[0].startswith("kvbench run strata/page_transfer -a pair=hbm:pinned -a transport=ce")
    planned = CLAIMS["strata-page-first-deepseek"]
    found = check(planned, suites(), machine_for(planned.forms[0]), [])
    assert found.verdict == "NOT MEASURED"
    assert found.commands == (planned.forms[0].planned,)


def test_a_host_form_supports_a_shape_and_says_so() -> None:
    host = LAYOUT.forms[1]
    ceiling = (Ceiling("gather copy", 10e9, "measured", "interleaved"),)
    rows = rows_for(host, lambda _: 9.5e9, ceilings=ceiling, fraction=0.95)
    found = check(LAYOUT, suites(), Machine("host", {"gpus": 0.0}), [run_of(rows)])
    assert (found.verdict, found.label) == ("REPRODUCED", "host form")
    assert verdict_text(found) == "REPRODUCED as a shape (host form)"
    slow = [row.with_(value=5e9, fraction=0.5) for row in rows]
    found = check(LAYOUT, suites(), Machine("host", {"gpus": 0.0}), [run_of(slow)])
    assert verdict_text(found) == "NOT REPRODUCED as a shape (host form)"
    on_gpu = rows_for(LAYOUT.forms[0], lambda _: 40e9)
    both = check(LAYOUT, suites(), machine_for(LAYOUT.forms[0]), [run_of([*rows, *on_gpu])])
    assert (both.form.on, both.label) == ("gpu", "")  # the form of the paper comes first


@pytest.mark.parametrize(("claim", "form"), SHAPES, ids=map(names, SHAPES))
def test_every_shape_and_direction_can_be_judged(claim: Claim, form: Form) -> None:
    pages = {f"page_{2**i}_Bps": 1e9 * 2**i for i in range(5)}
    steps = {name: float(i + 1) for i, name in enumerate((
        "bottom", "top", "it", "cost", "residual", "asymmetric", "symmetric", "simple"
    ))}  # fmt: skip
    ceiling = (Ceiling("read", 1.0, "measured", "interleaved"),)
    rows = rows_for(
        form,
        lambda want: steps.get(want.name, float(len(want.name))),
        unit="1",
        detail=pages,
        ceilings=ceiling,
        fraction=0.5,
    )
    found = judged(claim, form, rows)
    assert found.verdict in JUDGED
    assert found.form is form
    assert found.label == ("" if form.on == "gpu" else "host form")
    simulated = judged(claim, form, [row.with_(basis="simulated") for row in rows])
    assert "simulated" in simulated.label


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": "tainted", "reason": "6 of 6 disturbed"}, "tainted: 6 of 6 disturbed"),
        ({"status": "invalid", "reason": "above the law"}, "invalid: above the law"),
        ({"status": "suspect"}, "suspect"),
        ({"status": "failed", "value": None, "reason": "it died"}, "failed: it died"), ({"value": None}, "no value"),
        ({"flags": ("in_llc",)}, "flagged in_llc"), ({"suite": "canary"}, "a canary"),
    ],
)  # fmt: skip
def test_rows_that_do_not_count(changes: dict[str, Any], why: str) -> None:
    rows = rows_for(ON_GPU, lambda _: 0.22 * 64e9, unit="B/s")
    bad = [row.with_(**changes) for row in rows]
    assert doubt(bad[0], make_run()) == why
    found = judged(SHARE, ON_GPU, bad)
    assert found.verdict == "NOT MEASURED"
    assert why in found.reason
    assert doubt(rows[0], make_run()) == ""
    resumed = check(SHARE, suites(), machine_for(ON_GPU), [run_of(rows, resumed=True)])
    assert (resumed.verdict, "resumed" in resumed.reason) == ("NOT MEASURED", True)


def test_a_row_beside_an_invalid_one_of_its_case_does_not_count() -> None:
    claim = CLAIMS["strata-prefill-interference"]
    form = claim.forms[0]
    (slow,) = rows_for(form, lambda _: 0.03, unit="1")
    primary = slow.with_(metric="victim_time", unit="s", status="invalid")
    assert judged(claim, form, [slow]).verdict == "REPRODUCED"
    found = judged(claim, form, [primary, slow])
    assert (found.verdict, "its case is invalid" in found.reason) == ("NOT MEASURED", True)


def at_rate(share: float, hour: int, **info: Any) -> Any:
    rows = rows_for(ON_GPU, lambda _: share * 64e9, unit="B/s")
    return run_of(rows, started_at=at(3600 * hour), uuid=f"{hour:08x}-0000-4000-8000-000000000000", **info)


def test_the_newest_group_counts_with_the_median_of_its_runs() -> None:
    group = "a" * 8 + "-0000-4000-8000-000000000000"
    runs = [at_rate(0.5, 1), at_rate(0.20, 2, group=group), at_rate(0.21, 3, group=group), at_rate(0.3, 4, group=group)]
    found = check(SHARE, suites(), machine_for(ON_GPU), runs[::-1])
    assert found.finding is not None
    assert found.seen is not None
    assert (found.finding.value, found.finding.low, found.finding.high) == (0.21, 0.20, 0.3)
    assert [info.started_at for info in found.seen.runs] == [at(3600 * hour) for hour in (4, 3, 2)]
    newer = check(SHARE, suites(), machine_for(ON_GPU), [*runs, at_rate(0.5, 9)])
    assert newer.finding is not None
    assert newer.finding.value == 0.5


def test_rows_of_two_commands_meet_in_one_environment_only() -> None:
    claim = CLAIMS["directkv-link-gap-pcie"]
    form = claim.forms[0]
    top, bottom = rows_for(form, lambda want: 4e12 if want.name == "top" else 40e9)
    one, two = run_of([top], started_at=at(0)), run_of([bottom], started_at=at(9))
    found = check(claim, suites(), machine_for(form), [one, two])
    assert found.verdict == "REPRODUCED"
    assert found.seen is not None
    assert len(found.seen.runs) == 2
    moved = run_of([bottom], started_at=at(9), env_digest="env-b")
    found = check(claim, suites(), machine_for(form), [one, moved])
    assert (found.verdict, found.reason) == ("NOT MEASURED", "its rows are of different environments")


def test_another_version_of_the_bench_is_another_case() -> None:
    (row,) = rows_for(ON_GPU, lambda _: 0.22 * 64e9, unit="B/s")
    assert judged(SHARE, ON_GPU, [row.with_(digest="0" * 64, bench_version=2)]).verdict == "NOT MEASURED"


def test_a_suite_that_is_not_there_is_no_crash() -> None:
    found = check(SHARE, Suites({}), machine_for(ON_GPU), [])
    assert (found.verdict, found.bench_is_here) == ("NOT MEASURED", False)
    assert "unknown suite" in found.reason


@pytest.mark.parametrize(
    ("number", "value", "agrees"),
    [
        (Number("x", 2.0, "1"), 2.19, True), (Number("x", 2.0, "1"), 2.21, False), (Number("x", 2.0, "1"), 1.81, True),
        (Number("x", 2.0, "1"), 1.79, False), (Number("x", 0.75, "1", 0.8), 0.86, True),
        (Number("x", 0.75, "1", 0.8), 0.9, False), (Number("x", 0.05, "1", None, "at_most"), -0.01, True),
        (Number("x", 0.05, "1", None, "at_most"), 0.06, False), (Number("x", 0.9, "1", None, "at_least"), 1.0, True),
        (Number("x", 0.9, "1", None, "at_least"), 0.8, False), (Number("x", -2.0, "1"), -2.1, True),
    ],
)  # fmt: skip
def test_tolerance_range_and_bounds(number: Number, value: float, agrees: bool) -> None:
    assert number_agrees(number, value, 0.1) is agrees


def made(kind: Any, **changes: Any) -> Claim:
    values: dict[str, Any] = {
        "system": "neo", "id": "neo-x", "kind": kind, "statement": "x", "numbers": (Number("x", 2.0, "1"),),
        "section": "1", "hardware": "x", "baseline": "x", "conditions": "x", "misquoted": "", "forms": (GPU,),
        "tolerance": 0.1, **changes,
    }  # fmt: skip
    return Claim(**values)


GPU = Form("gpu", (), (Cases("it", "a/b", "m", {}),), "value")
UP = {"neutral": 1.0, "side": "above"}


@pytest.mark.parametrize(
    ("claim", "found", "basis", "verdict", "reason"),
    [
        (made("number"), Finding(2.1, "1", ""), "measured", "REPRODUCED", ""),
        (made("number"), Finding(2.1, "B/s", ""), "measured", "NOT REPRODUCED", "measured in B/s"),
        (made("number"), Finding(2.1, "1", ""), "simulated", "DIRECTION ONLY", "simulated rows support no number"),
        (made("number"), Finding(3.0, "1", ""), "simulated", "NOT MEASURED", "refute no number"),
        (made("number", verified=False), Finding(2.1, "1", ""), "measured", "DIRECTION ONLY", "not be verified"),
        (made("number", contradiction="y"), Finding(2.1, "1", ""), "measured", "DIRECTION ONLY", "contradicts"),
        (made("number", **UP), Finding(3.0, "1", ""), "measured", "DIRECTION ONLY", "not within 10 %"),
        (made("number", **UP), Finding(0.9, "1", ""), "measured", "NOT REPRODUCED", "not within 10 %"),
        (made("number"), Finding(3.0, "1", ""), "measured", "NOT REPRODUCED", "not within 10 %"),
        (made("direction", **UP), Finding(1.1, "1", ""), "measured", "REPRODUCED", ""),
        (made("direction", **UP), Finding(1.01, "1", ""), "measured", "NOT REPRODUCED", "beyond 2 %"),
        (made("direction", neutral=0.0, side="below"), Finding(-0.1, "1", ""), "measured", "REPRODUCED", ""),
        (made("shape"), Finding(1.0, "1", "", holds=True), "measured", "REPRODUCED", ""),
        (made("shape"), Finding(1.0, "1", "", holds=False, tends=True), "measured", "DIRECTION ONLY", "that way"),
        (made("shape"), Finding(1.0, "1", "", holds=False, tends=False), "measured", "NOT REPRODUCED", ""),
    ],
)  # fmt: skip
def test_judgement(claim: Claim, found: Finding, basis: Basis, verdict: str, reason: str) -> None:
    got = judge(claim, claim.forms[0], found, basis)
    assert got[0] == verdict
    assert reason in got[1]


def test_no_side_is_no_direction() -> None:
    assert on_side(made("shape"), 99.0) is False


HOST = [(claim, form) for claim in CLAIMS.values() for form in claim.forms if form.cases and form.on != "gpu"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HOST), st.data())
def test_nothing_on_a_host_reproduces_a_number(pair: tuple[Claim, Form], data: st.DataObject) -> None:
    claim, form = pair
    values = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
        [n.value for n in claim.numbers] or [1.0]
    )
    rows = rows_for(
        form, lambda _: data.draw(values), basis=data.draw(st.sampled_from(BASES)),
        unit=data.draw(st.sampled_from(["1", "B", "B/s", "s", "\x1b[31m[b]|"])),
        flags=tuple(data.draw(st.lists(st.sampled_from(["in_llc", "small_window"]), max_size=1))),
    )  # fmt: skip
    found = check(claim, suites(), Machine("[b]\n", {"gpus": 0.0, "cores": 2.0}), [run_of(rows)])
    assert claim.kind != "number" or found.verdict != "REPRODUCED"
    if found.verdict in JUDGED:
        assert found.label
    text = claims_text([found], "hw [b]\n\x1b[31m", everything=True)
    assert "\x1b" not in text
    assert claim.id in text


def test_a_number_no_unit_has_a_prefix_for_is_shown_and_a_sum_beyond_floats_is_none() -> None:
    claim = CLAIMS["ellm-reservation-200k"]
    form = claim.forms[1]
    found = check(claim, suites(), Machine("host", {"gpus": 0.0}), [run_of(rows_for(form, lambda _: 1.79e308))])
    assert found.verdict == "NOT REPRODUCED"
    assert "1.79e+308" in claims_text([found], "hw", everything=False)
    claim = CLAIMS["strata-decode-suffers-more"]
    form = claim.forms[1]
    rows = rows_for(form, lambda want: 1.7e308 if want.name == "top" else -1.7e308, unit="1")
    found = check(claim, suites(), Machine("host", {"gpus": 0.0, "cores": 2.0}), [run_of(rows)])
    assert (found.verdict, found.reason) == ("NOT MEASURED", "what was found is no finite number")
