"""CSV, JSON and Parquet out of the database, and `kvbench db`'s view of it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import sqlite3
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

import kvbench.store
from kvbench.contract.result import Bytes, Ceiling, Scalar
from kvbench.errors import MissingExtra, StoreError, UsageError
from kvbench.store import admin
from kvbench.store.engine import Store, open_store
from kvbench.store.formats import export
from kvbench.store.schema import SCHEMA_VERSION, VERSION_TABLE, metadata
from tests.needs import missing_module, require
from tests.store.factories import HOSTILE, make_row, make_run


@pytest.fixture
def filled(store: Store) -> Store:
    run = make_run(label="x")
    store.begin_run(run)
    ceilings = (Ceiling("dram", 2e10, "physical", "spec"), Ceiling("memcpy", None, "measured", "case"))
    store.add_results(run.uuid, [make_row(0, suite="canary")], 0)
    store.add_results(run.uuid, [make_row(1, ceilings=ceilings, fraction=0.5, bytes=Bytes(link=7))], 1)
    row = make_row(2, axes={"threads": "all", "op": "=cmd|' /C calc'!A0"}, status="skipped", value=None, samples=())
    store.add_results(run.uuid, [row.with_(reason='no "room",\r\nsorry \udcff', detail={"bound": -1.5, "ok": True})], 2)
    return store


def test_csv_is_a_tidy_table_no_spreadsheet_runs(filled: Store, tmp_path: Path) -> None:
    written = export(filled, "x", tmp_path / "x.csv")
    assert (written.format, written.runs, written.rows) == ("csv", 1, 3)
    data = (tmp_path / "x.csv").read_bytes()
    assert data.startswith(b"run,group,label,")
    header, *rows = list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True))
    assert data.replace(b"\r\nsorry", b"").count(b"\n") == data.replace(b"\r\nsorry", b"").count(b"\r\n") == 4
    assert {len(row) for row in rows} == {len(header)}
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["suite"] for row in table] == ["canary", "ladder", "ladder"]
    assert (table[1]["value"], table[1]["ceiling.name"], table[1]["ceiling.value"]) == (
        "10000000001.0",
        "dram",
        "20000000000.0",
    )
    assert (table[1]["bytes.link"], table[1]["bytes.near"], table[1]["axis.bytes"]) == ("7", "", "8192")
    assert (table[2]["value"], table[2]["status"], table[2]["axis.threads"]) == ("", "skipped", "all")
    assert table[2]["axis.op"] == "'=cmd|' /C calc'!A0"
    assert table[2]["reason"] == 'no "room",\r\nsorry \\udcff'
    assert (table[2]["detail.bound"], table[2]["detail.ok"]) == ("-1.5", "true")  # a negative number is no formula


def test_json_is_the_document_of_show(filled: Store, tmp_path: Path) -> None:
    export(filled, "x", tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["schema"] == "kvbench.results/1"
    assert [len(found[name]) for name in ("runs", "results", "canaries")] == [1, 2, 1]
    assert found["results"][1]["value"] is None


def test_parquet_or_the_extra_that_brings_it(filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        assert export(filled, "x", tmp_path / "x.parquet").rows == 3
        table = pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pydict()
        assert table["value"] == [1e10, 1e10 + 1, None]
        assert table["axis.threads"] == [None, None, "all"]
        assert table["reason"][2] == 'no "room",\r\nsorry \\udcff'
        (tmp_path / "x.parquet").unlink()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"export --format parquet needs.*kvbench\[parquet\]"):
        export(filled, "x", tmp_path / "x.parquet")
    assert not [path for path in tmp_path.iterdir() if "parquet" in path.name]


def test_parquet_keeps_types_and_numbers(any_store: Store, tmp_path: Path) -> None:
    require("pyarrow", missing_module("pyarrow"))
    import pyarrow as arrow
    from pyarrow import parquet

    run = make_run(label="x")
    any_store.begin_run(run)
    large = 2**53 + 1  # the first whole number a double does not hold
    details: list[dict[str, Scalar]] = [
        {"whole": large, "mixed": 1, "exact": large, "word": "all", "flag": True, "real": -0.0},
        {"whole": -(2**63), "mixed": 0.5, "exact": 0.5, "word": 2, "flag": None, "real": 5e-324},
    ]
    for number, detail in enumerate(details):
        row = make_row(number, detail=detail, value=1e300, bytes=Bytes(link=2**63 - 1), flags=("a", "b"))
        any_store.add_results(run.uuid, [row], number)
    export(any_store, "x", tmp_path / "x.parquet")
    found = parquet.read_table(tmp_path / "x.parquet")
    kinds = {name: str(found.schema.field(name).type) for name in found.column_names}
    assert {name: kinds[f"detail.{name}"] for name in details[0]} == {
        "whole": "int64", "mixed": "double", "exact": "string", "word": "string", "flag": "bool", "real": "double"
    }  # fmt: skip
    # columns of our own keep their type when no row has a value, so that the files of two exports are one table
    empty = {name: kinds[name] for name in ("label", "stop", "ceiling.value", "ceiling.name", "bytes.near", "fraction")}
    assert list(empty.values()) == ["string", "string", "double", "string", "int64", "double"]
    values = found.to_pydict()
    assert values["detail.whole"] == [large, -(2**63)]
    assert values["detail.mixed"] == [1.0, 0.5]
    assert values["detail.exact"] == [str(large), "0.5"]
    assert values["detail.word"] == ["all", "2"]
    assert repr(values["detail.real"]) == "[-0.0, 5e-324]"
    assert (values["value"], values["bytes.link"], values["flags"]) == ([1e300] * 2, [2**63 - 1] * 2, ["a b"] * 2)
    other = make_run(label="y")
    any_store.begin_run(other)
    any_store.add_results(other.uuid, [make_row(5, status="failed", value=None, samples=(), reason="died")], 0)
    export(any_store, "y", tmp_path / "y.parquet")
    second = parquet.read_table(tmp_path / "y.parquet")
    both = arrow.concat_tables([found, second], promote_options="default")
    assert both["value"].to_pylist() == [1e300, 1e300, None]
    assert str(both.schema.field("value").type) == "double"


def test_export_refuses_what_it_cannot_do(filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="unknown format"):
        export(filled, "x", tmp_path / "x.xls")
    with pytest.raises(UsageError, match="unknown format"):
        export(filled, "x", tmp_path / "x.csv", "xml")
    with pytest.raises(UsageError, match="no run matches"):
        export(filled, "nothing", tmp_path / "x.csv")
    with pytest.raises(UsageError, match="this is a directory"):
        export(filled, "x", tmp_path, "csv")
    kept = tmp_path / "kept.csv"
    kept.write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        export(filled, "x", kept)
    assert kept.read_text() == "mine"
    assert export(filled, "x", kept, force=True).rows == 3
    assert export(filled, "x", tmp_path / "x.txt", "bundle").format == "bundle"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        export(filled, "x", tmp_path / "y.csv")
    assert sorted(p.name for p in tmp_path.iterdir() if "csv" in p.name) == ["kept.csv"]


def test_hostile_text_survives_csv(store: Store, tmp_path: Path) -> None:
    run = make_run(label="h")
    store.begin_run(run)
    for number, text in enumerate(HOSTILE):
        store.add_results(run.uuid, [make_row(number, reason=text)], number)
    export(store, "h", tmp_path / "h.csv")
    with (tmp_path / "h.csv").open(newline="", encoding="utf-8") as stream:
        found = [row["reason"] for row in csv.DictReader(stream)]
    assert found == [f"'{text}" if text.startswith("=") else text for text in HOSTILE]


def test_a_fresh_database_is_a_migrated_one(tmp_path: Path) -> None:
    """Same tables, columns, types, defaults, indices and checks: the migrations and the metadata never drift."""
    with open_store(tmp_path / "fresh.db") as fresh:
        made = _schema(fresh.database.engine)
    engine = create_engine(f"sqlite:///{tmp_path / 'migrated.db'}")
    with engine.begin() as connection:
        admin.migrate(connection)
        assert compare_metadata(_context(connection), metadata) == []
    assert _schema(engine) == made
    assert made[VERSION_TABLE]
    engine.dispose()
    with open_store(tmp_path / "migrated.db") as migrated:
        run = make_run()
        migrated.begin_run(run)
        migrated.add_results(run.uuid, [make_row()], 0)
        assert migrated.results(run.uuid, with_samples=True) == [make_row()]


def _context(connection: object) -> MigrationContext:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})  # type: ignore[arg-type]


def _schema(engine: object) -> dict[str, object]:
    """Return name -> SQL of every table and index, the order of its parts aside, and the version stamp."""
    with engine.connect() as connection:  # type: ignore[attr-defined]
        found = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").all()
        stamp = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").all()
    made: dict[str, object] = {"stamp": [tuple(row) for row in stamp]}
    for name, sql in found:
        head, _, body = " ".join(sql.split()).partition("(")
        made[name] = (head.strip(), sorted(part.strip() for part in body.removesuffix(")").split(", ")))
    return made


def test_the_version_is_that_of_the_newest_migration() -> None:
    versions = sorted((Path(admin.__file__).parent / "migrations" / "versions").glob("v*.py"))
    assert versions[-1].name[1:5] == SCHEMA_VERSION


def test_info_check_and_upgrade(filled: Store) -> None:
    facts = admin.check(filled.where)
    assert (facts["schema"], facts["integrity"], facts["foreign_keys"]) == (SCHEMA_VERSION, "ok", 0)
    assert (facts["runs"], facts["cases"], facts["results"], facts["samples"]) == (1, 3, 3, 2)
    assert admin.info(filled.where)["results"] == 3
    assert admin.upgrade(filled.where) == {"database": filled.where, "from": SCHEMA_VERSION, "to": SCHEMA_VERSION}
    with sqlite3.connect(filled.where) as raw:  # SQLite checks foreign keys only where it is asked to
        raw.execute("DELETE FROM cases")
    raw.close()
    assert admin.check(filled.where)["integrity"] == "3 rows point at nothing"
    with filled.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(UsageError, match="newer kvbench"):
        admin.upgrade(filled.where)


def test_the_schema_is_valid_postgresql() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    text = "\n".join(str(CreateTable(table).compile(dialect=dialect)) for table in metadata.sorted_tables)
    assert "id BIGINT GENERATED BY DEFAULT AS IDENTITY" in text
    assert "axes JSON NOT NULL" in text  # JSONB would give 1e16 back as an integer
    assert 'uuid TEXT COLLATE "C" NOT NULL' in text
    assert "value FLOAT(53)" in text  # double precision


def test_every_lazy_name_loads() -> None:
    for name in kvbench.store.__all__:
        assert getattr(kvbench.store, name).__module__ if name != "FORMATS" else kvbench.store.FORMATS
    with pytest.raises(AttributeError):
        kvbench.store.nothing  # noqa: B018
