"""The driver calls of an inflation without the pool around them: what it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvbench.memory.vmm.protocol import Chunk, Vmm


class CallsAlone:
    """Moves ``chunks`` from one range of addresses to another and back, by the calls the pool would make.

    The chunks may be mapped elsewhere too; these are further mappings of them. Raises what the driver raises.
    """

    def __init__(self, vmm: Vmm, chunks: Sequence[Chunk]) -> None:
        self._vmm, self._chunks = vmm, list(chunks)
        self._size = self._chunks[0].nbytes
        self._offsets = [at * self._size for at in range(len(self._chunks))]
        self._whole = [(0, self._size * len(self._chunks))]
        self._old = vmm.reserve(self._whole[0][1])
        try:
            self._new = vmm.reserve(self._whole[0][1])
        except BaseException:
            vmm.free(self._old)
            raise
        self._mapped: set[int] = set()
        self._closed = False

    def prepare(self) -> None:
        """Map the chunks at the old addresses and leave the new ones empty."""
        self._clear()
        self._vmm.map_many(self._old, self._offsets, self._chunks)
        self._mapped.add(self._old.serial)
        self._vmm.set_access_many(self._old, self._whole)

    def unmap(self) -> None:
        """Unmap the old addresses, one call."""
        self._vmm.unmap_many(self._old, self._whole)
        self._mapped.discard(self._old.serial)

    def map(self) -> None:
        """Map the chunks at the new addresses, a call each."""
        self._vmm.map_many(self._new, self._offsets, self._chunks)
        self._mapped.add(self._new.serial)

    def access(self) -> None:
        """Make the new addresses accessible, one call."""
        self._vmm.set_access_many(self._new, self._whole)

    def _clear(self) -> None:
        for place in (self._old, self._new):
            if place.serial in self._mapped:
                self._vmm.unmap_many(place, self._whole)
                self._mapped.discard(place.serial)

    def close(self) -> None:
        """Unmap and give the addresses back. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._clear()
        self._vmm.free(self._old)
        self._vmm.free(self._new)

    def __enter__(self) -> CallsAlone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
