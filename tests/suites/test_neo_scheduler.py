"""neo_output_length, kv_budget and routes/executor as the worker runs them: honest rows."""

from __future__ import annotations

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.worker import measure_case


def case(known: Context, suite: str, name: str, /, **axes: Value) -> dict[str, Result]:
    bench = load_suites().find(suite, name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    assert bench.where is None or bench.where(values)
    rows = measure_case(bench, values, known)
    return {row.metric: row for row in rows}


def test_gain_by_output_length(context: Context) -> None:
    rows = case(context, "neo", "neo_output_length", output=50, requests=60)
    assert {row.basis for row in rows.values()} == {"simulated"}
    assert {row.status for row in rows.values()} == {"ok"}
    gain, neo, alone = (rows[metric].value for metric in ("gain", "neo_rate", "gpu_only_rate"))
    assert gain is not None
    assert neo is not None
    assert alone is not None
    assert gain == pytest.approx(neo / alone)
    assert rows["gain"].detail["paper"] == 1.03
    share = rows["cpu_decode_share"].value
    assert share is not None
    assert 0.0 < share < 1.0
    again = case(context, "neo", "neo_output_length", output=50, requests=60)
    assert again["gain"].value == gain
    assert again["gain"].detail["digest"] == rows["gain"].detail["digest"]


def test_the_cpu_is_varied_on_one_machine_only() -> None:
    where = load_suites().find("neo", "neo_output_length").where
    assert where is not None
    assert where({"machine": "a10g", "cpu": 4})
    assert not where({"machine": "t4", "cpu": 4})


def test_outputs_of_one_token_have_no_decodes(context: Context) -> None:
    rows = case(context, "neo", "neo_output_length", output=1, requests=20)
    assert rows["gain"].value == pytest.approx(1.0, abs=0.05)
    share = rows["cpu_decode_share"]
    assert share.value is None
    assert share.status == "skipped"
    assert share.reason


def test_what_does_not_fit_is_skipped(context: Context) -> None:
    long = case(context, "neo", "neo_output_length", machine="t4", output=700)
    assert long["gain"].status == "skipped"
    assert "do not fit" in long["gain"].reason
    few = case(context, "neo", "kv_budget", blocks=20)
    assert "20 blocks" in few["gain"].reason
    many = case(context, "neo", "kv_budget", blocks=6600)
    assert "weights leave" in many["gain"].reason


def test_starved_gains_more(context: Context) -> None:
    starved, ample = (case(context, "neo", "kv_budget", blocks=blocks, requests=40) for blocks in (54, 1650))
    first, last = starved["gain"].value, ample["gain"].value
    assert first is not None
    assert last is not None
    assert first > 1.5 > last
    assert last == pytest.approx(1.0, abs=0.1)
    for rows in (starved, ample):
        for metric in ("knee_rate", "gpu_only_knee", "knee_gain"):
            assert rows[metric].basis == "simulated"
            assert (rows[metric].value is None) is (rows[metric].status == "skipped")


def test_a_replay_carried_out(context: Context) -> None:
    rows = case(context, "routes", "executor", near="h100", layers=2, requests=6)
    executed = rows["executed_time"]
    if executed.status == "skipped":
        assert "a core each" in executed.reason
        return
    assert executed.status in HAS_VALUE
    assert executed.basis == "emulated"
    simulated, error = rows["simulated_time"], rows["executor_error"]
    assert simulated.basis == "simulated"
    assert executed.value is not None
    assert simulated.value is not None
    assert error.value == pytest.approx(executed.value / simulated.value - 1.0)
    assert error.basis == "emulated"
    assert error.status == executed.status
    assert executed.detail["copy_bandwidth"]
    share = executed.detail["paced_share"]
    assert isinstance(share, float)
    assert 0.0 < share < 1.0
    assert rows["iteration_error"].n == executed.detail["working_iterations"]
    assert (rows["work_error"].value is None) is (rows["work_error"].status == "skipped")


def test_a_real_near_side_is_measured(context: Context) -> None:
    rows = case(context, "routes", "executor", near="blas", offload="all", layers=2, requests=4)
    executed = rows["executed_time"]
    if executed.status != "skipped":
        assert executed.basis == rows["executor_error"].basis == "measured"
        assert rows["simulated_time"].basis == "simulated"
        assert "BLAS" in (executed.kernel or "")


def test_a_real_near_side_has_no_near_kv() -> None:
    where = load_suites().find("routes", "executor").where
    assert where is not None
    assert where({"near": "blas", "offload": "all"})
    assert not where({"near": "blas", "offload": "part"})
