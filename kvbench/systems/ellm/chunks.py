"""Who owns each physical chunk and what it is doing: the state machine under the elastic pool (eLLM, section 2.2).

A chunk is owned by the KV cache or by activations, and is free (mapped nowhere that counts), in use (a live slot needs
it) or mapped-available (mapped in a slot, nobody needs it now). Ownership moves by bookkeeping alone. In use and
mapped-available are properties of slots, so the table only counts them; whether a chunk is mapped at all it keeps per
chunk, since that is what a double free or a stolen chunk would break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvbench.errors import KvbenchError, UsageError


class Owner(IntEnum):
    """Which of the two pools a chunk belongs to."""

    KV = 0
    ACT = 1

    @property
    def other(self) -> Owner:
        return Owner(1 - self)


class PoolExhausted(KvbenchError):
    """There are not enough chunks (or addresses) for a request; the pool is as it was before it."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Chunks of one owner by state."""

    free: int
    used: int
    idle: int

    @property
    def total(self) -> int:
        return self.free + self.used + self.idle


class ChunkTable:
    """Owner and state of ``kv`` + ``act`` chunks, numbered from 0; the first ``kv`` belong to the KV cache at first.

    Taking, giving back and transferring cost the same for every size of table. Raises UsageError for sizes below 0.
    """

    def __init__(self, kv: int, act: int) -> None:
        if kv < 0 or act < 0 or kv + act == 0:
            raise UsageError("no chunks to manage", where="ChunkTable", got=f"{kv} + {act}", expected="1 or more")
        self.total = kv + act
        self._owner = bytearray([Owner.KV]) * kv + bytearray([Owner.ACT]) * act
        self._mapped = bytearray(self.total)
        # Popped from the end, so chunks given back last go out first: their pages are the warmest.
        self._free = [list(range(kv))[::-1], list(range(kv, self.total))[::-1]]
        self._used, self._idle = [0, 0], [0, 0]
        self.transferred = 0  # chunks that changed their owner

    def free(self, owner: Owner) -> int:
        """Return how many chunks of ``owner`` are free."""
        return len(self._free[owner])

    def idle(self, owner: Owner) -> int:
        """Return how many chunks of ``owner`` are mapped-available."""
        return self._idle[owner]

    def counts(self, owner: Owner) -> Counts:
        """Return the chunks of ``owner`` by state."""
        return Counts(len(self._free[owner]), self._used[owner], self._idle[owner])

    def take(self, owner: Owner, count: int) -> list[int]:
        """Return ``count`` free chunks of ``owner``, from now on mapped-available.

        Raises PoolExhausted when there are fewer; then nothing has changed.
        """
        free = self._free[owner]
        if count > len(free):
            raise PoolExhausted(
                f"too few free chunks of {owner.name}", where="ChunkTable", got=f"{len(free)} free",
                expected=f"{count}",
            )  # fmt: skip
        if count <= 0:
            return []
        taken = free[-count:][::-1]
        del free[-count:]
        mapped = self._mapped
        for chunk in taken:
            mapped[chunk] = 1
        self._idle[owner] += count
        return taken

    def put(self, owner: Owner, chunks: Sequence[int]) -> None:
        """Make mapped-available ``chunks`` of ``owner`` free.

        Raises UsageError for a double free, another owner's chunk, or more than are mapped-available; then nothing has
        changed.
        """
        self._expect(owner, chunks)
        if len(chunks) > self._idle[owner]:
            raise UsageError(
                "chunks in use cannot be taken away", where="ChunkTable", got=f"{len(chunks)} chunks",
                expected=f"at most the {self._idle[owner]} mapped-available of {owner.name}",
            )  # fmt: skip
        mapped = self._mapped
        for chunk in chunks:
            mapped[chunk] = 0
        self._idle[owner] -= len(chunks)
        self._free[owner].extend(reversed(chunks))

    def _expect(self, owner: Owner, chunks: Sequence[int]) -> None:
        mapped, owners = self._mapped, self._owner
        for chunk in chunks:
            if not 0 <= chunk < self.total:
                raise UsageError("no such chunk", where="ChunkTable", got=chunk, expected=f"0..{self.total - 1}")
            if owners[chunk] != owner:
                raise UsageError(
                    "the chunk belongs to the other pool", where=f"chunk {chunk}", got=Owner(owners[chunk]).name,
                    expected=owner.name,
                )  # fmt: skip
            if not mapped[chunk]:
                raise UsageError("double free", where=f"chunk {chunk}", got="free", expected="mapped-available")
        if len(set(chunks)) != len(chunks):
            raise UsageError("double free", where="ChunkTable", got="a chunk listed twice", expected="each once")

    def use(self, owner: Owner, count: int) -> None:
        """Count ``count`` mapped-available chunks of ``owner`` as in use. Raises UsageError when there are fewer."""
        if not 0 <= count <= self._idle[owner]:
            raise UsageError(
                f"too few mapped-available chunks of {owner.name}", where="ChunkTable", got=self._idle[owner],
                expected=f"{count}",
            )  # fmt: skip
        self._idle[owner] -= count
        self._used[owner] += count

    def rest(self, owner: Owner, count: int) -> None:
        """Count ``count`` chunks in use of ``owner`` as mapped-available. Raises UsageError when there are fewer."""
        if not 0 <= count <= self._used[owner]:
            raise UsageError(
                f"too few chunks in use of {owner.name}", where="ChunkTable", got=self._used[owner], expected=f"{count}"
            )
        self._used[owner] -= count
        self._idle[owner] += count

    def transfer(self, source: Owner, count: int) -> None:
        """Give ``count`` free chunks of ``source`` to the other owner. Raises PoolExhausted, changing nothing."""
        free = self._free[source]
        if not 0 <= count <= len(free):
            raise PoolExhausted(
                f"too few free chunks of {source.name} to lend", where="ChunkTable", got=len(free), expected=f"{count}"
            )
        if count:
            moved = free[-count:]
            del free[-count:]
            owners, other = self._owner, source.other
            for chunk in moved:
                owners[chunk] = other
            self._free[other].extend(moved)
            self.transferred += count

    def owner_of(self, chunk: int) -> Owner:
        """Return who owns ``chunk``."""
        return Owner(self._owner[chunk])

    def mapped(self, chunk: int) -> bool:
        """Return whether ``chunk`` is in use or mapped-available."""
        return bool(self._mapped[chunk])

    def check(self) -> None:
        """Count everything again, whatever it takes. Raises KvbenchError where the table contradicts itself."""
        for owner in Owner:
            free, counts = self._free[owner], self.counts(owner)
            own = self._owner.count(owner)
            wrong = [c for c in free if self._mapped[c] or self._owner[c] != owner]
            if wrong or len(set(free)) != len(free) or counts.total != own:
                raise KvbenchError(
                    f"chunks of {owner.name} do not add up", where="ChunkTable", got=f"{counts}, {wrong[:4]}",
                    expected=f"{own} in all",
                )  # fmt: skip
