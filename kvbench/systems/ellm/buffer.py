"""The CPU elastic buffer: KV of prefilled requests leaves layer by layer, comes back before decode, none is lost.

After eLLM (DAC 2026, sections 2.2.2 and 2.3.1). The paper leaves open which requests leave, in which order they come
back, and how large the buffer is: all three are the caller's here. The buffer's memory is cut into chunks, so a block
of any size fits wherever enough chunks are free. ``physical`` bytes exist; ``logical`` bytes may be used (section
2.3.2): making that smaller only refuses new blocks and never throws one out.

A block is one layer's KV of one request, named by a key. Where its bytes are:

    (unknown) --offload--> LEAVING --copy done--> HELD --evict--> FAR --fetch--> COMING --copy done--> (unknown)

``LEAVING`` and ``HELD``: the near copy is whole; ``HELD``, ``FAR`` and ``COMING``: the far one is. ``cancel`` turns
LEAVING and HELD back into near-only, and COMING back into FAR. Chunks that a copy may still read or write are given to
nobody else until it is done.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvbench.errors import KvbenchError, UsageError
from kvbench.units import compact_bytes

WHERE = "CPU elastic buffer"
Key = Hashable


@dataclass(frozen=True, slots=True)
class Copy:
    """``nbytes`` from address ``source`` to address ``target``."""

    target: int
    source: int
    nbytes: int


class Ticket(Protocol):
    """Copies that were submitted together."""


class Mover(Protocol):
    """What copies; the forms are in :mod:`kvbench.systems.ellm.movers`. A block's tickets end in order of submission.

    ``submit`` returns at once; the copies begin after what the compute side had queued before. ``done`` tells whether a
    ticket's copies are over and raises what made them fail. ``order`` makes all later work of the compute side come
    after them; ``wait`` blocks the caller until then.
    """

    def submit(self, copies: Sequence[Copy], label: str) -> Ticket: ...

    def done(self, ticket: Ticket) -> bool: ...

    def order(self, ticket: Ticket) -> None: ...

    def wait(self, ticket: Ticket) -> None: ...


class Place(Enum):
    """Where a block is; see the module."""

    LEAVING = "leaving"
    HELD = "held"
    FAR = "far"
    COMING = "coming"


@dataclass(slots=True)
class _Block:
    place: Place
    near: int | None
    nbytes: int
    chunks: list[int]
    ticket: Ticket | None


class ElasticBuffer:
    """``physical`` bytes of CPU memory at ``address``, lent to blocks in chunks of ``chunk`` bytes.

    For one thread at a time: the one that computes. Near memory is the caller's. Raises UsageError for sizes that are
    no whole number of chunks.
    """

    def __init__(self, mover: Mover, address: int, physical: int, *, chunk: int) -> None:
        if chunk < 1 or physical < chunk or physical % chunk:
            raise UsageError(
                "not a whole number of chunks", where=WHERE, got=f"{physical} bytes in chunks of {chunk}",
                expected="physical = n x chunk, n >= 1",
            )  # fmt: skip
        self.physical, self.chunk, self._address, self._mover = physical, chunk, address, mover
        self._logical = physical
        self._free = list(range(physical // chunk - 1, -1, -1))
        self._blocks: dict[Key, _Block] = {}
        self._draining: list[tuple[Ticket, list[int]]] = []
        self.refused = self.moved_out = self.moved_in = 0  # blocks; bytes submitted either way

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def logical(self) -> int:
        """Bytes that may be used: at most ``physical``."""
        return self._logical

    @property
    def used(self) -> int:
        """Bytes in chunks that are not free, those of cancelled copies still under way included."""
        return self.physical - len(self._free) * self.chunk

    @property
    def room(self) -> int:
        """Bytes a new block may have."""
        return max(0, self._logical - self.used)

    def resize(self, logical: int) -> None:
        """Let ``logical`` bytes be used; what is stored stays. Raises UsageError outside 0..physical."""
        if not 0 <= logical <= self.physical:
            raise UsageError("no such logical size", where=WHERE, got=logical, expected=f"0..{self.physical} bytes")
        self._logical = logical

    # -- blocks --------------------------------------------------------------------------------------------------

    def place(self, key: Key) -> Place | None:
        """Return where the block ``key`` is, None when the buffer has nothing to do with it."""
        block = self._blocks.get(key)
        return None if block is None else block.place

    def offload(self, key: Key, near: int, nbytes: int) -> bool:
        """Begin to copy ``nbytes`` at ``near`` into the buffer; False, and nothing done, where the room is too small.

        The near bytes must stay as they are until :meth:`evict`. Raises UsageError for a key that is here already.
        """
        if key in self._blocks:
            raise UsageError("this block is here already", where=WHERE, got=f"{key} {self._blocks[key].place.value}")
        if nbytes < 1:
            raise UsageError("a block of no bytes", where=WHERE, got=nbytes)
        self.settle()
        need = -(-nbytes // self.chunk)
        if need * self.chunk > self.room:
            self.refused += 1
            return False
        chunks = [self._free.pop() for _ in range(need)]
        ticket = self._mover.submit(self._copies(chunks, near, nbytes, out=True), f"offload {key}")
        self._blocks[key] = _Block(Place.LEAVING, near, nbytes, chunks, ticket)
        self.moved_out += nbytes
        return True

    def evict(self, key: Key) -> None:
        """Give the near copy up: later work of the compute side may overwrite it, and comes after the copy.

        Raises UsageError unless the block is leaving or held.
        """
        block = self._known(key, "evict", Place.LEAVING, Place.HELD)
        if block.place is Place.LEAVING and block.ticket is not None:
            self._mover.order(block.ticket)
        block.place, block.near = Place.FAR, None

    def fetch(self, key: Key, near: int) -> None:
        """Begin to copy the block to ``near``; :meth:`ready` says when the compute side may read it there.

        The far copy is given up when the copy is done. Raises UsageError unless the block is far: one that is still
        near needs no copy, only :meth:`cancel`.
        """
        block = self._known(key, "fetch", Place.FAR)
        copies = self._copies(block.chunks, near, block.nbytes, out=False)
        block.ticket = self._mover.submit(copies, f"fetch {key}")  # behind an offload still under way
        block.place, block.near = Place.COMING, near
        self.moved_in += block.nbytes

    def ready(self, key: Key) -> None:
        """Let all later work of the compute side come after the fetch of ``key``; nothing where it is over."""
        block = self._blocks.get(key)
        if block is None:
            return
        self._known(key, "wait for", Place.COMING)
        if block.ticket is not None:
            self._mover.order(block.ticket)

    def cancel(self, key: Key) -> None:
        """Undo: a block that is leaving or held is near only again, one that is coming is far again.

        What a cancelled fetch wrote to near memory is nobody's; later work of the compute side comes after it. Raises
        UsageError for a far block: that is its only copy.
        """
        block = self._known(key, "cancel", Place.LEAVING, Place.HELD, Place.COMING)
        if block.place is Place.COMING:
            if block.ticket is not None:
                self._mover.order(block.ticket)
            block.place, block.near = Place.FAR, None
            return
        self._forget(key, block)

    def drop(self, key: Key) -> None:
        """Forget the block, its request has ended; later work of the compute side comes after a copy under way."""
        block = self._known(key, "drop", *Place)
        if block.ticket is not None:
            self._mover.order(block.ticket)
        self._forget(key, block)

    def settle(self) -> None:
        """Take note of the copies that are over; never waits.

        Raises KvbenchError when one failed: its block is then where the other copy is, near or far.
        """
        try:
            for key, block in list(self._blocks.items()):
                if block.ticket is None or not self._over(key, block):
                    continue
                block.ticket = None
                if block.place is Place.LEAVING:
                    block.place = Place.HELD
                elif block.place is Place.COMING:
                    self._forget(key, block)
        finally:
            self._drain()

    def wait(self) -> None:
        """Block until every copy is over, then :meth:`settle`."""
        for ticket in [block.ticket for block in self._blocks.values()] + [ticket for ticket, _ in self._draining]:
            if ticket is not None:
                self._mover.wait(ticket)
        self.settle()

    def close(self) -> None:
        """Wait for copies under way. Raises UsageError when blocks are left whose only copy is here."""
        self.wait()
        lost = [key for key, block in self._blocks.items() if block.place is Place.FAR]
        if lost:
            raise UsageError(
                "closed with blocks whose only copy is here", where=WHERE, got=f"{len(lost)}, the first {lost[0]}",
                mend="fetch or drop them first",
            )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------------------------

    def _known(self, key: Key, act: str, *places: Place) -> _Block:
        block = self._blocks.get(key)
        if block is None or block.place not in places:
            found = "not here" if block is None else block.place.value
            raise UsageError(
                f"cannot {act} this block", where=WHERE, got=f"{key} {found}",
                expected=" or ".join(place.value for place in places),
            )  # fmt: skip
        return block

    def _copies(self, chunks: Sequence[int], near: int, nbytes: int, *, out: bool) -> list[Copy]:
        made: list[Copy] = []
        start = 0
        for number, chunk in enumerate(chunks):
            if number + 1 < len(chunks) and chunks[number + 1] == chunk + 1:
                continue  # the run goes on
            far, at = self._address + chunks[start] * self.chunk, near + start * self.chunk
            size = min((number + 1 - start) * self.chunk, nbytes - start * self.chunk)
            made.append(Copy(far, at, size) if out else Copy(at, far, size))
            start = number + 1
        return made

    def _over(self, key: Key, block: _Block) -> bool:
        if block.ticket is None:
            return True
        try:
            return self._mover.done(block.ticket)
        except Exception as error:
            was, block.ticket = block.place, None
            if was is Place.LEAVING:
                self._forget(key, block)  # the near copy was never given up
            elif was is Place.COMING:
                block.place, block.near = Place.FAR, None
            raise KvbenchError(
                f"a copy of block {key} failed while it was {was.value}", where=WHERE,
                got=f"{type(error).__name__}: {error}", mend="the other copy is whole" if was is not Place.FAR else "",
            ) from error  # fmt: skip

    def _forget(self, key: Key, block: _Block) -> None:
        del self._blocks[key]
        if block.ticket is None:
            self._free.extend(reversed(block.chunks))
        else:
            self._draining.append((block.ticket, block.chunks))

    def _drain(self) -> None:
        kept = []
        for ticket, chunks in self._draining:
            if self._ended(ticket):
                self._free.extend(reversed(chunks))
            else:
                kept.append((ticket, chunks))
        self._draining = kept

    def _ended(self, ticket: Ticket) -> bool:
        try:
            return self._mover.done(ticket)
        except KvbenchError:
            return True  # it failed, so it is over; nobody waits for its bytes any more

    def __repr__(self) -> str:
        sizes = f"{compact_bytes(self.used)} of {compact_bytes(self._logical)} used"
        return f"<ElasticBuffer {sizes}, {compact_bytes(self.physical)} physical, {len(self._blocks)} blocks>"


class Spill:
    """Offloads a request's fresh KV layer by layer during its prefill: give :meth:`after` to the stack.

    ``blocks``: (address, bytes) of each layer's KV. All layers leave or none: ``taken`` says whether there was room
    when it began. Raises UsageError without layers.
    """

    def __init__(self, buffer: ElasticBuffer, request: Key, blocks: Sequence[tuple[int, int]]) -> None:
        if not blocks:
            raise UsageError("a request without layers", where=WHERE)
        self._buffer, self._request, self._blocks = buffer, request, tuple(blocks)
        buffer.settle()
        need = sum(-(-nbytes // buffer.chunk) * buffer.chunk for _, nbytes in self._blocks)
        self.taken = need <= buffer.room

    def after(self, layer: int) -> None:
        """Begin to offload ``layer``, whose KV has just been computed."""
        if self.taken and not self._buffer.offload((self._request, layer), *self._blocks[layer]):
            raise KvbenchError(
                "the room shrank during a prefill", where=WHERE, got=f"{self._buffer.room} bytes at layer {layer}",
                mend="resize the buffer between prefills",
            )  # fmt: skip

    def evict(self) -> None:
        """Give up the near copies of all layers."""
        if self.taken:
            for layer in range(len(self._blocks)):
                self._buffer.evict((self._request, layer))


class Refill:
    """Brings a request's KV back for decode, layer by layer: give :meth:`before` to the stack.

    ``blocks``: (address, bytes) of each layer's KV, as they left. All fetches are queued by :meth:`start`.
    """

    def __init__(self, buffer: ElasticBuffer, request: Key, blocks: Sequence[tuple[int, int]]) -> None:
        self._buffer, self._request, self._blocks = buffer, request, tuple(blocks)

    def start(self) -> None:
        """Queue the fetch of every layer, first layer first."""
        for layer, (near, _) in enumerate(self._blocks):
            self._buffer.fetch((self._request, layer), near)

    def before(self, layer: int) -> None:
        """Let ``layer`` be computed only once its KV is there."""
        self._buffer.ready((self._request, layer))
