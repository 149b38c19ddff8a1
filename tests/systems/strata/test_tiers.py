"""The two-tier cache: units, write policies by hand, room, and any visits against conservation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import KvbenchError, UsageError
from kvbench.systems.strata.tiers import Found, TieredCache, unit_key, unit_of
from kvbench.systems.strata.writes import POLICIES, Writes


def test_units_and_keys() -> None:
    assert [unit_of(1, 1), unit_of(64, 16), unit_of(16, 512)] == [1, 64, 512]
    with pytest.raises(UsageError, match="multiple"):
        unit_of(24, 16)
    ids = tuple(range(10, 20))
    assert unit_key(ids, 16, 160, 16) == ids[:9], "the last token is computed whatever is cached"
    assert unit_key(ids, 16, 161, 16) == ids
    assert unit_key(ids, 16, 160, 32) == (11, 13, 15, 17)
    assert unit_key(None, 16, 160, 16) == ()
    assert unit_key((5,), 512, 1, 512) == ()


def test_when_each_policy_writes() -> None:
    back, through, some = Writes("write_back"), Writes("write_through"), Writes("write_through_selective", 2)
    assert [w.after_use(1, False) for w in (back, through, some)] == [False, True, False]
    assert [w.after_use(2, False) for w in (back, through, some)] == [False, True, True]
    assert [w.after_use(9, True) for w in (back, through, some)] == [False, False, False]
    assert [w.at_eviction(False) for w in (back, through, some)] == [True, False, False]
    assert not back.at_eviction(True)
    with pytest.raises(UsageError, match="write policy"):
        Writes("sometimes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="threshold"):
        Writes(threshold=0)


A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def cache(policy: str, threshold: int = 2, near: int = 80, far: int = 1000) -> TieredCache:
    return TieredCache(near, far, 10, Writes(policy, threshold), load_back=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "written", "flushed", "lost", "load"),
    [("write_back", 0, 40, 0, 40), ("write_through", 120, 0, 0, 40), ("write_through_selective", 0, 0, 40, 0)],
)
def test_one_shot_documents(policy: str, written: int, flushed: int, lost: int, load: int) -> None:
    held = cache(policy)
    assert [held.visit(key)[0].hit for key in (A, B, C)] == [0, 0, 0]
    moved = held.moved
    assert (moved.written, moved.flushed, moved.evicted, moved.lost) == (written, flushed, 40, lost)
    second = held.visit(A)[0]
    assert (second.near, second.load, sum(tokens for _, tokens in second.loads)) == (0, load, load)
    held.tree.check()


def test_what_is_used_twice_is_written_selectively() -> None:
    held = cache("write_through_selective")
    assert [held.visit(key)[0].hit for key in (A, A, B, C)] == [0, 40, 0, 0]
    assert (held.moved.written, held.moved.lost) == (40, 0)
    assert held.visit(A)[0][:2] == (0, 40)
    assert held.moved.loaded == 40


def test_short_far_hits_are_computed_again() -> None:
    held = cache("write_back")
    held.load_back = 50
    for key in (A, B, C):
        held.visit(key)
    assert held.visit(A)[0].hit == 0
    assert (held.moved.loaded, held.moved.again) == (0, 40)
    assert held.tree.near_pages == 8
    held.tree.check()


def test_a_full_far_tier_drops_its_oldest() -> None:
    held = cache("write_back", far=40)
    for key in (A, B, C, A, B, C):
        held.visit(key)
    held.tree.check()
    assert held.moved.dropped > 0
    assert held.tree.far_pages <= 4
    none = cache("write_back", far=0)
    for key in (A, B, C):
        none.visit(key)
    assert (none.moved.unwritten, none.moved.lost) == (40, 40)


def test_room() -> None:
    held = cache("write_back")
    assert held.visit(tuple(range(20, 29))) == (Found(), None), "it does not fit at all and runs without the cache"
    assert held.tree.nodes == 0
    leaf = held.tree.enqueue(A)
    held.tree.dispatch(leaf)
    held.start(leaf, 80)
    assert held.free == 0
    with pytest.raises(KvbenchError, match="no room in the near tier"):
        held.make_room(1)
    with pytest.raises(KvbenchError, match="more given back"):
        held.give(81)
    with pytest.raises(UsageError, match="a cache"):
        TieredCache(1, 1, 0)


def test_output_is_found_once_a_prompt_names_it() -> None:
    held = cache("write_through", near=200)
    _, tail = held.visit((1, 2), own=35, output=35)
    assert tail is not None
    assert (held.tree.near_pages, held.private) == (5, 0)
    assert held.tree.match((1, 2, 3, 4, 5, 6)).cached == 2
    assert held.tree.name(tail, (9, 2, 3, 4, 5)) == 0, "another prefix"
    assert held.tree.name(tail, (1, 2, 3, 4, 5, 6)) == 3
    assert held.tree.name(tail, (1, 2, 3, 4, 5, 6)) == 0, "it has its name"
    assert held.visit((1, 2, 3, 4, 5, 6))[0].near == 50
    held.tree.check()
    _, tail = held.visit((7,), own=30, output=30)
    assert tail is not None
    assert held.tree.name(tail, (7, 8)) == 1, "a shorter prompt repeats part of it"
    assert held.tree.match((7, 8)).near == 2
    held.tree.check()
    assert held.visit((7,), own=9, output=9)[1] is None, "no whole page"
    while (node := held.tree.oldest_near()) is not None:
        held.tree.demote(node)
    assert held.tree.name(tail, (7, 8, 9)) == 1, "the rest, from the far tier too"
    assert held.tree.match((7, 8, 9)).far == 3
    held.tree.check()
    while (node := held.tree.oldest_far()) is not None:
        held.tree.forget_far(node)
    assert held.tree.name(tail, (7, 8, 9)) == 0, "it is gone"


KEYS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=30)


@given(KEYS, st.sampled_from(POLICIES), st.integers(0, 12), st.integers(0, 12), st.integers(0, 15))
def test_capacities_hold_and_amounts_add_up(
    keys: list[tuple[int, ...]], policy: str, near: int, far: int, load_back: int
) -> None:
    held = TieredCache(near * 10, far * 10, 10, Writes(policy), load_back=load_back)  # type: ignore[arg-type]
    for key in keys:
        before = held.tree.match(key)
        found, _ = held.visit(key, own=7)
        held.tree.check()
        assert 0 <= held.free <= held.near
        assert 0 <= held.far_free <= held.far
        assert held.private == 0
        if found.hit:
            assert found.near == before.near * 10
            assert found.load in (0, before.far * 10)
    moved = held.moved
    assert moved.lost <= moved.evicted
    assert moved.written + moved.flushed - moved.dropped >= held.tree.far_pages * 10, "far KV came from nowhere"
