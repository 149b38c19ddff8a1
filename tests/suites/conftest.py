"""A context with short budgets, and a GPU that is the fake driver's, for benches as the worker runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbench.context import Context
from tests.suites.gpu_rig import Rig, rig, short_context


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return short_context(tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[Rig]:
    with rig(monkeypatch, context) as made:
        yield made
