"""Deferral: who waits for whom, in which order, and that everybody is served; delay hits counted by hand."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.strata.deferral import Deferral, restore, scan
from kvbench.systems.strata.delay_hits import DelayHits, delay_hits
from kvbench.systems.strata.radix_node import Key
from kvbench.systems.strata.tiers import TieredCache
from tests.systems.strata.fig7 import Entry


def entries(cache: TieredCache, *keys: Key) -> deque[Entry]:
    return deque(Entry(str(at), key, cache) for at, key in enumerate(keys))


def names(found: list[Entry]) -> str:
    return "".join(entry.name for entry in found)


def test_more_than_the_threshold_waits_at_the_front() -> None:
    cache = TieredCache(10_000, 0, 1)
    document = tuple(range(101))
    queue = entries(cache, document, (*document[:100], 7), (*document, 8), (900,), (*document, 9))
    ready, deferred = scan(queue, Deferral(), window=10)
    assert (names(ready), names(deferred)) == ("013", "24"), "100 tokens are not more than 100"
    restore(queue, deferred, ready[1:])
    assert names(list(queue)) == "2413"
    cache.tree.dispatch(ready[0].node)
    again = scan(queue, Deferral(), window=10)
    assert (names(again[0]), names(again[1])) == ("13", "24"), "in flight is as transient as in queue"
    restore(queue, again[1], again[0])
    cache.start(ready[0].node, 101)
    cache.computed(ready[0].node)
    assert names(scan(queue, Deferral(), window=10)[0]) == "2413"


def test_without_deferral_all_are_schedulable() -> None:
    cache = TieredCache(10_000, 0, 1)
    queue = entries(cache, *[tuple(range(500))] * 3)
    ready, deferred = scan(queue, Deferral(enabled=False), window=10)
    assert (names(ready), deferred) == ("012", [])


def test_the_window_never_hides_the_one_that_all_wait_for() -> None:
    cache = TieredCache(10_000, 0, 1)
    queue = entries(cache, *[tuple(range(500))] * 9)
    ready, deferred = scan(queue, Deferral(), window=9)
    restore(queue, deferred, ready)
    assert names(list(queue)) == "123456780"
    assert names(scan(queue, Deferral(), window=4)[0]) == "0"


def test_enough_ends_the_scan() -> None:
    cache = TieredCache(10_000, 0, 1)
    queue = entries(cache, (1,), (2,), (3,))
    ready, _ = scan(queue, Deferral(), 10, enough=lambda found: len(found) == 2)
    assert (names(ready), names(list(queue))) == ("01", "2")


def test_a_threshold_below_zero() -> None:
    with pytest.raises(UsageError, match="threshold"):
        Deferral(-1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), min_size=1, max_size=12),
    st.integers(1, 12), st.integers(1, 3), st.integers(0, 200),
)  # fmt: skip
def test_everybody_is_served_once(kinds: list[tuple[int, int]], window: int, batch: int, threshold: int) -> None:
    cache = TieredCache(100_000, 0, 1)
    queue = entries(cache, *[tuple(range(1000 * kind, 1000 * kind + length)) for kind, length in kinds])
    served = ""
    while queue:
        ready, deferred = scan(queue, Deferral(threshold), window)
        assert ready, "somebody is always schedulable when nothing is in flight"
        chosen = ready[:batch]
        for entry in chosen:
            cache.tree.dispatch(entry.node)
            served += entry.name + " "
        for entry in chosen:
            need = len(entry.key) - cache.find(entry.node).hit
            cache.start(entry.node, need)
            cache.give(need - cache.computed(entry.node))
            cache.tree.release(entry.node)
        restore(queue, deferred, ready[batch:])
        cache.tree.check()
    assert sorted(map(int, served.split())) == list(range(len(kinds)))
    assert cache.tree.transient_pages == 0


def test_delay_hits_by_hand() -> None:
    trace = [(0.0, (1, 2)), (0.5, (1, 2, 3)), (1.0, (1, 2, 3)), (1.2, (1, 9)), (1.6, (1, 2, 3))]
    # at 0.5 pages 1 and 2 are on their way; at 1.0 they are there, 3 is not; at 1.6 all are
    assert delay_hits(trace, 1.0) == DelayHits(total=5, requests=2, asked=13, first=4, delayed=3)
    assert delay_hits(trace, 0.0).delayed == 0
    assert delay_hits(trace, 1e9).share_of_repeats == 1.0
    assert delay_hits(trace, 1e9).hit_rate == 0.0
    assert delay_hits(trace, 0.1, speed=10.0) == delay_hits(trace, 1.0)
    assert delay_hits([(0.0, (1,))], 1.0).share_of_repeats is None
    assert delay_hits([], 1.0).hit_rate is None


def naive(trace: list[tuple[float, tuple[int, ...]]], resolve: float) -> int:
    first: dict[int, float] = {}
    delayed = 0
    for at, pages in trace:
        delayed += sum(page in first and at < first[page] + resolve for page in pages)
        for page in pages:
            first.setdefault(page, at)
    return delayed


TRACE = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 5)), max_size=20)


@given(TRACE)
def test_delay_hits_rise_with_resolve_time_and_rate_and_saturate(gaps: list[tuple[int, int, int]]) -> None:
    now, trace = 0.0, []
    for gap, kind, length in gaps:
        now += gap
        trace.append((now, tuple(range(10 * kind, 10 * kind + length))))
    counts = [delay_hits(trace, resolve).delayed for resolve in (0.0, 0.5, 1.0, 4.0, 20.0, 1e6)]
    assert counts == [naive(trace, resolve) for resolve in (0.0, 0.5, 1.0, 4.0, 20.0, 1e6)]
    assert counts == sorted(counts)
    rates = [delay_hits(trace, 4.0, speed=speed).delayed for speed in (0.5, 1.0, 2.0, 8.0)]
    assert rates == sorted(rates)
    assert counts[-1] == delay_hits(trace, 1.0).repeats


def test_what_makes_no_delay_hits() -> None:
    with pytest.raises(UsageError, match="delay hits"):
        delay_hits([], -1.0)
    with pytest.raises(UsageError, match="speed above 0"):
        delay_hits([], 1.0, speed=0.0)
    with pytest.raises(UsageError, match="out of order"):
        delay_hits([(2.0, (1,)), (1.0, (1,))], 1.0)
