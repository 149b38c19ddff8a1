"""Digests identify a case for good: literal values here, so that a change of the recipe cannot pass unseen."""

from __future__ import annotations

import pytest

from kvbench.contract import axis
from kvbench.contract.bench import bench
from kvbench.contract.case import Case, case_digest
from kvbench.contract.result import Ceiling, Result


def host_bandwidth(case: Case, measure: object) -> None:
    """Bandwidth."""


DECLARED = bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", op=axis.choice("read", "write"),
    bytes=axis.bytes(smoke=["4KiB"], quick=["4KiB"], full=["4KiB"]), threads=axis.threads(),
)(host_bandwidth).in_suite("ladder", "here.py")  # fmt: skip


def test_the_digest_is_that_of_the_documented_canonical_json() -> None:
    case = DECLARED.case({"op": "read", "threads": "all", "bytes": 4096})
    assert case.digest == "c92f94f52ae082cab4c3fbbbea3b21749d207bfd765f8ab166a1d32793341343"


def test_the_order_axes_are_given_in_does_not_matter_but_types_do() -> None:
    one = DECLARED.case({"op": "read", "threads": 1, "bytes": 4096})
    assert DECLARED.case({"bytes": 4096, "threads": 1, "op": "read"}).digest == one.digest
    assert case_digest("ladder", "host_bandwidth", 1, {"op": "read", "threads": "1", "bytes": 4096}, {}) != one.digest
    assert case_digest("ladder", "host_bandwidth", 2, dict(one.axes), {}) != one.digest


def test_an_axis_added_later_keeps_history_at_its_default() -> None:
    before = {"op": DECLARED.axes["op"]}
    later = {**before, "hint": axis.choice("none", "nta", since="2", default="none")}
    old = case_digest("s", "b", 1, {"op": "read"}, before)
    assert case_digest("s", "b", 1, {"op": "read", "hint": "none"}, later) == old
    assert case_digest("s", "b", 1, {"op": "read", "hint": "nta"}, later) != old


def test_attribute_access_gives_the_resolved_number_behind_a_word() -> None:
    case = DECLARED.case({"op": "read", "threads": "all", "bytes": 4096})
    assert case.threads == "all"
    resolved = Case(case.suite, case.bench, case.version, case.axes, case.digest, {"threads": 2})
    assert resolved.threads == 2
    assert resolved.op == "read"
    with pytest.raises(AttributeError, match="no axis 'pages'"):
        _ = resolved.pages
    assert case.text(DECLARED.axes) == "ladder/host_bandwidth op=read bytes=4KiB threads=all"


@pytest.mark.parametrize(
    "changes",
    [{"version": 0}, {"better": "bigger"}, {"digest": axis.threads()}, {"pages": "4k"}, {"_x": axis.threads()},
     {"op": axis.Axis("choice", (), (), (), since="2")}],
)  # fmt: skip
def test_a_bench_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    given = {"version": 1, "metric": "m", "unit": "s", "better": "lower", **changes}
    with pytest.raises(ValueError):
        bench(**given)  # type: ignore[arg-type]


def test_a_row_never_holds_a_number_that_is_none() -> None:
    row = Result("s", "b", 1, {}, "m", "s", "lower", "d", "ok", value=1.0)
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="never NaN"):
            row.with_(value=bad)
        with pytest.raises(ValueError, match="never NaN"):
            row.with_(detail={"x": bad})
        with pytest.raises(ValueError, match="never NaN"):
            row.with_(samples=(1.0, bad))
        with pytest.raises(ValueError, match="never NaN"):
            row.with_(ceilings=(Ceiling("c", bad, "measured", "x"),))
    with pytest.raises(ValueError, match="skipped row"):
        row.with_(status="skipped")
    with pytest.raises(ValueError, match="status"):
        row.with_(status="fine")
    assert Result.from_wire(row.to_wire()) == row
