"""Rows that contradict themselves: refused by every way in, and no traceback where an older database has one."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvbench.contract.result import Bytes, Ceiling, PlannedCase, Result, RunInfo, RunStatus
from kvbench.errors import UsageError
from kvbench.machine.fingerprint import fingerprint
from kvbench.report.summary import run_summary
from kvbench.store.bundle import BundleWriter, read_bundle
from kvbench.store.consistent import check_consistent, standing
from kvbench.store.engine import Store, open_store
from kvbench.store.formats import export
from kvbench.store.transfer import export_bundle, import_bundle
from kvbench.store.wire import check_case, check_foreign_run
from tests.store.factories import at, digest_of, here, make_row, make_run

ENDED: tuple[RunStatus, ...] = ("ok", "partial", "failed")
SECONDS: dict[str, Any] = {"metric": "latency", "unit": "s", "better": "lower"}
LAW = Ceiling("dram", 9.7e9, "physical", "spec")  # the value of the rows is 1e10
HALF = Ceiling("stream", 2e10, "measured", "case")
# as the sampler makes them: all samples kept, a pass of 1 ms that moves 10 MB or makes 1,000 operations
TAKEN: dict[str, Any] = {"n": 3, "kept": 3, "samples": (1e-3, 1.1e-3, 0.9e-3), "stop": "timeout"}
RATE: dict[str, Any] = {**TAKEN, "bytes": Bytes(unique=20_000_000, link=10_000_000), "rate_of": "link", "seconds": 1e-3}
TIME: dict[str, Any] = {
    **TAKEN, **SECONDS, "value": 1e-6, "seconds": 1e-6, "detail": {"reps": 2, "sampled_seconds": 0.0062}
}  # fmt: skip
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
    ({"ceilings": (HALF,), "fraction": -0.5}, "fraction is -0.5, but the value is 0.5"),
    ({"bytes": Bytes(link=-1)}, r"bytes\.link is -1"),
    ({"rate_of": "payload"}, "rate_of is 'payload', expected one of unique, link, demand, near"),
    ({"unit": ""}, "unit is empty"),
    ({"metric": " "}, "metric is empty"),
    ({"ceilings": (Ceiling("dram", -1.0, "physical", "spec"),)}, r"ceilings\[0\]\.value"),
    ({"ceilings": (Ceiling("dram", 0.0, "measured", "spec"),)}, r"ceilings\[0\]\.value is 0\.0, expected more than 0"),
    ({"ceilings": (LAW,)}, r"1\.031 x the physical ceiling dram in a row that is ok, expected invalid"),
    ({"ceilings": (Ceiling("x", None, "measured", "-"), LAW), "status": "suspect"}, "row that is suspect"),
    ({"ceilings": (LAW,), "status": "tainted"}, "row that is tainted"),
    ({**SECONDS, "value": 9e-7, "ceilings": (Ceiling("floor", 1e-6, "physical", "law"),)}, r"1\.111 x the physical"),
    ({"ceilings": (HALF,), "fraction": 0.6}, r"fraction is 0\.6, but the value is 0\.5 of the first ceiling"),
    ({**SECONDS, "value": 2e10, "ceilings": (HALF,), "fraction": 0.5}, "the value is 1 of the first"),
    ({"fraction": 0.5}, r"fraction is 0\.5 of a value or a first ceiling that is null"),
    ({"ceilings": (Ceiling("x", None, "measured", "-"), HALF), "fraction": 0.5}, "first ceiling that is null"),
    ({"unit": "cycle", "value": -3.0}, "cycle from None on, expected 0 or more"),
    ({"unit": "B", "value": -1.0}, "B from None on, expected 0 or more"),
    ({"low": -1.0}, r"from -1\.0 on, expected 0 or more"),
    ({"unit": "cycle", "value": 3.0, "low": -3.0}, r"cycle from -3\.0 on"),
    ({"n": 0, "kept": 0, "samples": (), "stop": "timeout"}, "n is 0 in a measured row"),
    ({"stop": "no_samples"}, "in a row that stopped for no_samples"),
    ({"flags": ("tainted",)}, "status is ok in a row with the flag tainted"),
    ({"flags": ("x", "tainted"), "status": "suspect"}, "status is suspect in a row with the flag tainted"),
    ({**RATE, "value": 1e11}, r"value is 100000000000\.0 B/s, but 10000000 link bytes in 0\.001 s are 1e\+10 B/s"),
    ({**RATE, "seconds": 1.0}, r"10000000 link bytes in 1\.0 s are 1e\+07 B/s"),
    ({**RATE, "rate_of": "unique"}, r"20000000 unique bytes in 0\.001 s are 2e\+10 B/s"),
    ({**RATE, "stop": None, "value": 1e10 + 100}, "10000000 link bytes"),
    (
        {**RATE, "bytes": Bytes(), "seconds": 1.0},
        r"seconds is 1\.0, but the samples are 0\.0009 to 0\.0011 s, median 0\.001",
    ),
    ({**RATE, "unit": "FLOP/s", "seconds": 1e-6}, "seconds is 1e-06, but the samples"),
    ({**RATE, "unit": "FLOP/s", "seconds": 1.05e-3}, r"seconds is 0\.00105, but the samples"),
    ({**RATE, "unit": "FLOP/s", "seconds": 1.2e-3, "n": 6}, r"seconds is 0\.0012, but the samples"),
    ({**RATE, "samples": (0.0, 1e-3, 2e-3)}, r"samples holds 0\.0 s in a row that is measured"),
    ({**RATE, "samples": (0.0,) * 3}, r"samples holds 0\.0 s"),
    ({**RATE, "samples": (1.0,) * 3}, r"seconds is 0\.001, but the samples are 1 to 1 s"),
    ({**TIME, "samples": (0.0,) * 3, "basis": "emulated"}, r"samples holds 0\.0 s in a row that is emulated"),
    ({**TIME, "seconds": 1e-3}, r"value is 1e-06 s, but result\.seconds is 0\.001"),
    ({**TIME, "value": 1e-5}, r"value is 1e-05 s, but result\.seconds is 1e-06"),
    ({**TIME, "value": 1e-2, "seconds": 1e-2}, r"seconds is 0\.01, but the samples"),
    ({**TIME, "samples": (1.0,) * 3}, r"samples take 6 s, but sampling took 0\.0062 s"),
    ({**TIME, "samples": (1e-3,) * 3, "low": 9e-7}, "wider than the samples"),
    ({**TIME, "samples": (1e-3,) * 3, "high": 1.1e-6}, "wider than the samples"),
    ({**RATE, "low": 8e9}, "wider than the samples"),
    ({**RATE, "high": 1.2e10}, "wider than the samples"),
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
        make_row(0, ceilings=(LAW,), status="invalid"),
        make_row(0, ceilings=(LAW,), basis="modelled"),
        make_row(0, ceilings=(replace(LAW, value=9.9e9), HALF), fraction=1e10 / 9.9e9),  # within the slack of a law
        make_row(0, ceilings=(replace(LAW, kind="measured"),), fraction=1e10 / 9.7e9),
        make_row(0, ceilings=(HALF,), fraction=0.5),
        make_row(0, ceilings=(HALF,)),
        make_row(0, **SECONDS | {"value": 2e-6}, ceilings=(Ceiling("floor", 1e-6, "physical", "-"),), fraction=0.5),
        make_row(0, value=0.0, unit="B"),
        make_row(0, value=1.0, unit="1", low=-1.0),
        make_row(0, n=0, kept=0, samples=()),  # worked out of another row, which says how many samples
        make_row(0, n=0, kept=0, samples=(), basis="modelled"),
        make_row(0, value=None, status="failed", samples=(), n=0, kept=0, stop="no_samples"),
        make_row(0, **RATE),
        make_row(0, **RATE, low=1e10 / 1.1, high=1e10 / 0.9),
        make_row(0, **RATE | {"bytes": Bytes(), "rate_of": None, "unit": "FLOP/s", "value": 3.0}),
        make_row(0, **RATE | {"n": 4, "seconds": 1.05e-3, "unit": "FLOP/s"}),  # some of the samples: within their range
        make_row(0, **RATE | {"value": 3.0, "basis": "simulated"}),
        make_row(0, **RATE | {"samples": ()}),
        make_row(
            0, **RATE | {"value": None, "status": "failed", "samples": (), "stop": "no_samples", "n": 0, "kept": 0}
        ),
        make_row(0, **TIME),
        make_row(0, **TIME, low=0.9e-6, high=1.1e-6),
        make_row(0, **TIME | {"value": 1e-3, "seconds": 1e-3}),  # one operation a pass
        make_row(0, **TIME | {"detail": {"reps": 2, "sampled_seconds": 0.005890}}),  # a device's clock may run ahead
        make_row(0, **TIME | {"detail": {"reps": "many"}}),
        make_row(0, **TIME | {"stop": None, "seconds": 5e-7}),  # worked out by the bench, of nobody's samples
        make_row(0, status="tainted", flags=("tainted",)),
        make_row(0, status="invalid", flags=("tainted",)),
        make_row(0, status="tainted"),
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


def test_the_number_of_a_case_is_of_samples_and_one_worked_out_of_it_need_not_be(store: Store) -> None:
    run = make_run()
    nobody: dict[str, Any] = {"n": 0, "kept": 0, "samples": ()}
    store.begin_run(run)
    with pytest.raises(ValueError, match=r"n is 0 in a measured row with the value 10000000000\.0"):
        store.add_results(run.uuid, [make_row(0, **nobody)], 0)
    store.add_results(run.uuid, [make_row(0), make_row(0, "one_way", **nobody)], 0)
    store.add_results(run.uuid, [make_row(1, basis="modelled", **nobody)], 1)
    assert len(store.results(run.uuid)) == 3


def test_two_units_of_one_metric_are_refused_and_two_versions_may_differ(tmp_path: Path) -> None:
    run = make_run()
    with BundleWriter(tmp_path / "b.jsonl", sync_lines=False) as writer:
        writer.begin_run(run)
        writer.add_results(run.uuid, [make_row(0, unit="B/s")], 0)
        other = make_row(1, suite="other", unit="s", better="lower")
        writer.add_results(run.uuid, [other], 1)
    assert len(read_bundle(tmp_path / "b.jsonl").runs[0].results) == 2
    with BundleWriter(tmp_path / "c.jsonl", sync_lines=False) as writer:
        writer.begin_run(run)
        writer.add_results(run.uuid, [make_row(0, unit="B/s")], 0)
        writer.add_results(run.uuid, [make_row(1, unit="FLOP/s")], 1)
    with pytest.raises(UsageError, match=r"c.jsonl, line 3: ladder/host_bandwidth bandwidth is in FLOP/s here, in B/s"):
        read_bundle(tmp_path / "c.jsonl")


# -- runs --------------------------------------------------------------------------------------------------------------

AXES: dict[str, str | int] = {"n": 1}
CASE = PlannedCase(digest_of("s", "b", 1, AXES), "s", "b", 1, AXES)
KEY: dict[str, Any] = {
    "cpu_vendor": "amd", "cpu_family": "25", "cpu_model": "17", "cpu_stepping": "1", "sockets": 1, "numa_nodes": 1,
    "cores": 2, "gpus": [],
}  # fmt: skip
# written out: what a released version called a machine may not move with the code
HERE: dict[str, Any] = {
    "machine": {"key": KEY}, "hw_class": "amd-25-17-1-s1-n1-c2-94c8649b", "env": {"kernel": "6.1"},
    "env_digest": "086e8c63de0fb572",
}  # fmt: skip
LATER = (datetime.now(UTC) + timedelta(days=3)).isoformat(timespec="microseconds")
FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"started_at": LATER}, "run.started_at is .*, later than this machine's clock"),
    ({"started_at": at(9), "finished_at": at(8), "status": "ok"}, "run.finished_at is .*, before the run began"),
    ({"plan": (CASE, CASE)}, f"run.plan names the case {CASE.digest[:12]} twice"),
    ({"label": "latest"}, "run.label: this label is taken"),
    ({"label": "latest~2"}, "run.label: this label is taken"),
    ({"label": "  "}, "run.label: not a usable label"),
    ({"label": ""}, "run.label: not a usable label"),
    ({"label": "beef"}, "run.label: this label reads as the UUID of a run"),
    ({"label": "680ce5e3"}, "run.label: this label reads as the UUID of a run"),
    (
        {**HERE, "hw_class": "amd-25-17-1-s1-n1-c4-94c8649b"},
        "run.hw_class is .*c4-94c8649b', but that of run.machine.key",
    ),
    ({**HERE, "hw_class": "cpu-a"}, "run.hw_class is 'cpu-a', but that of run.machine.key is 'amd-25-17-1"),
    ({**HERE, "machine": {"key": {**KEY, "cores": 4}}}, "run.hw_class is .*, but that of run.machine.key is"),
    ({**HERE, "machine": {"key": {**KEY, "new": 1}}}, "run.hw_class is .*, but that of run.machine.key is"),
    ({**HERE, "env": {"kernel": "6.2"}}, "run.env_digest is '.*', but that of run.env is"),
]
TAKEN_RUNS: list[dict[str, Any]] = [
    HERE,
    {**HERE, "hw_class": "imported-0123456789ab"},  # another tool's file names its machine otherwise
    {**HERE, "env_digest": "imported-0123456789ab"},  # measured here, so the user says
    {**HERE, "machine": {"key": {**KEY, "cpu_model": "a\\x00"}}},  # what a database wrote for what it cannot hold
    {**HERE, "env": {"boot": "a\\udcff"}},
    {**HERE, "machine": {"key": {"cpu_vendor": "amd"}}},  # not all of what makes a class
    {**HERE, "machine": {"key": {**KEY, "gpus": [{}]}}},
    {"machine": {"key": None}},
    {"machine": {}},
]


@pytest.mark.parametrize(("changes", "said"), FOREIGN)
def test_no_import_takes_a_run_that_contradicts_itself(
    store: Store, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    line = {"schema": "kvbench.bundle/1", "kind": "run", "run": make_run(**changes).to_wire()}
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=f"b.jsonl, line 1: {said}") as caught:
        import_bundle(store, path)
    assert "\n" not in str(caught.value)
    assert store.runs() == []


@pytest.mark.parametrize("changes", TAKEN_RUNS)
def test_a_run_whose_keys_cannot_be_told_or_agree_is_taken(changes: dict[str, Any]) -> None:
    check_foreign_run(make_run(**changes))


def test_the_keys_of_this_machine_are_those_of_its_facts() -> None:
    here = fingerprint()
    facts = json.loads(json.dumps({"machine": here.machine, "env": here.env}))
    check_foreign_run(make_run(hw_class=here.hw_class, env_digest=here.env_digest, **facts))


@pytest.mark.parametrize(("end", "said"), [(at(-1), "before the run began"), (LATER, "later than this machine's")])
def test_an_end_before_the_beginning_or_in_the_future_is_refused(
    store: Store, tmp_path: Path, end: str, said: str
) -> None:
    with BundleWriter(tmp_path / "b.jsonl", sync_lines=False) as writer:
        run = make_run()
        writer.begin_run(run)
        writer.add_results(run.uuid, [make_row(0)], 0, committed_at=run.started_at)
    line = {"kind": "end", "run": run.uuid, "status": "ok", "finished_at": end}
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=f"b.jsonl, line 3: finished_at is .*{said}"):
        import_bundle(store, tmp_path / "b.jsonl")


def test_what_an_older_database_took_can_be_exported_and_comes_in_again(store: Store, tmp_path: Path) -> None:
    """A label and a clock that were not looked at then cost no run."""
    olds: list[RunInfo] = [make_run(label="mine"), make_run(started_at=at(60))]
    for run in olds:
        store.begin_run(run)
        store.add_results(run.uuid, [make_row(0)], 0)
        store.finish_run(run.uuid, "ok", at(30))  # of the second: a clock that was set back by half a minute
    with store.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE runs SET label = 'beef' WHERE uuid = '{olds[0].uuid}'")
        connection.exec_driver_sql(f"UPDATE runs SET last_commit_at = '{at(40)}'")
        connection.exec_driver_sql(f"UPDATE results SET committed_at = '{at(40)}'")
    for run in olds:
        export_bundle(store, run.uuid, tmp_path / f"{run.uuid}.jsonl")
    with open_store(tmp_path / "new.db", here=here()) as other:
        for run in olds:
            import_bundle(other, tmp_path / f"{run.uuid}.jsonl")
        found = {run.info.uuid: run.info for run in other.runs()}
    assert found[olds[0].uuid].label == "was-beef"
    assert found[olds[0].uuid].finished_at == at(40)  # the end is not before the last case
    assert found[olds[1].uuid].finished_at == at(60)
    import_bundle(store, tmp_path / f"{olds[0].uuid}.jsonl")  # and into where it came from, changing nothing
    assert store.run(olds[0].uuid).info.label == "beef"


def test_a_stored_row_that_contradicts_itself_is_named_by_the_export(store: Store, tmp_path: Path) -> None:
    run = make_run()
    store.begin_run(run)
    store.add_results(run.uuid, [make_row(0)], 0)
    store.finish_run(run.uuid, "ok", at(30))
    with store.database.write() as connection:
        connection.exec_driver_sql("UPDATE results SET fraction = 0.5")
    with pytest.raises(
        UsageError, match=r"host_bandwidth contradicts itself.*fraction is 0\.5.*--format csv"
    ) as caught:
        export_bundle(store, run.uuid, tmp_path / "b.jsonl")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b.jsonl").exists()
    assert len(store.results(run.uuid)) == 1
    assert export(store, run.uuid, tmp_path / "b.csv").rows == 1


def test_a_byte_order_mark_of_an_editor_is_read_over(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b.jsonl", sync_lines=False) as writer:
        run = make_run()
        writer.begin_run(run)
        writer.add_results(run.uuid, [make_row(0)], 0)
    whole = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + whole)
    assert read_bundle(tmp_path / "marked.jsonl").runs == read_bundle(tmp_path / "b.jsonl").runs
    (tmp_path / "later.jsonl").write_bytes(whole.replace(b"\n{", b"\n\xef\xbb\xbf{", 1))
    with pytest.raises(UsageError, match="line 2: not JSON"):
        read_bundle(tmp_path / "later.jsonl")
    (tmp_path / "wide.jsonl").write_text(whole.decode(), encoding="utf-16")
    with pytest.raises(UsageError, match="line 1: the file is UTF-16, expected UTF-8; save it as UTF-8"):
        read_bundle(tmp_path / "wide.jsonl")
