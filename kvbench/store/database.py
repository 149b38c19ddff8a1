"""One open database: transactions, and what its errors mean to a user."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from kvbench.errors import KvbenchError, MissingExtra, StoreError, UsageError
from kvbench.store.opened import hold_open
from kvbench.store.target import Target

BUSY_TIMEOUT_S = 30
_WRITES = "kvbench_writes"
T = TypeVar("T")

# serialization_failure, deadlock_detected: the transaction was chosen to give way and may simply be tried again
_GAVE_WAY = ("40001", "40P01")
_ATTEMPTS = 5
# A server that vanished without a word (power, cable) must not hang a run for the kernel's two hours.
_POSTGRES_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 10, "application_name": "kvbench", "keepalives_idle": 30, "keepalives_interval": 10,
    "keepalives_count": 3, "tcp_user_timeout": 60_000,
}  # fmt: skip
# What a role, a database or PGOPTIONS may have set and our promises forbid: floats cut to 15 digits on their way out,
# and commits acknowledged before they are on disk. The session's own word is the last.
_POSTGRES_SESSION = (
    "SELECT set_config('extra_float_digits', '1', false), set_config('synchronous_commit', "
    "CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, "
    "false)"
)

# primary result codes of SQLite (sqlite.org/rescode.html)
_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _NOTADB = 5, 6, 8, 10, 11, 13, 14, 26


def to_json(value: Any) -> str:
    """Return strict JSON (no NaN), ASCII only. Raises ValueError for what strict JSON cannot say."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Database:
    """An engine whose transactions are explicit. SQLite: readers BEGIN, writers BEGIN IMMEDIATE. PostgreSQL: readers
    REPEATABLE READ (its default shows every statement another snapshot), writers READ COMMITTED (a row another writer
    inserted first must become visible).

    A transaction that reads before it writes fails at once under SQLite's deferred BEGIN when another process has
    written meanwhile, whatever the busy timeout: 299 of 320 runs were lost that way with 8 writers (tooling.md 1).
    """

    def __init__(self, target: Target, engine: Engine, notices: tuple[str, ...] = ()) -> None:
        self.target, self.engine, self.notices = target, engine, notices
        self._writer = engine.execution_options(**{_WRITES: True})
        self._reader = engine
        self._closed: Callable[[], None] | None = None
        if target.kind == "postgresql":
            self._reader = engine.execution_options(isolation_level="REPEATABLE READ")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection inside one read transaction (one snapshot). Raises KvbenchError."""
        try:
            with self._reader.connect() as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise explain(error, self.target) from None

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield a connection inside one write transaction, durable as a whole on return. Raises KvbenchError."""
        try:
            with self._writer.connect() as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise explain(error, self.target) from None

    @contextmanager
    def rebuild(self) -> Iterator[Connection]:
        """Yield a connection as :meth:`write` does, for migrations: SQLite checks foreign keys at the end only.

        SQLite alters most columns by dropping the table and renaming a copy. With foreign keys on, the drop deletes
        row by row: every row of samples would follow its result. Raises KvbenchError.
        """
        try:
            with self._writer.connect() as connection:
                raw = connection.connection.driver_connection
                assert raw is not None
                if self.target.kind == "sqlite":
                    raw.execute("PRAGMA foreign_keys=OFF")  # outside a transaction, where alone it has an effect
                try:
                    with connection.begin():
                        yield connection
                        if self.target.kind == "sqlite":
                            lost = len(connection.exec_driver_sql("PRAGMA foreign_key_check").all())
                            if lost:
                                raise StoreError(
                                    f"{lost} rows would point at nothing", where=self.target.display,
                                    mend="nothing was changed",
                                )  # fmt: skip
                finally:
                    if self.target.kind == "sqlite":
                        raw.execute("PRAGMA foreign_keys=ON")
        except SQLAlchemyError as error:
            raise explain(error, self.target) from None

    def transact(self, work: Callable[[Connection], T]) -> T:
        """Return ``work(connection)``, run as :meth:`write` does and again when PostgreSQL made it give way.

        Two transactions that insert the same cases in another order wait for each other; the server ends one of them.
        ``work`` may therefore run several times. Raises KvbenchError.
        """
        for attempt in range(_ATTEMPTS):
            try:
                with self._writer.connect() as connection, connection.begin():
                    return work(connection)
            except SQLAlchemyError as error:
                if _sqlstate(error) not in _GAVE_WAY or attempt == _ATTEMPTS - 1:
                    raise explain(error, self.target) from None
            time.sleep(random.uniform(0.0, 0.05 * 2**attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def hold(self) -> None:
        """Note that the file is open here, until :meth:`close`; it has been made by now."""
        if self.target.path is not None and self._closed is None:
            self._closed = hold_open(self.target.path)

    def close(self) -> None:
        self.engine.dispose()
        if self._closed is not None:
            self._closed()


def sqlite_engine(target: Target, uri: str, *, query_only: bool) -> Engine:
    """Return an engine for the SQLite ``uri``; ``query_only`` makes every write an error."""
    engine = create_engine(
        "sqlite+pysqlite://", poolclass=QueuePool, pool_size=2, max_overflow=8, json_serializer=to_json,
        hide_parameters=True,        creator=lambda: _sqlite_connect(uri, query_only),
    )  # fmt: skip

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _sqlite_connect(uri: str, query_only: bool) -> Any:
    import sqlite3

    # isolation_level=None: pysqlite's own BEGIN would leave reads and DDL outside the transaction
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )  # fmt: skip
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        if query_only:
            connection.execute("PRAGMA query_only=ON")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def postgres_engine(target: Target, *, query_only: bool) -> Engine:
    """Return an engine for a PostgreSQL URL. Raises MissingExtra without psycopg 3, UsageError for a bad URL."""
    assert target.url is not None
    try:
        url = make_url(target.url)
        arguments = {name: value for name, value in _POSTGRES_DEFAULTS.items() if name not in url.query}
        # PGCLIENTENCODING in the environment would make other bytes of our text
        arguments["client_encoding"] = "utf8"
        engine = create_engine(
            url, json_serializer=to_json, hide_parameters=True, pool_pre_ping=True, pool_size=2, max_overflow=8,
            connect_args=arguments,
        )  # fmt: skip
    except ImportError:
        raise MissingExtra("psycopg", "postgres", f"the database {target.display}") from None
    except (SQLAlchemyError, ValueError):
        # the text of a parse error quotes the URL, password included
        raise UsageError(
            "the URL cannot be read", where="--db", got=target.display,
            expected="postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        ) from None  # fmt: skip

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, record: object) -> None:
        connection.execute(_POSTGRES_SESSION)
        connection.commit()

    if query_only:

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    return engine


def _sqlstate(error: BaseException) -> str:
    return str(getattr(getattr(error, "orig", None) or error, "sqlstate", None) or "")


def explain(error: SQLAlchemyError, target: Target) -> KvbenchError:
    """Return what a database error means: one line, no statement, no parameters, no password."""
    where = target.display
    if isinstance(error, PoolTimeout):
        return StoreError("no connection became free", where=where, mend="close other users of this database")
    origin: BaseException = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = target.scrub(" ".join(str(origin).split()))
    if target.kind == "sqlite":
        return _explain_sqlite(origin, text, where)
    state = _sqlstate(error)
    if state == "53100":
        return StoreError("the disk of the database is full", where=where, mend="free space; what is stored is kept")
    if state in ("25006", "42501"):
        return StoreError(f"the database refuses writes ({text})", where=where, mend="grant INSERT, or another --db")
    if state.startswith(("28", "3D")):
        return UsageError(f"the database cannot be used ({text})", where=where, mend="check the URL and the server")
    if state.startswith(("08", "57P")) or (not state and type(origin).__name__ == "OperationalError"):
        # no state: libpq itself speaks, the server said nothing any more or nothing at all
        return StoreError(
            f"the server cannot be reached ({text})", where=where,
            mend="start it or check the URL; what was acknowledged is kept and `kvbench run --resume RUN` goes on",
        )  # fmt: skip
    return StoreError(f"the database failed ({text})", where=where)


def _explain_sqlite(origin: BaseException, text: str, where: str) -> KvbenchError:
    code = getattr(origin, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    if primary == _FULL:
        return StoreError("the disk is full", where=where, mend="free space; everything committed before is kept")
    if primary in (_BUSY, _LOCKED):
        return StoreError(
            f"another process held the database for {BUSY_TIMEOUT_S} s", where=where, mend="end it, or use PostgreSQL"
        )
    if primary in (_CORRUPT, _NOTADB):
        return UsageError(
            f"the database is damaged ({text})", where=where,
            mend="restore a copy, or `sqlite3 FILE .recover`; nothing was changed",
        )  # fmt: skip
    if primary == _READONLY:
        return StoreError("the database is read-only", where=where, mend="mend its permissions or give another --db")
    if primary == _CANTOPEN:
        return StoreError(f"the database cannot be opened ({text})", where=where, mend="check the folder's permissions")
    if primary == _IOERR:
        return StoreError(
            f"the disk failed or is full ({text})", where=where, mend="everything committed before is kept"
        )
    return StoreError(f"the database failed ({text})", where=where)
