"""Which transports a pair of tiers has, and what a pass between them costs besides: for the grids of the page benches.

Loaded by ``kvbench list``: nothing heavy at module level.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvbench.model import geometry

MODELS = list(geometry.MODELS)
BY_PAIR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dram:dram": ("cpu", "staged"),
        "dram@0:dram@1": ("cpu", "staged"),
        "dram:file": ("cpu", "batch", "staged", "direct"),
        "hbm:pinned": ("ce", "batch", "sm", "staged", "torch"),
    }
)


def exists(axes: Mapping[str, str | int]) -> bool:
    """Return whether the pair has the transport; threads of the host matter only where they move the bytes."""
    return axes["transport"] in BY_PAIR[str(axes["pair"])] and (
        axes["pair"] != "hbm:pinned" or axes["threads"] == "all"
    )


def scratch_bytes(pair: str, moved: int) -> int:
    """Return the bytes of the scratch file behind a pass of ``moved`` bytes; 0 where there is none."""
    from kvbench.systems.strata.transfer import SPREAD
    from kvbench.transport.host_file import FileEnd

    return FileEnd.needs(SPREAD * moved) if moved and pair == "dram:file" else 0


def setup_seconds(moved: int) -> float:
    """Return what making and checking large pools takes beyond the ``seconds`` a bench declares."""
    from kvbench.systems.strata import transfer

    return transfer.setup_seconds(moved)
