"""What a selector opens: a file that is there is a bundle, any other name is looked for in the database."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.cli.reading import is_bundle, load_runs
from kvbench.errors import UsageError
from kvbench.store import BundleWriter, open_store
from tests.store.factories import make_row, make_run

LABELS = ("e.jsonl", "nightly.jsonl.gz", "a/b.jsonl", "x.json")


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with a run of each label, also as the default one."""
    path = tmp_path / "kv.db"
    with open_store(path) as store:
        for label in LABELS:
            run = make_run(label=label)
            store.begin_run(run)
            store.add_results(run.uuid, [make_row(0)], 0)
    monkeypatch.setenv("KVBENCH_DB", str(path))
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.mark.parametrize("label", LABELS)
def test_a_label_that_ends_as_a_bundle_does_is_found(db: str, label: str) -> None:
    for given in (db, None):
        assert [run.info.label for run in load_runs(label, given)] == [label]
    assert not is_bundle(label)


def test_a_file_of_that_name_comes_first(db: str, tmp_path: Path) -> None:
    run = make_run(label="in the file")
    with BundleWriter(tmp_path / "e.jsonl") as writer:
        writer.begin_run(run)
    assert is_bundle("e.jsonl")
    assert [found.info.label for found in load_runs("e.jsonl", None)] == ["in the file"]


def test_a_bundle_that_is_not_there_is_told_as_one(db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, db, str(tmp_path / "none.db")):
        with pytest.raises(UsageError, match=r"gone\.jsonl: the bundle cannot be read \(No such file"):
            load_runs("gone.jsonl", given)
    with pytest.raises(UsageError, match="no run matches"):
        load_runs("gone", db)
    monkeypatch.setenv("KVBENCH_DB", str(tmp_path / "none.db"))
    with pytest.raises(UsageError, match=r"gone\.jsonl\.gz: the bundle cannot be read \(No such file"):
        load_runs("gone.jsonl.gz", None)
    assert not (tmp_path / "none.db").exists()


def test_the_database_itself_is_no_bundle(db: str) -> None:
    with pytest.raises(UsageError, match="line 1: this is a database, expected a bundle file; --db names a database"):
        load_runs(db, db)
    assert len(load_runs("e.jsonl", db)) == 1
