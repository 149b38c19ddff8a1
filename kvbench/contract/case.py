"""A case: a bench and its axis values, with the digest that identifies it everywhere and for good."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.contract.axis import Axis, Value


def case_digest(suite: str, bench: str, version: int, axes: Mapping[str, Value], declared: Mapping[str, Axis]) -> str:
    """Return sha256 of the canonical JSON of suite, bench, version and axes (sorted, typed; sizes are bytes).

    An axis with a ``since`` is left out at its default, so cases stored before it existed keep their digest.
    """
    kept = {
        name: value
        for name, value in sorted(axes.items())
        if not (name in declared and declared[name].since is not None and declared[name].default == value)
    }
    text = json.dumps(
        {"suite": suite, "bench": bench, "version": version, "axes": kept},
        sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False,
    )  # fmt: skip
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True)
class Case:
    """One point of a bench's grid.

    ``axes`` hold what the user asked (words stay words); ``resolved`` the numbers behind words on this machine.
    Attribute access gives the resolved number where there is one: ``case.threads`` is 2 where ``axes`` say ``all``.
    """

    suite: str
    bench: str
    version: int
    axes: Mapping[str, Value]
    digest: str
    resolved: Mapping[str, Value] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            if name in self.resolved:
                return self.resolved[name]
            if name in self.axes:
                return self.axes[name]
        raise AttributeError(f"case of {self.suite}/{self.bench} has no axis {name!r}")

    def text(self, declared: Mapping[str, Axis] | None = None) -> str:
        """Return ``suite/bench op=read bytes=256MiB threads=all``: the id shown to users and typed back by them."""
        parts = [
            f"{name}={declared[name].format(value) if declared and name in declared else value}"
            for name, value in self.axes.items()
        ]
        return " ".join([f"{self.suite}/{self.bench}", *parts])
