"""``kvbench db``: what a database is, whether it is whole, and bringing an older schema up to date."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, func, inspect, select, text

from kvbench.errors import UsageError
from kvbench.store.database import Database
from kvbench.store.engine import open_database, read_version
from kvbench.store.schema import SCHEMA_VERSION, metadata
from kvbench.store.target import file_system_of, parse_target

Facts = dict[str, str | int | None]


def info(target: str | Path | None = None) -> Facts:
    """Return where the database is, its schema version and how many rows each table has. Raises UsageError."""
    database = open_database(parse_target(target), create=False, readonly=True)
    try:
        return _head(database) | _counts(database)
    finally:
        database.close()


def check(target: str | Path | None = None) -> Facts:
    """Return :func:`info` with ``integrity``: ``ok``, or the first thing that is wrong. Reads the whole file.

    ``foreign_keys`` counts rows that point at nothing. A PostgreSQL server checks its own pages: unknown is None.
    """
    database = open_database(parse_target(target), create=False, readonly=True)
    try:
        facts = _head(database) | _counts(database)
        facts |= {"integrity": None, "foreign_keys": None}
        if database.target.kind == "sqlite":
            with database.read() as connection:
                found = connection.execute(text("PRAGMA integrity_check(1)")).scalars().all()
                lost = len(connection.execute(text("PRAGMA foreign_key_check")).all())
            integrity = " ".join(str(found[0]).split()) if found else "no answer"
            if integrity == "ok" and lost:
                integrity = f"{lost} rows point at nothing"
            facts |= {"integrity": integrity, "foreign_keys": lost}
        return facts
    finally:
        database.close()


def upgrade(target: str | Path | None = None) -> Facts:
    """Bring the schema to this version, in one transaction; return ``from`` and ``to``.

    Raises UsageError when the database is newer than this kvbench or cannot be used; nothing is changed then.
    """
    database = open_database(parse_target(target), create=False, readonly=False, any_version=True)
    try:
        with database.write() as connection:
            found = read_version(connection)
            if not found.isdigit() or int(found) > int(SCHEMA_VERSION):
                raise UsageError(
                    "the database was written by a newer kvbench", where=database.target.display,
                    got=f"version {found}", expected=f"at most version {SCHEMA_VERSION}", mend="upgrade kvbench",
                )  # fmt: skip
            migrate(connection)
            reached = read_version(connection)
        return {"database": database.target.display, "from": found, "to": reached}
    finally:
        database.close()


def migrate(connection: Connection, revision: str = "head") -> None:
    """Run the migrations up to ``revision`` inside the caller's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "kvbench.store:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _head(database: Database) -> Facts:
    facts: Facts = {"database": database.target.display, "kind": database.target.kind}
    with database.read() as connection:
        facts["schema"] = read_version(connection)
        if database.target.path is not None:
            path = database.target.path
            beside = [path, path.with_name(f"{path.name}-wal")]  # what is committed may still lie in the log
            facts["bytes"] = sum(file.stat().st_size for file in beside if file.exists())
            facts["journal"] = str(connection.execute(text("PRAGMA journal_mode")).scalar_one())
            facts["file_system"] = file_system_of(database.target.path)
    return facts


def _counts(database: Database) -> Facts:
    with database.read() as connection:
        there = set(inspect(connection).get_table_names())
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
            if table.name in there
        }
