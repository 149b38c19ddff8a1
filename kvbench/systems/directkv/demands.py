"""What a bench declares of its host cases before a run: bytes of scratch files, seconds beyond the timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.contract.axis import Value
    from kvbench.systems.directkv.host_needs import Needs


def demands(
    needs: Callable[[Mapping[str, Value]], Needs],
) -> tuple[Callable[[Mapping[str, Value]], int], Callable[[Mapping[str, Value]], float]]:
    """Return a bench's ``disk`` and ``setup``: what the :class:`Needs` of a host case say, and nothing on a GPU."""

    def scratch_bytes(axes: Mapping[str, Value]) -> int:
        return 0 if axes["device"] == "gpu" else needs(axes).scratch

    def setup_seconds(axes: Mapping[str, Value]) -> float:
        return 0.0 if axes["device"] == "gpu" else needs(axes).setup

    return scratch_bytes, setup_seconds
