"""The replay benches of eLLM, run as the worker runs them."""

from __future__ import annotations

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Result
from kvbench.worker import measure_case


def run(worker: Context, name: str, **axes: Value) -> dict[str, Result]:
    bench = load_suites().find("ellm", name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    assert bench.where is None or bench.where(values)
    return {row.metric: row for row in measure_case(bench, values, worker)}


def value(row: Result) -> float:
    assert row.value is not None, row.reason
    return row.value


@pytest.mark.parametrize("pools", ["none", "intra", "inter", "both"])
def test_replay_elastic_gives_simulated_rows_that_add_up(context: Context, pools: str) -> None:
    rows = run(context, "replay_elastic", pools=pools, requests=30)
    bench = load_suites().find("ellm", "replay_elastic")
    assert set(rows) == {bench.metric, *bench.extra_metrics}
    assert all((row.status, row.basis) == ("ok", "simulated") for row in rows.values())
    assert value(rows["token_rate"]) == pytest.approx(2048 * value(rows["request_rate"]))
    assert value(rows["goodput"]) == pytest.approx(value(rows["request_rate"]) * value(rows["attainment"]))
    assert value(rows["ttft_mean"]) <= value(rows["ttft_p99"])
    assert (value(rows["map_share"]) > value(rows["map_wait"]) > 0.0) == (pools in ("intra", "both"))
    assert (value(rows["small_prefills"]), value(rows["short_prompts"])) == (1.0, 1.0)


def test_all_at_once_and_requests_that_do_not_fit(context: Context) -> None:
    rows = run(context, "replay_elastic", pools="none", workload="8k-2k", rate_milli=0, requests=6, context=32768)
    assert value(rows["largest_batch"]) == 6.0
    assert (value(rows["short_prompts"]), value(rows["small_prefills"])) == (0.0, 0.0)  # prompts of 24K go together
    rows = run(context, "replay_elastic", pools="none", workload="8k-2k", context=8192)
    assert rows["token_rate"].status == "skipped"
    assert "longest context" in rows["token_rate"].reason
    rows = run(context, "replay_elastic", pools="none", machine="a10g")
    assert rows["token_rate"].status == "skipped"
    assert "activations of the longest prefill" in rows["token_rate"].reason
    chats = run(context, "replay_elastic", pools="intra", workload="sharegpt", rate_milli=4000, requests=60)
    assert 0.8 < value(chats["short_prompts"]) <= 1.0


def test_replay_slo_moves_a_scaled_buffer_alone(context: Context) -> None:
    fixed = run(context, "replay_slo", policy="fixed", slo=5, size_percent=25)
    scaled = run(context, "replay_slo", policy="scaled", slo=5, size_percent=25)
    assert value(fixed["mean_size"]) == pytest.approx(0.25, rel=1e-3)
    assert "reversals" not in fixed
    assert scaled["attainment"].detail["changes"] > 0  # type: ignore[operator]
    assert value(scaled["mean_size"]) != pytest.approx(0.25, rel=1e-3)
    for rows in (fixed, scaled):
        assert all(row.basis == "simulated" for row in rows.values())
        least = min(value(rows["ttft_attainment"]), value(rows["tpot_attainment"]))
        assert value(rows["attainment"]) <= least
