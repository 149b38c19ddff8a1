"""Pictures of replays: curves over the rate, a line a policy, and what was waited for."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.contract.result import Result
from kvbench.report.drawing import to_svg
from kvbench.report.html import Contents, make_report
from kvbench.report.pooled import pool
from kvbench.report.replay_figures import replay_figures
from kvbench.report.replay_rows import digest_of, replays, sustained
from tests.needs import missing_module, require
from tests.report.made import case, side


@pytest.fixture(autouse=True)
def extra() -> None:
    require("the extra report", missing_module("vl_convert"))


def rows(policy: str, rate: int, **metrics: float | None) -> list[Result]:
    """Return the rows of one replay at ``rate`` requests in 1000 s."""
    axes: dict[str, Any] = {
        "workload": "loogle", "policy": policy, "params": "default", "machine": "h200", "model": "llama-3-8b",
        "rate_milli": rate, "requests": 10, "seed": 0, "in_flight": 0, "slo_ttft_us": 2_000_000, "slo_tpot_us": 0,
    }  # fmt: skip
    units = {"ttft_mean": "s", "ttft_p99": "s", "tpot_mean": "s"}
    found = {"request_rate": rate / 1e3, **metrics}
    return [
        case("routes", "replay", axes, value, metric=name, basis="simulated", low=None, high=None,
             unit=units.get(name, "1"), status="ok" if value is not None else "skipped",
             detail={"digest": f"{rate:064x}"})
        for name, value in found.items()
    ]  # fmt: skip


def figures(*replayed: list[Result]) -> list[Any]:
    return list(replay_figures(pool(0, side("a", [[row for own in replayed for row in own]]).runs), ("a",)))


def test_rates_are_curves_with_a_line_a_policy() -> None:
    found = figures(
        *(
            rows(name, rate, ttft_mean=rate / 1e3 * k, stall_link_in=0.1 * k - 0.1)
            for name, k in (("lru", 1), ("neo", 2)) for rate in (500, 1000, 4000)
        ),
    )  # fmt: skip
    assert [figure.title for figure in found] == [
        "routes/replay: ttft_mean", "routes/replay: request_rate", "routes/replay: stalls"
    ]  # fmt: skip
    points = found[0].spec["data"]["values"]
    assert [(p["series"], p["x"], p["y"]) for p in points][:3] == [
        ("lru", 0.5, 0.5),
        ("lru", 1.0, 1.0),
        ("lru", 4.0, 4.0),
    ]
    assert {p["series"] for p in points} == {"lru", "neo"}
    assert found[1].notes == ("equal: lru, neo",)
    assert found[0].notes == ()
    assert [(d["case"], d["cause"]) for d in found[2].spec["data"]["values"]] == [
        (f"neo at {rate:g}/s", "link_in") for rate in (0.5, 1, 4)
    ]
    assert all(figure.basis == ("simulated",) and to_svg(figure.spec).startswith("<svg") for figure in found)


def test_more_policies_than_colours_are_cut_into_figures() -> None:
    found = figures(*(rows(f"p{i}", rate, ttft_mean=1.0 + i) for i in range(11) for rate in (500, 1000)))
    drawn = [{p["series"] for p in figure.spec["data"]["values"]} for figure in found if "ttft" in figure.title]
    assert [len(names) for names in drawn] == [8, 3]


def test_one_rate_is_a_line_a_case_and_what_has_no_value_is_not_drawn() -> None:
    found = figures(rows("lru", 1000, tpot_mean=None, hit_rate=0.5), rows("neo", 1000, hit_rate=0.25))
    assert {figure.title.split(":")[1].split()[0] for figure in found} == {"request_rate", "hit_rate"}


def test_the_report_shows_them() -> None:
    both = [*rows("lru", 500, goodput=0.4), *rows("lru", 2000, goodput=0.0)]
    made = make_report(Contents(sides=(side("a", [both]),), made_at="2026-01-01T00:00:00+00:00"))
    assert "routes/replay: goodput" in made.html
    assert made.undrawn == 0


def test_goodput_of_a_sweep_is_the_highest_rate_that_holds() -> None:
    both = [
        ("run", row) for name, shares in (("lru", (1.0, 0.9, 0.89)), ("neo", (0.5, 0.4, 0.3)))
        for rate, share in zip((500, 1000, 2000), shares, strict=True) for row in rows(name, rate, attainment=share)
    ]  # fmt: skip
    found = replays(both)
    assert sustained(found) == {("lru", "default"): 1.0, ("neo", "default"): None}
    assert digest_of(found[:1]) == found[0].digest
    assert digest_of(found) not in {each.digest for each in found}
    assert digest_of(found) != digest_of(found[::-1])
    assert digest_of([]) is None
