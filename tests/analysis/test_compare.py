"""What is matched, what may be compared, and what is said when nothing may."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.analysis.compare import Comparison, Row, compare, differences, window
from kvbench.contract.result import Result
from tests.analysis.sides import around, ceiling, each, row, side


def only(found: Comparison) -> Row:
    (single,) = found.rows
    return single


@pytest.mark.parametrize(("factor", "word"), [(1.0, "SAME"), (0.9, "SLOWER"), (1.1, "FASTER")])
def test_a_change_in_five_runs_a_side(factor: float, word: str) -> None:
    found = compare([side("a", around(1.0)), side("b", around(factor))])
    assert (only(found).verdict, found.verdict) == (word, word)
    assert only(found).ratio == pytest.approx(factor)
    assert only(found).comparable == "comparable"
    assert only(found).runs_a == only(found).runs_b == 5


def test_one_run_a_side_gives_the_ratio_and_no_verdict() -> None:
    found = compare([side("a", around(1.0, runs=1)), side("b", around(2.0, runs=1))])
    assert (only(found).verdict, only(found).ratio) == ("INCONCLUSIVE", pytest.approx(2.0))
    assert only(found).low is None
    assert "4 are needed" in only(found).reason


def test_a_latency_is_better_when_lower() -> None:
    a, b = around(1.0, unit="s", better="lower"), around(1.2, unit="s", better="lower")
    found = compare([side("a", a), side("b", b)])
    assert only(found).verdict == "SLOWER"
    assert only(found).loss == pytest.approx(0.2)


def test_missing_and_extra_cases_are_kept_apart() -> None:
    found = compare([side("a", around(1.0, cases=3)), side("b", [rows[1:] for rows in around(1.0, cases=4)])])
    (other,) = found.against
    assert len(other.rows) == 2
    assert [r.axes["bytes"] for r in other.missing] == [4096]
    assert [r.axes["bytes"] for r in other.extra] == [4 * 4096]


def test_two_stores_with_nothing_in_common_have_no_data() -> None:
    found = compare([side("a", [[row(1, 1e10)]]), side("b", [[row(2, 1e10)]])])
    assert (found.verdict, found.matched) == ("NO_DATA", 0)


@pytest.mark.parametrize("status", ["skipped", "failed"])
def test_a_side_without_a_value_has_no_data_and_says_why(status: Any) -> None:
    b = each(around(1.0), lambda r: r.with_(value=None, status=status, reason="no such tier"))
    found = compare([side("a", around(1.0)), side("b", b)])
    assert (only(found).verdict, only(found).b) == ("NO_DATA", None)
    assert "no such tier" in only(found).reason


def test_an_invalid_value_is_none() -> None:
    b = each(around(5.0), lambda r: r.with_(status="invalid", reason="2.0 x the physical ceiling"))
    found = compare([side("a", around(1.0)), side("b", b)])
    assert (only(found).verdict, only(found).b) == ("NO_DATA", None)


def test_tainted_runs_are_left_out_while_four_clean_ones_remain() -> None:
    b = around(1.0)
    b[0][0] = b[0][0].with_(value=5e9, status="tainted")
    found = compare([side("a", around(1.0)), side("b", b)])
    assert (only(found).verdict, only(found).runs_b) == ("SAME", 4)
    assert "1 tainted" in only(found).reason
    b[1][0] = b[1][0].with_(status="tainted")
    assert only(compare([side("a", around(1.0)), side("b", b)])).verdict == "TAINTED"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"unit": "FLOP/s"}, "unit"), ({"better": "lower"}, "better"), ({"basis": "modelled"}, "basis"),
        ({"rate_of": "demand"}, "rate_of"), ({"flags": ("in_llc",)}, "in_llc"),
    ],
)  # fmt: skip
def test_what_is_another_thing_is_incomparable(change: dict[str, Any], field: str) -> None:
    found = compare([side("a", around(1.0)), side("b", around(1.0, **change))])
    assert (only(found).verdict, only(found).comparable) == ("INCOMPARABLE", "incomparable")
    assert field in only(found).differs
    assert only(found).ratio is None


@pytest.mark.parametrize("basis", ["modelled", "emulated", "simulated"])
def test_numbers_nobody_measured_are_never_compared(basis: Any) -> None:
    found = compare([side("a", around(1.0, basis=basis)), side("b", around(1.0, basis=basis))])
    assert only(found).verdict == "INCOMPARABLE"


def test_another_version_of_the_bench_is_incomparable_and_not_missing() -> None:
    def newer(found: Result) -> Result:
        return found.with_(bench_version=2, digest="f" * 64)

    found = compare([side("a", around(1.0)), side("b", each(around(1.0), newer))])
    assert (only(found).verdict, found.against[0].missing) == ("INCOMPARABLE", ())
    assert "version 1 against 2" in only(found).reason


def test_values_that_look_alike_are_other_cases() -> None:
    axes: list[dict[str, Any]] = [{"n": 1}, {"n": "1"}]
    found = compare([side("a", [[row(0, 1e10, axes=axes[0])]]), side("b", [[row(0, 1e10, axes=axes[1])]])])
    assert list(found.rows) == []
    assert len(found.against[0].missing) == len(found.against[0].extra) == 1


def test_other_hardware_with_the_same_words_is_compared_by_fractions() -> None:
    a = around(1.0, resolved={"threads": 2}, ceilings=ceiling(2e10), fraction=0.5)
    b = around(4.0, resolved={"threads": 64}, ceilings=ceiling(5e10), fraction=0.8)
    found = compare([side("a", a), side("b", b, hw_class="cpu-b")])
    assert (only(found).comparable, only(found).compares) == ("normalised", "fraction")
    assert only(found).ratio == pytest.approx(1.6)
    assert (only(found).a, only(found).b) == (pytest.approx(1e10, rel=0.01), pytest.approx(4e10, rel=0.01))
    assert set(only(found).differs) == {"threads", "hw_class"}
    assert only(found).verdict == "FASTER"


def test_without_a_common_ceiling_nothing_is_said_of_other_resolved_numbers() -> None:
    a, b = around(1.0, resolved={"threads": 2}), around(4.0, resolved={"threads": 64})
    assert only(compare([side("a", a), side("b", b)])).verdict == "INCONCLUSIVE"


def test_other_hardware_with_the_same_case_is_comparable_and_says_what_differs() -> None:
    machines = [{"machine": {"key": {"cores": cores, "gpus": []}}} for cores in (2, 64)]
    sides = [side("a", around(1.0), **machines[0]), side("b", around(3.0), hw_class="cpu-b", **machines[1])]
    found = compare(sides)
    assert (only(found).comparable, only(found).differs) == ("comparable", ("hw_class",))
    assert found.against[0].hardware == (("cores", "2", "64"),)


def canary(factor: float) -> list[Result]:
    return [row(0, 1e9 * factor, suite="canary", metric="rate")]


def test_a_canary_that_moved_taints_everything_on_the_same_hardware() -> None:
    a = [[*rows, *canary(1.0)] for rows in around(1.0)]
    b = [[*rows, *canary(0.8)] for rows in around(1.0)]
    found = compare([side("a", a), side("b", b)])
    assert (only(found).verdict, found.verdict) == ("TAINTED", "TAINTED")
    assert found.against[0].moved
    elsewhere = compare([side("a", a), side("b", b, hw_class="cpu-b")])
    assert only(elsewhere).verdict == "SAME"


def test_rows_that_all_lean_one_way_speak_for_the_environment() -> None:
    found = compare([side("a", around(1.0, cases=20)), side("b", around(0.99, cases=20))])
    assert "20 of 20 rows are slower" in found.against[0].balance
    few = compare([side("a", around(1.0, cases=5)), side("b", around(0.99, cases=5))])
    assert few.against[0].balance == ""


def test_three_sides_are_each_held_against_the_first() -> None:
    found = compare([side("a", around(1.0)), side("b", around(1.1)), side("c", around(0.9))])
    assert [r.verdict for r in found.rows] == ["FASTER", "SLOWER"]
    assert [r.side for r in found.rows] == [1, 2]
    assert found.verdict == "SLOWER"


def test_one_side_is_refused() -> None:
    with pytest.raises(ValueError, match="two sides"):
        compare([side("a", around(1.0))])


def test_differences_name_fields_at_every_depth() -> None:
    a = {"gpu": {"driver": "550", "cuda": 12}, "kernel": "6.1", "same": 1}
    b = {"gpu": {"driver": "570", "cuda": 12}, "same": 1, "new": True}
    assert list(differences(a, b)) == [("gpu.driver", "550", "570"), ("kernel", "6.1", "-"), ("new", "-", "True")]


def test_the_window_of_a_sample_is_its_share_of_the_sampled_time() -> None:
    assert window(row(0, 1e10, n=6)) == pytest.approx(0.6 * 0.99 / 6)
    assert window(row(0, 1e10, n=6, detail={})) is None


def test_a_short_window_widens_the_margin_of_its_row() -> None:
    short = {"reps": 1, "sampled_seconds": 30e-6, "window_share": 1.0, "gated": 0}
    found = compare([side("a", around(1.0, detail=short)), side("b", around(0.97, detail=short))])
    assert only(found).margin == pytest.approx(200e-9 / 5e-6)
    assert only(found).verdict != "SLOWER"
