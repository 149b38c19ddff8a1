"""What a selector means, and that it never silently means one of two things."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.store.bundle import BundleWriter
from kvbench.store.engine import Store
from tests.store.factories import at, make_row, make_run

A, B = "aaaa1111-0000-4000-8000-00000000000", "aaaa2222-0000-4000-8000-00000000000"
GROUP = "bbbb0000-0000-4000-8000-000000000000"


def add(store: Store, *, status: str = "ok", suite: str = "ladder", **changes: object) -> str:
    run = make_run(**changes)
    store.begin_run(run)
    value = None if status in ("failed", "skipped") else 1.0
    store.add_results(run.uuid, [make_row(0, suite=suite, status=status, value=value)], 0)
    return run.uuid


def names(store: Store, selector: str, host: str | None = None) -> list[str]:
    return [run.uuid for run in store.resolve(selector, host)]


def test_prefixes_of_runs_and_groups(any_store: Store) -> None:
    add(any_store, uuid=f"{A}1", group=GROUP, started_at=at(2))
    add(any_store, uuid=f"{A}2", group=GROUP, started_at=at(1))
    add(any_store, uuid=f"{B}1", started_at=at(0))
    assert names(any_store, "bbbb") == [f"{A}2", f"{A}1"]  # oldest first
    assert names(any_store, GROUP) == [f"{A}2", f"{A}1"]
    assert names(any_store, f"{A}1") == [f"{A}1"]
    assert names(any_store, "aaaa2") == [f"{B}1"]
    with pytest.raises(UsageError, match="matches 3 things") as caught:
        names(any_store, "aaaa")
    assert caught.value.exit_code == 2
    for name in (f"run {A}1", f"run {A}2", f"run {B}1"):
        assert name in str(caught.value)
    for selector in ("aaa", "aaaa3", "zzzz", "aaaa%", "____", "", "%", "AAAA2222", "'); drop"):
        with pytest.raises(UsageError, match=r"no run matches|too short"):
            names(any_store, selector)


def test_a_group_of_one_run_is_that_run(any_store: Store) -> None:
    add(any_store, uuid=f"{A}1", group=f"{A}9")
    assert names(any_store, "aaaa") == [f"{A}1"]
    add(any_store, uuid=f"{B}1", group=f"{B}1")
    assert names(any_store, "aaaa2") == [f"{B}1"]


def test_labels_name_one_group(any_store: Store) -> None:
    add(any_store, uuid=f"{A}1", group=GROUP, label="base")
    add(any_store, uuid=f"{A}2", group=GROUP, label="base", started_at=at(1))
    assert names(any_store, "base") == [f"{A}1", f"{A}2"]
    add(any_store, uuid=f"{B}1", label="base")
    with pytest.raises(UsageError, match=r"matches 2 things.*label of group bbbb"):
        names(any_store, "base")
    odd = add(any_store, label="x")
    with any_store.database.write() as connection:  # a label from before such labels were refused
        connection.exec_driver_sql(f"UPDATE runs SET label = 'aaaa2222' WHERE uuid = '{odd}'")
    with pytest.raises(UsageError, match="matches 2 things"):
        names(any_store, "aaaa2222")
    with any_store.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE runs SET label = '{A}1' WHERE uuid = '{odd}'")
    assert names(any_store, f"{A}1") == [f"{A}1"]  # a whole UUID is never a label


def test_latest_is_the_newest_group_of_this_host_with_a_value(any_store: Store) -> None:
    with pytest.raises(UsageError, match="0 groups of this host have a row with a value"):
        names(any_store, "latest")
    old = add(any_store, started_at=at(1))
    group = make_run().group
    new = [add(any_store, started_at=at(second), group=group) for second in (2, 9)]
    add(any_store, started_at=at(10), status="failed")
    add(any_store, started_at=at(11), status="invalid")
    add(any_store, started_at=at(12), status="skipped")
    add(any_store, started_at=at(12), suite="canary")
    elsewhere = add(any_store, started_at=at(13), host="elsewhere")
    assert names(any_store, "latest") == new
    assert names(any_store, "latest~0") == new
    assert names(any_store, "latest~1") == [old]
    assert names(any_store, "latest", "elsewhere") == [elsewhere]
    with pytest.raises(UsageError, match=r"1 group of this host has.*at most latest~0"):
        names(any_store, "latest~1", "elsewhere")
    with pytest.raises(UsageError, match=r"2 groups.*at most latest~1"):
        names(any_store, "latest~2")
    for selector in ("latest~", "latest~-1", "latest~x", "Latest"):
        with pytest.raises(UsageError, match="no run matches"):
            names(any_store, selector)


@pytest.mark.parametrize("status", ["suspect", "tainted"])
def test_latest_does_not_pass_over_the_run_of_a_busy_machine(store: Store, status: str) -> None:
    add(store, started_at=at(1))
    newest = add(store, started_at=at(2), status=status)  # still running: nothing has ended it
    assert names(store, "latest") == [newest]
    assert store.run(newest).info.status == "running"


def test_bundle_files(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, row = make_run(), make_row()
    with BundleWriter(tmp_path / "b.jsonl") as writer:
        writer.begin_run(run)
        writer.add_results(run.uuid, [row], 0)
        writer.finish_run(run.uuid, "ok", at(1))
    (loaded,) = store.load(str(tmp_path / "b.jsonl"))
    assert (loaded.info.uuid, loaded.info.status, loaded.results) == (run.uuid, "ok", (row,))
    with pytest.raises(UsageError, match="no such bundle file"):
        store.resolve(str(tmp_path / "missing.jsonl"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").write_bytes((tmp_path / "b.jsonl").read_bytes())
    assert names(store, "base") == [run.uuid]
    add(store, label="base")
    with pytest.raises(UsageError, match=r"matches 2 things.*the file base"):
        store.resolve("base")


def test_load_reads_rows_with_and_without_samples(any_store: Store) -> None:
    uuid = add(any_store)
    (plain,), (full,) = any_store.load(uuid), any_store.load(uuid, with_samples=True)
    assert plain.results[0].samples == ()
    assert full.results[0].samples == make_row().samples
    assert plain.info == full.info


def test_runs_are_listed_newest_first(any_store: Store) -> None:
    uuids = [add(any_store, started_at=at(second), host=host) for second, host in ((1, "a"), (3, "b"), (2, "a"))]
    assert [run.info.uuid for run in any_store.runs()] == [uuids[1], uuids[2], uuids[0]]
    assert [run.info.uuid for run in any_store.runs(limit=1)] == [uuids[1]]
    assert [run.info.uuid for run in any_store.runs(host="a")] == [uuids[2], uuids[0]]
