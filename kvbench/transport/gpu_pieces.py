"""What a transport between GPU tiers is given: where each fragment lies and where it goes; what it offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvbench.errors import UsageError
from kvbench.memory.cuda.device import Stream

Words = np.ndarray[Any, np.dtype[np.int64]]


class Scatter(Protocol):
    """Fragments with the addresses copies take: ``fragment`` bytes each, one number for all or int64 [count]."""

    @property
    def fragment(self) -> int | Words: ...

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def targets(self) -> Words:
        """Return the target addresses, int64 [count]."""
        ...

    def sources(self) -> Words:
        """Return the source addresses, int64 [count]."""
        ...


@dataclass(frozen=True, slots=True)
class Pieces:
    """``count`` fragments of ``fragment`` bytes: fragment i goes from slot ``order[i]`` of the source to slot i.

    ``target`` and ``source`` are addresses for copies. Slots lie one after the other. With more than one fragment the
    order has no neighbours left beside each other, so no run is longer than a fragment (design 2: fragment).
    """

    target: int
    source: int
    fragment: int
    order: Words

    @property
    def count(self) -> int:
        return len(self.order)

    @property
    def nbytes(self) -> int:
        return self.count * self.fragment

    def targets(self) -> Words:
        """Return the target addresses, int64 [count]."""
        return self.target + self.fragment * np.arange(self.count, dtype=np.int64)

    def sources(self) -> Words:
        """Return the source addresses, int64 [count]."""
        return self.source + self.fragment * self.order


def scattered(count: int, seed: int) -> Words:
    """Return a random order of ``count`` slots in which no slot is followed by its neighbour (for 1: the order itself).

    Raises UsageError for 2 slots, of which one always follows the other or the order stays as it was.
    """
    if count == 1:
        return np.zeros(1, np.int64)
    if count < 4:
        raise UsageError("too few fragments to scatter", where="pieces", got=count, expected="1, or at least 4")
    order = np.random.default_rng(seed).permutation(count).astype(np.int64)
    # Whatever follows its neighbour changes places with the next one, until nothing does; each round leaves fewer.
    for _ in range(count):
        runs = np.flatnonzero(np.diff(order) == 1)
        if not len(runs):
            return order
        for i in runs:
            other = (i + 1 + count // 2) % count
            order[i + 1], order[other] = order[other], order[i + 1]
    return np.concatenate([np.arange(1, count, 2), np.arange(0, count, 2)]).astype(np.int64)


class Mover(Protocol):
    """Moves all of its bytes each time it is submitted: ``operations`` on the stream, ``link_bytes`` over the link.

    ``kernel`` names what moves them, for the row.
    """

    operations: int
    link_bytes: int
    kernel: str

    def submit(self, stream: Stream) -> None:
        """Queue the work on ``stream``; raises CudaError when the driver refuses a call."""
        ...
