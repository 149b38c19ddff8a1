"""Finding chunks for a request and putting them where they are needed: reclaim, transfer, map, and their failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.host import preflight
from kvbench.memory.vmm.protocol import Reservation, Vmm, check_whole
from kvbench.systems.ellm.act_slots import MAPPED, STALE, UNMAPPED, ActSlot, ActSlots
from kvbench.systems.ellm.background import Background, Job
from kvbench.systems.ellm.chunks import ChunkTable, Owner, PoolExhausted
from kvbench.systems.ellm.kv_slots import KvSlot, KvSlots
from kvbench.systems.ellm.mapping import Mapping, PartlyDone, Range, Stuck


@dataclass(frozen=True, slots=True)
class Sizes:
    """``kv_chunks`` and ``act_chunks`` of ``chunk_bytes`` that belong to either side at first.

    ``kv_slots`` requests at most, each with addresses for ``context_bytes``. ``act_bytes`` of addresses for
    activations; more than there can ever be memory for, so that holes between live slots do no harm.
    """

    chunk_bytes: int
    kv_chunks: int
    act_chunks: int
    kv_slots: int
    context_bytes: int
    act_bytes: int


REACH = 1 << 47  # bytes of addresses a process can have, and a GPU beside it
MANY = 1 << 20  # entries: fewer are not worth a look at the memory left
BOOKS = 64  # bytes of bookkeeping a chunk or a page of addresses takes, at most


def _check_reach(sizes: Sizes) -> None:
    """Raise UsageError for what no process has addresses for, Unavailable where the bookkeeping would take all memory.

    Both are found before a list of that many entries is built.
    """
    chunks = sizes.kv_chunks + sizes.act_chunks
    asked = {
        "context_bytes": sizes.context_bytes, "act_bytes": sizes.act_bytes, "all chunks": chunks * sizes.chunk_bytes
    }  # fmt: skip
    for name, nbytes in asked.items():
        if nbytes > REACH:
            raise UsageError(
                f"{name} beyond the address space", where="elastic pool", got=f"{nbytes} bytes",
                expected=f"at most {REACH}", mend="reserve fewer addresses",
            )  # fmt: skip
    entries = max(0, chunks) + (sizes.act_bytes + sizes.context_bytes) // sizes.chunk_bytes
    if entries > MANY:
        preflight(BOOKS * entries)


@dataclass(frozen=True, slots=True)
class Policy:
    """``reuse``: slots given back stay mapped. ``alias``: a reclaimed chunk is mapped at its new place at once and
    unmapped from the old one in the background. ``lazy``: borrowed chunks go back when they are asked for, not at
    once. ``elastic``: the two sides borrow from each other.
    """

    reuse: bool = True
    alias: bool = False
    lazy: bool = True
    elastic: bool = True


@dataclass(slots=True)
class Tally:
    """What the pool has done since it was built."""

    allocations: int = 0  # slots opened, and live ones that outgrew their chunks
    mapped: int = 0  # chunks mapped, one driver call each
    unmapped: int = 0  # chunks unmapped
    unmap_calls: int = 0  # ranges unmapped, one driver call each
    access_calls: int = 0  # ranges made accessible, one driver call each
    ahead: int = 0  # of the chunks mapped: in the background, before they were needed
    ahead_failed: int = 0  # mappings ahead that the driver refused
    ahead_skipped: int = 0  # mappings ahead for which there was no chunk


class _Flight:
    """Chunks being mapped behind the mapped ones of ``slot``."""

    __slots__ = ("chunks", "first", "job", "slot")

    def __init__(self, slot: KvSlot, first: int, chunks: list[int]) -> None:
        self.slot, self.first, self.chunks = slot, first, chunks
        self.job: Job | None = None


class _Unmapping:
    """Old mappings being undone: pages of the activation range, or chunks' worth of addresses of ``slot``."""

    __slots__ = ("job", "ranges", "slot")

    def __init__(self, ranges: Sequence[Range], slot: KvSlot | None, job: Job) -> None:
        self.ranges, self.slot, self.job = tuple(ranges), slot, job


class Backing:
    """The chunks, the two kinds of slots, and the driver under them; :class:`~.pool.ElasticPool` decides what happens.

    Raises UsageError for sizes off the driver's granularity, before memory is touched; what the driver raises.
    """

    def __init__(self, vmm: Vmm, sizes: Sizes, background: Background) -> None:
        for name in Sizes.__slots__:
            check_whole(getattr(sizes, name), name, "elastic pool")
        grain = vmm.granularity()
        for name in ("chunk_bytes", "context_bytes", "act_bytes"):
            value = getattr(sizes, name)
            if value <= 0 or value % (grain if name == "chunk_bytes" else sizes.chunk_bytes):
                whole = grain if name == "chunk_bytes" else sizes.chunk_bytes
                raise UsageError(
                    f"{name} off the granularity", where="elastic pool", got=value,
                    expected=f"a multiple of {whole} bytes", mend=f"use {-(-max(value, 1) // whole) * whole}",
                )  # fmt: skip
        _check_reach(sizes)
        self.vmm, self.sizes = vmm, sizes
        self.table = ChunkTable(sizes.kv_chunks, sizes.act_chunks)
        self.kv = KvSlots(sizes.kv_slots)
        self.act = ActSlots(sizes.act_bytes // sizes.chunk_bytes)
        self.context_chunks = sizes.context_bytes // sizes.chunk_bytes
        self.tally = Tally()
        self.last_failure: KvbenchError | None = None  # of a mapping ahead, which nobody waits for
        chunks = vmm.create_many(sizes.chunk_bytes, self.table.total)
        try:
            self.act_range: Reservation = vmm.reserve(sizes.act_bytes)
        except BaseException:
            vmm.release_many(chunks)
            raise
        self.mapping = Mapping(vmm, chunks, sizes.chunk_bytes)
        self.background = background
        self._flights: dict[KvSlot, _Flight] = {}
        self._unmappings: deque[_Unmapping] = deque()

    # -- room ----------------------------------------------------------------------------------------------------

    def provide(self, kv: int, act: int, policy: Policy, *, deferred: bool) -> None:
        """Make ``kv`` and ``act`` chunks of either side free, both or none.

        In order: own free ones, the other side's, own mapped-available ones, the other side's (GC). The paper fixes
        only that the activation pool reclaims idle slots before it lends; the rest keeps mappings that may be reused.
        ``deferred``: what is reclaimed is unmapped in the background. Raises PoolExhausted, changing nothing; VmmError
        when the driver refuses, with what was reclaimed until then free.
        """
        table = self.table
        if kv <= table.free(Owner.KV) and act <= table.free(Owner.ACT):
            return
        wanted = {Owner.KV: kv, Owner.ACT: act}
        self.land_all()  # chunks in flight cannot be reclaimed
        have = {owner: table.free(owner) + table.idle(owner) for owner in Owner}
        enough = kv + act <= sum(have.values()) if policy.elastic else all(wanted[o] <= have[o] for o in Owner)
        if not enough:
            got = ", ".join(f"{o.name} {table.free(o)} free {table.idle(o)} mapped-available" for o in Owner)
            raise PoolExhausted(
                "not enough chunks", where="elastic pool" if policy.elastic else "isolated pools", got=got,
                expected=f"{kv} for KV and {act} for activations", mend="finish a request or ask for less",
            )  # fmt: skip
        for owner in Owner:
            short, other = wanted[owner] - table.free(owner), owner.other
            if policy.elastic and short > 0:
                lent = max(0, min(short, table.free(other) - wanted[other]))
                table.transfer(other, lent)
                short -= lent
            if short > 0:
                own = min(short, table.idle(owner))
                self.reclaim(owner, own, deferred=deferred)
                short -= own
            if short > 0:
                self.reclaim(other, short, deferred=deferred)
                table.transfer(other, short)

    def reclaim(self, owner: Owner, count: int, *, deferred: bool) -> None:
        """Make ``count`` mapped-available chunks of ``owner`` free. ``count`` is at most what the table says.

        Raises VmmError when the driver refuses; what was unmapped until then is free.
        """
        if owner is Owner.ACT:
            self._reclaim_act(count, deferred)
            return
        while count > 0:
            slot = self.kv.victim()
            if slot is None:
                raise KvbenchError("mapped-available chunks that no slot holds", where="elastic pool", got=count)
            if slot.flight is not None:
                self.land(slot)
                continue
            part = min(count, len(slot.chunks) - slot.need)
            self.trim(slot, part, deferred=deferred)
            count -= part

    def trim(self, slot: KvSlot, count: int, *, deferred: bool) -> None:
        """Make the last ``count`` chunks of ``slot``, which it does not need, free."""
        ranges = [(len(slot.chunks) - count, count)]
        failed: PartlyDone | None = None
        if deferred:
            self._unmap_later(slot.reservation, ranges, slot)
        else:
            try:
                self.mapping.detach(slot.reservation, ranges)
            except PartlyDone as error:
                if not error.done:
                    raise
                failed = error
            self._count_unmapped(ranges)
        self.table.put(Owner.KV, self.kv.trimmed(slot, count, deferred))
        if failed is not None:
            raise failed

    def _reclaim_act(self, count: int, deferred: bool) -> None:
        found = self.act.idle_ranges(count)
        ranges = [(first, pages) for _, first, pages in found]
        failed: PartlyDone | None = None
        if not found:
            return
        if deferred:
            self._unmap_later(self.act_range, ranges, None)
        else:
            try:
                self.mapping.detach(self.act_range, ranges)
            except PartlyDone as error:
                failed, found = error, found[: error.done]
            self._count_unmapped(ranges[: len(found)])
        for run, first, pages in found:
            self.table.put(Owner.ACT, self.act.detached(run, first, pages, STALE if deferred else UNMAPPED))
        if failed is not None:
            raise failed

    # -- addresses given up --------------------------------------------------------------------------------------

    def _unmap_later(self, reservation: Reservation, ranges: Sequence[Range], slot: KvSlot | None) -> None:
        self.sweep()
        job = self.background.submit(partial(self.mapping.detach, reservation, ranges))
        self._unmappings.append(_Unmapping(ranges, slot, job))

    def drain(self) -> None:
        """Wait for every unmapping under way. One that failed leaves its addresses stale: clearing tries again."""
        while self._unmappings:
            self._unmappings[0].job.wait()
            self._note_unmapped(self._unmappings.popleft())

    def sweep(self) -> None:
        """Note the unmappings that are over by now, without waiting."""
        while self._unmappings and self._unmappings[0].job.done:
            self._note_unmapped(self._unmappings.popleft())

    def _note_unmapped(self, over: _Unmapping) -> None:
        error = over.job.error
        done = over.ranges if error is None else over.ranges[: error.done if isinstance(error, PartlyDone) else 0]
        self._forget(done, over.slot)

    def _forget(self, ranges: Sequence[Range], slot: KvSlot | None) -> None:
        for span in ranges:
            if slot is None:
                self.act.mark(*span, UNMAPPED)
            else:
                slot.stale.remove(span)
        self._count_unmapped(ranges)

    def _clear(self, reservation: Reservation, ranges: Sequence[Range], slot: KvSlot | None) -> None:
        """Unmap stale ``ranges``, now. Raises PartlyDone where the driver refuses; the rest stays stale."""
        try:
            self.mapping.detach(reservation, ranges)
        except PartlyDone as error:
            self._forget(ranges[: error.done], slot)
            raise
        self._forget(ranges, slot)

    def _count_unmapped(self, ranges: Sequence[Range]) -> None:
        self.tally.unmap_calls += len(ranges)
        self.tally.unmapped += sum(count for _, count in ranges)

    # -- mapping -------------------------------------------------------------------------------------------------

    def attach_kv(self, slot: KvSlot, count: int) -> None:
        """Map ``count`` free chunks behind those of ``slot``; they are mapped-available. Raises VmmError, undone."""
        self.clear_kv(slot)
        ranges = [(len(slot.chunks), count)]
        chunks = self.table.take(Owner.KV, count)
        try:
            self.mapping.attach(slot.reservation, ranges, chunks)
        except KvbenchError as error:
            self.table.put(Owner.KV, chunks)
            if isinstance(error, Stuck):
                slot.stale.extend(error.ranges)
            raise
        self.tally.access_calls += 1
        self.tally.mapped += count
        self.kv.extend(slot, chunks)

    def attach_act(self, slot: ActSlot) -> int:
        """Map free chunks at every unmapped page of ``slot``; return how many. Raises VmmError, undone."""
        act = self.act
        if STALE in act.state[slot.first : slot.first + slot.pages]:
            self.drain()
            stale = act.ranges(slot.first, slot.pages, STALE)
            if stale:
                self._clear(self.act_range, stale, None)
        ranges = act.ranges(slot.first, slot.pages, UNMAPPED)
        count = sum(pages for _, pages in ranges)
        chunks = self.table.take(Owner.ACT, count)
        try:
            self.mapping.attach(self.act_range, ranges, chunks)
        except KvbenchError as error:
            self.table.put(Owner.ACT, chunks)
            if isinstance(error, Stuck):
                for span in error.ranges:
                    act.mark(*span, STALE)
            raise
        self.tally.access_calls += len(ranges)
        self.tally.mapped += count
        at = 0
        for first, pages in ranges:
            act.attached(first, chunks[at : at + pages])
            at += pages
        return count

    def clear_kv(self, slot: KvSlot) -> None:
        """Make the addresses behind the mapped ones of ``slot`` usable."""
        if slot.stale:
            self.drain()
            if slot.stale:
                self._clear(slot.reservation, list(slot.stale), slot)

    # -- mapping ahead -------------------------------------------------------------------------------------------

    def launch(self, wants: Sequence[tuple[KvSlot, int]]) -> None:
        """Map free chunks, so many for each slot, in the background; there are that many.

        A job each: a failure belongs to one slot.
        """
        for slot, count in wants:
            flight = _Flight(slot, len(slot.chunks), self.table.take(Owner.KV, count))
            slot.flight = self._flights[slot] = flight
            flight.job = self.background.submit(partial(self._fly, flight))

    def _fly(self, flight: _Flight) -> None:
        self.mapping.attach(flight.slot.reservation, [(flight.first, len(flight.chunks))], flight.chunks)

    def land(self, slot: KvSlot) -> None:
        """Wait for the mappings ahead of ``slot``; its chunks are mapped-available, or free where that failed."""
        flight = self._flights.pop(slot)
        slot.flight = None
        error: KvbenchError | None = None
        if flight.job is not None:
            flight.job.wait()
            error = flight.job.error
        if flight.job is not None and error is None:
            self.kv.extend(slot, flight.chunks)
            self.tally.access_calls += 1
            self.tally.mapped += len(flight.chunks)
            self.tally.ahead += len(flight.chunks)
            return
        self.table.put(Owner.KV, flight.chunks)
        self.tally.ahead_failed += 1
        self.last_failure = error
        if isinstance(error, Stuck):
            slot.stale.extend(error.ranges)

    def land_all(self) -> None:
        """Wait for every mapping ahead."""
        for slot in list(self._flights):
            self.land(slot)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmap and give back everything; no slot is live. Raises the first error, after trying all of it."""
        errors: list[KvbenchError] = []
        self.land_all()
        self.drain()
        self.background.close()
        for slot in self.kv.slots:
            ranges = [(0, len(slot.chunks)), *slot.stale]
            self._end(slot.reservation, [r for r in ranges if r[1]], errors)
        pages = [r for state in (MAPPED, STALE) for r in self.act.ranges(0, self.act.pages, state)]
        self._end(self.act_range, pages, errors)
        try:
            self.vmm.release_many(self.mapping.chunks)
        except KvbenchError as error:
            errors.append(error)
        if errors:
            raise errors[0]

    def _end(self, reservation: Reservation, ranges: Sequence[Range], errors: list[KvbenchError]) -> None:
        try:
            if ranges:
                self.mapping.detach(reservation, ranges)
            self.vmm.free(reservation)
        except KvbenchError as error:
            errors.append(error)

    def abandon(self) -> None:
        """Give back what can be given back, live slots too: the way out of an error, which is the one that tells."""
        with suppress(KvbenchError):
            self.close()

    def check(self) -> None:
        """Compare the table with what the slots hold. Raises KvbenchError where they differ."""
        self.table.check()
        self.kv.check()
        self.act.check()
        held: dict[Owner, list[int]] = {Owner.KV: [], Owner.ACT: [c for c in self.act.chunk if c >= 0]}
        for slot in self.kv.slots:
            held[Owner.KV] += [*slot.chunks, *(slot.flight.chunks if slot.flight else ())]
        used = {
            Owner.KV: sum(slot.need for slot in self.kv.slots),
            Owner.ACT: sum(slot.pages for slot in self.act.live.values()),
        }
        for owner in Owner:
            counts, chunks = self.table.counts(owner), held[owner]
            strangers = [c for c in chunks if self.table.owner_of(c) != owner or not self.table.mapped(c)]
            if strangers or len(set(chunks)) != len(chunks):
                raise KvbenchError("a slot holds a chunk that is not its own", where=owner.name, got=strangers[:4])
            if counts.used != used[owner] or counts.used + counts.idle != len(chunks):
                raise KvbenchError(
                    "slots and table disagree", where=owner.name, got=str(counts),
                    expected=f"{used[owner]} in use of {len(chunks)} mapped",
                )  # fmt: skip
        pages = [p for s in self.act.live.values() for p in range(s.first, s.first + s.pages)]
        if any(self.act.state[page] != MAPPED for page in pages):
            raise KvbenchError("a live activation slot has an unmapped page", where="elastic pool")
