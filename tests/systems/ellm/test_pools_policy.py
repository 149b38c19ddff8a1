"""Pools as counts: against chunks that are really mapped, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.ellm.chunks import ChunkTable, Owner
from kvbench.systems.ellm.pools import Moves, Pools


def test_static_pools_never_lend_and_never_call() -> None:
    pools = Pools(10, 4, lend=False)
    assert pools.grant(opens=6, grows=1, act=4) == Moves()
    pools.rest(4)
    assert pools.grant(opens=4) is None
    assert pools.grant(act=5) is None
    assert pools.grant(opens=3, act=4) == Moves()
    assert (pools.kv_used, pools.act_used, pools.mapped, pools.spare()) == (10, 4, 0, 0)
    assert (pools.most_kv(4), pools.most_kv(5)) == (10, -1)


def test_both_needs_of_an_iteration_are_granted_together_or_not_at_all() -> None:
    pools = Pools(10, 4, lend=True)
    assert pools.grant(opens=12, act=3) is None
    assert (pools.kv_used, pools.act_used, pools.spare()) == (0, 0, 14)
    assert pools.grant(opens=11, act=3) == Moves(mapped=14, borrowed=1)
    pools.check()


def test_order_of_search() -> None:
    pools = Pools(4, 4, lend=True)
    assert pools.grant(act=4) == Moves(mapped=4)
    pools.rest(4)  # mapped-available
    assert pools.grant(act=3) == Moves()  # used again as it is
    pools.rest(3)
    assert pools.grant(opens=4) == Moves(mapped=4)  # own free ones
    assert pools.grant(opens=2) == Moves(mapped=2, unmapped=2, borrowed=2)  # idle activations are unmapped, then lent
    assert pools.kv_owned == 6
    pools.give(3)
    assert pools.grant(opens=1) == Moves()  # a slot is used again with its mapping
    assert pools.grant(grows=1) == Moves(mapped=1, unmapped=1, grown=1)  # a slot that grows cannot use another's
    assert pools.grant(act=3) == Moves(mapped=1, unmapped=1, borrowed=1)  # deflation: only now, and only what is needed
    pools.check()


@pytest.mark.parametrize("wrong", [{"opens": -1}, {"grows": -1}, {"act": -1}])
def test_bad_input(wrong: dict[str, int]) -> None:
    pools = Pools(2, 2, lend=True)
    with pytest.raises(UsageError, match="below 0"):
        pools.grant(**wrong)
    for call in (pools.give, pools.rest):
        with pytest.raises(UsageError, match="more given back"):
            call(1)
    for sizes in ((0, 0), (-1, 3)):
        with pytest.raises(UsageError, match="no chunks"):
            Pools(*sizes, lend=True)


class Mapped:
    """The same grants on a table of real chunks, in the order of search of docs/ellm.md."""

    def __init__(self, kv: int, act: int) -> None:
        self.table = ChunkTable(kv, act)
        self.idle: dict[Owner, list[int]] = {Owner.KV: [], Owner.ACT: []}
        self.used: dict[Owner, list[int]] = {Owner.KV: [], Owner.ACT: []}
        self.mapped = self.unmapped = 0

    def reuse(self, owner: Owner, count: int) -> int:
        again = min(count, len(self.idle[owner]))
        self.table.use(owner, again)
        for _ in range(again):
            self.used[owner].append(self.idle[owner].pop())
        return count - again

    def own_free(self, owner: Owner, count: int) -> int:
        fresh = min(count, self.table.free(owner))
        self.used[owner] += self.table.take(owner, fresh)
        self.table.use(owner, fresh)
        self.mapped += fresh
        return count - fresh

    def borrow(self, owner: Owner, count: int) -> int:
        lent = min(count, self.table.free(owner.other))
        self.table.transfer(owner.other, lent)
        return self.own_free(owner, lent) + count - lent

    def reclaim(self, owner: Owner, source: Owner, count: int) -> int:
        taken = [self.idle[source].pop() for _ in range(min(count, len(self.idle[source])))]
        self.table.put(source, taken)
        self.unmapped += len(taken)
        if source is not owner:
            self.table.transfer(source, len(taken))
        return self.own_free(owner, len(taken)) + count - len(taken)

    def grant(self, opens: int, grows: int, act: int) -> bool:
        table = self.table
        if opens + grows + act > sum(table.free(o) + table.idle(o) for o in Owner):
            return False
        act = self.own_free(Owner.ACT, self.reuse(Owner.ACT, act))
        kv = self.own_free(Owner.KV, self.reuse(Owner.KV, opens) + grows)
        kv, act = self.borrow(Owner.KV, kv), self.borrow(Owner.ACT, act)
        kv = self.reclaim(Owner.KV, Owner.KV, kv)
        kv, act = self.reclaim(Owner.KV, Owner.ACT, kv), self.reclaim(Owner.ACT, Owner.KV, act)
        assert (kv, act) == (0, 0)
        return True

    def back(self, owner: Owner, count: int) -> None:
        self.table.rest(owner, count)
        for _ in range(count):
            self.idle[owner].append(self.used[owner].pop())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(1, 12), st.data())
def test_counts_are_those_of_mapped_chunks(kv: int, act: int, data: st.DataObject) -> None:
    pools, real = Pools(kv, act, lend=True), Mapped(kv, act)
    few = st.integers(0, 8)
    for _ in range(data.draw(st.integers(1, 12))):
        opens, grows, need = data.draw(few), data.draw(few), data.draw(few)
        assert (pools.grant(opens=opens, grows=grows, act=need) is not None) == real.grant(opens, grows, need)
        free_kv = data.draw(st.integers(0, pools.kv_used))
        pools.rest(pools.act_used)
        real.back(Owner.ACT, len(real.used[Owner.ACT]))
        pools.give(free_kv)
        real.back(Owner.KV, free_kv)
        pools.check()
        real.table.check()
        counts = real.table.counts(Owner.KV)
        assert (pools.kv_used, pools.kv_owned, pools.borrowed) == (counts.used, counts.total, real.table.transferred)
        assert (pools.mapped, pools.unmapped) == (real.mapped, real.unmapped)
