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


@pytest.fixture(params=trees.NAMES)
def every_tree(request: pytest.FixtureRequest, tree: Tree) -> Path:
    return tree(request.param)
