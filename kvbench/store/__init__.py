"""Keeps results: a database (SQLite or PostgreSQL) and bundle files that travel. Names load on first use.

No name here is also the name of a module of this package: importing the module would replace the name.
SQLAlchemy is imported by the names that need a database only: ``run --bundle F --no-db`` works without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.store.bundle import Bundle, BundleRun, BundleWriter, check_bundle, read_bundle
    from kvbench.store.decisions import Calibration, KnownCase, Note
    from kvbench.store.engine import Store, open_store
    from kvbench.store.formats import FORMATS, Exported, export
    from kvbench.store.labels import check_label
    from kvbench.store.query import LoadedRun, StoredRun
    from kvbench.store.series import Figure, Pair, Point
    from kvbench.store.sink import Sink
    from kvbench.store.transfer import ImportCounts, export_bundle, import_bundle

__all__ = [
    "FORMATS", "Bundle", "BundleRun", "BundleWriter", "Calibration", "Exported", "Figure", "ImportCounts", "KnownCase",
    "LoadedRun", "Note", "Pair", "Point", "Sink", "Store", "StoredRun", "check_bundle", "check_label", "export",
    "export_bundle", "import_bundle", "open_store", "read_bundle",
]  # fmt: skip

_HOMES = {
    "Bundle": "bundle", "BundleRun": "bundle", "BundleWriter": "bundle", "check_bundle": "bundle",
    "read_bundle": "bundle", "Calibration": "decisions", "KnownCase": "decisions", "Note": "decisions",
    "Store": "engine",
    "open_store": "engine", "FORMATS": "formats", "Exported": "formats",
    "export": "formats", "LoadedRun": "query", "StoredRun": "query",
    "Figure": "series", "Pair": "series", "Point": "series",
    "Sink": "sink", "ImportCounts": "transfer", "export_bundle": "transfer", "import_bundle": "transfer",
    "check_label": "labels",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"kvbench.store.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kvbench.store' has no attribute {name!r}")
