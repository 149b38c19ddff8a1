"""The engine against schedules worked out by hand, a queue of the textbook, and policies that do wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvbench.errors import UsageError
from kvbench.replay.contention import Contention
from kvbench.replay.engine import Executed, ReplayError, replay
from kvbench.replay.ledger import ConservationError, Ledger, TierSize
from kvbench.replay.metrics import Slo
from kvbench.replay.protocol import Chunk, Live, Phase, Plan, State
from kvbench.replay.request import Request

from .rigs import Factors, OneByOne, requests

TWO = [Request(0, 1.0, 10, 3), Request(1, 2.0, 5, 1)]


def test_a_schedule_worked_out_by_hand() -> None:
    # 0: prefill 1..3, decodes 3.5 and 4; 1 waits from 2 to 4, its only token comes at 6; idle until 10
    outcome = replay([*TWO, Request(2, 10.0, 1, 1)], OneByOne(), Factors(), audit="every", keep_log=True)
    found = outcome.summary(Slo(ttft=2.5, tpot=1.0))
    assert (found.requests, found.finished, found.rejected, found.iterations) == (3, 3, 0, 5)
    assert found.span == pytest.approx(11.0)
    assert found.busy == found.near == pytest.approx(7.0)
    assert found.idle == pytest.approx(4.0)
    assert found.request_rate == pytest.approx(3 / 11)
    assert found.token_rate == pytest.approx(5 / 11)
    assert (found.ttft.p50, found.ttft.p99, found.ttft.mean) == pytest.approx((2.0, 4.0, 8 / 3))
    assert found.tpot.n == 1
    assert found.tpot.mean == pytest.approx(0.5)
    assert found.latency.p50 == pytest.approx(3.0)
    assert found.per_token.p50 == pytest.approx(2.0)
    assert found.within == 2
    assert found.goodput == pytest.approx(2 / 11)
    assert found.attainment == pytest.approx(2 / 3)
    assert (found.prompt_tokens, found.computed, found.output_tokens) == (16, 16 + 2, 5)
    assert found.mean_batch == 1.0
    assert outcome.log == (
        "a 0 1.0", "i 1.0 3.0 0 0 0 0  0:10:0", "a 1 2.0", "i 3.0 3.5 0 1 0 0  ", "i 3.5 4.0 0 1 0 0  ",
        "f 0 3.0 4.0", "i 4.0 6.0 0 0 0 0  1:5:0", "f 1 6.0 6.0", "a 2 10.0", "i 10.0 12.0 0 0 0 0  2:1:0",
        "f 2 12.0 12.0",
    )  # fmt: skip


def test_an_empty_trace_is_an_empty_outcome() -> None:
    found = replay([], OneByOne(), Factors()).summary()
    assert (found.requests, found.request_rate, found.goodput, found.hit_rate, found.ttft.p50) == (0, *[None] * 4)


def test_a_request_larger_than_memory_is_rejected_and_counted() -> None:
    found = replay([Request(0, 0.0, 999, 3), Request(1, 0.0, 10, 1)], OneByOne(), Factors(), audit="every").summary()
    assert (found.finished, found.rejected, found.attainment) == (1, 1, 0.5)


def test_steps_are_cut_at_arrivals_and_ends_and_change_nothing() -> None:
    trace = requests(60, 0.8, 3, tokens=(1, 50), out=(1, 30))
    one, many = (
        replay(trace, OneByOne(0.4, 0.03, steps=steps), Factors(), keep_log=True, audit="every") for steps in (1, 1000)
    )
    assert one.log == many.log
    assert one.digest == many.digest
    assert one.summary() == many.summary()
    runs: list[Executed] = []
    replay(trace, OneByOne(0.4, 0.03, steps=1000), Factors(), watch=runs.append)
    arrivals = [request.arrival for request in trace]
    assert any(run.steps > 1 for run in runs)
    for run in runs:  # only the last step of an event may see an arrival
        if run.steps > 1:
            before_last = run.end - 0.03 * 1.001
            assert not any(run.begin < arrival <= before_last for arrival in arrivals)


def test_a_queue_with_fixed_service_waits_as_long_as_the_textbook_says() -> None:
    service, rate = 0.1, 6.0
    trace = requests(30_000, rate, 11, tokens=(1, 1), out=(1, 1))
    found = replay(trace, OneByOne(service), Factors()).summary()
    load = service * 30_000 / (trace[-1].arrival - trace[0].arrival)  # of this very trace
    wait = load * service / (2 * (1 - load))  # Pollaczek and Khinchine, M/D/1
    assert found.ttft.mean is not None
    assert found.ttft.mean - service == pytest.approx(wait, rel=0.06)


def test_the_door_lets_in_so_many_and_waiting_outside_counts() -> None:
    trace = [Request(i, 0.0, 1, 2) for i in range(5)]
    seen: list[int] = []

    class Watching(OneByOne):
        def plan(self, state: State) -> Plan | None:
            seen.append(state.unfinished)
            assert state.next_arrival is None  # a full house, or nobody left outside
            return super().plan(state)

    found = replay(trace, Watching(1.0, 1.0), Factors(), in_flight=2).summary()
    assert max(seen) == 2
    assert found.ttft.p99 == pytest.approx(9.0)
    with pytest.raises(UsageError, match="in_flight"):
        replay(trace, OneByOne(), Factors(), in_flight=0)


@pytest.mark.parametrize(
    ("phase", "seconds", "stalls"),
    [
        (Phase(compute=1.0, hbm=2.0, link_in=1.5), 2.0, {}),
        (Phase(compute=1.0, link_in=1.5, link_out=0.2), 1.5, {"link_in": 0.5}),
        (Phase(compute=1.0, link_in=0.5, link_out=3.0, repeat=2), 6.0, {"link_out": 4.0}),
        (Phase(hbm=1.0, cpu=1.25, serial=0.25, repeat=4), 6.0, {"cpu": 1.0, "serial": 1.0}),
        (Phase(compute=1.0, until=4.5), 4.5, {"until": 3.5}),
        (Phase(compute=1.0, until=0.5), 1.0, {}),
    ],
)
def test_time_of_a_phase_and_what_it_waited_for(phase: Phase, seconds: float, stalls: dict[str, float]) -> None:
    found = replay([Request(0, 0.0, 1, 1)], OneByOne(phases=(phase,)), Factors(), audit="every").summary()
    assert found.busy == pytest.approx(seconds)
    assert {cause: value for cause, value in found.stalls.items() if value} == pytest.approx(stalls)
    assert found.near == pytest.approx(seconds - sum(stalls.values()))
    assert found.stall_share == pytest.approx(sum(stalls.values()) / seconds)


def test_contention_makes_work_longer_only_while_the_other_one_runs() -> None:
    slow = Contention(compute_link=2.0, hbm_link=1.5, cpu_link=4.0, link_duplex=1.25)
    assert slow.disturbed(Phase(compute=1.0, hbm=1.0, cpu=1.0)) == (1.0, 1.0, 0.0, 0.0, 1.0)
    # 8 s of copying cover all of the slowed work; 1 s covers half a second of the 1 s of compute
    assert slow.disturbed(Phase(compute=1.0, hbm=1.0, link_in=8.0, cpu=1.0)) == (2.0, 1.5, 8.0, 0.0, 4.0)
    assert slow.disturbed(Phase(compute=1.0, link_out=1.0)) == (1.5, 0.0, 0.0, 1.0, 0.0)
    assert slow.disturbed(Phase(link_in=4.0, link_out=2.0)) == (0.0, 0.0, 4.5, 2.5, 0.0)
    assert Contention().none
    assert not slow.none
    # two cores of one host: 2 s of near work end after 4, in which the CPU does 4 / 1.25 of its 5 s
    cores = Contention(near_cpu=2.0, cpu_near=1.25)
    assert cores.disturbed(Phase(compute=2.0, hbm=1.0, cpu=5.0)) == pytest.approx((4.0, 2.0, 0.0, 0.0, 5.8))
    assert cores.disturbed(Phase(compute=1.0, hbm=4.0, cpu=1.0)) == pytest.approx((1.15625, 4.625, 0.0, 0.0, 1.25))
    assert cores.disturbed(Phase(compute=2.0, link_in=1.0)) == (2.0, 0.0, 1.0, 0.0, 0.0)
    assert not cores.none
    with pytest.raises(UsageError, match="hbm_link"):
        Contention(hbm_link=0.9)
    policy = OneByOne(phases=(Phase(compute=1.0, link_in=4.0),))
    assert replay([Request(0, 0.0, 1, 1)], policy, Factors(slow)).summary().near == pytest.approx(2.0)


class Wrong(OneByOne):
    """Does one thing wrong: ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def plan(self, state: State) -> Plan | None:
        live = self.queue[0]
        short = (Phase(compute=1.0),)
        chunk = Chunk(live, live.remaining, live.kv)
        other: dict[str, Any] = {
            "nothing": None,
            "twice": Plan(short, prefill=(chunk, chunk)),
            "too many": Plan(short, prefill=(Chunk(live, live.remaining + 1, live.kv),)),
            "no tokens": Plan(short, prefill=(Chunk(live, 0, 10),)),
            "forgotten": Plan(short, prefill=(Chunk(live, 1, live.kv - 1),)),
            "early decode": Plan(short, decode=(live,)),
            "steps": Plan(short, prefill=(chunk,), steps=2),
            "no step": Plan(short, prefill=(chunk,), steps=0),
            "bytes": Plan(short, prefill=(chunk,), link_in_bytes=-1),
            "negative": Plan((Phase(compute=-1.0),), prefill=(chunk,)),
            "endless": Plan((Phase(compute=math.inf),), prefill=(chunk,)),
            "barren": Plan(()),
            "drop": Plan(short, prefill=(chunk,), drop=(live,)),
        }
        if self.how == "books":
            self.ledger.take("near", 77, 1)  # nobody knows of it
            return Plan(short, prefill=(chunk,))
        return other[self.how]  # type: ignore[no-any-return]

    def wake(self, state: State) -> float | None:
        return state.now if self.how == "awake" else None


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("nothing", ReplayError, "waits for nothing.*1 unfinished requests, 1 not begun, oldest 0.*near 0/1000"),
        ("twice", ReplayError, "planned twice"),
        ("too many", ReplayError, "a chunk of request 0"),
        ("no tokens", ReplayError, "a chunk of request 0"),
        ("forgotten", ReplayError, "a chunk of request 0"),
        ("early decode", ReplayError, "decode of request 0"),
        ("steps", ReplayError, "plans steps"),
        ("no step", ReplayError, "plans steps"),
        ("bytes", ReplayError, "bytes and calls"),
        ("negative", ReplayError, "a phase"),
        ("endless", ReplayError, "a phase"),
        ("barren", ReplayError, "without a token, again and again"),
        ("drop", ReplayError, "drop of request 0"),
        ("books", ConservationError, "owner 77"),
    ],
)
def test_a_policy_that_does_wrong_is_named_and_never_hangs(how: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        replay([Request(0, 0.0, 10, 3)], Wrong(how), Factors(), audit="every")


def test_kv_that_moves_without_the_link_is_found() -> None:
    class Beaming(OneByOne):
        def __init__(self) -> None:
            super().__init__()
            self.ledger = Ledger([TierSize("near", 1000, 4), TierSize("far", 1000, 4)])

        def plan(self, state: State) -> Plan | None:
            made = super().plan(state)
            self.ledger.move(self.queue[0].request.id, "near", "far", 3)
            return made

    with pytest.raises(ConservationError, match=r"without crossing the link.*at least 0 B in, 8 B out"):
        replay(TWO, Beaming(), Factors())


def test_a_policy_that_is_awake_and_does_nothing_is_named() -> None:
    class Awake(OneByOne):
        def plan(self, state: State) -> Plan | None:
            return None

        def wake(self, state: State) -> float | None:
            return state.now

    with pytest.raises(ReplayError, match="is awake and plans nothing"):
        replay(TWO, Awake(), Factors())


def test_a_policy_that_wakes_for_ever_is_named() -> None:
    class Restless(OneByOne):
        def plan(self, state: State) -> Plan | None:
            return None

        def wake(self, state: State) -> float | None:
            return state.now + 1.0

    with pytest.raises(ReplayError, match="waits again and again"):
        replay(TWO, Restless(), Factors())


def test_a_policy_that_drops_for_ever_is_named() -> None:
    class Dropping(OneByOne):
        def plan(self, state: State) -> Plan | None:
            live = self.queue[0]
            drop = (live,) if live.kv else ()
            return Plan((Phase(compute=0.1),), prefill=(Chunk(live, 1, 0),), drop=drop)

    with pytest.raises(ReplayError, match="has dropped the KV of request 0"):
        replay(TWO, Dropping(), Factors())


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        ([Request(0, 2.0, 1, 1), Request(1, 1.0, 1, 1)], "arrivals out of order"),
        ([Request(0, 1.0, 1, 1), Request(0, 1.0, 1, 1)], "two requests of one id"),
    ],
)
def test_a_trace_that_is_none(trace: list[Request], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        replay(trace, OneByOne(), Factors())


def test_hits_are_counted_apart_from_what_is_restored_after_a_drop() -> None:
    class Hits(OneByOne):
        done = 0

        def plan(self, state: State) -> Plan | None:
            live, self.done = self.queue[0], self.done + 1
            if self.done == 1:  # 6 of 10 from a cache
                return Plan((Phase(compute=1.0),), prefill=(Chunk(live, 2, 6),))
            if self.done == 2:
                return Plan((Phase(compute=1.0),), prefill=(Chunk(live, 7, 3),), drop=(live,))
            return Plan((Phase(compute=1.0),), decode=(live,))

        def finish(self, plan: Plan, state: State) -> None:
            for live in state.ended:
                self.queue.remove(live)

    lives: list[Live] = []

    def watch(ran: Executed) -> None:
        lives.extend(chunk.live for chunk in ran.plan.prefill)

    found = replay([Request(0, 0.0, 10, 2)], Hits(), Factors(), audit="every", watch=watch).summary()
    assert (found.reused, found.restored, found.dropped, found.computed) == (6, 3, 8, 2 + 7 + 1)
    assert found.hit_rate == pytest.approx(0.6)
    live = lives[0]
    assert (live.reused, live.restored, live.dropped, live.kv, live.stage) == (6, 3, 8, 11, "finished")
