"""Far memory for the attention tests: host memory, or a scratch file, and what breaks it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable
from kvbench.memory.tiers import parse_tier
from kvbench.systems.directkv.host_attention_far import UNIT, Bytes, Far, MemoryFar, open_far


def aligned(nbytes: int) -> Bytes:
    raw = np.zeros(nbytes + UNIT, np.uint8)
    return raw[-raw.ctypes.data % UNIT :][:nbytes]


class Held(MemoryFar):
    """Far memory that holds its own bytes."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = aligned(nbytes)
        super().__init__(int(self.bytes.ctypes.data), nbytes)


class Failing(Held):
    """Far memory whose read number ``at`` fails."""

    def __init__(self, nbytes: int, at: int) -> None:
        super().__init__(nbytes)
        self.at = at

    def read(self, offset: int, into: Bytes, *, cached: bool = True) -> None:
        self.at -= 1
        if self.at < 0:
            raise Unavailable("the device failed", where="far")
        super().read(offset, into, cached=cached)


class Stale(Held):
    """Far memory whose reads bring something else from ``offset`` on."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        super().__init__(nbytes)
        self.wrong_from: int | None = None
        self.offset = offset

    def read(self, offset: int, into: Bytes, *, cached: bool = True) -> None:
        super().read(offset, into, cached=cached)
        if self.wrong_from is not None and offset >= self.wrong_from:
            into.view(np.uint32)[:] = into.view(np.uint32)[::-1].copy()


def far_of(tier: str, nbytes: int, stack: ExitStack, scratch: Path) -> Far:
    """Return ``nbytes`` of ``tier``; skips where a file cannot be far."""
    if tier == "dram":
        return Held(-(-nbytes // UNIT) * UNIT)
    try:
        return open_far(parse_tier(tier), nbytes, stack.enter_context, lambda n: 0, scratch, 3)
    except Unavailable as error:
        pytest.skip(str(error))
