"""The generators against the statistics that were published, and against themselves."""

from __future__ import annotations

import hashlib
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.replay.generate.documents import DISTANCES
from kvbench.replay.generate.laws import Arrivals, Lengths, geometric, shares, stream
from kvbench.replay.generate.presets import AGENTIC, PRESETS, preset
from kvbench.replay.request import Request, blocks_of

# Strata, Table 1: mean input and output, documents, questions; NEO's shipped lengths.
PUBLISHED = {
    "loogle": (21613, 15.6, 105, 2410),
    "narrativeqa": (54797, 13, 50, 1461),
    "reviewmt": (17708, 208, 100, 1092),
}
NAMES = [*PRESETS, "synthetic:input=100,output=7"]


def digest(requests: Iterator[Request]) -> str:
    found = hashlib.sha256()
    for each in requests:
        found.update(repr(each).encode())
    return found.hexdigest()


def near(mean: float, values: list[int]) -> bool:
    """Whether ``values`` may be drawn from a law of this mean: within four standard errors."""
    return abs(statistics.fmean(values) - mean) <= 4 * statistics.stdev(values) / math.sqrt(len(values))


@pytest.mark.parametrize("name", PUBLISHED)
def test_means_and_counts_are_those_of_table_1(name: str) -> None:
    inputs, outputs, documents, questions = PUBLISHED[name]
    found = list(preset(name).requests(questions))
    assert len({each.session for each in found}) == documents
    # strata keep the mean of a hundred documents within a percent of the law's
    assert statistics.fmean(each.input_tokens for each in found) == pytest.approx(inputs, rel=0.01)
    assert near(outputs, [each.output_tokens for each in found])


@pytest.mark.parametrize("rate", [1.0, 50.0])
def test_sharegpt_has_the_published_means_and_the_rate_at_every_rate(rate: float) -> None:
    found = list(preset("sharegpt").requests(20_000, rate))
    # steady from its first second to its last
    for part in (found[:4000], found[-4000:]):
        assert len(part) / (part[-1].arrival - part[0].arrival) == pytest.approx(rate, rel=0.12)
    assert statistics.fmean(each.input_tokens for each in found) == pytest.approx(681, rel=0.04)
    assert near(261, [each.output_tokens for each in found])
    turns = [b.arrival - a.arrival for a, b in pairs(found)]
    assert turns
    assert max(abs(gap - 60.0) for gap in turns) <= 2e-6


def pairs(requests: list[Request]) -> list[tuple[Request, Request]]:
    """Return (turn before, turn) of every turn that has one."""
    known = {each.id: each for each in requests}
    return [(known[each.parent], each) for each in requests if each.parent is not None]


def test_osc_stays_in_the_range_of_the_shipped_lengths() -> None:
    found = list(preset("osc").requests(2000))
    inputs, outputs = [each.input_tokens for each in found], [each.output_tokens for each in found]
    assert near(372, inputs)
    assert near(45, outputs)
    assert min(inputs) >= 29
    assert max(inputs) <= 589
    assert min(outputs) >= 15
    assert max(outputs) <= 129


def test_agents_follow_the_manifest() -> None:
    found = list(preset("agentic").requests(20_000, rate=20.0))
    new = [b.input_tokens - a.input_tokens - a.output_tokens for a, b in pairs(found)]
    # history is dropped before a turn that would not fit, so long turns are a little rarer among the others
    assert statistics.fmean(new) == pytest.approx(6000, rel=0.08)
    assert statistics.median(new) == pytest.approx(4000, rel=0.06)
    assert max(new) <= 50_000
    outputs = [each.output_tokens for each in found]
    assert statistics.fmean(outputs) == pytest.approx(1000, rel=0.02)
    assert statistics.median(outputs) == pytest.approx(800, rel=0.02)
    assert max(each.input_tokens for each in found) <= AGENTIC.most_context
    shared = 32_768 // 512
    assert len({each.hash_ids[:shared] for each in found if each.hash_ids}) == 1
    gaps = [b.arrival - a.arrival for a, b in pairs(found)]
    assert statistics.fmean(gaps) == pytest.approx(0.7 * 5 + 0.3 * 30, rel=0.06)


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_in_order_and_its_ids_name_prefixes(name: str) -> None:
    found = list(preset(name).requests(600, seed=3))
    assert [each.id for each in found] == list(range(600))
    assert all(a.arrival <= b.arrival for a, b in pairwise(found))
    before: dict[int, int] = {}
    for each in found:
        if each.hash_ids is None:
            continue
        assert len(each.hash_ids) == blocks_of(each.input_tokens, 512)
        for previous, name_ in zip((-1, *each.hash_ids), each.hash_ids, strict=False):
            assert before.setdefault(name_, previous) == previous


@pytest.mark.parametrize("name", ["reviewmt", "sharegpt", "agentic"])
def test_a_turn_shares_the_whole_blocks_of_the_turn_before(name: str) -> None:
    found = list(preset(f"{name}:block=16").requests(300, rate=2.0, seed=1))
    turns = pairs(found)
    assert turns
    for a, b in turns:
        assert a.hash_ids is not None
        assert b.hash_ids is not None
        whole = a.input_tokens // 16
        assert b.hash_ids[:whole] == a.hash_ids[:whole]
        if a.input_tokens % 16:
            assert b.hash_ids[whole] != a.hash_ids[whole]


def test_questions_share_the_document_and_nothing_else() -> None:
    found = list(preset("loogle:block=1,distance=min").requests(60))
    first, second = (each.hash_ids for each in found[:2])
    assert first is not None
    assert second is not None
    same = sum(a == b for a, b in zip(first, second, strict=False))
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second)


def test_distances_order_the_same_questions() -> None:
    found = {each: list(preset(f"loogle:distance={each}").requests(500)) for each in DISTANCES}
    counts = {each: sorted(x.session or 0 for x in made) for each, made in found.items()}
    assert counts["min"] == counts["shuffle"] == counts["max"]
    between = {}
    for each, made in found.items():
        last: dict[int | None, int] = {}
        gaps = []
        for i, request in enumerate(made):
            if request.session in last:
                gaps.append(i - last[request.session])
            last[request.session] = i
        between[each] = statistics.fmean(gaps)
    assert between["min"] == 1.0
    assert between["min"] < between["shuffle"] < between["max"] <= 22 + 1


def test_documents_are_the_same_at_every_rate() -> None:
    slow, fast = (list(preset("loogle").requests(400, rate=rate, seed=5)) for rate in (0.001, 5.0))
    assert [replace(each, arrival=0.0) for each in slow] == [replace(each, arrival=0.0) for each in fast]


def test_more_conversations_than_can_be_held_are_refused() -> None:
    with pytest.raises(UsageError, match="too many conversations"):
        preset("sharegpt").requests(10, rate=1e6)


def test_the_same_seed_is_the_same_trace_whatever_the_hash_seed() -> None:
    mine = {name: digest(preset(name).requests(200, seed=7)) for name in PRESETS}
    program = (
        "from tests.replay.generate.test_presets import digest\n"
        "from kvbench.replay.generate.presets import PRESETS, preset\n"
        "for name in PRESETS: print(name, digest(preset(name).requests(200, seed=7)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert dict(line.split() for line in done.stdout.splitlines()) == mine
    assert mine["loogle"] != digest(preset("loogle").requests(200, seed=8))


@given(cv=st.sampled_from([0.5, 1.0, 2.0, 3.0]), rate=st.floats(0.01, 1000.0))
@settings(max_examples=20, deadline=None)
def test_arrivals_have_their_rate_and_variation(cv: float, rate: float) -> None:
    times = list(islice(Arrivals(rate, cv).times(stream(1, "test")), 20_000))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0.0
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / rate, rel=4 * cv / math.sqrt(20_000) + 1e-6 * rate)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.1)


@given(
    mean=st.floats(10.0, 50_000.0), sigma=st.floats(0.0, 1.5), ends=st.tuples(st.floats(0.05, 0.9), st.floats(1.2, 40))
)
@settings(max_examples=25, deadline=None)
def test_lengths_keep_their_mean_after_clipping(mean: float, sigma: float, ends: tuple[float, float]) -> None:
    low, high = max(1, int(mean * ends[0])), math.ceil(mean * ends[1])
    law = Lengths(mean, sigma, low, high)
    found = list(islice(law.draws(stream(2, "test")), 8000))
    assert low <= min(found)
    assert max(found) <= high
    error = 5 * statistics.pstdev(found) / math.sqrt(len(found)) + 0.5
    assert statistics.fmean(found) == pytest.approx(mean, abs=error)
    spread = law.spread(40, stream(3, "test"))
    assert len(spread) == 40
    assert min(spread) >= low
    assert max(spread) <= high


@given(st.integers(1, 500), st.integers(1, 60))
def test_shares_add_up(total: int, parts: int) -> None:
    found = shares(total, parts, stream(0, "test"))
    assert sum(found) == total
    assert max(found) - min(found) <= 1


def test_turns_have_their_mean() -> None:
    found = list(islice(geometric(20.0, stream(4, "test")), 20_000))
    assert min(found) == 1
    assert statistics.fmean(found) == pytest.approx(20.0, rel=0.03)


def test_an_option_left_at_its_default_is_not_in_the_name() -> None:
    assert preset("loogle:distance=shuffle,block=512").text == "loogle"
    assert preset("loogle: distance = max ,cv=2").text == "loogle:cv=2.0,distance=max"
    assert preset(preset("synthetic:output=3,input=9").text).values["input"] == 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("logle", ["unknown preset", "did you mean 'loogle'", "sharegpt", "agentic"]),
        ("loogle:far=1", ["not an option", "distance=VALUE"]),
        ("loogle:distance=middle", ["min shuffle max"]),
        ("loogle:block=0", ["1..1048576"]),
        ("loogle:cv=nan", ["0..10"]),
        ("loogle:cv=0", ["0..10"]),
        ("loogle:", ["not an option"]),
        ("loogle:cv=1,cv=2", ["twice"]),
        ("osc:block=16", ["not an option"]),
    ],
)
def test_what_is_wrong_with_a_name_is_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        preset(text)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("count", "rate", "seed"),
    [(0, 1.0, 0), (1, 0.0, 0), (1, -1.0, 0), (1, float("nan"), 0), (1, float("inf"), 0), (1, 1.0, -1), (10**9, 1.0, 0)],
)
def test_numbers_out_of_range_are_refused_before_anything_is_made(count: int, rate: float, seed: int) -> None:
    with pytest.raises(UsageError):
        preset("loogle").requests(count, rate, seed)
