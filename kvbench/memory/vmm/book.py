"""What is reserved, created and mapped: the checks before a driver's calls, and the state after them.

A driver claims what a request touches, makes its calls outside the lock, then settles what became of each. Arrays per
granule of a reservation keep the checks of a thousand mappings a few numpy operations.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError
from kvbench.memory.vmm.protocol import SLOTS, Chunk, Counters, Reservation, Span, check_whole
from kvbench.memory.vmm.ranges import Ints, check_chunk, flat_index, integers, overlapping, whole_span

FREE, MAPPED, ACCESSIBLE, CHANGING = range(4)
_serials = itertools.count(1)  # of the process: a chunk of another driver is never taken for one of this


@dataclass(frozen=True, slots=True)
class Claim:
    """What one call touches: ``address`` and ``nbytes`` of each part (int64 [parts]), in the order asked.

    ``handle``: of the chunk to map, int64 [parts]; empty for ranges of whole mappings. ``before``: the state of each
    granule when it was claimed (uint8 [sum of count]).
    """

    space: _Space
    address: Ints
    nbytes: Ints
    handle: Ints
    low: Ints
    count: Ints
    slots: Ints
    before: npt.NDArray[np.uint8]

    def part(self, first: int, last: int) -> Claim:
        """Return the claim of parts ``first`` to ``last`` alone, a view."""
        cut = slice(first, last)
        start = int(self.count[:first].sum())
        return Claim(
            self.space, self.address[cut], self.nbytes[cut], self.handle[cut], self.low[cut], self.count[cut],
            self.slots[cut], self.before[start : start + int(self.count[cut].sum())],
        )  # fmt: skip


class _Space:
    """A reservation by granules: the chunk slot + 1 behind each, its state, and whether a mapping begins there."""

    __slots__ = ("head", "owner", "places", "reservation", "state", "states")

    def __init__(self, reservation: Reservation, granules: int) -> None:
        self.reservation = reservation
        self.owner = np.zeros(granules, np.int32)
        self.state = np.zeros(granules, np.uint8)
        self.states = self.state.data  # one granule of it costs a tenth of what numpy takes
        self.head = np.zeros(granules, np.bool_)
        self.places = 0  # mapped, or claimed for a map


class Book:
    """The state of one driver, of ``granularity`` bytes a granule. Safe to use from several threads."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self._lock = threading.Lock()
        self._spaces: dict[int, _Space] = {}
        self._table = np.zeros((3, 64), np.int64)  # by slot: serial (0: nobody's), bytes, handle
        self._maps = np.zeros(64, np.int32)
        self._seen = np.zeros(64, np.int32)
        self._chunks: dict[int, Chunk] = {}
        self._free: list[int] = []
        self._used = 0
        self._mappings = self._reserved = self._chunk_bytes = self.lost = 0

    # -- sizes ---------------------------------------------------------------------------------------------------

    def check_size(self, nbytes: int, what: str) -> None:
        """Raise UsageError unless ``nbytes`` is a whole, positive number of granules."""
        check_whole(nbytes, what)
        if nbytes < 1 or nbytes % self.granularity:
            raise UsageError(
                f"{what} is off the granularity", where="vmm", got=f"{nbytes} bytes",
                expected=f"a positive multiple of {self.granularity} bytes",
            )  # fmt: skip

    def check_count(self, count: int, what: str) -> None:
        """Raise UsageError unless at least one thing is asked for."""
        check_whole(count, what)
        if count < 1:
            raise UsageError(f"{what} asks for nothing", where="vmm", got=count, expected="at least one")

    # -- addresses -----------------------------------------------------------------------------------------------

    def add_space(self, address: int, nbytes: int) -> Reservation:
        """Enter addresses. Raises MemoryError when the book itself has no room for them."""
        reservation = Reservation(next(_serials), address, nbytes)
        space = _Space(reservation, nbytes // self.granularity)
        with self._lock:
            self._spaces[reservation.serial] = space
            self._reserved += nbytes
        return reservation

    def drop_space(self, reservation: Reservation) -> None:
        """Strike addresses out, before they go. Raises UsageError when they are not here or hold a mapping."""
        with self._lock:
            space = self._space(reservation)
            if space.places:
                raise UsageError(
                    "addresses still hold mappings", where="vmm free", got=f"{space.places} mapped",
                    mend="unmap them first",
                )  # fmt: skip
            self._spaces.pop(reservation.serial)
            self._reserved -= reservation.nbytes

    def _space(self, reservation: Reservation) -> _Space:
        if not isinstance(reservation, Reservation):
            raise UsageError(
                "not a reservation", where="vmm", got=type(reservation).__name__, expected="what reserve() returned"
            )
        found = self._spaces.get(reservation.serial)
        if found is None:
            raise UsageError(
                "no such reservation", where="vmm", got=f"number {reservation.serial}",
                expected="one of this driver that was not freed",
            )  # fmt: skip
        return found

    def check_space(self, reservation: Reservation) -> None:
        """Raise UsageError unless ``reservation`` is alive here."""
        with self._lock:
            self._space(reservation)

    # -- chunks --------------------------------------------------------------------------------------------------

    def add_chunks(self, nbytes: int, handles: Sequence[int]) -> list[Chunk]:
        """Enter one chunk of ``nbytes`` a handle."""
        with self._lock:
            made = []
            for handle in handles:
                slot = self._free.pop() if self._free else self._new_slot()
                chunk = Chunk(next(_serials) * SLOTS + slot, nbytes, handle)
                self._table[:, slot] = chunk.serial, nbytes, handle
                self._chunks[chunk.serial] = chunk
                made.append(chunk)
            self._chunk_bytes += nbytes * len(made)
            return made

    def _new_slot(self) -> int:
        if self._used == SLOTS:
            raise UsageError("chunks alive at once", where="vmm create", got=SLOTS + 1, expected=f"at most {SLOTS}")
        if self._used == len(self._maps):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._maps = np.concatenate([self._maps, np.zeros_like(self._maps)])
            self._seen = np.zeros_like(self._maps)
        self._used += 1
        return self._used - 1

    def _slots(self, chunks: Sequence[Chunk]) -> Ints:
        """Return the slots of live chunks. Raises UsageError for one that is not."""
        try:
            serials = np.fromiter([chunk.serial for chunk in chunks], np.int64, len(chunks))
        except (AttributeError, TypeError, ValueError, OverflowError):
            for chunk in chunks:
                check_chunk(chunk)
            raise
        slots = serials % SLOTS
        inside = slots < len(self._maps)
        good = inside & (self._table[0, np.where(inside, slots, 0)] == serials)
        if not good.all():
            at = int(np.argmin(good))
            check_chunk(chunks[at])
            raise UsageError(
                "no such chunk", where="vmm", got=f"number {chunks[at].number}, place {at} of the call",
                expected="one of this driver that was not released",
            )  # fmt: skip
        return slots

    def drop_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Strike chunks out, before they go. Raises UsageError, with all of them still here, if one may not."""
        with self._lock:
            slots = self._slots(chunks)
            ordered = np.sort(slots)
            if (ordered[1:] == ordered[:-1]).any():
                raise UsageError("a chunk is released twice in one call", where="vmm release", got=len(chunks))
            mapped = self._maps[slots] > 0
            if mapped.any():
                chunk = chunks[int(np.argmax(mapped))]
                raise UsageError(
                    "the chunk is still mapped", where="vmm release", got=f"{self._maps[chunk.slot]} times",
                    mend="unmap it first",
                )  # fmt: skip
            for chunk in chunks:
                self._strike(chunk)

    def _strike(self, chunk: Chunk) -> None:
        self._table[0, chunk.slot] = 0
        self._free.append(chunk.slot)
        self._chunks.pop(chunk.serial)
        self._chunk_bytes -= chunk.nbytes

    def restore_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Enter again, as they were, chunks that :meth:`drop_chunks` struck out and that did not go after all."""
        with self._lock:
            for chunk in chunks:
                self._free.remove(chunk.slot)
                self._table[0, chunk.slot] = chunk.serial
                self._chunks[chunk.serial] = chunk
                self._chunk_bytes += chunk.nbytes

    def mapped_count(self, chunk: Chunk) -> int:
        """Return at how many places a live chunk is mapped."""
        with self._lock:
            return int(self._maps[self._slots([chunk])[0]])

    # -- mappings ------------------------------------------------------------------------------------------------

    def claim_map(self, reservation: Reservation, offsets: Sequence[int] | Ints, chunks: Sequence[Chunk]) -> Claim:
        """Claim the places where ``chunks`` are to be mapped. Raises UsageError when one is taken or does not exist."""
        if len(offsets) != len(chunks):
            raise UsageError("offsets and chunks differ", where="vmm map", got=f"{len(offsets)} and {len(chunks)}")
        self.check_count(len(chunks), "map")
        if len(chunks) == 1:
            check_whole(offsets[0], "an offset", "vmm map")
            return self._claim_one(reservation, int(offsets[0]), chunks[0])
        at = integers(offsets, "map", 1)
        with self._lock:
            slots = self._slots(chunks)
            nbytes, handles = self._table[1, slots], self._table[2, slots]
            space, low, count = self._place(reservation, at, nbytes, "map")
            flat = flat_index(low, count)
            taken = space.state[flat] != FREE
            if taken.any() or overlapping(low, count):
                self._refuse(space, low, count, "something is mapped there already", "map", FREE)
            before = space.state[flat].copy()
            space.state[flat] = CHANGING
            self._count_maps(slots, 1)
            space.places += len(chunks)
        return Claim(space, at + reservation.address, nbytes, handles, low, count, slots, before)

    def _count_maps(self, slots: Ints, by: int) -> None:
        """Add ``by`` to the mappings of each slot, as often as it is named."""
        order = np.arange(len(slots), dtype=np.int32)
        self._seen[slots] = order
        if (self._seen[slots] == order).all():  # each slot once, as nearly always: ten times faster than ufunc.at
            self._maps[slots] += by
        else:
            np.add.at(self._maps, slots, by)

    def _claim_one(self, reservation: Reservation, offset: int, chunk: Chunk) -> Claim:
        check_chunk(chunk)
        nbytes = chunk.nbytes
        with self._lock:
            space, low, count = self._place_one(reservation, offset, nbytes, "map")
            if chunk.serial not in self._chunks:
                self._slots([chunk])
            before = space.states[low : low + count].tobytes()
            if any(before):
                one = np.array((low, count), np.int64)
                self._refuse(space, one[:1], one[1:], "something is mapped there already", "map", FREE)
            space.state[low : low + count] = CHANGING
            self._maps[chunk.slot] += 1
            space.places += 1
        return _claim(space, reservation.address + offset, nbytes, chunk.handle, low, count, chunk.slot, before)

    def commit_map(self, claim: Claim) -> None:
        """The claimed places are mapped."""
        with self._lock:
            flat = flat_index(claim.low, claim.count)
            owner = claim.slots + 1
            if int(claim.count.max()) > 1:
                owner = np.repeat(owner, claim.count)
            claim.space.owner[flat] = owner
            claim.space.state[flat] = MAPPED
            claim.space.head[claim.low] = True
            self._mappings += len(claim.low)

    def abandon_map(self, claim: Claim) -> None:
        """The claimed places are as they were: nothing is mapped there."""
        with self._lock:
            claim.space.state[flat_index(claim.low, claim.count)] = FREE
            self._count_maps(claim.slots, -1)
            claim.space.places -= len(claim.low)

    def claim_spans(self, reservation: Reservation, spans: Sequence[Span], what: str, *, unmap: bool) -> Claim:
        """Claim ranges of whole mappings. Raises UsageError for one that is none, or given twice.

        ``unmap``: they are kept from any other call until settled.
        """
        self.check_count(len(spans), what)
        if len(spans) == 1:
            offset, size = whole_span(spans[0], what)
            return self._claim_span(reservation, offset, size, what, unmap=unmap)
        table = integers(spans, what, 2)
        at, nbytes = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
        with self._lock:
            space, low, count = self._place(reservation, at, nbytes, what)
            end = low + count
            flat = flat_index(low, count)
            state = space.state[flat].copy()
            if ((state != MAPPED) & (state != ACCESSIBLE)).any() or overlapping(low, count):
                self._refuse(space, low, count, "not everything there is mapped, or it is in other hands", what, MAPPED)
            inner = end[end < len(space.head)]
            if not space.head[low].all() or ((space.owner[inner] != 0) & ~space.head[inner]).any():
                raise UsageError(
                    "the range cuts a mapping", where=f"vmm {what}", got=f"{len(spans)} ranges",
                    expected="ranges of whole mappings",
                )  # fmt: skip
            if unmap:
                space.state[flat] = CHANGING
        none = np.empty(0, np.int64)
        return Claim(space, at + reservation.address, nbytes, none, low, count, none, state)

    def _claim_span(self, reservation: Reservation, offset: int, nbytes: int, what: str, *, unmap: bool) -> Claim:
        with self._lock:
            space, low, count = self._place_one(reservation, offset, nbytes, what)
            high = low + count
            before = space.states[low:high].tobytes()
            if before.count(MAPPED) + before.count(ACCESSIBLE) != count:
                one = np.array((low, count), np.int64)
                why = "not everything there is mapped, or it is in other hands"
                self._refuse(space, one[:1], one[1:], why, what, MAPPED)
            if not space.head[low] or (high < len(space.head) and space.owner[high] and not space.head[high]):
                raise UsageError(
                    "the range cuts a mapping", where=f"vmm {what}", got=f"bytes {offset} to {offset + nbytes}",
                    expected="a range of whole mappings",
                )  # fmt: skip
            if unmap:
                space.state[low:high] = CHANGING
        return _claim(space, reservation.address + offset, nbytes, 0, low, count, 0, before)

    def commit_access(self, claim: Claim) -> None:
        """The ranges are accessible."""
        with self._lock:
            claim.space.state[flat_index(claim.low, claim.count)] = ACCESSIBLE

    def without_access(self, claim: Claim) -> list[Span]:
        """Return (address, nbytes) of the runs in the ranges that had no access when they were claimed."""
        found: list[Span] = []
        for k, address in enumerate(claim.address.tolist()):
            closed = np.flatnonzero(claim.part(k, k + 1).before == MAPPED)
            for run in np.split(closed, np.flatnonzero(np.diff(closed) > 1) + 1) if len(closed) else ():
                found.append((address + int(run[0]) * self.granularity, len(run) * self.granularity))
        return found

    def commit_unmap(self, claim: Claim) -> None:
        """Nothing is mapped in the ranges any more."""
        with self._lock:
            flat, space = flat_index(claim.low, claim.count), claim.space
            heads = space.owner[flat][space.head[flat]] - 1
            self._count_maps(heads, -1)
            self._mappings -= len(heads)
            space.places -= len(heads)
            space.owner[flat] = 0
            space.head[flat] = False
            space.state[flat] = FREE

    def restore_unmap(self, claim: Claim) -> None:
        """The ranges are mapped still, with the access they had."""
        with self._lock:
            claim.space.state[flat_index(claim.low, claim.count)] = claim.before

    def mappings(self, claim: Claim) -> list[Span]:
        """Return (offset, nbytes) of every mapping in the claimed ranges, in order."""
        found: list[Span] = []
        with self._lock:
            for low, count in zip(claim.low.tolist(), claim.count.tolist(), strict=True):
                heads = [*(np.flatnonzero(claim.space.head[low : low + count]) + low).tolist(), low + count]
                found.extend((a * self.granularity, (b - a) * self.granularity) for a, b in itertools.pairwise(heads))
        return found

    def _place_one(self, reservation: Reservation, at: int, nbytes: int, what: str) -> tuple[_Space, int, int]:
        """Do for one range what :meth:`_place` does for many, in Python's own integers."""
        space, grain = self._space(reservation), self.granularity
        if at % grain or nbytes % grain or at < 0 or nbytes < 1 or at + nbytes > reservation.nbytes:
            if max(abs(at), abs(nbytes)) > sys.maxsize // 2:  # more than the arrays of the other checks hold
                raise UsageError(
                    "beyond the reservation", where=f"vmm {what}", got=f"bytes {at} to {at + nbytes}",
                    expected=f"at most {reservation.nbytes}",
                )  # fmt: skip
            self._place(reservation, np.array([at], np.int64), np.array([nbytes], np.int64), what)
        return space, at // grain, nbytes // grain

    def _place(self, reservation: Reservation, at: Ints, nbytes: Ints, what: str) -> tuple[_Space, Ints, Ints]:
        space = self._space(reservation)
        for name, values in (("offset", at), ("size", nbytes)):
            off = (values % self.granularity != 0) | (values < (0 if name == "offset" else 1))
            if off.any():
                raise UsageError(
                    f"{name} off the granularity", where=f"vmm {what}", got=f"{int(values[off][0])} bytes",
                    expected=f"a {'' if name == 'offset' else 'positive '}multiple of {self.granularity} bytes",
                )  # fmt: skip
        beyond = (nbytes > reservation.nbytes) | (at > reservation.nbytes - nbytes)  # a sum could overflow
        if beyond.any():
            k = int(np.argmax(beyond))
            raise UsageError(
                "beyond the reservation", where=f"vmm {what}", got=f"bytes {at[k]} to {int(at[k]) + int(nbytes[k])}",
                expected=f"at most {reservation.nbytes}",
            )  # fmt: skip
        return space, at // self.granularity, nbytes // self.granularity

    def _refuse(self, space: _Space, low: Ints, count: Ints, why: str, what: str, wanted: int) -> NoReturn:
        for k, (first, size) in enumerate(zip(low.tolist(), count.tolist(), strict=True)):
            state = space.state[first : first + size]
            bad = state != FREE if wanted == FREE else (state != MAPPED) & (state != ACCESSIBLE)
            if bad.any():
                place = (first + int(np.argmax(bad))) * self.granularity
                raise UsageError(why, where=f"vmm {what}", got=f"offset {place}, place {k} of the call")
        raise UsageError("places of one call overlap", where=f"vmm {what}", got=f"{len(low)} places")

    # -- what is alive -------------------------------------------------------------------------------------------

    def counters(self, fds: int) -> Counters:
        """Return what is alive, with ``fds`` descriptors of the driver."""
        with self._lock:
            return Counters(
                len(self._spaces), self._reserved, len(self._chunks), self._chunk_bytes, self._mappings, fds, self.lost
            )

    def alive(self) -> tuple[list[Reservation], list[Chunk]]:
        """Return every live reservation and chunk."""
        with self._lock:
            return [space.reservation for space in self._spaces.values()], list(self._chunks.values())

    def mapped_spans(self, reservation: Reservation) -> list[Span]:
        """Return (offset, nbytes) of every mapping of a reservation, in order."""
        with self._lock:
            space = self._space(reservation)
            heads = np.flatnonzero(space.head)
            found = []
            for head, following in itertools.zip_longest(heads.tolist(), heads[1:].tolist(), fillvalue=len(space.head)):
                run = space.owner[head:following] != 0
                size = len(run) if run.all() else int(np.argmin(run))
                found.append((head * self.granularity, size * self.granularity))
            return found


def _claim(
    space: _Space, address: int, nbytes: int, handle: int, low: int, count: int, slot: int, before: bytes
) -> Claim:
    a, b, c, d, e, f = (np.array((value,), np.int64) for value in (address, nbytes, handle, low, count, slot))
    return Claim(space, a, b, c, d, e, f, np.frombuffer(before, np.uint8))
