"""Stores on a machine whose processes the test decides about, of both kinds.

Where ``KVBENCH_TEST_POSTGRES`` names no server and the binaries are here, the first test marked ``postgres`` starts one
(server.py); it ends with the session.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbench.store.engine import Store, open_store
from tests.needs import require
from tests.store.factories import here
from tests.store.server import Server, missing_server

NAME = "KVBENCH_TEST_POSTGRES"
_own: list[Server] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # before tests/conftest.py looks whether there is a server
    if item.get_closest_marker("postgres") and not os.environ.get(NAME) and missing_server() is None:
        _own.append(Server())
        os.environ[NAME] = _own[0].url


def pytest_sessionfinish() -> None:
    while _own:
        _own.pop().close()
        os.environ.pop(NAME, None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "kv.db", here=here()) as opened:
        yield opened


BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(params=BOTH)
def any_target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a store of each kind can be made: a path, or the URL of an empty schema on the server."""
    if request.param == "sqlite":
        yield str(tmp_path / "kv.db")
        return
    with fresh_postgres() as url:
        yield url


@pytest.fixture
def any_store(any_target: str) -> Iterator[Store]:
    """A fresh store of each kind."""
    with open_store(any_target, here=here()) as opened:
        yield opened


@pytest.fixture(scope="module")
def mortal() -> Iterator[Server]:
    """A server a test may kill: the session's own where it has one, never the one of KVBENCH_TEST_POSTGRES."""
    if _own:
        yield _own[0]
        return
    require("postgres", missing_server())
    server = Server()
    yield server
    server.close()


@contextmanager
def fresh_postgres() -> Iterator[str]:
    """Make a schema for one test and drop it after; yield the URL that sees only that schema."""
    with fresh_schema(os.environ[NAME]) as url:
        yield url


@contextmanager
def fresh_schema(server: str) -> Iterator[str]:
    """As :func:`fresh_postgres`, on the server of the URL ``server``."""
    import psycopg

    plain = server.replace("postgresql+psycopg://", "postgresql://", 1)
    name = f"kvbench_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    yield f"{plain}{'&' if '?' in plain else '?'}options=-csearch_path%3D{name}"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {name} CASCADE")
