"""One team a size for a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kvbench.kernels.team import Team

CPU = min(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def teams() -> Iterator[Callable[[int], Team]]:
    """Return teams by size, all members on one CPU: what is computed does not depend on where."""
    made: dict[int, Team] = {}

    def team(size: int) -> Team:
        if size not in made:
            made[size] = Team([CPU] * size)
        return made[size]

    yield team
    for each in reversed(made.values()):  # the first one made gives the affinity back
        each.close()
