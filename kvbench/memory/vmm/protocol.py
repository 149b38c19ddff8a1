"""What a driver of virtual memory offers: address ranges apart from the physical chunks that are mapped into them.

The order is reserve, create, map, set_access, use, unmap, release, free (the calls of CUDA's cuMem* interface). A chunk
may be mapped at several places at once (an alias), which is how memory moves to a new owner before its old address is
given up (eLLM, arXiv 2506.15155, section 3.1). What is mapped cannot be touched before ``set_access``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvbench.errors import KvbenchError, Unavailable, UsageError

Offsets = npt.NDArray[np.int64]
Span = tuple[int, int]  # (offset, nbytes) within a reservation
SLOTS = 1 << 28  # chunks of a driver alive at once; 2**35 numbers are left for those made in the life of a process


@dataclass(frozen=True, slots=True)
class Reservation:
    """``nbytes`` of addresses at ``address``, a multiple of the granularity. ``serial`` is never used again."""

    serial: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """``nbytes`` of physical memory. ``handle``: offset in the memfd, or cuMem handle.

    ``serial`` is never used again; its place in the driver's tables, ``slot``, is part of it (one number tells both:
    reading two fields of a thousand chunks takes longer than all other checks of a map) and is used again.
    """

    serial: int
    nbytes: int
    handle: int

    @property
    def slot(self) -> int:
        """The place in the driver's tables."""
        return self.serial % SLOTS

    @property
    def number(self) -> int:
        """What users are told: the chunk's number in the process."""
        return self.serial // SLOTS


@dataclass(frozen=True, slots=True)
class Counters:
    """What is alive: ``mappings`` counts each place a chunk is mapped at; ``fds`` are open descriptors of the driver.

    ``lost`` are things a failing call may or may not have given back: they are not touched again.
    """

    reservations: int
    reserved_bytes: int
    chunks: int
    chunk_bytes: int
    mappings: int
    fds: int
    lost: int = 0


class VmmError(KvbenchError):
    """A call was refused: ``call`` names it, ``index`` which one of the vectorised form (0 based), ``code`` its error.

    Nothing of the failing form stays done (map, create), or exactly what came before ``index`` (unmap, release).
    """

    def __init__(self, what: str, *, call: str, index: int, code: int, mend: str = "", where: str = "vmm") -> None:
        self.call, self.index, self.code = call, index, code
        super().__init__(f"{call} number {index}: {what}", where=where, mend=mend)


class Exhausted(VmmError, Unavailable):
    """No room: memory, addresses, mappings or reserved huge pages; nothing of the call stays done."""


class Fence(Protocol):
    """Work that may still read a range."""

    def done(self) -> bool:
        """Return whether the work is over; never waits."""

    def wait(self) -> None:
        """Return once the work is over. Raises KvbenchError when it does not end."""

    def close(self) -> None:
        """Give back what the fence holds. Closing twice is fine."""


def check_fence(fence: object) -> None:
    """Raise UsageError for what cannot be waited for: nothing it guards could ever be given back."""
    missing = [name for name in ("done", "wait", "close") if not callable(getattr(fence, name, None))]
    if missing:
        raise UsageError(
            "not a fence", where="vmm guard", got=f"{type(fence).__name__} without {', '.join(missing)}",
            expected="an object with done(), wait() and close()",
        )  # fmt: skip


def check_whole(value: object, what: str, where: str = "vmm") -> None:
    """Raise UsageError unless ``value`` is an integer; a float is none, whatever its value."""
    if type(value) is int or isinstance(value, (int, np.integer)):
        return
    raise UsageError(
        f"{what}: not a whole number", where=where, got=f"{type(value).__name__} {value!r}", expected="an integer"
    )


class Vmm(Protocol):
    """A driver. Sizes and offsets are bytes and multiples of :meth:`granularity`; what is wrong about a request raises
    UsageError before memory is touched, what the system refuses raises :class:`VmmError` or :class:`Exhausted`.

    Safe to use from several threads, as long as each range is in the hands of one at a time.
    """

    @property
    def name(self) -> str:
        """``host`` or ``cuda``."""

    def granularity(self) -> int:
        """Return the bytes everything is a multiple of."""

    def reserve(self, nbytes: int) -> Reservation:
        """Take addresses; nothing is mapped there. Raises Exhausted beyond the address space."""

    def free(self, reservation: Reservation) -> None:
        """Give the addresses back, after its fences. Raises UsageError while something is mapped there."""

    def create(self, nbytes: int) -> Chunk:
        """Return a new chunk. Raises Exhausted without room."""

    def create_many(self, nbytes: int, count: int) -> list[Chunk]:
        """Return ``count`` new chunks of ``nbytes`` each, or none at all."""

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back. Raises UsageError while it is mapped, or once it is gone."""

    def release_many(self, chunks: Sequence[Chunk]) -> None:
        """Give chunks back in order."""

    def map(self, reservation: Reservation, offset: int, chunk: Chunk) -> None:
        """Map ``chunk`` at ``offset``; it stays inaccessible until :meth:`set_access`."""

    def map_many(self, reservation: Reservation, offsets: Sequence[int] | Offsets, chunks: Sequence[Chunk]) -> None:
        """Map ``chunks[i]`` at ``offsets[i]`` from a compiled loop. A failing k-th map undoes the first k."""

    def set_access(self, reservation: Reservation, offset: int, nbytes: int) -> None:
        """Make a range of whole mappings readable and writable; after it a touch costs no page fault."""

    def set_access_many(self, reservation: Reservation, spans: Sequence[Span]) -> None:
        """Make ranges accessible. A failing k-th one makes those of this call that were not accessible so again."""

    def unmap(self, reservation: Reservation, offset: int, nbytes: int) -> None:
        """Unmap whole mappings, after every fence of the reservation."""

    def unmap_many(self, reservation: Reservation, spans: Sequence[Span]) -> None:
        """Unmap ranges in order, after every fence of the reservation."""

    def guard(self, reservation: Reservation, fence: Fence) -> None:
        """Hand over a fence: nothing of ``reservation`` is unmapped or freed before its work is over."""

    def mapped_count(self, chunk: Chunk) -> int:
        """Return at how many places ``chunk`` is mapped."""

    def counters(self) -> Counters:
        """Return what is alive."""

    def close(self) -> None:
        """Close the driver. Raises UsageError, naming them, while reservations or chunks are alive."""

    def destroy(self) -> Counters:
        """Give everything back, live or not, after all fences; return what was alive. For the way out of an error."""
