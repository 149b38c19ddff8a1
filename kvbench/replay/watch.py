"""Who is told how far a replay in this process has come; it may raise to stop it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_watcher: list[Callable[[int], None]] = []


@contextlib.contextmanager
def watching(told: Callable[[int], None]) -> Iterator[None]:
    """Let ``told`` hear of the replays of the block: how many requests have been read, -1 for none further."""
    _watcher.append(told)
    try:
        yield
    finally:
        _watcher.pop()


def watcher() -> Callable[[int], None] | None:
    """Return whoever watches now."""
    return _watcher[-1] if _watcher else None
