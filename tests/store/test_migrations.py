"""Migrations on populated databases of both kinds: every released version comes up to this one, and back."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, MetaData, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from kvbench.errors import StoreError, UsageError
from kvbench.store import admin
from kvbench.store.bundle import read_bundle
from kvbench.store.database import Database
from kvbench.store.engine import open_database, open_store, read_version
from kvbench.store.schema import SCHEMA_VERSION, VERSION_TABLE
from kvbench.store.target import parse_target
from tests.store import fixtures
from tests.store.conftest import NAME, fresh_postgres
from tests.store.factories import here, make_row, make_run

# Migrations only these tests know: what the next ones will have to do, on tables other tables point at.
NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9001", "{before}"

def upgrade():
    with op.batch_alter_table("results") as batch:
        batch.add_column(sa.Column("added", sa.Text(), nullable=False, server_default="x"))
        batch.alter_column("kernel", new_column_name="code", existing_type=sa.Text())
        batch.drop_constraint("better", type_="check")
        batch.create_check_constraint("better", "better IN ('higher', 'lower', 'none')")
    op.create_index("ix_results_added", "results", ["added"])

def downgrade():
    op.drop_index("ix_results_added", "results")
    with op.batch_alter_table("results") as batch:
        batch.drop_constraint("better", type_="check")
        batch.create_check_constraint("better", "better IN ('higher', 'lower')")
        batch.alter_column("code", new_column_name="kernel", existing_type=sa.Text())
        batch.drop_column("added")
"""
FAILING = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9002", "9001"

def upgrade():
    op.create_table("half", sa.Column("id", sa.Integer(), primary_key=True))
    with op.batch_alter_table("runs") as batch:
        batch.add_column(sa.Column("half", sa.Text()))
    op.execute("INSERT INTO nowhere VALUES (1)")

def downgrade():
    op.drop_table("half")
"""


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A folder with the two migrations above."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "v9001_next.py").write_text(NEXT.format(before=SCHEMA_VERSION))
    (folder / "v9002_failing.py").write_text(FAILING)
    return folder


@pytest.fixture(params=fixtures.versions())
def released(request: pytest.FixtureRequest, any_target: str) -> tuple[str, str]:
    """A database as a released version left it: its version and where it is."""
    version = str(request.param)
    if "://" not in any_target:
        raw = sqlite3.connect(any_target)
        raw.executescript(fixtures.dump(version, "sqlite"))
        raw.close()
        return version, any_target
    name = any_target.rpartition("%3D")[2]
    with psycopg.connect(os.environ[NAME].replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {name}".encode())
        connection.execute(fixtures.dump(version, "postgresql").replace(fixtures.SCHEMA, name).encode())
    return version, any_target


@contextmanager
def opened(target: str) -> Iterator[Database]:
    database = open_database(parse_target(target), create=False, readonly=False, any_version=True)
    try:
        yield database
    finally:
        database.close()


def contents(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return table -> rows as they lie in the database, without what the models think of them."""
    found = MetaData()
    found.reflect(connection)
    return {
        t.name: [tuple(row) for row in connection.execute(select(t).order_by(*t.primary_key or t.columns))]
        for t in found.sorted_tables if t.name != VERSION_TABLE
    }  # fmt: skip


def shape(connection: Connection) -> dict[str, Any]:
    """Return what the database says about its tables: columns, types, keys, checks, indices."""
    looked = inspect(connection)
    return {
        name: {
            "columns": sorted(
                (c["name"], repr(c["type"]), c["nullable"], c["default"], repr(c.get("identity")))
                for c in looked.get_columns(name)
            ),
            "primary": looked.get_pk_constraint(name),
            "unique": sorted((u["name"] or "", u["column_names"]) for u in looked.get_unique_constraints(name)),
            "foreign": sorted(
                (f["name"] or "", f["constrained_columns"], f["referred_table"], sorted(f["options"].items()))
                for f in looked.get_foreign_keys(name)
            ),
            "checks": sorted((c["name"] or "", c["sqltext"]) for c in looked.get_check_constraints(name)),
            "indices": sorted((i["name"] or "", i["column_names"], i["unique"]) for i in looked.get_indexes(name)),
        } for name in looked.get_table_names()
    }  # fmt: skip


def test_there_is_a_fixture_of_this_version() -> None:
    assert fixtures.versions()[-1] == SCHEMA_VERSION


def test_a_released_database_comes_up_with_all_its_content(released: tuple[str, str]) -> None:
    version, target = released
    if version != SCHEMA_VERSION:
        with pytest.raises(UsageError, match="kvbench db upgrade"):
            open_store(target)
    assert admin.upgrade(target)["from"] == version
    facts = admin.check(target)
    assert (facts["schema"], facts["foreign_keys"] or 0) == (SCHEMA_VERSION, 0)
    assert all(facts[table] for table in ("samples", "baselines", "annotations", "calibrations", "claim_checks"))
    with open_store(target, here=here()) as store, open_store(target, readonly=True, here=here()) as reader:
        wanted = read_bundle(fixtures.FOLDER / f"{version}.jsonl").runs
        for loaded, run in zip(
            reader.load("00000000-0000-4000-8000-000000000009", with_samples=True), wanted, strict=True
        ):
            assert loaded.info == run.info
            assert repr(loaded.results) == repr(run.results)  # equality takes 0.0 for -0.0 and 1 for 1.0
        fresh = make_run()
        store.begin_run(fresh)
        store.add_results(fresh.uuid, [make_row(1)], 0)  # ids go on after those of the file
        assert reader.results(fresh.uuid) == [make_row(1, samples=())]


def test_a_released_database_has_the_shape_of_a_fresh_one(released: tuple[str, str], tmp_path: Path) -> None:
    _, target = released
    admin.upgrade(target)
    with opened(target) as database, database.read() as connection:
        found = shape(connection)
    if "://" in target:
        with fresh_postgres() as url, open_store(url) as store, store.database.read() as connection:
            assert shape(connection) == found
    else:
        with open_store(tmp_path / "fresh.db") as store, store.database.read() as connection:
            assert shape(connection) == found


def test_up_and_back_keeps_every_row_and_the_shape(released: tuple[str, str], more: Path) -> None:
    _, target = released
    admin.upgrade(target)
    with opened(target) as database:
        with database.read() as connection:
            before, shape_before = contents(connection), shape(connection)
        assert all(before.values())
        with database.rebuild() as connection:
            admin.migrate(connection, "9001", folder=more)
        with database.read() as connection:
            assert read_version(connection) == "9001"
            assert "code" in {c["name"] for c in inspect(connection).get_columns("results")}
            assert contents(connection).keys() == before.keys()
            up = contents(connection)
            assert {name: len(rows) for name, rows in up.items()} == {name: len(rows) for name, rows in before.items()}
            assert up["samples"] == before["samples"]
        with pytest.raises(UsageError, match="newer kvbench"):
            open_store(target)
        with database.rebuild() as connection:
            admin.migrate(connection, SCHEMA_VERSION, back=True, folder=more)
        with database.read() as connection:
            assert contents(connection) == before
            assert shape(connection) == shape_before
    with open_store(target) as store:
        store.begin_run(make_run())


def test_a_failing_migration_leaves_nothing_behind(released: tuple[str, str], more: Path) -> None:
    _, target = released
    admin.upgrade(target)
    with opened(target) as database:
        with database.read() as connection:
            before, shape_before = contents(connection), shape(connection)
        with pytest.raises((StoreError, SQLAlchemyError), match="nowhere"), database.rebuild() as connection:
            admin.migrate(connection, "9002", folder=more)
        with database.read() as connection:
            assert contents(connection) == before
            assert shape(connection) == shape_before
            assert read_version(connection) == SCHEMA_VERSION
    with open_store(target) as store:
        assert len(store.runs()) == 2


def test_rows_that_would_point_at_nothing_stop_a_migration(tmp_path: Path) -> None:
    run = make_run()
    with open_store(tmp_path / "kv.db") as store:
        store.begin_run(run)
        store.add_results(run.uuid, [make_row(0)], 0)
        with pytest.raises(StoreError, match="1 rows would point at nothing"), store.database.rebuild() as connection:
            connection.exec_driver_sql("DELETE FROM cases")
        assert store.results(run.uuid, with_samples=True) == [make_row(0)]
        with store.database.read() as connection:
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1


def test_down_to_nothing_and_up_again_is_a_fresh_database(any_target: str) -> None:
    with open_store(any_target) as store, store.database.read() as connection:
        fresh = shape(connection)
    with opened(any_target) as database:
        with database.rebuild() as connection:
            admin.migrate(connection, "base", back=True)
        with database.read() as connection:
            assert set(shape(connection)) == {VERSION_TABLE}
        with database.rebuild() as connection:
            admin.migrate(connection)
        with database.read() as connection:
            assert shape(connection) == fresh
    with open_store(any_target) as store:
        store.begin_run(make_run())
