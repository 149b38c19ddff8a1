"""kvbench measures what the memory hierarchy of this machine delivers to a KV cache, and which way of offloading pays.

The public API is what a suite or a caller needs: ``bench``, ``axis``, ``Case``, ``Measure``, ``Result``, ``Tier``,
``open_store`` and ``errors``. Attributes load on first use, so ``import kvbench`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench import errors
    from kvbench.contract import axis
    from kvbench.contract.bench import bench
    from kvbench.contract.case import Case
    from kvbench.contract.result import Result
    from kvbench.measure import Measure
    from kvbench.memory.tiers import Tier, register_tier
    from kvbench.store import open_store

__version__ = "0.1.0"
__all__ = ["Case", "Measure", "Result", "Tier", "axis", "bench", "errors", "open_store", "register_tier"]

_HOMES = {
    "Case": "kvbench.contract.case", "Measure": "kvbench.measure", "Result": "kvbench.contract.result",
    "Tier": "kvbench.memory.tiers", "register_tier": "kvbench.memory.tiers", "bench": "kvbench.contract.bench",
    "open_store": "kvbench.store",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "axis":
        return importlib.import_module("kvbench.contract.axis")
    if name == "errors":
        return importlib.import_module("kvbench.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
