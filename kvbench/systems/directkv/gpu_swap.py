"""The order of `swap` on a GPU: slabs of the far matrix into near buffers on a stream of their own, then products.

The copy of slab s + 1 is queued before the product of s; events alone say who waits for whom, and nothing waits for the
device as a whole. With one buffer a copy waits for the product before it; with two they overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UsageError
from kvbench.memory.cuda.device import Device, Event, Launch, Stream

Enter = Callable[[AbstractContextManager[Any]], Any]


@dataclass(frozen=True, slots=True)
class Load:
    """One copy: ``nbytes`` from a far ``source`` to a near ``target``."""

    target: int
    source: int
    nbytes: int


class SwapQueue:
    """``loads[s]`` then ``products[s]`` for every slab s, over ``slots`` near buffers used in turns.

    ``operations`` are those of one :meth:`submit`, on the given stream and on ``side``; slab s uses buffer s modulo
    ``slots``, which its load and launch already name. Raises UsageError for lists of other lengths or no buffer.
    """

    def __init__(
        self, device: Device, enter: Enter, loads: Sequence[Load], products: Sequence[Launch], slots: int
    ) -> None:
        if not loads or len(loads) != len(products) or not 1 <= slots <= len(loads):
            raise UsageError("not slabs with a product each", where="swap",
                             got=f"{len(loads)} loads, {len(products)} products, {slots} buffers")  # fmt: skip
        self.loads, self.products, self.slots = tuple(loads), tuple(products), slots
        self.side: Stream = enter(Stream(device))
        self._begin: Event = enter(Event(device))
        self._arrived: list[Event] = [enter(Event(device)) for _ in loads]
        self._free: list[Event] = [enter(Event(device)) for _ in loads]
        # begin: a record and a wait; a slab: copy, record, wait, launch, record; a wait for its buffer where it had one
        self.operations = 2 + 5 * len(loads) + max(0, len(loads) - slots)

    def submit(self, stream: Stream) -> None:
        """Queue all of it: forked from ``stream`` by an event, joined by the last slab's. Raises CudaError."""
        stream.record(self._begin)
        self.side.wait(self._begin)
        self._load(0)
        for slab, product in enumerate(self.products):
            if slab + 1 < len(self.loads) and self.slots > 1:
                self._load(slab + 1)
            stream.wait(self._arrived[slab])
            stream.launch(product)
            stream.record(self._free[slab])
            if slab + 1 < len(self.loads) and self.slots == 1:
                self._load(slab + 1)  # its wait is for an event that has to be recorded before

    def _load(self, slab: int) -> None:
        if slab >= self.slots:
            self.side.wait(self._free[slab - self.slots])
        load = self.loads[slab]
        self.side.copy(load.target, load.source, load.nbytes)
        self.side.record(self._arrived[slab])
