"""Trees of machines we do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine import trees

Tree = Callable[[str], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return the root of a freshly written tree by name."""

    def build(name: str) -> Path:
        root = tmp_path / name
        root.mkdir()
        return trees.build(root, name)

    return build


@pytest.fixture(scope="session")
def kept_tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Return the root of a tree by name, written once: for tests that only read (the large ones are 2,000 files)."""
    made: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in made:
            made[name] = trees.build(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return build


@pytest.fixture(params=trees.NAMES)
def every_tree(request: pytest.FixtureRequest, kept_tree: Tree) -> Path:
    return kept_tree(request.param)
