"""Chunks into addresses and out again: the only driver calls the pool makes after it is built."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.vmm.protocol import Chunk, Reservation, Vmm, VmmError

Range = tuple[int, int]  # (first chunk's worth of addresses, how many)


class Stuck(KvbenchError):
    """A failed mapping could not be undone: ``ranges`` are still mapped, to be unmapped before they are used."""

    def __init__(self, cause: KvbenchError, ranges: Sequence[Range]) -> None:
        self.ranges = tuple(ranges)
        super().__init__(f"{cause}; undoing it failed too", where="mapping")


class PartlyDone(KvbenchError):
    """Unmapping failed; the first ``done`` ranges are unmapped."""

    def __init__(self, cause: KvbenchError, done: int) -> None:
        self.done = done
        super().__init__(str(cause))


class Mapping:
    """``chunks`` (all of ``chunk_bytes``) by number, and the calls that move them."""

    def __init__(self, vmm: Vmm, chunks: Sequence[Chunk], chunk_bytes: int) -> None:
        self.vmm, self.chunks, self.chunk_bytes = vmm, tuple(chunks), chunk_bytes

    def spans(self, ranges: Sequence[Range]) -> list[Range]:
        """Return ``ranges`` in bytes."""
        size = self.chunk_bytes
        return [(first * size, count * size) for first, count in ranges]

    def attach(self, reservation: Reservation, ranges: Sequence[Range], numbers: Sequence[int]) -> None:
        """Map chunks ``numbers`` over ``ranges`` in order and make them accessible, or leave nothing mapped.

        Raises VmmError as the driver does; Stuck when the ranges could not be unmapped again after a failure.
        """
        size, chunks = self.chunk_bytes, self.chunks
        offsets = [at for first, count in ranges for at in range(first * size, (first + count) * size, size)]
        self.vmm.map_many(reservation, offsets, [chunks[number] for number in numbers])
        try:
            self.vmm.set_access_many(reservation, self.spans(ranges))
        except VmmError as error:
            try:
                self.detach(reservation, ranges)
            except PartlyDone as failed:
                raise Stuck(error, ranges[failed.done :]) from error
            except KvbenchError:  # a fence that does not end: nothing was unmapped
                raise Stuck(error, ranges) from error
            raise

    def detach(self, reservation: Reservation, ranges: Sequence[Range]) -> None:
        """Unmap ``ranges`` in order, after the fences of ``reservation``. Raises PartlyDone where it stopped."""
        try:
            self.vmm.unmap_many(reservation, self.spans(ranges))
        except VmmError as error:
            # CUDA may report an error of earlier work and have unmapped all the same.
            gone = not self._mapped(reservation, ranges[error.index])
            raise PartlyDone(error, error.index + gone) from error

    def _mapped(self, reservation: Reservation, span: Range) -> bool:
        """Return whether a range that was accessible is mapped still: it can be made accessible again if it is."""
        try:
            self.vmm.set_access_many(reservation, self.spans([span]))
        except UsageError:
            return False
        except VmmError:
            return True
        return True
