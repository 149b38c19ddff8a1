"""Batches: the queue of the paper's Fig. 7 batch for batch, shared loads, nobody lost, nobody starved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.strata.batching import Batch, Candidate, Limits, balanced, fifo, loading_bound
from tests.systems.strata.fig7 import FIFO, STRATA, Toggles, run

WIDE = Limits(tokens=1 << 30, memory=1 << 40, requests=1 << 20)


def test_the_queue_of_fig_7_in_order() -> None:
    assert run(Toggles(False, False, False)) == FIFO


def test_the_queue_of_fig_7_as_strata_serves_it() -> None:
    assert run(Toggles(True, True, True)) == STRATA


def test_each_part_alone_changes_fig_7_its_own_way() -> None:
    deferred = run(Toggles(True, False, False))
    assert deferred[:2] == [("A0", "B0"), ("A1", "B1")]
    assert deferred[2:] == FIFO[2:]
    assert run(Toggles(False, True, False)) == [
        ("A0", "A1"), ("B0", "B1"), ("C", "F"), ("D0", "D1"), ("G",), ("decode",),
    ]  # fmt: skip
    assert run(Toggles(False, False, True)) == [
        ("A0", "A1"), ("B0", "B1"), ("C", "D0"), ("decode",), ("D1", "F"), ("G",),
    ]  # fmt: skip


def heavy(context: int, tokens: int = 1000, new: int = 1) -> Candidate:
    return Candidate(new, new, ((context, tokens),))


def test_a_shared_load_counts_once_and_brings_its_sharers() -> None:
    queue = [heavy(1), heavy(2), heavy(1), Candidate(7, 7), heavy(1)]
    found = balanced(queue, WIDE, 100.0)
    assert found.chosen == (0, 2, 4, 3, 1), "the second load comes when nothing better is left"
    assert found.bundled == 2
    assert found.load == 2000, "contexts 1 and 2, once each"


def test_what_a_bundle_brings_brings_more() -> None:
    chain = [heavy(1), Candidate(1, 1, ((1, 1000), (2, 500))), heavy(3), Candidate(1, 1, ((2, 500), (4, 9)))]
    found = balanced(chain, Limits(10, 1 << 40, 3), 100.0)
    assert found == Batch((0, 1, 3), 3, 1509, 1, 2)


def test_the_batch_stays_below_the_ratio_where_it_can() -> None:
    queue = [Candidate(100), heavy(1, 9000), heavy(2, 9000), Candidate(50)]
    found = balanced(queue, Limits(1000, 1 << 40, 3), 100.0)
    assert found.chosen == (0, 1, 3)
    assert not found.loading_bound(100.0)
    assert fifo(queue, Limits(1000, 1 << 40, 3)).loading_bound(100.0)
    assert (loading_bound(100, 1, 100.0), loading_bound(101, 1, 100.0)) == (False, True)


def test_when_nothing_better_is_left_it_is_filled_in_order() -> None:
    queue = [heavy(1, 5000), heavy(2, 5000), heavy(3, 5000)]
    assert balanced(queue, Limits(1000, 1 << 40, 2), 100.0) == Batch((0, 1), 2, 10000, 1, 0)


def test_what_is_computed_beside_it_hides_loads_too() -> None:
    queue = [Candidate(1), heavy(1, 5000), Candidate(1)]
    two = Limits(1000, 1 << 40, 2)
    assert balanced(queue, two, 100.0).chosen == (0, 2)
    assert balanced(queue, two, 100.0, computing=100).chosen == (0, 1)


@pytest.mark.parametrize("make", [fifo, balanced])
def test_limits(make: object) -> None:
    form = balanced if make is balanced else fifo
    long = [Candidate(600, 600), Candidate(600, 600), Candidate(600, 600)]
    assert form(long, Limits(1000, 1 << 40, 9)) == Batch((0,), 600)
    assert form(long, Limits(1000, 1 << 40, 9, cut=True)) == Batch((0, 1), 1000)
    assert form(long, Limits(100, 1 << 40, 9)) == Batch((0,), 600), "the head is served whatever it computes"
    assert form(long, Limits(100, 1 << 40, 9, cut=True)) == Batch((0,), 100)
    assert form(long, Limits(10_000, 1300, 9)).chosen == (0, 1)
    assert form(long, Limits(10_000, 599, 9)) == Batch(), "never beyond the memory"
    assert form(long, Limits(10_000, 1 << 40, 2)).chosen == (0, 1)
    assert form([], WIDE) == Batch()
    pinned = [Candidate(1, 100, (), ((7, 500),)), Candidate(1, 100, (), ((7, 500),))]
    assert form(pinned, Limits(10, 700, 9)).chosen == (0, 1), "what both pin is there once"
    assert form(pinned, Limits(10, 699, 9)).chosen == (0,)


def test_what_makes_no_batch() -> None:
    with pytest.raises(UsageError, match="limits"):
        Limits(0, 1, 1)
    with pytest.raises(UsageError, match="ratio"):
        balanced([Candidate(1)], WIDE, 0.0)


CANDIDATE = st.builds(
    Candidate, new=st.integers(1, 300), own=st.integers(0, 300),
    loads=st.lists(st.tuples(st.integers(0, 5), st.just(2000)), max_size=2, unique=True).map(tuple),
    pins=st.lists(st.tuples(st.integers(6, 9), st.just(50)), max_size=2, unique=True).map(tuple),
)  # fmt: skip
LIMITS = st.builds(
    Limits, tokens=st.integers(1, 900), memory=st.integers(4400, 9000), requests=st.integers(1, 6), cut=st.booleans()
)


@given(st.lists(CANDIDATE, min_size=1, max_size=12), LIMITS, st.sampled_from([1.0, 10.0, 100.0]))
def test_every_request_is_scheduled_once_and_the_head_waits_for_no_batch(
    queue: list[Candidate], limits: Limits, ratio: float
) -> None:
    waiting = list(range(len(queue)))
    served: list[int] = []
    while waiting:
        found = balanced([queue[at] for at in waiting], limits, ratio)
        chosen = [waiting[at] for at in found.chosen]
        assert chosen[0] == waiting[0], "the head of the queue is in every batch"
        assert len(set(chosen)) == len(chosen) <= limits.requests
        contexts = dict(pair for at in chosen for pair in queue[at].loads)
        pins = dict(pair for at in chosen for pair in queue[at].pins)
        assert found.load == sum(contexts.values())
        assert sum(queue[at].own for at in chosen) + found.load + sum(pins.values()) <= limits.memory
        if limits.cut:
            assert found.new == min(limits.tokens, sum(queue[at].new for at in chosen))
        else:
            assert found.new == sum(queue[at].new for at in chosen)
            assert found.new <= limits.tokens or len(chosen) == 1
        served += chosen
        waiting = [at for at in waiting if at not in chosen]
    assert sorted(served) == list(range(len(queue)))
