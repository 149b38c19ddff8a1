"""Cost tables: interpolation, flags beyond the grid, holes, their error, and the way back from a run's rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import NoData, UsageError
from kvbench.systems.neo.costs import SCHEMA, Line, Plane, Tables, tables_from_rows

LINE = Line("linr", (1, 2, 4, 8), (1.0, 1.0, 2.0, 6.0))
PLANE = Plane("cdec", (1, 4), (16, 64, 256), ((1.0, 4.0, 16.0), (None, 5.0, 17.0)))


def test_a_line_interpolates_between_neighbours() -> None:
    assert [LINE.at(x).seconds for x in (0, 1, 3, 4, 6, 8)] == [0.0, 1.0, 1.5, 2.0, 4.0, 6.0]
    assert not LINE.at(6).extrapolated


def test_beyond_the_grid_is_flagged_and_goes_on_as_the_last_segment_does() -> None:
    beyond = LINE.at(10)
    assert (beyond.seconds, beyond.extrapolated) == (8.0, True)
    assert "measured from 1 to 8, asked for 10" in beyond.reason
    below = Line("pref", (64, 128), (1.0, 3.0)).at(2)
    assert (below.seconds, below.extrapolated) == (0.0, True)


def test_one_point_answers_for_itself_only() -> None:
    one = Line("gdec", (1024,), (0.5,))
    assert one.at(1024).seconds == 0.5
    assert one.at(2048).seconds is None
    assert "one point" in one.at(2048).reason
    assert one.error().median is None


def test_a_plane_is_bilinear_flagged_outside_and_silent_beside_holes() -> None:
    assert PLANE.at(1, 16).seconds == 1.0
    assert PLANE.at(1, 40).seconds == pytest.approx(2.5)
    assert PLANE.at(2, 160).seconds == pytest.approx(10.0 + 1 / 3)
    assert PLANE.at(0, 160).seconds == PLANE.at(3, 0).seconds == 0.0
    assert PLANE.at(1, 512).extrapolated
    assert PLANE.at(1, 512).seconds == pytest.approx(32.0 + 1 / 3, abs=0.4)
    assert PLANE.at(8, 64).extrapolated
    hole = PLANE.at(2, 20)
    assert hole.seconds is None
    assert "hole at 4 requests of 16 tokens" in hole.reason
    assert PLANE.at(4, 64).seconds == 5.0  # a hole beside it does not matter on a grid point


def test_the_error_of_interpolating_is_that_of_points_left_out() -> None:
    found = LINE.error()  # 2 from 1 and 4: 4/3; 4 from 2 and 8: 8/3
    assert found.n == 2
    assert found.worst == pytest.approx(1 / 3)
    assert found.median == pytest.approx(1 / 3)
    assert Line("gdec", (1, 2, 4), (3.0, 6.0, 12.0)).error().worst == pytest.approx(0.0)
    plane = PLANE.error()
    assert plane.n == 1
    assert plane.worst == pytest.approx(0.0)


@given(st.integers(1, 8), st.integers(16, 256))
def test_a_bilinear_law_is_met_everywhere(requests: int, tokens: int) -> None:
    def law(r: int, t: int) -> float:
        return 1.0 + 0.5 * r + 0.25 * t + 0.125 * r * t

    grid = Plane("cdec", (1, 3, 8), (16, 100, 256), tuple(tuple(law(r, t) for t in (16, 100, 256)) for r in (1, 3, 8)))
    found = grid.at(requests, tokens)
    assert found.seconds == pytest.approx(law(requests, tokens))
    assert not found.extrapolated


def test_bad_tables_are_refused() -> None:
    for bad in (
        lambda: Line("linr", (2, 1), (1.0, 1.0)), lambda: Line("linr", (1, 2), (1.0, -1.0)),
        lambda: Line("linr", (1,), (1.0, 2.0)), lambda: Line("linr", (), ()), lambda: LINE.at(-1),
        lambda: Plane("cdec", (1,), (1, 2), ((1.0,),)), lambda: Plane("cdec", (1,), (1,), ((float("nan"),),)),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            bad()


def row(table: str, near: str, tokens: int, requests: int, value: float | None, **other: Any) -> dict[str, Any]:
    axes: dict[str, Any] = {
        "table": table,
        "near": near,
        "tokens": tokens,
        "requests": requests,
        "model": "llama-3-8b",
        "threads": "all",
    }
    plain = {
        "suite": "neo", "bench": "cost_tables", "bench_version": 1, "metric": "stage_time", "axes": axes,
        "value": value, "status": "ok" if value is not None else "skipped",
        "basis": "measured" if near == "cpu" else "modelled",
    }  # fmt: skip
    return {**plain, **other}


ROWS = [
    row("linr", "T4", 16, 1, 1.0), row("linr", "T4", 256, 1, 2.0), row("pref", "T4", 256, 1, 0.5),
    row("gdec", "T4", 1024, 1, 0.25), row("lnch", "T4", 16, 1, 1e-4, basis="emulated"),
    row("cdec", "cpu", 1024, 1, 0.5), row("cdec", "cpu", 4096, 1, 2.0), row("cdec", "cpu", 4096, 4, 2.5),
    row("cdec", "cpu", 1024, 4, None), row("linr", "A10G", 16, 1, 9.0),
]  # fmt: skip


def test_tables_come_back_from_the_rows_of_a_run() -> None:
    found = tables_from_rows(ROWS, near="T4")
    assert found.linr == Line("linr", (16, 256), (1.0, 2.0))
    assert found.cdec == Plane("cdec", (1, 4), (1024, 4096), ((0.5, 2.0), (None, 2.5)))
    assert found.lnch == 1e-4
    assert found.basis == {
        "cdec": "measured",
        "gdec": "modelled",
        "linr": "modelled",
        "lnch": "emulated",
        "pref": "modelled",
    }
    assert found.missing == ("cdec at 4 requests, 1024 tokens: skipped",)


def test_a_cell_is_the_median_of_its_runs_and_only_ok_rows_count() -> None:
    more = [row("linr", "T4", 16, 1, v) for v in (3.0, 5.0)]
    tainted = row("linr", "T4", 512, 1, 7.0, status="tainted")
    found = tables_from_rows([*ROWS, *more, tainted], near="T4")
    assert found.linr == Line("linr", (16, 256), (3.0, 2.0))
    assert "linr at 1 requests, 512 tokens: tainted" in found.missing


def test_rows_that_make_no_table_are_named() -> None:
    with pytest.raises(NoData, match=r"no usable rows for lnch.*kvbench run neo/cost_tables -a near=cpu,T4"):
        tables_from_rows([r for r in ROWS if r["axes"]["table"] != "lnch"], near="T4")
    with pytest.raises(NoData, match="no such rows"):
        tables_from_rows([], near="T4")
    with pytest.raises(UsageError, match="another version"):
        tables_from_rows([{**ROWS[0], "bench_version": 2}], near="T4")


def test_the_document_is_versioned_and_comes_back() -> None:
    found = tables_from_rows(ROWS, near="T4")
    text = json.dumps(found.to_json(), allow_nan=False)
    data = json.loads(text)
    assert data["schema"] == SCHEMA
    assert data["interpolation_error"]["linr"] == {"n": 0, "median": None, "worst": None}
    assert Tables.from_json(data) == found
    for bad in (
        {**data, "schema": "kvbench.costs/2"},
        {k: v for k, v in data.items() if k != "cdec"},
        {**data, "lnch": "x"},
    ):
        with pytest.raises(UsageError):
            Tables.from_json(bad)
