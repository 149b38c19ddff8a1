"""Stores on a machine whose processes the test decides about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.store.engine import Store, open_store
from tests.store.factories import here


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "kv.db", here=here()) as opened:
        yield opened


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A fresh store of each kind; the PostgreSQL one is a schema of its own in KVBENCH_TEST_POSTGRES."""
    if request.param == "sqlite":
        with open_store(tmp_path / "kv.db", here=here()) as opened:
            yield opened
        return
    with fresh_postgres() as url, open_store(url, here=here()) as opened:
        yield opened


class fresh_postgres:
    """A schema made for one test and dropped after it; entering gives the URL that sees only that schema."""

    def __enter__(self) -> str:
        import uuid

        from sqlalchemy import create_engine, text

        url = os.environ["KVBENCH_TEST_POSTGRES"].replace("postgresql://", "postgresql+psycopg://", 1)
        self._schema = f"kvbench_test_{uuid.uuid4().hex[:12]}"
        self._engine = create_engine(url)
        with self._engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {self._schema}"))
        return f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{self._schema}"

    def __exit__(self, *exc: object) -> None:
        from sqlalchemy import text

        with self._engine.begin() as connection:
            connection.execute(text(f"DROP SCHEMA {self._schema} CASCADE"))
        self._engine.dispose()
