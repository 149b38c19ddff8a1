"""The elastic pool: who gets which chunks, in which order, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.vmm.driver import ThreadFence
from kvbench.memory.vmm.protocol import VmmError
from kvbench.memory.vmm.touch import HostTouch
from kvbench.systems.ellm.backing import Policy, Sizes
from kvbench.systems.ellm.chunks import ChunkTable, Counts, Owner, PoolExhausted
from kvbench.systems.ellm.identity import moved_bytes, stamp, stamp_all
from kvbench.systems.ellm.mapping import PartlyDone
from kvbench.systems.ellm.pool import ElasticPool
from tests.systems.ellm.rigs import CHUNK, FakeRig, HostRig, Stepwise, fake_rig, host_rig

SIZES = Sizes(CHUNK, 8, 8, 6, 16 * CHUNK, 48 * CHUNK)


@pytest.fixture
def rig() -> Iterator[HostRig]:
    with host_rig() as made:
        yield made


def pool_of(rig: HostRig | FakeRig, sizes: Sizes = SIZES, **policy: bool) -> ElasticPool:
    return ElasticPool(rig.vmm, sizes, Policy(**policy), Stepwise())


def background(pool: ElasticPool) -> Stepwise:
    found = pool._backing.background
    assert isinstance(found, Stepwise)
    return found


def test_a_slot_given_back_serves_the_next_without_a_call(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        sizes = [5, 2, 3]
        slots = [pool.open_kv(n * CHUNK) for n in sizes]
        for slot in slots:
            pool.close_kv(slot)
        mapped, made = pool.tally.mapped, len(rig.runner.made)
        again = [pool.open_kv(3 * CHUNK), pool.open_kv(1)]
        assert again[0].number == slots[2].number, "not the smallest slot that is large enough"
        assert again[1].number == slots[1].number
        assert (pool.tally.mapped, len(rig.runner.made)) == (mapped, made)
        grown = pool.open_kv(7 * CHUNK)
        assert grown.number == slots[0].number, "not the one that maps most"
        assert pool.tally.mapped == mapped + 2
        assert pool.slack_bytes() == CHUNK  # one of the two chunks of slots[1]
        for slot in (*again, grown):
            pool.close_kv(slot)


def test_activations_best_fit_and_coalesce(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        a, b, c = (pool.open_act(n * CHUNK) for n in (2, 3, 1))
        pool.close_act(a)
        pool.close_act(c)
        assert pool.open_act(CHUNK).first == 0, "the run of 2 is the smallest that holds 1"
        pool.close_act(b)
        pool.check()
        whole = pool.open_act(4 * CHUNK)
        assert whole.first == 1, "pages 1 to 47 are one run again"
        for slot in list(pool._backing.act.live.values()):
            pool.close_act(slot)


@pytest.mark.parametrize("driver", [host_rig, fake_rig])
def test_memory_comes_and_goes_in_several_ranges(driver: type) -> None:
    with driver() as rig, pool_of(rig, Sizes(CHUNK, 4, 6, 4, 16 * CHUNK, 48 * CHUNK)) as pool:
        a, b, c = (pool.open_act(2 * CHUNK) for _ in range(3))
        pool.close_act(a)
        pool.close_act(c)
        kv = pool.open_kv(8 * CHUNK)
        assert (pool.tally.unmap_calls, pool.tally.unmapped) == (2, 4)
        pool.close_act(b)
        pool.close_kv(kv)
        calls = pool.tally.access_calls
        whole = pool.open_act(6 * CHUNK)  # pages 2 and 3 are mapped still
        assert pool.tally.access_calls == calls + 2
        for page in range(6):
            rig.write(pool.address(whole) + page * CHUNK, page + 1)
        assert [rig.read(pool.address(whole) + page * CHUNK) for page in range(6)] == [1, 2, 3, 4, 5, 6]
        pool.close_act(whole)


def test_inflation_takes_idle_activations_and_copies_nothing(rig: HostRig) -> None:
    touch = HostTouch()
    with pool_of(rig) as pool:
        stamp_all(pool, touch)
        held = pool.open_act(2 * CHUNK)
        slot = pool.open_kv(14 * CHUNK)
        assert pool.borrowed == 6
        assert pool.counts(Owner.ACT) == Counts(free=0, used=2, idle=0)
        assert moved_bytes(pool, slot, touch) == 0
        touch.write(slot.address, b"12345678")
        assert moved_bytes(pool, slot, touch) == CHUNK, "a chunk with another number was not noticed"
        with pytest.raises(PoolExhausted, match="not enough chunks"):
            pool.open_kv(CHUNK)
        pool.close_kv(slot)
        back = pool.open_act(9 * CHUNK)  # lazy deflation
        assert pool.counts(Owner.ACT).used == 11
        for live in (held, back):
            pool.close_act(live)


def test_isolated_pools_do_not_lend(rig: HostRig) -> None:
    with pool_of(rig, elastic=False) as pool:
        with pytest.raises(PoolExhausted, match="isolated pools"):
            pool.open_kv(9 * CHUNK)
        slot = pool.open_kv(8 * CHUNK)
        assert pool.counts(Owner.ACT) == Counts(8, 0, 0)
        pool.close_kv(slot)


def test_eager_deflation_gives_back_at_once(rig: HostRig) -> None:
    with pool_of(rig, lazy=False) as pool:
        slot = pool.open_kv(12 * CHUNK)
        assert pool.counts(Owner.KV).total == 12
        pool.close_kv(slot)
        assert [pool.counts(owner).total for owner in Owner] == [8, 8]
        assert pool.counts(Owner.ACT).free == 8


def test_an_iteration_gets_all_or_nothing(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        slot = pool.open_kv(4 * CHUNK)
        before = [pool.counts(owner) for owner in Owner]
        for act in (9, 60):  # more chunks, more addresses than there are
            with pytest.raises(PoolExhausted):
                pool.grant(opens=[2 * CHUNK], grows=[(slot, 6 * CHUNK)], act=act * CHUNK)
            assert [pool.counts(owner) for owner in Owner] == before
            pool.check()
        granted = pool.grant(opens=[2 * CHUNK], grows=[(slot, 6 * CHUNK)], act=8 * CHUNK)
        assert granted.act is not None
        assert [pool.counts(owner).used for owner in Owner] == [8, 8]
        pool.close_act(granted.act)
        for live in (slot, *granted.kv):
            pool.close_kv(live)


def test_mapping_ahead_makes_the_next_step_free_of_calls(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        slot = pool.open_kv(CHUNK)
        assert pool.premap([(slot, CHUNK)]) == 0, "nothing is needed for what is mapped"
        assert pool.premap([(slot, CHUNK + 1)]) == 1
        assert pool.premap([(slot, CHUNK + 1)]) == 0, "it is on its way already"
        background(pool).step()
        made = len(rig.runner.made)
        pool.grow(slot, CHUNK + 1)
        assert len(rig.runner.made) == made
        assert (pool.tally.ahead, slot.need) == (1, 2)
        pool.close_kv(slot)


def test_mapping_ahead_that_fails_is_made_up_for(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        slot = pool.open_kv(CHUNK)
        rig.fail("mmap", 1)
        pool.premap([(slot, 2 * CHUNK)])
        pool.grow(slot, 2 * CHUNK)
        assert (pool.tally.ahead, pool.tally.ahead_failed) == (0, 1)
        assert "mmap" in pool.last_failure or "map" in pool.last_failure
        pool.close_kv(slot)


def test_mapping_ahead_with_no_memory_is_left_out(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        slots = [pool.open_kv(8 * CHUNK), pool.open_kv(7 * CHUNK)]
        assert pool.premap([(slots[0], 9 * CHUNK), (slots[1], 8 * CHUNK)]) == 1
        assert pool.tally.ahead_skipped == 1
        for slot in slots:
            pool.close_kv(slot)


def test_an_alias_is_unmapped_later_and_before_its_address_is_used(rig: HostRig) -> None:
    with pool_of(rig, alias=True) as pool:
        act = pool.open_act(8 * CHUNK)
        pool.close_act(act)
        slot = pool.open_kv(16 * CHUNK)
        lent = [rig.vmm.mapped_count(pool.chunks[number]) for number in pool.chunks_of(slot)]
        assert sorted(lent) == [1] * 8 + [2] * 8, "what was lent is not at both places"
        pool.close_kv(slot)
        again = pool.open_act(8 * CHUNK)  # its old addresses are stale until now
        pool.check()
        assert pool.chunks_of(again) != [-1] * 8
        pool.close_act(again)
        pool.settle()
        counts = [rig.vmm.mapped_count(chunk) for chunk in pool.chunks]
        assert max(counts) == 1


@pytest.mark.parametrize("alias", [False, True])
def test_nothing_is_unmapped_under_work_that_may_read_it(rig: HostRig, alias: bool) -> None:
    with pool_of(rig, alias=alias) as pool:
        fence = ThreadFence()
        act = pool.open_act(8 * CHUNK)
        pool.close_act(act, fence)
        steps: list[str] = []
        wait = fence.wait

        def waited() -> None:
            steps.append("fence")
            fence.leave()
            wait()

        fence.wait = waited  # type: ignore[method-assign]
        unmap = pool._backing.mapping.vmm._unmap  # type: ignore[attr-defined]

        def unmapped(claim: object) -> object:
            steps.append("unmap")
            return unmap(claim)

        rig.vmm._unmap = unmapped  # type: ignore[method-assign]
        slot = pool.open_kv(12 * CHUNK)
        if alias:
            assert steps == [], "the caller waited for somebody else's work"
        pool.settle()
        assert steps == ["fence", "unmap"]
        pool.close_kv(slot)


def test_cuda_waits_for_the_event_before_it_unmaps() -> None:
    from kvbench.memory.cuda.device import Stream
    from kvbench.memory.vmm.cuda import CudaVmm, EventFence

    with fake_rig() as rig:
        assert isinstance(rig.vmm, CudaVmm)
        with Stream(rig.vmm.device) as stream, pool_of(rig) as pool:
            act = pool.open_act(8 * CHUNK)
            pool.close_act(act, EventFence(rig.vmm.device, stream))
            rig.fake.forget()
            slot = pool.open_kv(12 * CHUNK)
            calls = [name for name in rig.fake.names() if name in ("cuEventSynchronize", "cuMemUnmap", "cuMemMap")]
            assert calls[:2] == ["cuEventSynchronize", "cuMemUnmap"]
            assert "cuMemUnmap" not in calls[2:]
            pool.close_kv(slot)


@pytest.mark.parametrize("driver", [host_rig, fake_rig])
def test_a_refused_map_leaves_the_pool_as_it_was(driver: type) -> None:
    with driver() as rig, pool_of(rig) as pool:
        slot = pool.open_kv(2 * CHUNK)
        before = [pool.counts(owner) for owner in Owner]
        for call in rig.calls[:2]:
            rig.fail(call, 1)
            with pytest.raises(VmmError, match="number 0"):
                pool.grow(slot, 6 * CHUNK)
            rig.heal()
            pool.check()
            assert [pool.counts(owner) for owner in Owner] == before
        pool.grow(slot, 6 * CHUNK)
        pool.close_kv(slot)


def test_a_refused_unmap_names_what_is_left(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        pool.close_act(pool.open_act(8 * CHUNK))
        rig.fail("mmap", 1)
        with pytest.raises(PartlyDone):
            pool.open_kv(12 * CHUNK)
        pool.check()
        assert pool.counts(Owner.ACT) == Counts(free=0, used=0, idle=8)
        slot = pool.open_kv(12 * CHUNK)
        pool.close_kv(slot)


def test_misuse_is_refused(rig: HostRig) -> None:
    for bad in ({"chunk_bytes": 1000}, {"context_bytes": CHUNK + 1}, {"act_bytes": 0}):
        sizes = {name: getattr(SIZES, name) for name in Sizes.__slots__} | bad
        with pytest.raises(UsageError, match="off the granularity"):
            ElasticPool(rig.vmm, Sizes(**sizes))
    with host_rig() as other, pool_of(rig) as pool, pool_of(other) as stranger:
        slot, act = pool.open_kv(CHUNK), pool.open_act(CHUNK)
        with pytest.raises(UsageError, match="closed with live tensors, got '1 KV slots, 1 activation slots'"):
            pool.close()
        for nbytes in (0, 17 * CHUNK):
            with pytest.raises(UsageError, match="beyond the addresses"):
                pool.grow(slot, nbytes) if nbytes else pool.open_kv(nbytes)
        foreigners: tuple[Callable[[], object], ...] = (
            lambda: stranger.close_kv(slot), lambda: stranger.close_act(act), lambda: stranger.grow(slot, CHUNK),
            lambda: stranger.chunks_of(act), lambda: stranger.premap([(slot, CHUNK)]),
        )  # fmt: skip
        for foreign in foreigners:
            with pytest.raises(UsageError, match="a slot of another pool"):
                foreign()
        as_kv: Any = act
        as_act: Any = slot
        no_fence: Any = "x"
        mixtures: tuple[Callable[[], object], ...] = (
            lambda: pool.close_kv(as_kv), lambda: pool.close_act(as_act), lambda: pool.grow(as_kv, CHUNK),
            lambda: pool.grant(grows=[(as_kv, CHUNK)]), lambda: pool.chunks_of(no_fence),
        )  # fmt: skip
        for mixed in mixtures:
            with pytest.raises(UsageError, match="the wrong kind of slot"):
                mixed()
        unguarded: tuple[Callable[[], object], ...] = (
            lambda: pool.close_kv(slot, no_fence), lambda: pool.close_act(act, no_fence),
        )  # fmt: skip
        for close in unguarded:
            with pytest.raises(UsageError, match="not a fence"):
                close()
        pool.check()
        pool.close_kv(slot)
        pool.close_act(act)
        doubles: tuple[Callable[[], object], ...] = (lambda: pool.close_kv(slot), lambda: pool.close_act(act))
        for again in doubles:
            with pytest.raises(UsageError, match="double free"):
                again()
        late_ones: tuple[Callable[[], object], ...] = (
            lambda: pool.grow(slot, CHUNK), lambda: slot.address, lambda: pool.address(slot),
            lambda: pool.address(act), lambda: pool.chunks_of(slot), lambda: pool.chunks_of(act),
        )  # fmt: skip
        for late in late_ones:
            with pytest.raises(UsageError, match="used after it was closed"):
                late()
        with pytest.raises(PoolExhausted, match="cannot spare"):
            pool.inflate(9)
        pool.close()
        with pytest.raises(UsageError, match="the pool is closed"):
            pool.open_kv(CHUNK)


def test_a_slot_closed_before_its_addresses_serve_another_request_stays_closed(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        first = pool.open_kv(2 * CHUNK)
        at = first.address
        pool.close_kv(first)
        second = pool.open_kv(2 * CHUNK)
        assert second.address == at
        with pytest.raises(UsageError, match="double free"):
            pool.close_kv(first)
        with pytest.raises(UsageError, match="used after it was closed"):
            pool.grow(first, 3 * CHUNK)
        assert len(pool.chunks_of(second)) == 2
        pool.check()
        pool.close_kv(second)


def test_sizes_that_are_no_whole_numbers_change_nothing(rig: HostRig) -> None:
    with pool_of(rig) as pool:
        pool.close_act(pool.open_act(2 * CHUNK))
        slot = pool.open_kv(CHUNK)
        before = [pool.counts(owner) for owner in Owner]
        half: Any = 1.5 * CHUNK
        asked: tuple[Callable[[], object], ...] = (
            lambda: pool.open_act(half), lambda: pool.open_kv(half), lambda: pool.grow(slot, half),
            lambda: pool.grant(act=half), lambda: pool.grant(opens=[CHUNK], act=half), lambda: pool.inflate(half),
            lambda: pool.premap([(slot, half)]),
        )  # fmt: skip
        for ask in asked:
            with pytest.raises(UsageError, match="not a whole number"):
                ask()
        assert [pool.counts(owner) for owner in Owner] == before
        pool.check()
        pool.close_kv(slot)


@pytest.mark.parametrize("name", ["act_bytes", "context_bytes", "kv_chunks"])
def test_sizes_beyond_any_address_space_are_named_before_memory_is_touched(rig: HostRig, name: str) -> None:
    for value in (1 << 60, 1 << 70):
        sizes = {field: getattr(SIZES, field) for field in Sizes.__slots__} | {name: value}
        with pytest.raises(UsageError, match="beyond the address space"):
            ElasticPool(rig.vmm, Sizes(**sizes))
    assert rig.vmm.counters().chunks == 0


def test_every_kv_slot_in_use(rig: HostRig) -> None:
    with pool_of(rig, Sizes(CHUNK, 8, 8, 2, CHUNK, CHUNK)) as pool:
        slots = [pool.open_kv(CHUNK) for _ in range(2)]
        with pytest.raises(PoolExhausted, match="every KV slot is in use"):
            pool.open_kv(CHUNK)
        for slot in slots:
            pool.close_kv(slot)


def test_the_table_keeps_owners_apart() -> None:
    table = ChunkTable(2, 2)
    mine = table.take(Owner.KV, 2)
    with pytest.raises(PoolExhausted):
        table.take(Owner.KV, 1)
    for chunks, why in (([3], "other pool"), ([mine[0], mine[0]], "double free"), ([9], "no such chunk")):
        with pytest.raises(UsageError, match=why):
            table.put(Owner.KV, chunks)
    table.use(Owner.KV, 1)
    with pytest.raises(UsageError, match="in use cannot be taken"):
        table.put(Owner.KV, mine)
    table.rest(Owner.KV, 1)
    table.put(Owner.KV, mine)
    with pytest.raises(UsageError, match="double free"):
        table.put(Owner.KV, mine[:1])
    table.transfer(Owner.KV, 2)
    assert [table.owner_of(c) for c in range(4)] == [Owner.ACT] * 4
    with pytest.raises(PoolExhausted):
        table.transfer(Owner.KV, 1)
    table.check()
    table._used[Owner.ACT] += 1
    with pytest.raises(KvbenchError, match="do not add up"):
        table.check()


def test_an_error_inside_gives_back_what_is_live(rig: HostRig) -> None:
    def fails() -> None:
        with ElasticPool(rig.vmm, SIZES) as pool:
            stamp(pool, pool.open_kv(3 * CHUNK), HostTouch())
            pool.open_act(CHUNK)
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        fails()
    assert rig.vmm.counters().chunks == rig.vmm.counters().reservations == 0


def test_with_a_real_thread(rig: HostRig) -> None:
    touch = HostTouch()
    with ElasticPool(rig.vmm, SIZES, Policy(alias=True)) as pool:
        stamp_all(pool, touch)
        for turn in range(20):
            slot = pool.open_kv(CHUNK)
            for chunks in range(2, 15):
                pool.premap([(slot, chunks * CHUNK)])
                pool.grow(slot, chunks * CHUNK)
            assert moved_bytes(pool, slot, touch) == 0
            pool.close_kv(slot)
            pool.close_act(pool.open_act((turn % 9 + 4) * CHUNK))
            pool.check()
        assert pool.tally.ahead > 0
        assert pool.background_tid is not None
