"""Rows that contradict themselves: refused by every way in, and no traceback where an older database has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.contract.result import Bytes, Ceiling, Result, RunStatus
from kvbench.errors import UsageError
from kvbench.report.summary import run_summary
from kvbench.store.bundle import BundleWriter, read_bundle
from kvbench.store.consistent import check_consistent, standing
from kvbench.store.engine import Store
from kvbench.store.transfer import import_bundle
from kvbench.store.wire import check_case
from tests.store.factories import make_row, make_run

ENDED: tuple[RunStatus, ...] = ("ok", "partial", "failed")
SECONDS: dict[str, Any] = {"metric": "latency", "unit": "s", "better": "lower"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"low": 2e10}, "outside its interval 20000000000.0 to unknown"),
    ({"high": 1e9}, "outside its interval unknown to 1000000000.0"),
    ({"low": 2e10, "high": 1e9}, "outside its interval"),
    ({"value": 0.0}, "expected more than 0"),
    ({"value": -1.0}, "expected more than 0"),
    ({**SECONDS, "value": 0.0}, r"0\.0 s, expected more than 0"),
    ({"unit": "FLOP/s", "value": -2.0}, "FLOP/s, expected more than 0"),
    ({"value": -1.0, "basis": "modelled"}, "expected more than 0"),
    ({"value": None}, "null in a row that is ok"),
    ({"status": "failed", "value": None, "low": 1.0, "reason": "x"}, "bound a value that is null"),
    ({"status": "skipped", "value": None, "reason": ""}, "reason is empty"),
    ({"kept": 7, "samples": ()}, "more than the 6 samples"),
    ({"n": -1, "kept": 0, "samples": ()}, "expected counts"),
    ({"kept": -1, "samples": ()}, "expected counts"),
    ({"kept": 2}, "samples holds 3, result.kept is 2"),
    ({"samples": (1e-3, -1e-3, 1e-3)}, r"samples holds -0\.001 s"),
    ({"seconds": 0.0}, "seconds is 0"),
    ({"seconds": -1.0}, "seconds is -1"),
    ({"fraction": -0.1}, "fraction is -0.1"),
    ({"bytes": Bytes(link=-1)}, r"bytes\.link is -1"),
    ({"rate_of": "payload"}, "rate_of is 'payload', expected one of unique, link, demand, near"),
    ({"unit": ""}, "unit is empty"),
    ({"metric": " "}, "metric is empty"),
    ({"ceilings": (Ceiling("dram", -1.0, "physical", "spec"),)}, r"ceilings\[0\]\.value"),
    ({"axes": {"n": True}}, r"axes\.n is True"),
    ({"axes": {"n": 1.5}}, r"axes\.n is 1\.5"),
    ({"bench_version": 0}, "bench_version is 0"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_no_way_in_takes_a_row_that_contradicts_itself(
    store: Store, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    run, row = make_run(), make_row(0).with_(**changes)
    store.begin_run(run)
    with pytest.raises(ValueError, match=said):
        check_case([row])  # what a worker asks before a row leaves it
    with pytest.raises(ValueError, match=said):
        store.add_results(
            run.uuid, [make_row(0, "other").with_(axes=row.axes, bench_version=row.bench_version), row], 0
        )
    with BundleWriter(tmp_path / "b.jsonl", sync_lines=False) as writer:
        writer.begin_run(run)
        with pytest.raises(ValueError, match=said):
            writer.add_results(run.uuid, [row], 0)
    line = {"kind": "case", "run": run.uuid, "position": 0, "at": run.started_at, "results": [row.to_wire()]}
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    if "axes" not in changes and "bench_version" not in changes:  # those change the digest, checked before
        with pytest.raises(UsageError, match=f"b.jsonl, line 2: .*{said}") as caught:
            import_bundle(store, tmp_path / "b.jsonl")
        assert caught.value.exit_code == 2
    assert store.results(run.uuid) == []


@pytest.mark.parametrize(
    "row",
    [
        make_row(0, low=1e10, high=1e10),
        make_row(0, samples=()),  # pruned: kept says how many there were
        make_row(0, value=0.0, unit="1"),
        make_row(0, value=-3.0, unit="1"),
        make_row(0, value=0.0, basis="simulated", **SECONDS),
        make_row(0, value=None, status="skipped", samples=(), n=0, kept=0),
        make_row(0, samples=(0.0, 1.0, 2.0)),
    ],
)
def test_what_may_be_is_taken(row: Result) -> None:
    check_consistent(row)


@pytest.mark.parametrize(
    "change",
    [
        {"low": 2e10, "high": 3e10}, {"low": 3e10, "high": 1e9}, {"value": 0.0}, {"value": -1.0}, {"seconds": -1.0},
        {"rate_of": "payload"}, {"bytes": Bytes(link=-1)}, {"value": 1.797e308}, {"detail": {"case_wall_s": "long"}},
        {"detail": {"case_wall_s": -5.0}}, {"axes": {"bytes": -4096}}, {"resolved": {"bytes": -1}},
    ],
)  # fmt: skip
def test_show_survives_a_row_that_an_older_database_took(change: dict[str, Any]) -> None:
    run = make_run()
    rows = [make_row(n, rate_of="link", bytes=Bytes(link=4096), seconds=1e-3) for n in range(5)]
    given = rows[1].with_(**change)
    text = run_summary([run], [(run.uuid, row) for row in (rows[0], given, *rows[2:])], [(run.uuid, given)])
    assert "5 rows: 5 ok" in text
    if "low" in change:  # an interval that does not hold its value says nothing about it
        assert "10.0 GB/s" in text
        assert "±" not in text


def test_the_status_of_an_ended_run_follows_from_its_rows() -> None:
    plan = {"a", "b"}
    for rows, status in (
        ([], "interrupted"),
        ([("a", "ok")], "interrupted"),
        ([("a", "ok"), ("b", "tainted")], "ok"),
        ([("a", "ok"), ("b", "skipped")], "ok"),
        ([("a", "ok"), ("b", "failed")], "partial"),
        ([("a", "ok"), ("b", "ok"), ("b", "invalid")], "partial"),
        ([("a", "skipped"), ("b", "failed")], "failed"),
    ):
        assert {standing(declared, plan, rows).status for declared in ENDED} == {status}
        assert standing("running", plan, rows).status == "running"
        assert standing("interrupted", plan, rows).status == "interrupted"
    assert standing("ok", (), ()).status == "failed"


def test_a_bundle_with_both_directions_of_one_metric_is_refused_and_two_benches_may_differ(tmp_path: Path) -> None:
    run = make_run()
    with BundleWriter(tmp_path / "b.jsonl", sync_lines=False) as writer:
        writer.begin_run(run)
        writer.add_results(run.uuid, [make_row(0, better="higher")], 0)
        writer.add_results(run.uuid, [make_row(1, suite="other", better="lower")], 1)
    assert len(read_bundle(tmp_path / "b.jsonl").runs[0].results) == 2
    with BundleWriter(tmp_path / "c.jsonl", sync_lines=False) as writer:
        writer.begin_run(run)
        writer.add_results(run.uuid, [make_row(0, better="higher")], 0)
        writer.add_results(run.uuid, [make_row(1, better="lower")], 1)
    with pytest.raises(UsageError, match=r"c.jsonl, line 3: .*better lower here, higher before"):
        read_bundle(tmp_path / "c.jsonl")
