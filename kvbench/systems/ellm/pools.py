"""The pools of an engine as counts: two static ones, or one that lends (eLLM, DAC 2026, sections 2.1 and 2.2).

:class:`kvbench.systems.ellm.pool.ElasticPool` maps real chunks; here they are only counted, so that a scheduler can be
replayed over hours. Order of search, states and what takes a map call are the same: own mapped-available chunks are
used again as they are, own free ones are mapped, the other side's free ones change their owner and are mapped, and last
mapped-available ones are unmapped and mapped where they are needed. What is left out: a slot that is used again has as
many chunks as its new owner wants, no more and no fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import KvbenchError, UsageError

WHERE = "eLLM pools"


@dataclass(frozen=True, slots=True)
class Moves:
    """What a grant took in driver calls: chunks ``mapped`` and ``unmapped``; of the mapped ones ``borrowed`` came from
    the other side, and ``grown`` ones are for sequences that were running: which these are is known a step ahead."""

    mapped: int = 0
    unmapped: int = 0
    borrowed: int = 0
    grown: int = 0


NONE = Moves()


@dataclass(slots=True)
class _Side:
    free: int
    idle: int = 0
    used: int = 0

    @property
    def spare(self) -> int:
        return self.free + self.idle

    @property
    def total(self) -> int:
        return self.free + self.idle + self.used


class Pools:
    """``kv`` and ``act`` chunks of KV cache and of activations; with ``lend`` either side takes from the other.

    Without it the chunks are mapped once, at the start, and no call is ever made. Every operation costs the same,
    whatever the number of chunks. Raises UsageError for sizes below 0, or of 0 together.
    """

    def __init__(self, kv: int, act: int, *, lend: bool) -> None:
        if kv < 0 or act < 0 or kv + act == 0:
            raise UsageError("no chunks to manage", where=WHERE, got=f"{kv} + {act}", expected="1 or more")
        self.lend = lend
        self.chunks = kv + act
        self._kv, self._act = _Side(kv), _Side(act)
        self.mapped = self.unmapped = self.borrowed = 0

    @property
    def kv_used(self) -> int:
        """Chunks that hold KV cache."""
        return self._kv.used

    @property
    def act_used(self) -> int:
        """Chunks under the activations of the iteration that runs."""
        return self._act.used

    @property
    def kv_owned(self) -> int:
        """Chunks that belong to the KV cache now, used or not."""
        return self._kv.total

    def most_kv(self, act: int) -> int:
        """Return how many chunks of KV cache there could be beside ``act`` chunks of activations; -1: ``act`` alone is
        too much."""
        if self.lend:
            return max(-1, self.chunks - act)
        return self._kv.total if act <= self._act.total else -1

    def spare(self, act: int = 0) -> int:
        """Return how many chunks more the KV cache could have now, if ``act`` were granted to activations with them.

        Negative when ``act`` alone is too much.
        """
        if not self.lend:
            return self._kv.spare if act <= self._act.spare else -1
        return self._kv.spare + self._act.spare - act

    def unmaps(self, grows: int) -> int:
        """Return how many chunks would be unmapped if running requests got ``grows`` more now."""
        return max(0, grows - self._kv.free - self._act.free) if self.lend else 0

    def grant(self, *, opens: int = 0, grows: int = 0, act: int = 0) -> Moves | None:
        """Give new requests ``opens`` chunks, running ones ``grows``, the iteration ``act`` - or nothing, then None.

        Raises UsageError for counts below 0.
        """
        if min(opens, grows, act) < 0:
            raise UsageError("chunks below 0", where=WHERE, got=(opens, grows, act), expected="0 or more")
        kv, mine = self._kv, self._act
        if opens + grows > self.spare(act):
            return None
        if not self.lend:
            _plain(kv, opens + grows)
            _plain(mine, act)
            return NONE
        # each side helps itself first: what is mapped already costs nothing
        again_act, again = min(act, mine.idle), min(opens, kv.idle)
        mine.idle -= again_act
        kv.idle -= again
        fresh_act, fresh = min(act - again_act, mine.free), min(opens - again + grows, kv.free)
        mine.free -= fresh_act
        kv.free -= fresh
        need_act, need = act - again_act - fresh_act, opens + grows - again - fresh
        # then the other's free chunks change their owner
        lent, lent_act = min(need, mine.free), min(need_act, kv.free)
        mine.free -= lent
        kv.free -= lent_act
        need, need_act = need - lent, need_act - lent_act
        # last, mapped-available ones are unmapped: own before the other's
        own = min(need, kv.idle)
        kv.idle -= own
        taken, taken_act = need - own, need_act
        mine.idle -= taken
        kv.idle -= taken_act
        if min(mine.idle, kv.idle) < 0:
            raise KvbenchError("a grant took more than there was", where=WHERE, got=(opens, grows, act))
        kv.used += opens + grows
        mine.used += act
        borrowed = lent + taken + lent_act + taken_act
        unmapped = own + taken + taken_act
        mapped = fresh_act + fresh + borrowed + own
        self.mapped += mapped
        self.unmapped += unmapped
        self.borrowed += borrowed
        return Moves(mapped, unmapped, borrowed, grows)

    def give(self, chunks: int) -> None:
        """Take back ``chunks`` of KV cache; they stay mapped. Raises UsageError when fewer are in use."""
        _rest(self._kv, chunks, "KV cache")

    def rest(self, chunks: int) -> None:
        """Take back ``chunks`` of activations when the iteration is over. Raises UsageError when fewer are in use."""
        _rest(self._act, chunks, "activations")

    def check(self) -> None:
        """Raise KvbenchError where the counts contradict each other."""
        sides = (self._kv, self._act)
        below = any(min(side.free, side.idle, side.used) < 0 for side in sides)
        if below or sum(side.total for side in sides) != self.chunks:
            raise KvbenchError("chunks do not add up", where=WHERE, got=str(sides), expected=f"{self.chunks} in all")


def _plain(side: _Side, chunks: int) -> None:
    again = min(chunks, side.idle)
    side.idle -= again
    side.free -= chunks - again
    side.used += chunks


def _rest(side: _Side, chunks: int, what: str) -> None:
    if not 0 <= chunks <= side.used:
        raise UsageError(f"more given back than {what} has", where=WHERE, got=chunks, expected=f"0..{side.used}")
    side.used -= chunks
    side.idle += chunks
