"""Which tool wrote a file, told by its first 64 KiB."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.store.importers import google_benchmark, mlc, nvbandwidth, nvbench, pytest_benchmark, stream
from kvbench.store.importers.found import Found
from kvbench.store.importers.source import Source, read_head

_MODULES = (nvbandwidth, nvbench, google_benchmark, pytest_benchmark, stream, mlc)
PARSERS: Mapping[str, Callable[[Source], Found]] = {module.TOOL: module.parse for module in _MODULES}
TOOLS = tuple(PARSERS)
_MARKS: Mapping[str, re.Pattern[str]] = {module.TOOL: module.MARK for module in _MODULES}
_BUNDLE = re.compile(r'\A\s*\{[^\n]{0,200}"kvbench\.bundle/')


def recognise(path: str | Path) -> str | None:
    """Return the name of the tool that wrote the file, None for a bundle and for what no tool here writes.

    Raises UsageError when the file cannot be read, or carries the marks of several tools.
    """
    head = _head(path)
    if _BUNDLE.match(head):
        return None
    marked = [tool for tool, mark in _MARKS.items() if mark.search(head)]
    if len(marked) > 1:
        raise UsageError(
            "the file looks like the output of several tools", where=str(path), got=", ".join(marked), expected="one",
            mend="say which with --from",
        )  # fmt: skip
    return marked[0] if marked else None


def is_bundle(path: str | Path) -> bool:
    """Return whether the file begins as a bundle does. Raises UsageError when it cannot be read."""
    return _BUNDLE.match(_head(path)) is not None


def _head(path: str | Path) -> str:
    return read_head(path).decode("utf-8", "replace").removeprefix("\ufeff")
