"""The elastic pool: KV cache and activations over one set of physical chunks (eLLM, arXiv 2506.15155, sections 2, 3).

A slot is a range of addresses, its memory comes and goes in chunks. What a request gives back stays mapped and serves
the next one; when one side runs short it takes the other side's chunks by bookkeeping and maps them where it needs
them: no byte is copied. The paper leaves chunk size, victims and the order of reclaim open; here they are parameters or
named where they are decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from kvbench.errors import UsageError
from kvbench.memory.vmm.protocol import Chunk, Fence, Vmm, check_fence, check_whole
from kvbench.systems.ellm.act_slots import ActSlot
from kvbench.systems.ellm.background import Background
from kvbench.systems.ellm.backing import Backing, Policy, Sizes, Tally
from kvbench.systems.ellm.chunks import Counts, Owner, PoolExhausted
from kvbench.systems.ellm.kv_slots import KvSlot


@dataclass(frozen=True, slots=True)
class Granted:
    """What one iteration got: a KV slot for each new request, and its activations."""

    kv: tuple[KvSlot, ...]
    act: ActSlot | None


class ElasticPool:
    """``sizes`` of memory on ``vmm``, handed out by ``policy``. Used by one thread; ``background`` is another.

    Raises UsageError for sizes off the granularity, and what the driver raises.
    """

    def __init__(
        self, vmm: Vmm, sizes: Sizes, policy: Policy | None = None, background: Background | None = None
    ) -> None:
        self.policy = policy or Policy()
        self.sizes = sizes
        self._backing = Backing(vmm, sizes, background or Background())
        self._closed = False

    # -- what is there -------------------------------------------------------------------------------------------

    @property
    def tally(self) -> Tally:
        """What the pool has done."""
        return self._backing.tally

    @property
    def borrowed(self) -> int:
        """How many chunks have changed their owner since the pool was built."""
        return self._backing.table.transferred

    @property
    def background_tid(self) -> int | None:
        """The native id of the mapping thread, None before it has started."""
        return self._backing.background.tid

    def start_background(self) -> int:
        """Start the mapping thread before anything needs it; return its native id. Raises Unavailable without one."""
        return self._backing.background.start()

    @property
    def last_failure(self) -> str:
        """Why the last mapping ahead that failed did; empty when none has."""
        return str(self._backing.last_failure or "")

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The driver's chunks by number."""
        return self._backing.mapping.chunks

    def counts(self, owner: Owner) -> Counts:
        """Return the chunks ``owner`` has, by state."""
        return self._backing.table.counts(owner)

    def slack_bytes(self) -> int:
        """Return the bytes mapped for slots that do not need them now."""
        return sum(self._backing.table.idle(owner) for owner in Owner) * self.sizes.chunk_bytes

    def chunks_of(self, slot: KvSlot | ActSlot) -> list[int]:
        """Return the numbers of the chunks mapped in a live slot, in order of their addresses."""
        if isinstance(slot, KvSlot):
            self._backing.kv.check_live(slot)
            return list(slot.chunks)
        self._backing.act.check_live(slot)
        return self._backing.act.chunk[slot.first : slot.first + slot.pages]

    def address(self, slot: KvSlot | ActSlot) -> int:
        """Return where the bytes of a live slot begin."""
        if isinstance(slot, KvSlot):
            self._backing.kv.check_live(slot)
            return slot.address
        self._backing.act.check_live(slot)
        return self._backing.act_range.address + slot.first * self.sizes.chunk_bytes

    def check(self) -> None:
        """Raise KvbenchError where the books do not agree with each other."""
        self._backing.check()

    # -- asking and giving back ----------------------------------------------------------------------------------

    def open_kv(self, nbytes: int) -> KvSlot:
        """Return a KV slot with ``nbytes`` mapped. Raises as :meth:`grant`."""
        self._open()
        need = self._chunks(nbytes)
        slot = self._pick(need)
        try:
            self._extend(slot, need)
        except BaseException:
            self._backing.kv.park(slot)
            raise
        return slot

    def open_act(self, nbytes: int) -> ActSlot:
        """Return an activation slot of ``nbytes``. Raises as :meth:`grant`."""
        self._open()
        slot, mapped = self._take_act(nbytes)
        try:
            if mapped < slot.pages:
                self._backing.provide(0, slot.pages - mapped, self.policy, deferred=self.policy.alias)
                self._attach_act(slot, mapped)
        except BaseException:
            self._undo_act(slot, mapped)
            raise
        self.tally.allocations += 1
        return slot

    def grow(self, slot: KvSlot, nbytes: int) -> None:
        """Map what ``slot`` needs to hold ``nbytes``; nothing happens where it holds them. Raises as :meth:`grant`."""
        self._open()
        self._backing.kv.check_live(slot)
        need = self._chunks(nbytes)
        if need > slot.need:
            self._extend(slot, need)

    def _extend(self, slot: KvSlot, need: int) -> None:
        """Let a live slot have ``need`` chunks in use, or as many as before."""
        backing, before = self._backing, slot.need
        if slot.flight is not None:
            backing.land(slot)
        try:
            missing = need - len(slot.chunks)
            if missing > 0:
                self._use(slot, len(slot.chunks))
                backing.provide(missing, 0, self.policy, deferred=self.policy.alias)
                backing.attach_kv(slot, missing)
            self._use(slot, need)
        except BaseException:
            self._undo_kv(slot, before)
            raise
        self.tally.allocations += 1

    def grant(self, opens: Sequence[int] = (), grows: Sequence[tuple[KvSlot, int]] = (), act: int = 0) -> Granted:
        """Give one iteration all it needs, or nothing: two iterations that each hold half would wait for ever.

        ``opens``: bytes of KV cache of each new request; ``grows``: live slots and the bytes they have to hold from now
        on; ``act``: bytes of activations (0: none). Raises PoolExhausted when there is not enough, the pool as it was
        before; UsageError for a slot that is not live and for sizes beyond its addresses; VmmError when the driver
        refuses (no slot is granted then, chunks may have changed hands).
        """
        self._open()
        backing = self._backing
        for slot, _ in grows:
            backing.kv.check_live(slot)
        wants = [(slot, self._chunks(nbytes)) for slot, nbytes in grows]
        check_whole(act, "bytes of activations")
        needs = [self._chunks(nbytes) for nbytes in opens]
        picked: list[KvSlot] = []
        undo: list[tuple[KvSlot, int]] = []
        slot_act: ActSlot | None = None
        mapped_act = 0
        try:
            for need in needs:
                picked.append(self._pick(need))
                wants.append((picked[-1], need))
            wants = [(slot, need) for slot, need in wants if need > slot.need]
            missing_kv = missing_act = 0
            for slot, need in wants:
                if slot.flight is not None:
                    backing.land(slot)
                undo.append((slot, slot.need))
                self._use(slot, min(need, len(slot.chunks)))
                missing_kv += need - slot.need
            if act:
                slot_act, mapped_act = self._take_act(act)
                missing_act = slot_act.pages - mapped_act
            backing.provide(missing_kv, missing_act, self.policy, deferred=self.policy.alias)
            for slot, need in wants:
                if need > len(slot.chunks):
                    backing.attach_kv(slot, need - len(slot.chunks))
                self._use(slot, need)
            if slot_act is not None and missing_act:
                self._attach_act(slot_act, mapped_act)
        except BaseException:
            for slot, need in reversed(undo):
                self._undo_kv(slot, need)
            for slot in picked:
                backing.kv.park(slot)
            if slot_act is not None:
                self._undo_act(slot_act, mapped_act)
            raise
        self.tally.allocations += len(wants) + (slot_act is not None)
        return Granted(tuple(picked), slot_act)

    def _chunks(self, nbytes: int) -> int:
        """Return how many chunks hold ``nbytes`` of KV cache. Raises UsageError beyond a slot's addresses."""
        check_whole(nbytes, "bytes of KV cache")
        if not 0 < nbytes <= self.sizes.context_bytes:
            raise UsageError(
                "KV cache beyond the addresses of its slot", where="elastic pool", got=nbytes,
                expected=f"1..{self.sizes.context_bytes} bytes",
            )  # fmt: skip
        return -(-nbytes // self.sizes.chunk_bytes)

    def _pick(self, need: int) -> KvSlot:
        kv = self._backing.kv
        return kv.pick(need) or kv.add(self._backing.vmm.reserve(self.sizes.context_bytes))

    def _take_act(self, nbytes: int) -> tuple[ActSlot, int]:
        """Return an activation slot and how many of its pages are mapped, which are in use from now on."""
        check_whole(nbytes, "bytes of activations")
        if nbytes < 1:
            raise UsageError("activations have a size", where="elastic pool", got=nbytes, expected="1 byte or more")
        slot, mapped = self._backing.act.take(-(-nbytes // self.sizes.chunk_bytes))
        try:
            self._backing.table.use(Owner.ACT, mapped)
        except BaseException:
            self._backing.act.give(slot)
            raise
        return slot, mapped

    def _attach_act(self, slot: ActSlot, mapped: int) -> None:
        self._backing.attach_act(slot)
        self._backing.table.use(Owner.ACT, slot.pages - mapped)

    def _undo_act(self, slot: ActSlot, mapped: int) -> None:
        self._backing.act.give(slot)
        self._backing.table.rest(Owner.ACT, mapped)

    def _undo_kv(self, slot: KvSlot, need: int) -> None:
        self._backing.table.rest(Owner.KV, slot.need - need)
        self._backing.kv.needs(slot, need)

    def _use(self, slot: KvSlot, need: int) -> None:
        """Count the chunks of ``slot`` up to ``need`` as in use; it maps that many."""
        if need > slot.need:
            self._backing.table.use(Owner.KV, need - slot.need)
            self._backing.kv.needs(slot, need)

    def close_kv(self, slot: KvSlot, fence: Fence | None = None) -> None:
        """Take a KV slot back. ``fence``: work that may still read it; its addresses are unmapped only after that.

        Raises UsageError for a double free, another pool's slot and what is no fence. Under a policy that unmaps at
        once, VmmError where the driver refuses; the slot is given back all the same.
        """
        self._open()
        backing = self._backing
        backing.kv.check_live(slot, closing=True)
        if fence is not None:
            check_fence(fence)
        if slot.flight is not None:
            backing.land(slot)
        if fence is not None:
            backing.vmm.guard(slot.reservation, fence)
        need = slot.need
        backing.kv.park(slot)
        backing.table.rest(Owner.KV, need)
        if not self.policy.reuse:
            backing.trim(slot, len(slot.chunks), deferred=self.policy.alias)
        self._return(Owner.KV)

    def close_act(self, slot: ActSlot, fence: Fence | None = None) -> None:
        """Take an activation slot back; as :meth:`close_kv`."""
        self._open()
        backing = self._backing
        backing.act.check_live(slot, closing=True)
        if fence is not None:
            backing.vmm.guard(backing.act_range, fence)
        backing.table.rest(Owner.ACT, backing.act.give(slot))
        if not self.policy.reuse:
            backing.reclaim(Owner.ACT, backing.table.idle(Owner.ACT), deferred=self.policy.alias)
        self._return(Owner.ACT)

    def _return(self, owner: Owner) -> None:
        """Give borrowed chunks back at once, where the policy is eager."""
        if self.policy.lazy:
            return
        counts = self.counts(owner)
        at_first = self.sizes.kv_chunks if owner is Owner.KV else self.sizes.act_chunks
        back = min(counts.total - at_first, counts.free + counts.idle)
        if back > 0:
            self._lend(owner, back)

    # -- moving memory -------------------------------------------------------------------------------------------

    def inflate(self, chunks: int) -> None:
        """Let the KV cache own ``chunks`` more: free ones of the activations, then those of idle slots, unmapped.

        They are mapped when they are written. Raises PoolExhausted when activations cannot spare that many.
        """
        self._lend(Owner.ACT, chunks)

    def deflate(self, chunks: int) -> None:
        """Let activations own ``chunks`` more, as :meth:`inflate`."""
        self._lend(Owner.KV, chunks)

    def _lend(self, source: Owner, chunks: int) -> None:
        self._open()
        check_whole(chunks, "chunks to lend")
        self._backing.land_all()
        counts = self.counts(source)
        if not 0 <= chunks <= counts.free + counts.idle:
            raise PoolExhausted(
                f"{source.name} cannot spare that many chunks", where="elastic pool",
                got=f"{counts.free} free, {counts.idle} mapped-available", expected=f"{chunks}",
            )  # fmt: skip
        self._backing.reclaim(source, max(0, chunks - counts.free), deferred=self.policy.alias)
        self._backing.table.transfer(source, chunks)

    def premap(self, ahead: Sequence[tuple[KvSlot, int]]) -> int:
        """Map, in the background, what live slots need to hold the given bytes; return how many chunks are on the way.

        For the step after this one: each sequence is assumed to emit one more token. A slot whose chunk cannot be had
        is left out (``tally.ahead_skipped``); the step itself will ask. Old mappings go in the background too.
        """
        self._open()
        backing, size = self._backing, self.sizes.chunk_bytes
        wants: list[tuple[KvSlot, int]] = []
        for slot, nbytes in ahead:
            backing.kv.check_live(slot)
            check_whole(nbytes, "bytes of KV cache")
            have = len(slot.chunks)
            if nbytes <= have * size or slot.flight is not None:
                continue
            count = min(-(-nbytes // size), backing.context_chunks) - have
            if count > 0:
                wants.append((slot, count))
        while wants:
            try:
                backing.provide(sum(count for _, count in wants), 0, self.policy, deferred=True)
                break
            except PoolExhausted:
                self.tally.ahead_skipped += wants.pop()[1]
        for slot, _ in wants:
            backing.clear_kv(slot)
        backing.launch(wants)
        return sum(count for _, count in wants)

    def settle(self) -> None:
        """Wait until nothing is under way in the background."""
        self._backing.land_all()
        self._backing.drain()

    # -- the end -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._closed:
            raise UsageError("the pool is closed", where="elastic pool", mend="open a new one")

    def close(self) -> None:
        """Unmap and give back everything. Raises UsageError, changing nothing, while slots are live. Twice is fine."""
        if self._closed:
            return
        kv, act = self._backing.kv.live, len(self._backing.act.live)
        if kv or act:
            raise UsageError(
                "closed with live tensors", where="elastic pool", got=f"{kv} KV slots, {act} activation slots",
                expected="none", mend="give them back first",
            )  # fmt: skip
        self._closed = True
        self._backing.close()

    def discard(self) -> None:
        """Give back everything, live slots too: for the way out of work that was broken off. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._backing.abandon()

    def __enter__(self) -> ElasticPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()
