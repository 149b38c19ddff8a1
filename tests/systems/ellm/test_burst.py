"""The queue model serves every request, obeys its buffer, and shows what the controller is for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.ellm.burst import Engine, Load, Outcome, Request, arrivals, replay
from kvbench.systems.ellm.slo import Params

ENGINE = Engine()
TTFT, TPOT = ENGINE.no_load(2048)


def params(slo: float) -> Params:
    return Params(400_000, slo * TTFT, slo * TPOT, minimum=4096)


def test_arrivals_are_seeded_and_come_in_bursts() -> None:
    load = Load(4000, prompt=100, output=50)
    made = arrivals(load, 1)
    assert made == arrivals(load, 1)
    assert made != arrivals(load, 2)
    times = [one.arrival for one in made]
    assert times == sorted(times)
    assert all(75 <= one.prompt <= 125 and 38 <= one.output <= 62 for one in made)
    inside = sum(one.arrival % load.period < load.length for one in made)
    expected = load.burst * load.length / (load.burst * load.length + load.calm * (load.period - load.length))
    assert inside / len(made) == pytest.approx(expected, abs=0.03)


def test_one_request_alone_takes_what_it_takes_without_load() -> None:
    found = replay([Request(5.0, 2048, 100)], ENGINE, params(1.001), 0, scaled=False)
    assert found == Outcome(
        1.0, 1.0, 1.0, pytest.approx(TTFT), 100, 0, 0, 0.0, None, 0, pytest.approx(5 + TTFT + 99 * TPOT)
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(0, 100_000), st.integers(5_000, 50_000), st.booleans(), st.integers(0, 9))
def test_every_request_ends_within_bounds(count: int, size: int, room: int, scaled: bool, seed: int) -> None:
    engine = Engine(gpu_tokens=room)
    found = replay(
        arrivals(Load(count, 5.0, 50.0, prompt=512, output=40), seed), engine, params(2), size, scaled=scaled
    )
    assert 0.0 <= found.attained <= min(found.ttft_attained, found.tpot_attained) <= 1.0
    assert found.iterations >= count
    assert found.seconds > 0.0
    if not scaled:
        assert (found.changes, found.mean_size) == (0, size)
    if size == 0 and not scaled:
        assert found.parked == 0


def test_a_buffer_brings_first_tokens_early_and_costs_later_ones() -> None:
    requests = arrivals(Load(200), 1)
    none, large = (replay(requests, ENGINE, params(5), size, scaled=False) for size in (0, 400_000))
    assert large.ttft_attained > none.ttft_attained
    assert large.tpot_attained < none.tpot_attained
    assert large.p99_ttft < none.p99_ttft
    assert (none.parked, large.parked > 0) == (0, True)


def test_the_controller_helps_a_buffer_that_is_too_small() -> None:
    requests = arrivals(Load(200), 1)
    fixed, scaled = (replay(requests, ENGINE, params(25), 10_000, scaled=one) for one in (False, True))
    assert scaled.attained > fixed.attained
    assert scaled.changes > 0
    assert scaled.reaction is not None
    assert scaled.reaction > 0


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to replay"):
        replay([], ENGINE, params(25), 0)
    with pytest.raises(UsageError, match="fits nowhere"):
        replay([Request(0.0, 300_000, 10)], ENGINE, params(25), 0)
    for load in (Load(0), Load(1, calm=0.0), Load(1, prompt=2)):
        with pytest.raises(UsageError, match="a load needs"):
            arrivals(load, 1)
