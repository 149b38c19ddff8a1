"""The rules by which claims are measured, each on points made for it: right, wrong, and points that say nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.analysis.claim_rules import RULES, Finding, Point, Points, Undecided
from kvbench.contract.result import Ceiling, Result
from tests.store.factories import make_row

SWEEP = tuple[float, ...]


def point(value: float, at: object = 0, *, half: float | None = None, **row: Any) -> Point:
    made = make_row(0, axes={"n": at}, unit=row.pop("unit", "1"), value=value, **row)
    low, high = (None, None) if half is None else (value - half, value + half)
    return Point(made, value, low, high, ("run",))


def sweep(*values: float, **row: Any) -> list[Point]:
    return [point(value, 2**i, **row) for i, value in enumerate(values)]


def found(rule: str, rows: Mapping[str, Sequence[Point]], **args: Any) -> Finding:
    return RULES[rule](Points(rows), **args)


def two(top: float, bottom: float, **changes: Any) -> dict[str, list[Point]]:
    return {"top": [point(top, half=0.1, **changes)], "bottom": [point(bottom, half=0.2, **changes)]}


def test_numbers_with_their_bounds() -> None:
    assert found("value", {"it": [point(3.0, half=1.0)]}) == Finding(3.0, "1", "3.00", 2.0, 4.0)
    share = found("share", {"it": [point(14e9, half=1e9, unit="B/s")]}, of=64e9)
    assert (share.value, share.unit) == (14 / 64, "1")
    assert (share.low, share.high) == (13 / 64, 15 / 64)
    assert "64.0 GB/s" in share.text
    ratio = found("ratio", two(2.0, 1.0))
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([2.0, 1.9 / 1.2, 2.1 / 0.8])
    assert found("difference", two(0.3, 0.1)).value == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("rule", "args", "holds", "tends", "fails"),
    [
        ("rising", {"axis": "n", "times": 2.0}, [1, 1.5, 1.49, 2.5], [1, 3, 2.5], [2, 1.5, 1]),
        ("rising", {"axis": "n", "times": 2.0}, [1, 2], [1, 1.1], [1, 1.01]),
        ("rising", {"axis": "n", "times": 1.1, "slack": 0.2}, [1, 1.3, 1.2], [1, 2, 1.5], [1, 0.5, 0.7]),
        ("climbs", {"axis": "n", "by": 0.3}, [0.0, 0.2, 0.19, 0.5], [0.0, 0.5, 0.2], [0.5, 0.5, 0.5]),
        ("proportional", {"axis": "n", "spread": 0.1}, [3, 6, 12.5], [3, 5, 9], [3, 2, 1]),
    ],
)  # fmt: skip
def test_runs_along_an_axis(
    rule: str, args: dict[str, Any], holds: SWEEP, tends: SWEEP, fails: SWEEP
) -> None:  # fmt: skip
    for values, wanted in ((holds, (True, True)), (tends, (False, True)), (fails, (False, False))):
        got = found(rule, {"it": sweep(*map(float, values))}, **args)
        assert (got.holds, got.tends) == wanted, values
        shuffled = found(rule, {"it": sweep(*map(float, values))[::-1]}, **args)
        assert shuffled == got


@pytest.mark.parametrize(
    ("rule", "args", "yes", "no"),
    [
        ("flat", {"axis": "n", "spread": 0.1}, [1.0, 1.09, 1.05], [1.0, 1.2, 1.0]),
        ("saturates", {"axis": "n", "least": 0.9}, [0.95, 1.0, 0.9], [0.5, 1.0, 1.0]),
        ("at_least", {"least": 0.9}, [0.9, 1.0], [0.95, 0.8]),
        ("nothing", {}, [0.0, 0.0], [0.0, 4096.0]),
    ],
)  # fmt: skip
def test_bounds_and_plateaus(rule: str, args: dict[str, Any], yes: list[float], no: list[float]) -> None:
    assert found(rule, {"it": sweep(*yes)}, **args).holds is True
    assert found(rule, {"it": sweep(*no)}, **args).holds is False


def test_numbers_made_of_a_number_of_the_paper() -> None:
    crossed = found("scaled", {"it": [point(50.0, half=1.0)]}, by=4e8, unit="B")
    assert (crossed.value, crossed.unit, crossed.low, crossed.high) == (2e10, "B", 49 * 4e8, 51 * 4e8)
    assert found("rest", {"it": [point(54.0)]}, of=80.0).value == pytest.approx(0.325)
    beside = found("ratio_beside", {"top": [point(0.0, unit="B")], "bottom": [point(4e8, unit="B")]}, plus=4e8)
    assert (beside.value, beside.unit) == (0.5, "1")
    most = found("largest", {"it": sweep(1.0, 1.8, 1.3)}, axis="n")
    assert (most.value, "at n=2" in most.text) == (1.8, True)
    for rule, rows, args in (
        ("scaled", {"it": [point(1.0, unit="s")]}, {"by": 1.0, "unit": "B"}),
        ("rest", {"it": [point(1.0)]}, {"of": 0.0}),
        ("ratio_beside", two(1.0, -3.0), {"plus": 1.0}),
    ):  # fmt: skip
        with pytest.raises(Undecided, match=r"no ratio|no share"):
            found(rule, rows, **args)


def test_what_falls_and_what_fades() -> None:
    assert found("falls", {"it": sweep(0.9, 0.8, 0.81, 0.6)}, axis="n", by=0.2).holds is True
    assert found("falls", {"it": sweep(0.9, 0.6, 0.8, 0.5)}, axis="n", by=0.2).tends is True
    assert found("falls", {"it": sweep(0.6, 0.9)}, axis="n", by=0.2).tends is False
    args: dict[str, Any] = {"axis": "n", "to": 1.0, "within": 0.05}
    assert found("fades", {"it": sweep(6.0, 2.0, 1.04)}, **args).holds is True
    for values in ((6.0, 2.0, 1.5), (6.0, 7.0, 1.0), (1.01, 1.0, 1.0)):
        assert found("fades", {"it": sweep(*values)}, **args).holds is False, values
    assert found("fades", {"it": sweep(6.0, 2.0, 1.5)}, **args).tends is True


def test_humps_in_order() -> None:
    def humps(low: SWEEP, high: SWEEP) -> Finding:
        return found("humped", {"low": sweep(*low), "high": sweep(*high)}, axis="n", names=["low", "high"])

    assert humps((1.0, 1.2, 1.0), (1.0, 1.5, 1.3)).holds is True
    assert humps((1.0, 1.2, 1.0), (1.0, 1.5, 1.3)).value == 1.5
    for low, high in (((1.0, 1.6, 1.0), (1.0, 1.5, 1.3)), ((1.0, 1.1, 1.2), (1.0, 1.5, 1.3))):
        assert humps(low, high).holds is False
    assert humps((1.0, 1.1, 1.2), (1.0, 1.5, 1.3)).tends is True


def test_several_curves_and_several_orders() -> None:
    def rise(first: SWEEP, second: SWEEP) -> Finding:
        return found("all_rise", {"a": sweep(*first), "b": sweep(*second)}, along={"a": "n", "b": "n"}, times=1.5)

    assert (rise((1.0, 2.0), (1.0, 3.0)).holds, rise((1.0, 2.0), (1.0, 3.0)).value) == (True, 2.0)
    assert (rise((1.0, 2.0), (1.0, 1.2)).holds, rise((1.0, 2.0), (1.0, 1.2)).tends) == (False, True)
    rows = {name: [point(value)] for name, value in {"a": 1.0, "b": 1.5, "c": 2.0}.items()}
    assert found("all_ordered", rows, orders=[["a", "b"], ["a", "c"]]).holds is True
    turned = found("all_ordered", rows, orders=[["a", "b"], ["c", "a"]])
    assert (turned.holds, turned.tends, turned.value) == (False, True, 1.5)
    for rule, args in (("all_rise", {"along": {}, "times": 1.0}), ("all_ordered", {"orders": []})):
        with pytest.raises(Undecided, match="was named"):
            found(rule, rows, **args)


def test_the_largest_quotient_along_an_axis() -> None:
    got = found("peak_ratio", {"top": sweep(2.0, 9.0, 4.0), "bottom": sweep(1.0, 3.0, 4.0)}, axis="n")
    assert got.value == 3.0
    assert "at n=2" in got.text
    apart = {"top": sweep(2.0, 9.0), "bottom": [point(1.0, 16), point(1.0, 32)]}
    with pytest.raises(Undecided, match="in common"):
        found("peak_ratio", apart, axis="n")


def test_the_load_that_is_sustained() -> None:
    def over(top: SWEEP, bottom: SWEEP, **args: float) -> Finding:
        rows = {"top": sweep(*top), "bottom": sweep(*bottom)}  # at loads 1, 2, 4, 8
        return found("sustained", rows, axis="n", **args)

    assert over((1.0, 1.0, 1.0, 0.8), (1.0, 1.0, 0.8, 0.2), least=0.9).value == pytest.approx(6.0 / 3.0)
    assert over((1.0, 1.0, 0.9, 0.8), (0.95, 0.85, 0.95, 0.0), least=0.9).value < 1.0  # the last that holds counts
    assert over((0.1, 0.2, 0.9, 1.1), (0.5, 1.5, 2.5, 3.5), most=1.0).value == pytest.approx(6.0 / 1.5)
    assert "6 over 3" in over((1.0, 1.0, 1.0, 0.8), (1.0, 1.0, 0.8, 0.2), least=0.9).text
    for top, text in (((1.0, 1.0, 1.0, 1.0), "above n=8"), ((0.1, 0.1, 0.1, 0.1), "below n=1")):
        with pytest.raises(Undecided, match=text):
            over(top, (1.0, 1.0, 0.8, 0.2), least=0.9)
    for args in ({}, {"least": 1.0, "most": 1.0}):
        with pytest.raises(Undecided, match="one number"):
            over((1.0, 0.0), (1.0, 0.0), **args)


def test_within_is_a_band() -> None:
    for top, wanted in ((0.95, True), (1.05, True), (0.9, False), (1.2, False)):
        assert found("within", two(top, 1.0), least=0.95, most=1.05).holds is wanted


def test_an_order_has_gaps() -> None:
    def order(*values: float) -> Finding:
        rows = {name: [point(value)] for name, value in zip("abc", values, strict=False)}
        return found("ordered", rows, names=list("abc")[: len(values)])

    assert (order(1.0, 2.0, 3.0).holds, order(1.0, 2.0, 3.0).value) == (True, 3.0)
    assert (order(1.0, 3.0, 2.0).holds, order(1.0, 3.0, 2.0).tends) == (False, True)
    assert (order(1.0, 1.01, 2.0).holds, order(2.0, 1.5, 1.0).tends) == (False, False)
    with pytest.raises(Undecided, match="no order"):
        order(1.0)


def test_a_fraction_is_that_of_the_measured_ceiling() -> None:
    ceiling = (Ceiling("gather read", 10.0, "measured", "interleaved"),)
    good = point(9.0, ceilings=ceiling, fraction=0.9)
    assert found("of_ceiling", {"it": [good]}, least=0.9).holds is True
    worse = point(8.0, ceilings=ceiling, fraction=0.8)
    got = found("of_ceiling", {"it": [good, worse]}, least=0.9)
    assert (got.value, got.holds) == (0.8, False)
    assert "80 % of gather read" in got.text
    by_law = point(9.0, ceilings=(Ceiling("dram", 10.0, "physical", "firmware"),), fraction=0.9)
    with pytest.raises(Undecided, match="no measured ceiling"):
        found("of_ceiling", {"it": [by_law]}, least=0.9)


def law(residual: float, rates: Sequence[float], **detail: Any) -> dict[str, list[Point]]:
    pages = {f"page_{2**i}_Bps": rate for i, rate in enumerate(rates)}
    cost = point(3e-6, unit="s", detail={"law": "additive", "holds": True, **pages, **detail})
    return {"cost": [cost], "residual": [point(residual)]}


def test_one_cost_per_operation_explains_a_sweep() -> None:
    got = found("per_operation_law", law(0.05, [1e9, 2e9, 3.9e9, 6e9]), most=0.15)
    assert (got.holds, got.value) == (True, 0.05)
    assert "3.00 us an operation" in got.text
    assert found("per_operation_law", law(0.3, [1e9, 2e9, 4e9, 6e9]), most=0.15).holds is False
    falls = found("per_operation_law", law(0.05, [1e9, 4e9, 2e9, 6e9]), most=0.15)
    assert (falls.holds, falls.tends) == (False, True)
    flat = found("per_operation_law", law(0.05, [1e9, 1e9, 1e9, 1e9]), most=0.15)
    assert (flat.holds, flat.tends) == (False, False)
    hostile = {"page_x_Bps": 1.0, "page_16_Bps": "9", "page_32_Bps": -1.0, "page_64_Bps": None, "page_90": 3}
    with pytest.raises(Undecided, match="3 page sizes"):
        found("per_operation_law", law(0.05, [1e9, 2e9, 3e9], **hostile), most=0.15)


@pytest.mark.parametrize(
    ("rule", "rows", "args", "text"),
    [
        ("value", {}, {}, "no case is called it"), ("value", {"it": sweep(1.0, 2.0)}, {}, "2 cases"),
        ("ratio", two(1.0, 0.0), {}, "no ratio"), ("ratio", two(1e308, 1e-308), {}, "no ratio"),
        ("ratio", {"top": [point(1.0)], "bottom": [point(1.0, unit="s")]}, {}, "different units"),
        ("difference", {"top": [point(1.0)], "bottom": [point(1.0, unit="s")]}, {}, "different units"),
        ("share", {"it": [point(1.0)]}, {"of": 0.0}, "no share"),
        ("rising", {"it": [point(1.0, "all"), point(2.0, 2)]}, {"axis": "n", "times": 2.0}, "no number"),
        ("rising", {"it": [point(1.0, 2), point(2.0, 2)]}, {"axis": "n", "times": 2.0}, "two different values"),
        ("rising", {"it": [point(1.0, 2)]}, {"axis": "n", "times": 2.0}, "two different values"),
        ("rising", {"it": sweep(1.0, 2.0)}, {"axis": "m", "times": 2.0}, "no number"),
        ("proportional", {"it": sweep(0.0, 2.0)}, {"axis": "n", "spread": 0.1}, "nothing to be in proportion"),
    ],
)  # fmt: skip
def test_points_that_say_nothing(rule: str, rows: Any, args: dict[str, Any], text: str) -> None:
    with pytest.raises(Undecided, match=text):
        found(rule, rows, **args)


ARGS: dict[str, dict[str, Any]] = {
    "share": {"of": 3.0}, "at_least": {"least": 1.0}, "of_ceiling": {"least": 0.9}, "nothing": {},
    "within": {"least": 0.9, "most": 1.1}, "flat": {"axis": "n", "spread": 0.1}, "rising": {"axis": "n", "times": 2.0},
    "climbs": {"axis": "n", "by": 0.1}, "saturates": {"axis": "n", "least": 0.9}, "value": {}, "ratio": {},
    "proportional": {"axis": "n", "spread": 0.1}, "per_operation_law": {"most": 0.1}, "difference": {},
    "ordered": {"names": ["it", "top"]}, "sustained": {"axis": "n", "least": 0.9},
    "peak_ratio": {"axis": "n"}, "largest": {"axis": "n"}, "scaled": {"by": 3.0, "unit": "B"}, "rest": {"of": 2.0},
    "ratio_beside": {"plus": 1.0}, "falls": {"axis": "n", "by": 0.1}, "fades": {"axis": "n", "to": 1.0, "within": 0.1},
    "humped": {"axis": "n", "names": ["it", "top"]}, "all_rise": {"along": {"it": "n"}, "times": 2.0},
    "all_ordered": {"orders": [["bottom", "it"], ["top", "it"]]},
}  # fmt: skip
ANY = st.floats(allow_nan=False, allow_infinity=False)
UNITS = st.sampled_from(["1", "s", "B/s", "B", "[bold]"])


@st.composite
def hostile(draw: st.DrawFn) -> Point:
    value = draw(ANY)
    unit, at = draw(UNITS), draw(st.sampled_from([1, 2, 2.5, "all", None, True, "\x1b[31m"]))
    share = draw(st.none() | ANY)
    detail: dict[str, Any] = {f"page_{i}_Bps": draw(ANY) for i in range(draw(st.integers(0, 5)))}
    row = Result(
        "ladder", "x", 1, {"n": at}, "m", unit, "higher", "0" * 64, "ok", value, fraction=share,
        ceilings=(Ceiling("[x]\n", draw(st.none() | ANY), "measured", ""),), detail=detail,
    )  # fmt: skip
    return Point(row, value, draw(st.none() | ANY), draw(st.none() | ANY), ("run",))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.lists(hostile(), min_size=1, max_size=4))
def test_no_point_breaks_a_rule(rule: str, points: list[Point]) -> None:
    rows = {"it": points, **dict.fromkeys(("top", "other_top", "cost"), points[:1]),
            **dict.fromkeys(("bottom", "other_bottom", "residual"), points[-1:])}  # fmt: skip
    with contextlib.suppress(Undecided):
        assert isinstance(found(rule, rows, **ARGS[rule]).value, float)


def test_every_rule_is_tested_here() -> None:
    assert set(ARGS) == set(RULES)
