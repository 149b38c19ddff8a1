"""Opening what is stored: the same selectors, bundles and notices in every command that reads runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.cli.output import say

if TYPE_CHECKING:
    from kvbench.store import LoadedRun, Store


def reading(db: str | None) -> Store:
    """Open the database for reading; it is not made."""
    from kvbench.store import open_store

    return open_store(db, create=False, readonly=True)


def is_bundle(selector: str) -> bool:
    """Return whether ``selector`` is read as a bundle file; by its name, also one that read_bundle will miss."""
    with contextlib.suppress(OSError, ValueError):  # a name no file system takes is no bundle
        if Path(selector).is_file():
            return True
    return selector.endswith((".jsonl", ".jsonl.gz"))


def load_runs(selector: str, db: str | None) -> Sequence[LoadedRun]:
    """Return what ``selector`` names; a bundle file needs no database."""
    from kvbench.store import LoadedRun, read_bundle

    if is_bundle(selector):
        found = read_bundle(selector)
        for notice in found.notices:
            say(f"kvbench: {notice}")
        return [LoadedRun(run.info, run.results) for run in found.runs]
    with reading(db) as store:
        return store.load(selector)
