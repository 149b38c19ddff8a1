"""The ``kvbench.results/1`` document: the one JSON shape `run` and `show` print (schema file beside the package)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvbench.contract.result import Result, RunInfo

RESULTS_SCHEMA = "kvbench.results/1"


def results_document(
    runs: Iterable[RunInfo], rows: Iterable[tuple[str, Result]], canaries: Iterable[tuple[str, Result]]
) -> dict[str, Any]:
    """Return the document for ``runs`` and their ``(run uuid, row)`` pairs; canaries stand in their own list."""
    return {
        "schema": RESULTS_SCHEMA,
        "runs": [run.to_json() for run in runs],
        "results": [row.to_json(run) for run, row in rows],
        "canaries": [row.to_json(run) for run, row in canaries],
    }
