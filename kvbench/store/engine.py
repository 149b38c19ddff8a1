"""Opens a store: picks the database, makes or checks its schema, and says in one line why it cannot be used."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from kvbench.errors import KvbenchError, StoreError, UsageError
from kvbench.store.checks import Checks
from kvbench.store.database import BUSY_TIMEOUT_S, Database, explain, postgres_engine, sqlite_engine
from kvbench.store.decisions import Decisions
from kvbench.store.liveness import Here
from kvbench.store.query import Queries
from kvbench.store.schema import SCHEMA_VERSION, VERSION_TABLE, metadata, runs
from kvbench.store.series import Series
from kvbench.store.target import Target, check_file, check_free_space, file_system_of, is_network, parse_target
from kvbench.store.write import Writes

QUICK_CHECK_BYTES = 16 << 20  # above it a whole-file check would cost more than the command it precedes
_CREATE_LOCK = 0x6B76_6265  # pg_advisory_xact_lock key: two first commands at once


class Store(Writes, Queries, Series, Decisions, Checks):
    """One open result database. ``notices`` are lines the user should see once; ``where`` is safe to print."""

    def __init__(self, database: Database, *, readonly: bool, here: Here) -> None:
        self._db, self.readonly, self._here = database, readonly, here

    @property
    def database(self) -> Database:
        """The connection behind it, for modules of this package."""
        return self._db

    @property
    def where(self) -> str:
        return self._db.target.display

    def describe(self) -> str:
        """Return the database's path or URL without its password."""
        return self.where

    @property
    def notices(self) -> Sequence[str]:
        return self._db.notices

    def check_writable(self) -> None:
        """Make one real, durable write that changes nothing. Raises KvbenchError. For use before measuring."""
        if self.readonly:
            raise UsageError("this database was opened for reading only", where=self.where)
        path = self._db.target.path
        if path is not None:
            check_file(self._db.target, create=False, write=True)
            check_free_space(path)
            try:
                with self._db.write() as connection:
                    # dirties page 1 without touching a table: a rolled-back insert would never reach the disk
                    connection.exec_driver_sql("PRAGMA user_version=0")
            except StoreError as error:
                raise UsageError(error.what, where=self.where, mend="mend it or give another --db") from None
            return
        with self._db.write() as connection:
            if connection.scalar(text("SELECT current_setting('transaction_read_only')")) == "on":
                raise UsageError("the database refuses writes", where=self.where, mend="connect to the primary server")
            for table in metadata.sorted_tables:
                wanted = ("SELECT", "INSERT", "UPDATE") if table is runs else ("SELECT", "INSERT")
                for right in wanted:  # one at a time: a comma list asks for any of them
                    held = text("SELECT has_table_privilege(:t, :r)")
                    if not connection.scalar(held, {"t": table.name, "r": right}):
                        raise UsageError(
                            f"this user may not {right} on the table {table.name}", where=self.where,
                            mend=f"GRANT {', '.join(wanted)} ON {table.name} TO the user",
                        )  # fmt: skip

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_store(
    target: str | Path | None = None, *, create: bool = True, readonly: bool = False, here: Here | None = None
) -> Store:
    """Open the database ``target`` names (a path, an URL; None: the default of design 9).

    A missing or empty SQLite file, or an empty PostgreSQL database, gets the schema when ``create`` and not
    ``readonly``. ``here`` replaces what is read about this machine.

    Raises UsageError for everything that is not a usable kvbench database of this version.
    """
    database = open_database(parse_target(target), create=create, readonly=readonly)
    return Store(database, readonly=readonly, here=here or Here.read())


def open_database(target: Target, *, create: bool, readonly: bool, any_version: bool = False) -> Database:
    """Open ``target`` as :func:`open_store` does; ``any_version`` leaves the version to the caller (an upgrade)."""
    create = create and not readonly
    notices: tuple[str, ...] = ()
    network = False
    if target.path is not None:
        there = check_file(target, create=create, write=not readonly)
        if not there:
            check_free_space(target.path)
        network = is_network(file_system_of(target.path if there else target.path.parent))
        if network and not readonly:
            notices = (
                f"{target.display}: on a network file system; one command may write at a time, "
                "give --db a local file or a postgresql:// URL for more",
            )
        engine = sqlite_engine(target, _uri(target.path, readonly), query_only=readonly)
    else:
        engine = postgres_engine(target, query_only=readonly)
    database = Database(target, engine, notices)
    try:
        _prepare(database, create=create, network=network, readonly=readonly, any_version=any_version)
        database.hold()
    except BaseException:
        database.close()
        raise
    return database


def _uri(path: Path, readonly: bool) -> str:
    name = quote(str(path.absolute()))
    if not readonly:
        return f"file:{name}?mode=rwc"
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        # mode=ro would leave its -shm and -wal files behind; query_only keeps writes out as well
        return f"file:{name}?mode=rw"
    wal = path.with_name(path.name + "-wal")
    # WAL needs its index file: where none can be made, a database without a log may be read as immutable
    if not wal.exists() or wal.stat().st_size == 0:
        return f"file:{name}?immutable=1"
    shm = path.with_name(path.name + "-shm")
    if not (shm.exists() or os.access(path.parent, os.W_OK)):
        raise UsageError(
            "its newest commits lie in a log that cannot be read where nothing may be written", where=str(path),
            got=f"{wal.name} with {wal.stat().st_size} B in a read-only folder",
            mend=f"copy {path.name} and {wal.name} together into a folder of yours and give --db the copy",
        )  # fmt: skip
    return f"file:{name}?mode=ro"


def _prepare(database: Database, *, create: bool, network: bool, readonly: bool, any_version: bool) -> None:
    target = database.target
    try:
        with database.read() as connection:
            _check_encoding(connection, target)
            tables = set(inspect(connection).get_table_names())
        if not tables and create:
            _create(database, network)
        elif not tables:
            raise UsageError("the database is empty", where=target.display, mend="`kvbench run` fills it")
        else:
            _check_identity(tables, target)
        with database.read() as connection:
            if not any_version:
                _check_version(connection, target)
            _check_pages(connection, target)
        if target.kind == "sqlite" and not readonly:
            _set_journal(database.engine, network)
    except SQLAlchemyError as error:
        raise _unusable(explain(error, target)) from None
    except StoreError as error:
        raise _unusable(error) from None


def _check_encoding(connection: Connection, target: Target) -> None:
    if target.kind == "sqlite":
        return
    found = connection.scalar(text("SHOW server_encoding"))
    if found != "UTF8":
        raise UsageError(
            "the database does not take every character", where=target.display, got=found, expected="encoding UTF8",
            mend="CREATE DATABASE ... TEMPLATE template0 ENCODING 'UTF8'",
        )  # fmt: skip


def _unusable(error: KvbenchError) -> UsageError:
    """Return ``error`` as exit 2: nothing has been measured yet, so the database named is the mistake."""
    if isinstance(error, UsageError):
        return error
    return UsageError(error.what, where=error.where, mend=error.mend or "give another --db")


def _check_identity(tables: set[str], target: Target) -> None:
    if VERSION_TABLE in tables:
        return
    raise UsageError(
        "this is a database of another program", where=target.display,
        got="tables " + ", ".join(sorted(tables)[:4]), expected="a kvbench database or an empty one",
        mend="give another --db; nothing was changed",
    )  # fmt: skip


def read_version(connection: Connection) -> str:
    """Return the schema version stamped in the database. Raises SQLAlchemyError; empty when there is no stamp."""
    rows = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    return str(rows[0]) if len(rows) == 1 else ""


def _check_version(connection: Connection, target: Target) -> None:
    found = read_version(connection)
    if found == SCHEMA_VERSION:
        return
    if found.isdigit() and int(found) < int(SCHEMA_VERSION):
        raise UsageError(
            "the database has an older schema", where=target.display, got=f"version {found}",
            expected=f"version {SCHEMA_VERSION}", mend="kvbench db upgrade",
        )  # fmt: skip
    if found.isdigit():
        raise UsageError(
            "the database was written by a newer kvbench", where=target.display, got=f"version {found}",
            expected=f"at most version {SCHEMA_VERSION}", mend="upgrade kvbench, or give another --db",
        )  # fmt: skip
    raise UsageError(
        "the database has no readable schema version", where=target.display, got=found,
        expected=f"version {SCHEMA_VERSION}",
    )  # fmt: skip


def _check_pages(connection: Connection, target: Target) -> None:
    if target.path is None or target.path.stat().st_size > QUICK_CHECK_BYTES:
        return
    found = connection.execute(text("PRAGMA quick_check(1)")).scalars().all()
    if found != ["ok"]:
        detail = " ".join(str(found[0]).split()) if found else "no answer"
        raise UsageError(
            f"the database is damaged ({detail})", where=target.display,
            mend="restore a copy, or `sqlite3 FILE .recover`; nothing was changed",
        )  # fmt: skip


def _create(database: Database, network: bool) -> None:
    if database.target.kind == "sqlite":
        _set_journal(database.engine, network)
    with database.write() as connection:
        if database.target.kind == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_CREATE_LOCK})"))
        if set(inspect(connection).get_table_names()):  # another process was faster
            return
        metadata.create_all(connection, checkfirst=False)
        stamp(connection)


def stamp(connection: Connection) -> None:
    """Write the version table exactly as Alembic would."""
    connection.execute(
        text(
            f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, "
            f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES ('{SCHEMA_VERSION}')"))


def _set_journal(engine: Engine, network: bool) -> None:
    """Put the file into WAL mode, or into rollback mode where a WAL index cannot be shared.

    The change needs the file alone for a moment and SQLite does not call the busy handler for it, so it is retried.
    """
    wanted = "delete" if network else "wal"
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        raw = engine.raw_connection()
        try:
            cursor = raw.cursor()
            try:
                (mode,) = cursor.execute("PRAGMA journal_mode").fetchone()
                if mode == wanted:
                    return
                (mode,) = cursor.execute(f"PRAGMA journal_mode={wanted}").fetchone()
                if mode == wanted:
                    return
                problem: Exception | None = None
            finally:
                cursor.close()
        except engine.dialect.loaded_dbapi.OperationalError as error:
            problem = error
            if getattr(error, "sqlite_errorcode", 5) & 0xFF != 5:
                raise UsageError(
                    f"the database cannot be written ({error})", where=engine.url.database or "database"
                ) from None
        finally:
            raw.close()
        if time.monotonic() > deadline:
            raise StoreError(f"journal mode {wanted} was refused ({problem or mode})")
        time.sleep(0.01)
