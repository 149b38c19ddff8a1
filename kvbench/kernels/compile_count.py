"""How many numba compilations this process has done; one that moves across a timed loop was timed with it (T24)."""

from __future__ import annotations

import sys
from typing import Any

_listener: Any = None


def compile_count() -> int:
    """Return the numba compilations of this process since numba was watched (0 where numba is not loaded).

    Kernels of this package are watched from their import; a load from the disk cache is no compilation. Code that
    compiles numba functions before any kernel is imported is counted from the first call of this function on.
    """
    if _listener is None:
        if "numba" not in sys.modules:
            return 0
        watch()
    return int(_listener.count)


def watch() -> None:
    """Start counting, once per process. Imports numba's event module."""
    global _listener
    if _listener is not None:
        return
    from numba.core import event

    class Counter(event.Listener):
        """Counts compile events; numba fires one per overload that missed the cache, callees included."""

        def __init__(self) -> None:
            self.count = 0

        def on_start(self, event: Any) -> None:
            self.count += 1

        def on_end(self, event: Any) -> None:
            """Nothing to do at the end of a compilation."""

    _listener = Counter()
    event.register("numba:compile", _listener)  # type: ignore[no-untyped-call]
