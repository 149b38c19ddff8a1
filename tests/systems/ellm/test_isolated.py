"""The two pools under one stream, the stream of the allocator, and the best-fit index."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.memory.vmm.touch import HostTouch
from kvbench.systems.ellm import mixed
from kvbench.systems.ellm.best_fit import SizeIndex
from kvbench.systems.ellm.isolated import BATCHED, Memory, Outcome, Request, play, requests, split
from tests.systems.ellm.rigs import CHUNK, host_rig

SMALL = Memory(CHUNK, chunks=128, tokens_per_chunk=256)


def played(context: int, *, elastic: bool, stream: list[Request] | None = None, steps: int = 30) -> Outcome:
    with host_rig(SMALL.chunks) as rig:
        return play(
            rig.vmm, SMALL, context, stream or requests(300, seed=1), steps, elastic=elastic, touch=HostTouch()
        )  # fmt: skip


def test_what_is_set_aside_is_what_an_elastic_pool_can_use() -> None:
    elastic, isolated = (played(24576, elastic=each) for each in (True, False))
    assert elastic.largest_batch > 1.5 * isolated.largest_batch  # 77 of 128 chunks are set aside
    assert isolated.borrowed == 0 < elastic.borrowed
    assert elastic.moved_bytes == isolated.moved_bytes == 0
    assert elastic.maps_per_1000 > 0


def test_with_little_set_aside_both_are_the_same() -> None:
    elastic, isolated = (played(2048, elastic=each) for each in (True, False))
    assert abs(elastic.admitted - isolated.admitted) <= 0.1 * isolated.admitted


def test_a_short_stream_is_served_to_its_end() -> None:
    stream = [Request(300, 5), Request(10, 3), Request(700, 1)]
    outcome = played(2048, elastic=True, stream=stream, steps=8)
    assert (outcome.admitted, outcome.finished, outcome.largest_batch, outcome.preempted) == (3, 3, 3, 0)
    assert outcome.prefills == 1


def test_one_prefill_takes_no_more_than_its_tokens() -> None:
    stream = [Request(BATCHED // 2, 2)] * 5
    assert played(2048, elastic=True, stream=stream, steps=1).prefills == 3


def test_a_split_that_leaves_no_kv_cache_is_refused() -> None:
    with pytest.raises(UsageError, match="take all memory"):
        split(SMALL, 128 * 256 * 2)


def test_requests_fit_every_context() -> None:
    stream = requests(2000, seed=3)
    assert stream == requests(2000, seed=3) != requests(2000, seed=4)
    assert max(request.prompt + request.output for request in stream) <= 2048
    assert min(min(request.prompt, request.output) for request in stream) >= 4


@pytest.mark.parametrize("seed", range(3))
def test_the_mixed_stream_closes_what_it_opens(seed: int) -> None:
    events = mixed.stream(50, 3, seed)
    held: dict[int, int] = {}
    act: set[int] = set()
    most, chunk = 0, 4096
    for event in events:
        if event.kind == "open":
            assert event.key not in held
            held[event.key] = event.tokens
        elif event.kind == "grow":
            assert event.tokens > held[event.key]
            assert event.tokens % mixed.TOKENS_PER_CHUNK == 1, "no new chunk is needed"
            held[event.key] = event.tokens
        elif event.kind == "close":
            del held[event.key]
        elif event.kind == "act":
            act.add(event.key)
        elif event.kind == "free":
            act.remove(event.key)
        most = max(most, sum(-(-tokens // mixed.TOKENS_PER_CHUNK) for tokens in held.values()))
    assert not held
    assert not act
    assert mixed.peak_chunks(events, chunk)[0] == most
    assert sum(event.kind == "step" for event in events) == 50


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40))
def test_the_index_finds_the_smallest_that_is_large_enough(steps: list[tuple[bool, int]]) -> None:
    index: SizeIndex[int] = SizeIndex()
    items: dict[int, int] = {}
    for number, (adding, size) in enumerate(steps):
        if adding or size not in items.values():
            index.add(size, number)
            items[number] = size
        else:
            found = index.best(size)
            assert found is not None
            index.remove(*found)
            assert items.pop(found[1]) == found[0] == size
        for wanted in (1, 5, 12, 13):
            fitting = [held for held in items.values() if held >= wanted]
            best = index.best(wanted)
            assert (best is None) == (not fitting)
            assert best is None or (best[0] == min(fitting) == items[best[1]])
        assert len(index) == len(items)
        largest = index.largest()
        assert (largest[0] if largest else None) == max(items.values(), default=None)
