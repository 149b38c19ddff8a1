"""Reads what other tools measured: each file becomes a run of its own, under suite ``imported``.

What a file does not say stays unsaid: no interval, no samples, no count where it has none, and a hardware class of its
own unless the file names its machine or the user says it is this one. Standard library only; nothing here is executed
or followed but side files beside the file. Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.store.importers.admit import Foreign, admit, read_foreign
    from kvbench.store.importers.recognise import TOOLS, recognise

__all__ = ["TOOLS", "Foreign", "admit", "read_foreign", "recognise"]

_HOMES = {
    "TOOLS": "recognise", "recognise": "recognise", "Foreign": "admit", "admit": "admit", "read_foreign": "admit",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvbench.store.importers' has no attribute {name!r}")
    # `recognise` is a module too: importing it has put that under the name
    globals()[name] = found = getattr(importlib.import_module(f"kvbench.store.importers.{_HOMES[name]}"), name)
    return found
