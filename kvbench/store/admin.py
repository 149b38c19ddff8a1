"""``kvbench db``: what a database is, whether it is whole, and bringing an older schema up to date."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import Connection, exists, func, inspect, select, text

from kvbench.errors import StoreError, UsageError
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
    """Return :func:`info` with ``integrity``: ``ok``, or the first thing that is wrong. Reads the whole database.

    ``foreign_keys`` counts rows that point at nothing, None where a damaged database could not be counted.
    """
    database = open_database(parse_target(target), create=False, readonly=True)
    try:
        facts = _head(database) | _counts(database)
        integrity, lost = (_sqlite_integrity if database.target.kind == "sqlite" else _postgres_integrity)(database)
        if integrity == "ok" and lost:
            integrity = f"{lost} rows point at nothing"
        return facts | {"integrity": integrity, "foreign_keys": lost}
    finally:
        database.close()


def _sqlite_integrity(database: Database) -> tuple[str, int | None]:
    with database.read() as connection:
        found = connection.execute(text("PRAGMA integrity_check(1)")).scalars().all()
        lost = len(connection.execute(text("PRAGMA foreign_key_check")).all())
    return " ".join(str(found[0]).split()) if found else "no answer", lost


def _postgres_integrity(database: Database) -> tuple[str, int | None]:
    """Read every value of every table (the server tells of pages it cannot read) and count what points at nothing."""
    lost = 0
    try:
        with database.read() as connection:
            for table in metadata.sorted_tables:
                connection.execute(text(f"SELECT count(length(t::text)) FROM {table.name} t"))
                for key in table.foreign_keys:
                    there = exists().where(key.column == key.parent)
                    astray = select(func.count()).select_from(table).where(key.parent.is_not(None), ~there)
                    lost += connection.execute(astray).scalar_one()
    except StoreError as error:
        return error.what, None
    return "ok", lost


def upgrade(target: str | Path | None = None) -> Facts:
    """Bring the schema to this version, in one transaction; return ``from`` and ``to``.

    Raises UsageError when the database is newer than this kvbench or cannot be used; nothing is changed then.
    """
    database = open_database(parse_target(target), create=False, readonly=False, any_version=True)
    try:
        with database.rebuild() as connection:
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


def migrate(connection: Connection, revision: str = "head", *, back: bool = False, folder: Path | None = None) -> None:
    """Run the migrations up to ``revision``, or ``back`` down to it, inside the caller's transaction.

    The transaction is one of :meth:`Database.rebuild`. ``folder`` holds further migrations (tests try theirs so).
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "kvbench.store:migrations")
    config.set_main_option("path_separator", "os")
    if folder is not None:
        own = Path(__file__).parent / "migrations" / "versions"
        config.set_main_option("version_locations", os.pathsep.join(map(str, (own, folder))).replace("%", "%%"))
    config.attributes["connection"] = connection
    (command.downgrade if back else command.upgrade)(config, revision)


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
