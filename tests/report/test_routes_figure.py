"""The picture of the map: one a number of questions, coloured by winner, framed where the model says another."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.contract.result import Result
from kvbench.report.drawing import to_svg
from kvbench.report.html import Contents, make_report
from kvbench.report.pooled import pool
from kvbench.report.routes_figure import map_figures
from tests.needs import missing_module, require
from tests.report.made import case, side


@pytest.fixture(autouse=True)
def extra() -> None:
    require("the extra report", missing_module("vl_convert"))


def place(link: int, context: int, winner: str, *, agree: bool = True, questions: int = 3, **changes: Any) -> Result:
    axes = {
        "link": link, "context": context, "questions": questions, "fits": 4, "output": 64, "machine": "h200",
        "model": "llama-3-8b",
    }  # fmt: skip
    detail = {"winner": winner, "second": "recompute", "model_winner": "load", "agree": agree}
    values = {"metric": "route_gain", "unit": "1", "basis": "simulated", "detail": detail, "low": None, "high": None}
    return case("routes", "map", axes, 1.5 + link / 100, **(values | changes))


def drawn(*places: Result) -> list[Any]:
    return list(map_figures(pool(0, side("a", [list(places)]).runs), ("a",)))


def test_a_map_for_each_number_of_questions() -> None:
    found = drawn(
        place(12, 2048, "strata"), place(450, 2048, "lru", agree=False), place(12, 8192, "strata"),
        place(12, 2048, "recompute", questions=1), place(450, 2048, "directkv", questions=1),
        place(12, 2048, "neo", questions=7),
    )  # fmt: skip
    assert [figure.title.endswith(end) for figure, end in zip(found, ("asked 3x", "asked 1x"), strict=True)]
    first = found[0]
    assert first.basis == ("simulated",)
    values = first.spec["data"]["values"]
    assert [(value["winner"], value["agree"]) for value in values] == [
        ("strata", True), ("lru", False), ("strata", True),
    ]  # fmt: skip
    assert "lru wins" in values[1]["tip"]
    colours = first.spec["layer"][0]["encoding"]["color"]["scale"]
    assert colours["domain"] == ["strata", "lru"]
    assert len(set(colours["range"])) == 2
    assert "<svg" in to_svg(first.spec)


def test_a_single_place_and_rows_of_other_makers_are_left_to_the_table() -> None:
    assert drawn(place(12, 2048, "strata")) == []
    odd: dict[str, Any] = {"detail": {"winner": "<script>"}}
    assert drawn(place(12, 2048, "strata", **odd), place(25, 2048, "strata", **odd)) == []


def test_the_report_draws_the_map_and_not_a_curve_of_every_rate() -> None:
    places = [place(link, 2048, "strata") for link in (12, 25)]
    report = make_report(Contents((side("a", [places]),), "2025-03-01T00:00:00+00:00", None))
    assert [each.figure.name for each in report.figures] == ["routes-map"]
    assert "which policy wins" in report.html
