"""Options that several commands share, so that each reads and behaves the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Db = Annotated[
    str | None,
    typer.Option("--db", metavar="PATH|URL", help="Database; default $KVBENCH_DB, then the user's data directory."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Selects = Annotated[
    list[str] | None, typer.Argument(metavar="[SELECT]...", help="suite or suite/bench; none means all suites.")
]
