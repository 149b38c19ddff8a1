"""Strata's policy in the engine: conservation with every toggle, the effect of each part, digests, what it refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs, costs
from kvbench.replay.engine import Executed, Outcome, replay
from kvbench.replay.generate.presets import preset
from kvbench.replay.machine import preset as machine
from kvbench.replay.policies.strata import Params, StrataPolicy, make
from kvbench.replay.request import Request, blocks_of
from kvbench.systems.strata.bubble import overlapped
from kvbench.systems.strata.writes import POLICIES

H200: Costs = costs(machine("h200"), "llama-3-8b")


def run(trace: list[Request], **params: Any) -> Outcome:
    return replay(iter(trace), make(H200, Params(**params)), H200, audit="every", keep_log=True)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(1, 5), st.integers(1, 70), st.integers(1, 6), st.sampled_from([0.0, 0.001, 0.3])
    ),
    min_size=1, max_size=14,
)  # fmt: skip


def built(kinds: list[tuple[int, int, int, int, float]], block: int = 16) -> list[Request]:
    """Documents of a few blocks, a question behind, every second one a further turn of the request before it."""
    made: list[Request] = []
    fresh, now = 10_000, 0.0
    for at, (document, blocks, question, output, gap) in enumerate(kinds):
        now += gap
        ids = [1000 * document + n for n in range(blocks)]
        tokens = blocks * block + question
        parent = None
        if at % 2:
            before = made[-1]
            assert before.hash_ids is not None
            parent, tokens = before.id, before.input_tokens + before.output_tokens + question
            ids = list(before.hash_ids[: before.input_tokens // block])
        more = blocks_of(tokens, block) - len(ids)
        ids += range(fresh, fresh + more)
        fresh += more
        made.append(Request(at, now, tokens, output, at // 2, parent, block, tuple(ids)))
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    REQUESTS, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(POLICIES),
    st.sampled_from([1, 16, 48]), st.sampled_from([40, 500, 2000]), st.sampled_from([0, 300, 3000]),
    st.sampled_from([32, 1000]), st.integers(1, 4),
)  # fmt: skip
def test_everything_adds_up_after_every_iteration(
    kinds: list[tuple[int, int, int, int, float]], defer: bool, balance: bool, bubble: bool, ahead: bool,
    chunked: bool, write: str, page: int, near: int, far: int, budget: int, window: int,
) -> None:  # fmt: skip
    trace = built(kinds)
    found = run(
        trace, defer=defer, defer_tokens=10, balance=balance, bubble=bubble, ahead=ahead, chunked=chunked, write=write,
        page_tokens=page, near_tokens=near, far_tokens=far, batch_tokens=budget, window=window, ratio=1.0, requests=5,
    )  # fmt: skip
    summary = found.summary()
    too_large = sum(-(-(r.total_tokens - 1) // page) * page > near for r in trace)
    assert (summary.finished, summary.rejected) == (len(trace) - too_large, too_large)
    if defer:
        assert found.counters["duplicate_tokens"] <= 64 * len(trace), "only what deferral lets through"


def test_the_same_trace_gives_the_same_log_with_and_without_steps() -> None:
    trace = list(preset("reviewmt").requests(40, 5.0, 3))
    digests = set()
    for single in (False, True):
        policy = make(H200, Params(near_tokens=60_000))
        digests.add(replay(iter(trace), policy, H200, single_steps=single).digest)
    assert len(digests) == 1


def test_hash_seeds_change_nothing() -> None:
    code = (
        "from tests.replay.test_policy_strata import *\n"
        "print(run(list(preset('loogle').requests(30, 5.0, 1)), near_tokens=60000).digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True,
        ).stdout
        for seed in ("0", "4321")
    }  # fmt: skip
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def document(number: int, at: float, name: int, question: int = 30, output: int = 1) -> Request:
    ids = (*range(1000 * name, 1000 * name + 40), 900_000 + number)
    return Request(number, at, 40 * 512 + question, output, None, None, 512, ids)


def test_a_prefill_beside_a_load_takes_what_layers_take() -> None:
    """One document is computed, pushed out by another and asked for again: its load hides behind little."""
    trace = [document(0, 0.0, 1), document(1, 10.0, 2), document(2, 20.0, 1)]
    seen: list[Executed] = []
    policy = make(H200, Params(near_tokens=25_000, write="write_through"))
    replay(iter(trace), policy, H200, watch=seen.append)
    last = next(one for one in seen if one.begin >= 20.0)
    assert last.plan.link_in_bytes == 40 * 512 * H200.token_bytes
    layers = H200.layers
    load = layers * H200.load(40 * 512)
    compute = layers * H200.layer([(30, 40 * 512)]).seconds
    head = H200.head(1).seconds
    assert last.end - last.begin == pytest.approx(overlapped(load, compute, layers) + head)
    assert load > compute


def test_a_bubble_holds_one_decode_and_the_load_goes_on() -> None:
    trace = [document(0, 0.0, 1), document(1, 10.0, 2), document(2, 20.0, 3, output=2000), document(3, 25.0, 1)]
    ends: dict[bool, float] = {}
    for bubble in (True, False):
        seen: list[Executed] = []
        policy = make(H200, Params(near_tokens=48_000, write="write_through", bubble=bubble, ahead=False))
        replay(iter(trace), policy, H200, watch=seen.append)
        notes = [one.plan.note for one in seen]
        assert notes.count("bubble") == bubble
        at = next(i for i, one in enumerate(seen) if one.plan.prefill and one.plan.prefill[0].live.request.id == 3)
        ends[bubble] = seen[at].end
        if bubble:
            decode, prefill = seen[at - 1], seen[at]
            assert (decode.plan.note, len(decode.plan.decode)) == ("bubble", 1)
            assert decode.plan.link_in_bytes == 40 * 512 * H200.token_bytes
            load = H200.layers * H200.load(40 * 512)
            layer = H200.layer([(30, 40 * 512)]).seconds
            assert prefill.end == pytest.approx(decode.begin + load + layer + H200.head(1).seconds)
        else:
            decode_after = seen[at + 1]
            assert decode_after.plan.note == "decode"
    layer = H200.layer([(30, 40 * 512)]).seconds
    assert ends[True] <= ends[False] + layer, "the decode took no time of its own"


def test_deferral_computes_a_shared_prefix_once() -> None:
    trace = [document(n, 0.0, 1) for n in range(4)]
    counts = {}
    for defer in (True, False):
        found = run(trace, defer=defer)
        counts[defer] = found.counters["duplicate_tokens"], found.summary().computed
    assert counts[True] == (0, 40 * 512 + 4 * 30)
    assert counts[False][0] >= 40 * 512
    assert counts[False][1] >= counts[True][1] + 40 * 512


def test_the_next_turn_finds_the_output() -> None:
    block = 16
    first = Request(0, 0.0, 64, 33, 7, None, block, (1, 2, 3, 4))
    turn = Request(1, 5.0, 130, 1, 7, 0, block, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    stranger = dataclasses.replace(turn, parent=None)
    assert run([first, turn]).summary().reused == 96, "all whole pages of 96 tokens"
    assert run([first, stranger]).summary().reused == 48, "without a parent only the prompt, its last page not"


def test_writes_wait_for_no_pass_and_are_counted() -> None:
    trace = [document(n, n * 1.0, n) for n in range(6)]
    behind = run(trace, near_tokens=50_000, write="write_through").summary()
    assert behind.link_out_bytes >= 5 * 40 * 512 * H200.token_bytes
    assert behind.stalls["link_out"] == pytest.approx(0.0, abs=1e-9)
    back = run(trace, near_tokens=50_000, write="write_back")
    assert back.summary().stalls["link_out"] > 0.0
    assert back.summary().link_out_bytes == back.counters["flushed_tokens"] * H200.token_bytes


def test_transport_and_layout_decide_what_a_load_costs() -> None:
    def stall(**how: Any) -> float:
        trace = [document(n, n * 5.0, n % 3) for n in range(9)]
        found = run(trace, near_tokens=30_000, write="write_through", page_tokens=32, **how).summary()
        return found.stalls["link_in"]

    threads, calls = stall(transport="sm"), stall(transport="ce", layout="layer_first")
    tiny = stall(transport="ce", layout="page_first")
    assert threads < calls < tiny


def test_requests_without_ids_and_what_does_not_fit() -> None:
    trace = [Request(0, 0.0, 100, 5), Request(1, 0.0, 5000, 5), Request(2, 0.1, 100, 5)]
    found = run(trace, near_tokens=1000)
    assert (found.summary().finished, found.summary().rejected, found.summary().reused) == (2, 1, 0)
    with_and_without = [Request(0, 0.0, 100, 5), document(1, 0.0, 1), document(2, 5.0, 1), Request(3, 5.0, 100, 5)]
    assert run(with_and_without).summary().reused == 40 * 512
    mixed = [document(0, 0.0, 1), Request(1, 1.0, 100, 1, None, None, 16, tuple(range(7)))]
    with pytest.raises(UsageError, match="block sizes are mixed"):
        run(mixed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_tokens": 0}, {"batch_tokens": 0}, {"window": 0}, {"requests": 0}, {"load_back": -1}, {"near_tokens": -1},
        {"transport": "pigeon"}, {"write": "never"}, {"write_uses": 0}, {"ratio": 0.0}, {"defer_tokens": -1},
        {"layout": "sideways"},
    ],
)  # fmt: skip
def test_parameters_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(H200, Params(**wrong))


def test_it_is_registered() -> None:
    from kvbench.replay import policies

    params = policies.parse_params("strata", ["page_tokens=16", "bubble=off", "near_tokens=5000"])
    assert params == Params(page_tokens=16, bubble=False, near_tokens=5000)
    assert isinstance(policies.make("strata", H200, params), StrataPolicy)


def test_a_long_queue_of_one_document_is_served() -> None:
    def questions() -> Iterator[Request]:
        yield from (document(n, 0.0, 1) for n in range(200))

    found = replay(questions(), make(H200, Params(window=8)), H200)
    assert found.summary().finished == 200
    assert found.counters["deferred"] == 199
