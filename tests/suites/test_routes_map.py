"""The map of routes, run as the worker runs it."""

from __future__ import annotations

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Result
from kvbench.worker import measure_case


def run(worker: Context, **axes: Value) -> dict[str, Result]:
    bench = load_suites().find("routes", "map")
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    return {row.metric: row for row in measure_case(bench, values, worker)}


def test_a_place_has_every_policy_and_route_and_says_what_each_number_is(context: Context) -> None:
    bench = load_suites().find("routes", "map")
    rows = run(context, link=450, context=2048, questions=3)
    assert set(rows) == {bench.metric, *bench.extra_metrics}
    assert {row.status for row in rows.values()} == {"ok"}
    for metric, row in rows.items():
        assert row.basis == ("simulated" if metric.startswith(("route_", "rate_")) else "modelled")
    gain, detail = rows["route_gain"], rows["route_gain"].detail
    rates = {name.removeprefix("rate_"): row.value for name, row in rows.items() if name.startswith("rate_")}
    assert gain.value == pytest.approx(rates[str(detail["winner"])] / rates["recompute"])  # type: ignore[operator]
    assert (detail["route"], detail["model_winner"], detail["agree"]) == ("load", "load", True)
    assert gain.value is not None
    assert gain.value > 1.3


def test_contexts_asked_once_leave_nothing_to_load(context: Context) -> None:
    rows = run(context, link=12, context=2048, questions=1)
    assert rows["route_gain"].value == pytest.approx(1.0, abs=0.011)
    assert rows["rate_lru"].value == pytest.approx(rows["rate_recompute"].value, rel=0.02)
    assert rows["rate_directkv"].value < rows["rate_recompute"].value  # type: ignore[operator]


def test_a_model_that_does_not_fit_is_no_place_of_the_map(context: Context) -> None:
    rows = run(context, machine="t4", model="llama-2-7b", link=12, context=256, questions=1, fits=1, output=4)
    assert rows["route_gain"].status == "ok"  # near memory is what the map says, not the T4's


def test_a_policy_without_a_rate_says_what_its_first_request_lacked(context: Context) -> None:
    rows = run(context, link=450, context=2048, questions=3, fits=1)
    gone = [row for name, row in rows.items() if name.startswith("rate_") and row.value is None]
    assert gone
    for row in gone:
        assert row.status == "skipped"
        assert row.reason.startswith("30 of 30 requests rejected, the first, request 0: "), row.reason
        assert "larger than memory" not in row.reason
