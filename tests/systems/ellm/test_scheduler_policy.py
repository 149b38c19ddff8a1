"""The scheduler over static and elastic pools: played without a clock, by hand and for drawn loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.ellm.parking import BufferRules, Parking
from kvbench.systems.ellm.pools import Pools
from kvbench.systems.ellm.scheduler import Part, Rules, Scheduler, Step


def act(tokens: int, rows: int) -> int:
    """Activations: a chunk for ten tokens, or for five logits."""
    return max(-(-tokens // 10), -(-rows // 5))


@dataclass
class Played:
    """What a load did: the order of prefills, of ends, and the steps as text."""

    prefills: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    largest: int = 0


class Player:
    """An engine without time: requests of (prompt, output) get their tokens step by step."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[tuple[int, int]], *, single: bool = False) -> None:
        self.scheduler, self.single = scheduler, single
        self.left: dict[int, int] = {}
        self.played = Played()
        for key, (prompt, output) in enumerate(requests):
            if scheduler.refuses(prompt + output - 1) is None:
                self.left[key] = output
                scheduler.arrive(key, prompt)

    def run(self) -> Played:
        while self.left:
            step = self.scheduler.plan()
            assert step is not None, "requests are left and nothing is planned"
            self.take(step)
        assert self.scheduler.plan() is None
        assert self.scheduler.pools.kv_used == 0
        return self.played

    def take(self, step: Step) -> None:
        scheduler, played = self.scheduler, self.played
        times = 1 if self.single or not step.decode else min([step.most, *(self.left[key] for key in step.decode)])
        played.lines.append(f"dropped {step.dropped}" if step.dropped else "")
        for part in step.parts:
            if part.last:
                self.left[part.key] -= 1
                played.prefills.append(part.key)
        for key in step.decode:
            self.left[key] -= times
        for index in range(times):
            played.lines.append(f"{step.parts} {step.decode} {step.fetch} {scheduler.growth_at(index)} {step.act}")
        played.largest = max(played.largest, len(step.decode))
        ended = [key for key, left in self.left.items() if not left]
        for key in ended:
            del self.left[key]
        played.ends += ended
        scheduler.finish(step, times, ended)
        self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.pools.check()
        held = sum(map(scheduler.chunks_of, [*scheduler.running, *scheduler.prefilling]))
        assert (scheduler.pools.kv_used, scheduler.pools.act_used) == (held, 0)
        if scheduler.parking is not None:
            scheduler.parking.check()


def make(
    *, chunks: int = 30, reserved: int = 12, lend: bool = True, buffer: int = 0, chunk: int = 0, batched: int = 100,
    sequences: int = 8, watermark: float = 0.0, tokens: int = 4, victims: str = "newest",
) -> Scheduler:  # fmt: skip
    rules = Rules(
        context=100, tokens_per_chunk=tokens, layers=4, chunk=chunk, batched=batched, sequences=sequences,
        watermark=watermark,
    )  # fmt: skip
    parking = Parking(BufferRules(buffer, victims=victims)) if buffer else None  # type: ignore[arg-type]
    return Scheduler(rules, Pools(chunks - reserved, reserved, lend=lend), act, parking)


def test_prompts_first_as_many_as_fit_then_decodes() -> None:
    scheduler = make(lend=False)
    for key, prompt in enumerate((20, 20, 40)):
        scheduler.arrive(key, prompt)
    first = scheduler.plan()
    assert first is not None
    assert first.parts == (Part(0, 20, 0, False, True), Part(1, 20, 0, False, True))  # 18 chunks: the third needs 10
    scheduler.finish(first, 1, [])
    assert scheduler.stalled == 0
    second = scheduler.plan()
    assert second is not None
    assert (second.parts, second.decode, scheduler.stalled) == ((), (0, 1), 1)
    assert second.most == 16  # 8 chunks are free, two are taken every four steps
    scheduler.finish(second, 16, [0])
    third = scheduler.plan()
    assert third is not None
    assert third.decode == (1,)  # 9 chunks were given back, 10 are asked for
    assert scheduler.chunks_of(1) == 9


def test_one_pool_admits_what_two_static_ones_cannot() -> None:
    for lend, wanted in ((False, 3), (True, 5)):  # 18 chunks, or 30 beside the two of one prompt's activations
        scheduler = make(lend=lend, batched=20)
        for key in range(8):
            scheduler.arrive(key, 20)
        admitted = 0
        while (step := scheduler.plan()) is not None and step.parts:
            scheduler.finish(step, 1, [])
            admitted += 1
        assert admitted == wanted


def test_a_prompt_without_room_goes_to_the_buffer_and_returns_before_others_are_let_in() -> None:
    scheduler = make(chunks=20, reserved=6, lend=False, buffer=60)
    for key, prompt in enumerate((40, 30, 20, 20)):
        scheduler.arrive(key, prompt)
    step = scheduler.plan()
    assert step is not None
    assert [(part.key, part.leaves) for part in step.parts] == [(0, False)]  # activations of 60 tokens at most
    scheduler.finish(step, 1, [])
    for key in (1, 2):  # while it leaves, a prompt of 30 tokens takes the four chunks that are free
        step = scheduler.plan()
        assert step is not None
        assert [(part.key, part.leaves) for part in step.parts] == [(key, True)]
        assert scheduler.pools.kv_used == 10 + (4, 3)[key - 1]
        scheduler.finish(step, 1, [])
    assert scheduler.parking is not None
    assert (scheduler.parking.stored, scheduler.chunks_of(1), scheduler.pools.kv_used) == (50, 0, 10)
    step = scheduler.plan()  # the last one fits neither: room on the GPU is for those that are parked
    assert step is not None
    assert (step.parts, step.decode, step.fetch) == ((), (0,), ())
    scheduler.finish(step, 1, [0])
    step = scheduler.plan()
    assert step is not None
    assert (step.decode, step.fetch) == ((1, 2), ((1, 30), (2, 20)))  # 8 and 6 of 14 chunks
    scheduler.finish(step, 1, [])
    assert (scheduler.chunks_of(1), scheduler.chunks_of(2), len(scheduler.parking)) == (8, 6, 0)


def test_the_one_admitted_last_loses_its_memory_and_comes_first_again() -> None:
    scheduler = make(chunks=14, reserved=3, lend=False)
    for key in (0, 1):
        scheduler.arrive(key, 20)
    for _ in range(2):  # activations of 30 tokens: one after the other
        step = scheduler.plan()
        assert step is not None
        scheduler.finish(step, 1, [])
    step = scheduler.plan()
    assert step is not None
    assert (step.decode, step.dropped, scheduler.preempted) == ((0,), (1,), 1)
    assert [(sequence.key, sequence.tokens) for sequence in scheduler.waiting] == [(1, 21)]
    scheduler.finish(step, 1, [])
    assert scheduler.plan() is not None


def test_chunked_prefill_fills_what_decodes_leave() -> None:
    scheduler = make(chunk=16, lend=False, chunks=60)
    for key, prompt in enumerate((20, 8)):
        scheduler.arrive(key, prompt)
    step = scheduler.plan()
    assert step is not None
    assert step.parts == (Part(0, 16, 0, False, False),)
    scheduler.finish(step, 1, [])
    step = scheduler.plan()
    assert step is not None
    assert step.parts == (Part(0, 4, 16, False, True), Part(1, 8, 0, False, True))
    scheduler.finish(step, 1, [])
    scheduler.arrive(2, 30)
    step = scheduler.plan()
    assert step is not None
    assert (step.parts, step.decode) == ((Part(2, 14, 0, False, False),), (0, 1))


LOADS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    LOADS, st.booleans(), st.sampled_from([0, 0, 40, 200]), st.sampled_from([0, 12]), st.integers(14, 40),
    st.sampled_from([1, 3, 4]), st.sampled_from([0.0, 0.05]), st.sampled_from(["newest", "longest"]),
)  # fmt: skip
def test_every_request_ends_and_steps_in_a_row_are_single_steps(
    load: list[tuple[int, int]],
    lend: bool,
    buffer: int,
    chunk: int,
    chunks: int,
    tokens: int,
    mark: float,
    victims: str,
) -> None:
    def play(single: bool) -> tuple[Played, Scheduler]:
        scheduler = make(
            chunks=chunks, lend=lend, buffer=0 if chunk else buffer, chunk=chunk, tokens=tokens, watermark=mark,
            victims=victims,
        )  # fmt: skip
        player = Player(scheduler, load, single=single)
        return player.run(), scheduler

    (one, by_one), (many, in_a_row) = play(True), play(False)
    assert [line for line in one.lines if line] == [line for line in many.lines if line]
    assert (one.ends, one.prefills) == (many.ends, many.prefills)
    for name in ("mapped", "unmapped", "borrowed"):
        assert getattr(by_one.pools, name) == getattr(in_a_row.pools, name)
    assert (by_one.stalled, by_one.preempted) == (in_a_row.stalled, in_a_row.preempted)


def test_what_can_never_run_is_refused() -> None:
    assert "longest context" in str(make(chunks=500).refuses(100))
    assert make(chunks=500).refuses(99) is None
    assert "18" in str(make(lend=False).refuses(73))
    assert make(lend=False).refuses(72) is None
    assert make(lend=True).refuses(80) is None  # 20 chunks beside 8
    assert "chunks of KV cache" in str(make(lend=True, chunks=27, reserved=1).refuses(80))
    with pytest.raises(UsageError, match="prefilled whole"):
        make(chunk=8, buffer=10)
    for wrong in ({"context": 0}, {"sequences": 0}, {"chunk": -1}, {"watermark": 1.0}):
        with pytest.raises(UsageError, match="eLLM scheduler"):
            Rules(**{"context": 1, "tokens_per_chunk": 1, "layers": 1, **wrong})  # type: ignore[arg-type]
