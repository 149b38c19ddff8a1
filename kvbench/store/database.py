"""One open database: transactions, and what its errors mean to a user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from kvbench.errors import KvbenchError, MissingExtra, StoreError, UsageError
from kvbench.store.target import Target

BUSY_TIMEOUT_S = 30
_WRITES = "kvbench_writes"

# primary result codes of SQLite (sqlite.org/rescode.html)
_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _NOTADB = 5, 6, 8, 10, 11, 13, 14, 26


def to_json(value: Any) -> str:
    """Return strict JSON (no NaN), ASCII only. Raises ValueError for what strict JSON cannot say."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Database:
    """An engine whose transactions are explicit: readers BEGIN, writers BEGIN IMMEDIATE.

    A transaction that reads before it writes fails at once under SQLite's deferred BEGIN when another process has
    written meanwhile, whatever the busy timeout: 299 of 320 runs were lost that way with 8 writers (tooling.md 1).
    """

    def __init__(self, target: Target, engine: Engine, notices: tuple[str, ...] = ()) -> None:
        self.target, self.engine, self.notices = target, engine, notices
        self._writer = engine.execution_options(**{_WRITES: True})

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection inside one read transaction (one snapshot). Raises KvbenchError."""
        try:
            with self.engine.connect() as connection, connection.begin():
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

    def close(self) -> None:
        self.engine.dispose()


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
    arguments = {"connect_timeout": 10, "application_name": "kvbench"}
    try:
        engine = create_engine(
            target.url, json_serializer=to_json, hide_parameters=True, pool_pre_ping=True, pool_size=2,
            max_overflow=8, connect_args=arguments,
        )  # fmt: skip
    except ImportError:
        raise MissingExtra("psycopg", "postgres", f"the database {target.display}") from None
    except (SQLAlchemyError, ValueError):
        # the text of a parse error quotes the URL, password included
        raise UsageError(
            "the URL cannot be read", where="--db", got=target.display,
            expected="postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        ) from None  # fmt: skip
    if query_only:

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    return engine


def explain(error: SQLAlchemyError, target: Target) -> KvbenchError:
    """Return what a database error means: one line, no statement, no parameters, no password."""
    where = target.display
    if isinstance(error, PoolTimeout):
        return StoreError("no connection became free", where=where, mend="close other users of this database")
    origin: BaseException = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = target.scrub(" ".join(str(origin).split()))
    if target.kind == "sqlite":
        return _explain_sqlite(origin, text, where)
    state = str(getattr(origin, "sqlstate", None) or "")
    if state == "53100":
        return StoreError("the disk of the database is full", where=where, mend="free space; what is stored is kept")
    if state in ("25006", "42501"):
        return StoreError(f"the database refuses writes ({text})", where=where, mend="grant INSERT, or another --db")
    if state.startswith(("28", "3D")):
        return UsageError(f"the database cannot be used ({text})", where=where, mend="check the URL and the server")
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
