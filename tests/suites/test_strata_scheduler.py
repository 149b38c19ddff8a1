"""hit_rate, scheduler_ablation, delay_hits and write_policies as the worker runs them: the signs of the paper."""

from __future__ import annotations

from functools import cache

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Result
from kvbench.worker import measure_case


@cache
def found(name: str) -> Bench:
    return load_suites().find("strata", name)


def case(known: Context, name: str, /, **axes: Value) -> dict[str, Result]:
    bench = found(name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    assert bench.where is None or bench.where(values)
    rows = {row.metric: row for row in measure_case(bench, values, known)}
    for row in rows.values():
        assert row.value is None or row.basis == "simulated"
        assert row.status == "ok" or row.reason
    return rows


def value(rows: dict[str, Result], metric: str) -> float:
    number = rows[metric].value
    assert number is not None
    return number


@pytest.mark.parametrize(("trace", "far"), [("sharegpt", "none"), ("sharegpt", "unlimited"), ("loogle", "unlimited")])
def test_the_hit_rate_does_not_rise_with_the_page(context: Context, trace: str, far: str) -> None:
    rows = [
        case(context, "hit_rate", trace=trace, far=far, page_tokens=page, requests=60) for page in (1, 4, 16, 64, 512)
    ]
    rates = [value(row, "hit_rate") for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1] > 0.0
    assert [value(row, "hit_loss") for row in rows] == pytest.approx([rates[0] - rate for rate in rates])
    padding = [value(row, "padding_share") for row in rows]
    assert padding[0] == 0.0
    assert padding == sorted(padding)


def test_a_page_loses_half_of_itself_where_prompts_part(context: Context) -> None:
    rows = case(context, "hit_rate", trace="sharegpt", far="unlimited", page_tokens=32, requests=400)
    detail = rows["hit_rate"].detail
    lost, hits = detail["lost_a_request"], detail["requests_with_hit"]
    assert isinstance(lost, float)
    assert isinstance(hits, int)
    assert 32 * 0.3 < lost * 400 / hits < 32 * 0.7


def ablation(known: Context, part: str, distance: str) -> float:
    rows = case(known, "scheduler_ablation", part=part, distance=distance, requests=300)
    return value(rows, "speedup")


def test_the_sign_of_each_part_is_the_paper_s(context: Context) -> None:
    defer = {distance: ablation(context, "defer", distance) for distance in ("min", "shuffle", "max")}
    assert defer["min"] > 1.05
    assert defer["min"] > defer["shuffle"] > 0.97
    assert defer["max"] == pytest.approx(1.0, abs=0.03)
    assert ablation(context, "balance", "min") == pytest.approx(1.0, abs=0.03)
    assert ablation(context, "io", "max") > 1.3
    for part, least in (("balance", 1.03), ("bubble", 1.0)):
        for distance in ("shuffle", "max"):
            assert ablation(context, part, distance) > least, (part, distance)


def test_all_parts_together(context: Context) -> None:
    rows = case(context, "scheduler_ablation", part="all", distance="max", requests=300)
    detail = rows["speedup"].detail
    assert value(rows, "speedup") > 2.0
    assert value(rows, "request_rate") / value(rows, "speedup") == pytest.approx(detail["rate_without"])
    assert detail["paper"] is None
    assert isinstance(detail["loading_bound"], float)
    assert 10.0 < detail["loading_bound"] < 63.0, "the onset of the roofline: 13 to 22 for this model in the facts"
    (row,) = case(context, "scheduler_ablation", part="all", requests=100, distance="min").values()
    assert row.status == "skipped"


def test_delay_hits_rise_and_saturate(context: Context) -> None:
    def share(**axes: Value) -> float:
        return value(case(context, "delay_hits", requests=300, **axes), "delayed_share")

    shares = [share(resolve_ms=ms, rate=4) for ms in (0, 100, 1000, 10_000, 100_000_000)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert share(resolve_ms=1000, rate=1) < share(resolve_ms=1000, rate=16)
    assert share(resolve_ms=1000, rate=4, trace="loogle") >= 0.0


def test_what_each_policy_writes(context: Context) -> None:
    def rows(trace: str, write: str, uses: int = 1) -> dict[str, Result]:
        return case(context, "write_policies", trace=trace, write=write, uses=uses, requests=200)

    for trace in ("one_shot", "multi_turn"):
        back, through = rows(trace, "write_back"), rows(trace, "write_through")
        selective = [rows(trace, "write_through_selective", uses) for uses in (1, 2, 4)]
        written = [value(row, "written") for row in selective]
        assert written == sorted(written, reverse=True)
        assert written[0] == value(through, "written") >= value(back, "written") > 0.0
        assert value(back, "eviction_wait") > 0.0
        assert [value(row, "eviction_wait") for row in (through, *selective)] == [0.0] * 4
        if trace == "one_shot":
            assert written[1:] == [0.0, 0.0], "what is asked for once is never written"
            assert selective[1]["loads_per_write"].value is None
            assert {value(row, "hit_rate") for row in (back, through, *selective)} == {0.0}
        else:
            assert 0.0 < written[1] < written[0]
            assert value(back, "hit_rate") > 0.3
            assert value(through, "loads_per_write") > 0.0
