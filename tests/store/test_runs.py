"""Runs and cases in the database: one transaction each, repeatable, and never half visible."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from kvbench.contract.result import Ceiling, PlannedCase, Result
from kvbench.errors import StoreError, UsageError
from kvbench.store import write
from kvbench.store.engine import Store, open_store
from kvbench.store.labels import check_label
from kvbench.store.schema import metadata, schema_doc
from tests.store.factories import at, digest_of, here, make_row, make_run


def test_repeating_a_call_changes_nothing(any_store: Store) -> None:
    run, rows = make_run(), [make_row(0), make_row(0, "latency", unit="s", better="lower", value=1e-6)]
    for _ in range(2):
        any_store.begin_run(run)
    for _ in range(2):
        any_store.add_results(run.uuid, rows, 0)
    for _ in range(2):
        any_store.finish_run(run.uuid, "ok", at(9))
    assert any_store.results(run.uuid, with_samples=True) == rows
    found = any_store.run(run.uuid)
    assert found.info == replace(run, status="ok", finished_at=at(9))
    assert (found.done, found.ok) == (1, 2)
    assert found.last_commit_at is not None


def test_counts_leave_canaries_out(any_store: Store) -> None:
    run = make_run(plan=(PlannedCase("d", "ladder", "b", 1, {"op": "read"}),))
    any_store.begin_run(run)
    any_store.add_results(run.uuid, [make_row(0, suite="canary")], 0)
    assert (any_store.run(run.uuid).done, any_store.run(run.uuid).ok) == (0, 0)
    any_store.add_results(run.uuid, [make_row(1, status="failed", value=None, samples=(), reason="died")], 1)
    assert (any_store.run(run.uuid).done, any_store.run(run.uuid).ok) == (1, 0)
    assert [row.suite for row in any_store.results(run.uuid)] == ["canary", "ladder"]
    assert [row.suite for row in any_store.results(run.uuid, canaries=True)] == ["canary"]
    assert [row.suite for row in any_store.results(run.uuid, canaries=False)] == ["ladder"]


def spoilt(row: Result, **changes: Any) -> Result:
    """Return ``row`` with values its constructor refuses, as a bug elsewhere might hand them over."""
    for name, value in changes.items():
        object.__setattr__(row, name, value)
    return row


def test_rows_that_are_no_case_are_refused_whole(store: Store) -> None:
    run = make_run()
    store.begin_run(run)
    for rows, said in (
        ([], "nothing measured"),
        ([make_row(0), make_row(1)], "two cases"),
        ([make_row(0), make_row(0)], "same metric"),
        ([make_row(0), spoilt(make_row(0, metric="other"), detail={"x": float("nan")})], "result.detail.x is nan"),
        ([spoilt(make_row(0), samples=(1.0, float("inf")))], "result.samples"),
        ([spoilt(make_row(0), ceilings=(Ceiling("dram", float("inf"), "physical", "spec"),))], "result.ceilings"),
        ([make_row(0, n=2**63)], "64-bit"),
    ):
        with pytest.raises(ValueError, match=said):
            store.add_results(run.uuid, rows, 0)
    assert store.results(run.uuid) == []


def test_a_failure_in_the_middle_of_a_case_leaves_none_of_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    store.begin_run(run)
    calls = []

    def fails_late(samples: tuple[float, ...]) -> bytes:
        calls.append(samples)
        if len(calls) == 2:
            raise OSError("gone")
        return b""

    monkeypatch.setattr(write, "encode_samples", fails_late)
    with pytest.raises(OSError, match="gone"):
        store.add_results(run.uuid, [make_row(0), make_row(0, "latency")], 0)
    assert len(calls) == 2
    monkeypatch.undo()
    assert store.results(run.uuid) == []
    assert store.run(run.uuid).last_commit_at is None
    with store.database.read() as connection:
        left = [connection.exec_driver_sql(f"SELECT count(*) FROM {t}").scalar_one() for t in ("cases", "samples")]
    assert left == [0, 0]


def test_a_reader_never_sees_an_uncommitted_case(tmp_path: Path) -> None:
    path = tmp_path / "kv.db"
    run = make_run()
    with open_store(path) as writer, open_store(path, readonly=True) as reader:
        writer.begin_run(run)
        with writer.database.write() as connection:
            (run_id,) = connection.exec_driver_sql("SELECT id FROM runs").one()
            write.insert_case(connection, run_id, [make_row(0), make_row(0, "latency")], 0, at(1))
            assert reader.results(run.uuid) == []
        assert len(reader.results(run.uuid)) == 2


def test_two_stores_of_one_file_and_two_files(tmp_path: Path) -> None:
    first, second = make_run(), make_run()
    with (
        open_store(tmp_path / "a.db") as a, open_store(tmp_path / "a.db") as again, open_store(tmp_path / "b.db") as b
    ):  # fmt: skip
        for store, run in ((a, first), (again, second)):
            store.begin_run(run)
            store.add_results(run.uuid, [make_row(0)], 0)
        assert {run.info.uuid for run in a.runs()} == {first.uuid, second.uuid}
        assert b.runs() == []


def test_unknown_and_ended_runs(any_store: Store) -> None:
    run = make_run()
    with pytest.raises(StoreError, match="not in this database"):
        any_store.add_results(run.uuid, [make_row()], 0)
    with pytest.raises(StoreError, match="not in this database"):
        any_store.finish_run(run.uuid, "ok", at(1))
    with pytest.raises(UsageError, match="no run has this UUID"):
        any_store.results(run.uuid)
    any_store.begin_run(run)
    with pytest.raises(ValueError, match="cannot end"):
        any_store.finish_run(run.uuid, "running", at(1))
    any_store.finish_run(run.uuid, "partial", at(1))
    with pytest.raises(StoreError, match="ended partial"):
        any_store.add_results(run.uuid, [make_row()], 0)
    with pytest.raises(StoreError, match="ended partial"):
        any_store.finish_run(run.uuid, "ok", at(2))
    with pytest.raises(StoreError, match="ended partial"):
        any_store.reopen_run(replace(run, resumed=True))


def test_a_uuid_names_one_run_and_a_digest_one_case(any_store: Store) -> None:
    run = make_run()
    any_store.begin_run(run)
    for change in ({"hw_class": "cpu-b"}, {"env": {"kernel": "6.2"}}, {"seed": 8}, {"started_at": at(5)}):
        with pytest.raises(StoreError, match="another run has this UUID"):
            any_store.begin_run(replace(run, **change))
    row = make_row(0)
    any_store.add_results(run.uuid, [row], 0)
    for changed in (row.with_(bench="other"), row.with_(bench_version=2), row.with_(axes={"bytes": 1, "op": "read"})):
        with pytest.raises(StoreError, match="known as another case"):
            any_store.add_results(run.uuid, [changed.with_(metric="m")], 1)
    assert any_store.results(run.uuid, with_samples=True) == [row]


@pytest.mark.parametrize("again", ["reopen", "begin"])
def test_a_resumed_run_goes_on_under_another_process(tmp_path: Path, again: str) -> None:
    run = make_run()
    path = tmp_path / "kv.db"
    with open_store(path, here=here(alive=False)) as store:
        store.begin_run(run)
        store.add_results(run.uuid, [make_row(0)], 0)
        assert store.run(run.uuid).info.status == "interrupted"
    resumed = replace(run, resumed=True, pid=77, pid_start="2000", boot_id="boot-1", flags=("resumed",))
    with open_store(path, here=here()) as store:
        (store.reopen_run if again == "reopen" else store.begin_run)(resumed)
        store.add_results(run.uuid, [make_row(1)], 0)
        assert store.run(run.uuid).info == resumed
        assert [row.axes["bytes"] for row in store.results(run.uuid)] == [4096, 8192]
        store.finish_run(run.uuid, "ok", at(3))
        assert store.run(run.uuid).info.resumed
        with pytest.raises(StoreError, match="not in this database"):
            store.reopen_run(make_run(resumed=True))


@pytest.mark.parametrize(
    ("host", "boot", "alive", "status"),
    [
        ("here", "boot-1", True, "running"),
        ("here", "boot-1", False, "interrupted"),
        ("here", "boot-0", True, "interrupted"),  # the machine was restarted
        ("here", "", False, "running"),  # boot unknown: no evidence
        ("elsewhere", "boot-1", False, "running"),
        ("elsewhere", "boot-0", False, "running"),
    ],
)
def test_only_its_own_machine_can_call_a_run_dead(
    tmp_path: Path, host: str, boot: str, alive: bool, status: str
) -> None:
    run = make_run(host=host, boot_id=boot)
    with open_store(tmp_path / "kv.db", here=here(alive=alive)) as store:
        store.begin_run(run)
        found = store.run(run.uuid)
        assert (found.info.status, found.stored_status) == (status, "running")
        assert store.effective_status(run) == status
        assert store.resolve(run.uuid)[0].status == status
        assert store.mark_interrupted() == ((run.uuid,) if status == "interrupted" else ())
        assert store.run(run.uuid).stored_status == status
        assert store.run(run.uuid).info.finished_at is None
        assert store.mark_interrupted() == ()


def test_labels(any_store: Store) -> None:
    group = make_run()
    runs = [group, make_run(group=group.group)]
    for run in runs:
        any_store.begin_run(run)
    assert any_store.set_label(group.group, "before [x]") == 2
    assert any_store.set_label(runs[1].uuid, "after'); DROP TABLE runs") == 1
    assert [run.info.label for run in any_store.runs(label="before [x]")] == ["before [x]"]
    assert any_store.set_label(runs[1].uuid, None) == 1
    with pytest.raises(UsageError, match="no run has this UUID"):
        any_store.set_label("nothing", "x")
    for label in ("", "latest", "latest~2", "x" * 201, "a\x00b", "caf\udce9"):
        with pytest.raises(UsageError):
            check_label(label)


def test_no_label_reads_as_the_uuid_that_show_is_told(any_store: Store) -> None:
    first = make_run()
    any_store.begin_run(first)
    whole = (first.uuid, first.group, "680ce5e3", "20250301", "680ce5e", "beef", "2025", "added")
    for label in (*whole, first.uuid[:4], first.uuid[:8], first.uuid[:9], first.uuid[:13]):
        with pytest.raises(UsageError, match="reads as the UUID of a run") as caught:
            any_store.begin_run(make_run(label=label))
        assert "\n" not in str(caught.value)
        with pytest.raises(UsageError, match="reads as the UUID of a run"):
            check_label(label)
        with pytest.raises(UsageError, match="reads as the UUID of a run"):
            any_store.set_label(first.uuid, label)
    assert [run.info for run in any_store.runs()] == [first]
    for label in ("680", "bad", "680ce5e3x", "680ce5e31", "v680ce5e3", "DEADBEEF", "deadbeef-base", "2025-03-01"):
        assert check_label(label) == label
        any_store.begin_run(make_run(label=label))


def test_a_case_takes_few_statements_however_many_rows_it_has(any_store: Store) -> None:
    """Each statement is a round trip to a server that may be far away."""
    run = make_run()
    any_store.begin_run(run)
    any_store.add_results(run.uuid, [make_row(0)], 0)
    asked: list[str] = []
    event.listen(any_store.database.engine, "before_cursor_execute", lambda c, u, s, p, x, m: asked.append(s))
    any_store.add_results(run.uuid, [make_row(0, f"m{n}") for n in range(20)], 0)
    again = [make_row(0, f"m{n}", value=3.0) for n in (3, 19)]
    any_store.add_results(run.uuid, [*again, make_row(0, "late")], 0)
    assert len([statement for statement in asked if not statement.startswith("BEGIN")]) == 10
    found = any_store.results(run.uuid, with_samples=True)
    assert [row.metric for row in found] == ["bandwidth", *(f"m{n}" for n in range(20)), "late"]
    assert {(row.value, row.samples) for row in found} == {(1e10, make_row(0).samples)}


def test_reading_old_rows_after_a_crash_of_the_same_uuid(store: Store) -> None:
    """A commit that was not acknowledged is retried by its producer: the row is there once."""
    run = make_run()
    store.begin_run(run)
    row = make_row(0)
    store.add_results(run.uuid, [row], 0)
    store.add_results(run.uuid, [row.with_(value=2.0), row.with_(metric="late")], 0)
    assert [(r.metric, r.value) for r in store.results(run.uuid)] == [("bandwidth", 1e10), ("late", 1e10)]


def test_every_column_is_documented() -> None:
    documented = schema_doc()
    assert set(documented) == {
        "machines", "environments", "runs", "cases", "results", "samples", "baselines", "annotations",
        "calibrations", "claim_checks",
    }  # fmt: skip
    for table in metadata.sorted_tables:
        for column in table.columns:
            assert column.doc, f"{table.name}.{column.name}"
            assert ("NULL:" in column.doc) == bool(column.nullable), f"{table.name}.{column.name}"


def test_the_database_itself_refuses_a_failed_row_with_a_value(store: Store) -> None:
    run = make_run()
    store.begin_run(run)
    store.add_results(run.uuid, [make_row(0)], 0)
    path = store.database.target.path
    assert path is not None
    raw = sqlite3.connect(path)
    for change in ("status = 'failed'", "status = 'fine'", "basis = 'guessed'", "better = 'sideways'"):
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            raw.execute(f"UPDATE results SET {change}")
    raw.close()


def test_digest_of_the_contract_is_the_digest_of_the_factories() -> None:
    from kvbench.contract.case import case_digest

    axes: dict[str, str | int] = {"op": "read", "bytes": 4096}
    assert case_digest("ladder", "b", 2, axes, {}) == digest_of("ladder", "b", 2, axes)
