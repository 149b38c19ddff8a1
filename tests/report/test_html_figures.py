"""What the figures of a report show: pooled runs, curves with fits, bars around 1, the ladder, series over time."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvbench.analysis.compare import compare
from kvbench.analysis.trend import trend
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Ceiling
from kvbench.report.curve_figures import bench_figures, size_axis
from kvbench.report.decision_figures import bars, gain, trend_figure
from kvbench.report.drawing import for_page, to_svg
from kvbench.report.figures import label_expression, log_ticks, size_ticks
from kvbench.report.ladder_figure import ASTRAY, PATHS, ladder_figure, rungs
from kvbench.report.pooled import pool, reading_order
from kvbench.store.decisions import KnownCase
from kvbench.store.series import Figure, Point
from tests.needs import missing_module, require
from tests.report.made import MACHINE, case, side


def values(figure: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = figure.spec["data"]["values"]
    return found


def test_several_runs_are_their_geometric_mean_and_extremes() -> None:
    runs = [[case("s", "b", {"n": 1}, value)] for value in (1e9, 4e9, 2e9)]
    (pooled,) = pool(0, side("a", runs).runs)
    assert pooled.row.value == pytest.approx(2e9)
    assert (pooled.row.low, pooled.row.high, pooled.runs, pooled.of) == (1e9, 4e9, 3, 3)


def test_one_run_keeps_its_interval() -> None:
    (pooled,) = pool(0, side("a", [[case("s", "b", {"n": 1}, 1e9)]]).runs)
    assert (pooled.row.low, pooled.row.high, pooled.runs) == (0.98e9, 1.02e9, 1)


@pytest.mark.parametrize(
    ("statuses", "status", "runs", "value"),
    [
        (("ok", "tainted", "ok"), "ok", 2, 1e9), (("tainted", "tainted", "skipped"), "tainted", 2, 1e9),
        (("failed", "skipped", "skipped"), "failed", 0, None), (("ok", "suspect", "failed"), "suspect", 2, 1e9),
        (("invalid", "failed", "invalid"), "invalid", 2, 1e9), (("ok", "invalid", "ok"), "ok", 2, 1e9),
    ],
)  # fmt: skip
def test_clean_runs_count_before_disturbed_ones(
    statuses: tuple[str, ...], status: str, runs: int, value: float | None
) -> None:
    made = [
        [case("s", "b", {"n": 1}, None if word in ("failed", "skipped") else 9e9 if word in ("tainted", "invalid")
              and status == "ok" else 1e9, status=word)] for word in statuses
    ]  # fmt: skip
    (pooled,) = pool(0, side("a", made).runs)
    assert (pooled.row.status, pooled.runs, pooled.of) == (status, runs, 3)
    assert pooled.row.value == (None if value is None else pytest.approx(value))
    assert pooled.drawable == (status not in ("failed", "invalid"))


def test_other_words_bases_and_ceilings_are_not_averaged() -> None:
    one, two = (case("s", "b", {"threads": "all"}, 1e9, resolved={"threads": n}) for n in (2, 4))
    assert len(pool(0, side("a", [[one], [two]]).runs)) == 2
    assert len(pool(0, side("a", [[one], [one.with_(basis="modelled")]]).runs)) == 2
    other = one.with_(ceilings=(Ceiling("another", 5e9, "measured", "x"),), fraction=0.2)
    (pooled,) = pool(0, side("a", [[one], [other]]).runs)
    assert (pooled.row.ceilings, pooled.row.fraction) == ((), None)


def test_a_row_without_value_joins_the_case_it_belongs_to() -> None:
    skipped = case("s", "b", {"threads": "all"}, None, status="skipped", reason="busy")
    valued = case("s", "b", {"threads": "all"}, 1e9, resolved={"threads": 2})
    for runs in ([[skipped], [valued]], [[valued], [skipped]]):
        (pooled,) = pool(0, side("a", runs).runs)
        assert (pooled.row.value, pooled.runs, pooled.of, pooled.row.reason) == (1e9, 1, 2, "left out: 1 skipped")


def test_rows_are_read_by_their_axes_numbers_before_words() -> None:
    rows = [case("s", "b", {"op": op, "threads": t}, 1e9) for t in ("all", 16, 2) for op in ("read", "copy")]
    ordered = sorted(pool(0, side("a", [rows]).runs), key=reading_order)
    assert [tuple(p.row.axes.values()) for p in ordered] == [
        ("copy", 2), ("copy", 16), ("copy", "all"), ("read", 2), ("read", 16), ("read", "all")
    ]  # fmt: skip


def test_a_curve_with_its_law() -> None:
    rows = [case("s", "b", {"bytes": 4096 << i}, (4096 << i) / (1e-5 + (4096 << i) / 1e10)) for i in range(10)]
    pooled = pool(0, side("a", [rows]).runs)
    assert size_axis(pooled) == "bytes"
    (figure,) = bench_figures(pooled, ("a",))
    assert [datum["x"] for datum in values(figure)] == [4096 << i for i in range(10)]
    assert any("alpha 10.0 us, beta 10.0 GB/s" in note for note in figure.notes)
    fitted = figure.spec["layer"][-1]["data"]["values"]
    assert [point["y"] for point in fitted] == pytest.approx([row.value for row in rows], rel=1e-3)
    assert figure.spec["encoding"]["x"]["scale"]["type"] == "log"
    assert figure.spec["layer"][0]["encoding"]["y"]["scale"]["type"] == "log"


def test_many_series_are_cut_into_parts_and_none_is_lost() -> None:
    rows = [
        case("s", "b", {"op": f"o{o}", "threads": t, "bytes": 4096 << i}, 1e9 * (o + 1))
        for o in range(10) for t in (1, 2) for i in range(4)
    ]  # fmt: skip
    figures = list(bench_figures(pool(0, side("a", [rows]).runs), ("a",)))
    assert all(len({d["series"] for d in values(f)}) <= 8 for f in figures)
    assert sum(len(values(f)) for f in figures) == len(rows)


def test_a_point_of_a_word_lies_at_its_number() -> None:
    rows = [case("s", "b", {"threads": t}, 1e9, resolved={"threads": n}) for t, n in ((1, 1), (2, 2), ("all", 8))]
    (figure,) = bench_figures(pool(0, side("a", [rows]).runs), ("a",))
    assert [datum["x"] for datum in values(figure)] == [1, 2, 8]


def test_bars_begin_at_one_and_point_right_when_better() -> None:
    slower_time = [[case("s", "t", {"n": i}, 2.0, metric="time", unit="s") for i in range(3)] for _ in range(5)]
    faster_rate = [[case("s", "r", {"n": i}, 2e9) for i in range(3)] for _ in range(5)]
    base = [[case("s", "t", {"n": i}, 1.0, metric="time", unit="s") for i in range(3)]
            + [case("s", "r", {"n": i}, 1e9) for i in range(3)] for _ in range(5)]  # fmt: skip
    other = [a + b for a, b in zip(slower_time, faster_rate, strict=True)]
    found = compare((side("a", base), side("b", other)))
    gains = {row.bench: gain(row) for row in found.rows}
    assert gains["t"] is not None
    assert gains["r"] is not None
    assert [gains["t"][0], gains["r"][0]] == pytest.approx([0.5, 2.0])
    (figure,) = bars(found.against[0], "b", "a")
    assert {datum["one"] for datum in values(figure)} == {1.0}
    assert {(d["verdict"], round(d["gain"], 3)) for d in values(figure)} == {("SLOWER", 0.5), ("FASTER", 2.0)}
    scale = figure.spec["layer"][0]["encoding"]["x"]["scale"]
    assert scale["type"] == "log"
    assert scale["domain"][0] * scale["domain"][1] == pytest.approx(1.0)
    assert scale["domain"][1] > 2.0


def test_the_ladder_takes_the_best_clean_measured_case_of_each_path() -> None:
    rows = [
        case("ladder", "host_bandwidth", {"op": "read", "bytes": 2**28, "threads": 1}, 2e10),
        case("ladder", "host_bandwidth", {"op": "read", "bytes": 2**28, "threads": 2}, 9e10, status="tainted"),
        case("ladder", "host_bandwidth", {"op": "read", "bytes": 2**16, "threads": 2}, 5e11, flags=("in_llc",)),
        case("ladder", "host_bandwidth", {"op": "copy", "bytes": 2**28, "threads": 2}, 3e10, basis="modelled"),
        case("ladder", "host_latency", {"bytes": 2**28}, 9.7e-8, metric="latency", unit="s"),
        case("ladder", "link", {"pair": "hbm:pinned", "direction": "fetch", "device": 0}, 5e10),
        case("ladder", "file_read", {"method": "direct"}, 2e9, ceilings=(), fraction=None),
    ]  # fmt: skip
    pooled = pool(0, side("a", [rows]).runs)
    found = {(rung.tier, rung.path): rung.pooled.row.value for rung in rungs(pooled)}
    assert found == {("dram", "dram"): 2e10, ("pinned", "hbm:pinned"): 5e10, ("file", "dram:file"): 2e9}
    figure = ladder_figure(pooled, MACHINE["facts"], "a", 1)
    assert figure is not None
    text = json.dumps(figure.spec)
    assert "32 GiB" in text
    assert "97.0 ns a load at 256 MiB" in text
    assert "no ceiling; " in text
    assert "91% of 55.0 GB/s read stream (measured)" in text


def test_the_ladder_names_benches_and_axes_that_exist() -> None:
    benches = load_suites().benches["ladder"]
    for name, axes in PATHS.items():
        assert set(axes) <= set(benches[name].axes)
        assert benches[name].unit == "B/s"
    assert {benches[name].unit for name in ("host_latency", "device_latency")} == {"s"}


@pytest.mark.parametrize("flag", sorted(ASTRAY))
def test_a_row_that_another_tier_served_is_no_path_of_the_ladder(flag: str) -> None:
    row = case("ladder", "file_read", {"method": "direct"}, 2e10, flags=(flag,))
    assert rungs(pool(0, side("a", [[row]]).runs)) == []


def points(levels: list[float | None]) -> list[Point]:
    found = []
    for i, level in enumerate(levels):
        figure = Figure(
            level, None, None, "B/s", "higher", 6, "ok" if level else "failed", "", "measured", None, None, ()
        )  # fmt: skip
        when, env = f"2025-03-{1 + i // 24:02d}T{i % 24:02d}:00:00", "env-a" if i < 12 else "env-b"
        found.append(Point(f"{i:08x}", "g", None, when, "h", env, None, "smoke", False, figure))
    return found


def test_a_series_shows_its_levels_where_they_changed() -> None:
    known = KnownCase("d" * 64, "s", "b", 1, {"n": 1})
    levels = [1e10 * (1 + 0.001 * (i % 5)) * (0.8 if i >= 12 else 1.0) for i in range(24)]
    figure = trend_figure(trend(known, "bandwidth", "hw", points([*levels, None]), ()))
    assert figure is not None
    assert len(values(figure)) == 24
    (change,) = (layer["data"]["values"][0] for layer in figure.spec["layer"] if layer.get("mark", {}).get("dx") == 4)
    assert change == {"x": 12.5, "text": "SLOWER x0.800"}
    assert any("the environment changed" in note for note in figure.notes)
    assert trend_figure(trend(known, "bandwidth", "hw", points([None, None]), ())) is None


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.7), (3e-9, 1e-1), (2.5e9, 4.1e9), (1e-150, 1e150), (9.0, 11.0)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)
    assert all(len(f"{tick:.9e}".rstrip("0").partition("e")[0].rstrip("0")) <= 5 for tick in ticks)


def test_sizes_and_units_of_ticks() -> None:
    assert size_ticks([1 << i for i in range(20)]) == [1 << i for i in range(0, 20, 3)]
    assert size_ticks([4, 2, 2]) == [2, 4]
    assert "alert" not in label_expression("'); alert(1)")


def test_a_picture_for_the_page_has_own_ids_variables_and_no_strange_element() -> None:
    require("report", missing_module("vl_convert"))
    rows = [case("s", "b", {"bytes": 4096 << i}, 1e9 + i, kernel='url(#x) #1b62a5 fill="#1c2126"') for i in range(4)]
    (figure,) = bench_figures(pool(0, side("a", [rows]).runs), ("a",))
    drawn = to_svg(figure.spec)
    shown = for_page(drawn, "f7")
    assert len(shown) < 0.8 * len(drawn)
    assert not re.search(r'"#[0-9a-f]{6}"', shown)
    assert "var(--s0)" in shown
    assert shown.count("aria-label") == 4
    assert "url(#x) #1b62a5 fill=&quot;#1c2126&quot;" in shown
    assert all(name.startswith("f7-") for name in re.findall(r'\bid="([^"]*)"', shown))
    with pytest.raises(ValueError, match="the element script"):
        for_page("<svg><script>x</script></svg>", "f1")
