"""Opening what is stored: the same selectors, bundles and notices in every command that reads runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.cli.output import say
from kvbench.errors import UsageError

if TYPE_CHECKING:
    from kvbench.store import LoadedRun, Store


def reading(db: str | None) -> Store:
    """Open the database for reading; it is not made."""
    from kvbench.store import open_store

    return open_store(db, create=False, readonly=True)


def is_bundle(selector: str) -> bool:
    """Return whether ``selector`` is read as a bundle file: there is a file of that name."""
    with contextlib.suppress(OSError, ValueError):  # a name no file system takes is no bundle
        return Path(selector).is_file()
    return False


def load_runs(selector: str, db: str | None) -> Sequence[LoadedRun]:
    """Return what ``selector`` names; a bundle file needs no database.

    A label may end as a bundle does: where there is no such file it is looked for in the database.
    """
    from kvbench.store import LoadedRun, read_bundle

    if not is_bundle(selector):
        try:
            with reading(db) as store:
                return store.load(selector)
        except UsageError:
            if not selector.endswith((".jsonl", ".jsonl.gz")):
                raise
    # a file that is there, or a name that is most likely one: then the line says that it is not there
    found = read_bundle(selector)
    for notice in found.notices:
        say(f"kvbench: {notice}")
    return [LoadedRun(run.info, run.results) for run in found.runs]
