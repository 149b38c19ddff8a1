"""JSON Schema files of every document ``--json`` prints; ``schema_for`` finds the one a document names."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from kvbench.errors import UsageError


def schema_for(name: str) -> dict[str, Any]:
    """Return the schema called ``name`` (``kvbench.results/1``); raises UsageError for an unknown name."""
    file = files(__name__) / f"{name.replace('/', '-')}.json"
    if not file.is_file():
        raise UsageError("unknown document schema", got=name, expected="the schema field of a kvbench document")
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded
