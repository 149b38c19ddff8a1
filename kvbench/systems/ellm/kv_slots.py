"""KV slots: each reserves the addresses of a maximum context and maps chunks when they are written (eLLM, 2.1.1).

A slot maps a prefix of its addresses. The first ``need`` chunks of a live slot are in use; the others, and all of a
slot given back, are mapped-available. Bookkeeping only.
"""

from __future__ import annotations

from typing import Protocol

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.vmm.protocol import Reservation
from kvbench.systems.ellm.best_fit import SizeIndex
from kvbench.systems.ellm.chunks import PoolExhausted


class Flight(Protocol):
    """Mappings a background thread is making for a slot."""

    chunks: list[int]


class KvSlot:
    """One request's KV cache at ``address``: ``chunks[i]`` is mapped at chunk i of it.

    Each opening gets an object of its own, also over addresses used before: what an earlier request kept is good for
    nothing any more. ``owner``: the slots it is one of.
    ``stale``: ranges (first, count) after the mapped ones that still carry mappings whose chunks have gone elsewhere.
    ``flight``: mappings under way right after the mapped ones.
    """

    __slots__ = ("chunks", "flight", "live", "need", "number", "owner", "reservation", "stale")

    def __init__(self, owner: KvSlots, number: int, reservation: Reservation) -> None:
        self.owner, self.number, self.reservation = owner, number, reservation
        self.chunks: list[int] = []
        self.need = 0
        self.live = False
        self.stale: list[tuple[int, int]] = []
        self.flight: Flight | None = None

    @property
    def address(self) -> int:
        """Where the slot's bytes begin. Raises UsageError once it is closed."""
        if not self.live:
            raise _closed(self)
        return self.reservation.address

    def __repr__(self) -> str:
        return f"KvSlot({self.number}, need={self.need}, mapped={len(self.chunks)}, live={self.live})"


class KvSlots:
    """At most ``limit`` slots. Raises UsageError below one."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise UsageError("no KV slots", where="KvSlots", got=limit, expected="1 or more")
        self.limit = limit
        self.slots: list[KvSlot] = []
        self._index: SizeIndex[KvSlot] = SizeIndex()  # slots not live, by mapped chunks
        self._idle: dict[KvSlot, None] = {}  # those with mapped chunks, longest given back first
        self._slack: dict[KvSlot, None] = {}  # live ones with more chunks than they need

    @property
    def live(self) -> int:
        """How many slots are live."""
        return len(self.slots) - len(self._index)

    def pick(self, need: int) -> KvSlot | None:
        """Return the smallest slot not live that maps at least ``need`` chunks, else the one that maps most, now live.

        The paper names the first rule and says "map on demand" otherwise; growing the largest makes the fewest calls.
        None: there is none, add one. Raises PoolExhausted when all ``limit`` slots are live.
        """
        found = self._index.best(need) or self._index.largest()
        if found is None:
            if len(self.slots) >= self.limit:
                raise PoolExhausted(
                    "every KV slot is in use", where="KvSlots", got=f"{self.limit} live", expected="one that is not",
                    mend="reserve more slots or finish a request",
                )  # fmt: skip
            return None
        size, slot = found
        self._index.remove(size, slot)
        self._idle.pop(slot, None)
        return self._reopened(slot)

    def _reopened(self, old: KvSlot) -> KvSlot:
        """Return a new live slot in the place of ``old``, with what it maps."""
        slot = KvSlot(self, old.number, old.reservation)
        slot.chunks, old.chunks = old.chunks, []
        slot.stale = old.stale  # the same list: unmappings under way strike out of it
        slot.live = True
        self.slots[slot.number] = slot
        return slot

    def add(self, reservation: Reservation) -> KvSlot:
        """Return a new live slot over ``reservation``."""
        slot = KvSlot(self, len(self.slots), reservation)
        self.slots.append(slot)
        slot.live = True
        return slot

    def park(self, slot: KvSlot) -> None:
        """Make a live slot not live; its chunks stay mapped. Raises UsageError for a double free."""
        self.check_live(slot, closing=True)
        slot.live, slot.need = False, 0
        self._slack.pop(slot, None)
        self._index.add(len(slot.chunks), slot)
        if slot.chunks:
            self._idle[slot] = None

    def check_live(self, slot: KvSlot, *, closing: bool = False) -> None:
        """Raise UsageError unless ``slot`` is a live one of this pool; ``closing``: it is about to be given back."""
        if not isinstance(slot, KvSlot):
            raise UsageError(
                "the wrong kind of slot", where="elastic pool", got=type(slot).__name__, expected="a slot of open_kv"
            )
        if slot.owner is not self:
            raise UsageError(
                "a slot of another pool", where=f"KV slot {slot.number}", expected="one that this pool opened"
            )
        if not slot.live:
            raise _closed(slot, closing=closing)

    def needs(self, slot: KvSlot, need: int) -> None:
        """Set how many of its chunks a live slot needs."""
        slot.need = need
        if len(slot.chunks) > need:
            self._slack[slot] = None
        else:
            self._slack.pop(slot, None)

    def extend(self, slot: KvSlot, chunks: list[int]) -> None:
        """Append mapped chunks to a live slot."""
        slot.chunks += chunks
        if len(slot.chunks) > slot.need:
            self._slack[slot] = None

    def victim(self) -> KvSlot | None:
        """Return a slot that maps chunks it does not need: the one given back longest ago, else a live one, or None.

        Which to take first the paper leaves open.
        """
        for found in (self._idle, self._slack):
            if found:
                return next(iter(found))
        return None

    def trimmed(self, slot: KvSlot, count: int, stale: bool) -> list[int]:
        """Note that the last ``count`` chunks of ``slot`` have gone; return them. ``stale``: still mapped there."""
        kept = len(slot.chunks) - count
        if kept < slot.need:
            raise KvbenchError("a chunk in use would be taken", where=repr(slot), got=count)
        if not slot.live:
            self._index.remove(len(slot.chunks), slot)
            self._index.add(kept, slot)
            if not kept:
                self._idle.pop(slot, None)
        elif kept == slot.need:
            self._slack.pop(slot, None)
        gone = slot.chunks[kept:]
        del slot.chunks[kept:]
        if stale:
            slot.stale.append((kept, count))
        return gone

    def check(self) -> None:
        """Raise KvbenchError where an index contradicts its slots."""
        for slot in self.slots:
            spare = len(slot.chunks) > slot.need
            wrong = (
                (not slot.live and slot.need)
                or slot.need > len(slot.chunks)
                or (slot in self._idle) != (spare and not slot.live)
                or (slot in self._slack) != (spare and slot.live)
            )
            if wrong:
                raise KvbenchError("a KV slot is in the wrong index", where=repr(slot))
        if len(self._index) != sum(not slot.live for slot in self.slots):
            raise KvbenchError("KV slots not live are miscounted", where="KvSlots", got=len(self._index))


def _closed(slot: KvSlot, *, closing: bool = False) -> UsageError:
    return UsageError(
        "double free" if closing else "used after it was closed", where=f"KV slot {slot.number}",
        got="a slot already given back", expected="a live one of this pool",
    )  # fmt: skip
