"""Reads what other tools measured: each file becomes a run of its own, under suite ``imported``.

What a file does not say stays unsaid: no interval, no samples, no count where it has none, and a hardware class of its
own unless the file names its machine or the user says it is this one. Standard library only; nothing here is executed
or followed but side files beside the file. Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.store.importers.admission import Foreign, admit, read_foreign
    from kvbench.store.importers.tools import TOOLS, is_bundle, recognise

__all__ = ["TOOLS", "Foreign", "admit", "is_bundle", "read_foreign", "recognise"]

_HOMES = {
    "TOOLS": "tools",
    "recognise": "tools",
    "is_bundle": "tools",
    "Foreign": "admission",
    "read_foreign": "admission",
    "admit": "admission",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvbench.store.importers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvbench.store.importers.{_HOMES[name]}"), name)
