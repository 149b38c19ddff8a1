"""eLLM's policies in the engine: times and bytes of single requests by hand, audits, digests, and what bends them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs, costs
from kvbench.replay.engine import Executed, Outcome, replay
from kvbench.replay.generate.presets import preset
from kvbench.replay.machine import preset as machine
from kvbench.replay.metrics import Slo, Summary
from kvbench.replay.policies import make, parse_params
from kvbench.replay.policies.ellm import unloaded
from kvbench.replay.policies.ellm_params import ElasticParams, EngineParams, IsolatedParams
from kvbench.replay.request import Request

SMALL = IsolatedParams(context=4096, slo_prompt=1024)
FORMS: dict[str, EngineParams] = {
    "none": SMALL,
    "chunked": replace(SMALL, chunk=512),
    "inter": replace(SMALL, cpu_buffer=True, controller=True, size=0.25),
    "intra": ElasticParams(context=4096, slo_prompt=1024, cpu_buffer=False, controller=False),
    "both": ElasticParams(context=4096, slo_prompt=1024),
    "longest": ElasticParams(context=4096, slo_prompt=1024, victims="longest", order="shortest", controller=False),
    "on demand": ElasticParams(context=4096, slo_prompt=1024, premap=False, alias=False),
    "no alias": ElasticParams(context=4096, slo_prompt=1024, alias=False, tokens_per_chunk=24),
}  # fmt: skip


@cache
def small() -> Costs:
    """An 8B model on a board that leaves 41,000 tokens of KV: a hundred requests already queue."""
    return costs(machine("a100").with_(memory=24e9), "llama-3-8b")


def run(params: EngineParams, trace: list[Request], **how: object) -> Outcome:
    name = "ellm_elastic" if isinstance(params, ElasticParams) else "ellm_isolated"
    return replay(trace, make(name, small(), params), small(), **how)  # type: ignore[arg-type]


@cache
def load(rate: float = 9.0, count: int = 100) -> tuple[Request, ...]:
    return tuple(preset("synthetic:input=1024,output=128").requests(count, rate))


def played(params: EngineParams, rate: float = 9.0) -> tuple[Summary, Outcome]:
    ttft, tpot = unloaded(small(), 1024)
    found = run(params, list(load(rate)))
    return found.summary(Slo(25 * ttft, 25 * tpot)), found


@pytest.mark.parametrize("form", FORMS)
def test_books_balance_and_steps_in_a_row_are_single_steps(form: str) -> None:
    params = replace(FORMS[form], context=16_384)
    trace = list(load(40.0, 50))
    deep = run(params, trace, audit="every", single_steps=True)
    fast = run(params, trace)
    assert deep.digest == fast.digest
    assert deep.tally.finished == 50
    for name, value in deep.counters.items():
        assert fast.counters[name] == pytest.approx(value, rel=1e-9), name
    assert fast.summary().map_calls == fast.counters["mapped"] * (2 if form == "no alias" else 1)
    assert fast.counters["largest_batch"] > 10


def test_a_request_that_is_alone_has_the_unloaded_times_and_pays_for_its_mapping() -> None:
    ttft, _ = unloaded(small(), 1024)
    trace = [Request(0, 1.0, 1024, 3)]
    plain = run(SMALL, trace).summary()
    assert plain.ttft.mean == pytest.approx(ttft)
    elastic = run(FORMS["intra"], trace)
    found = elastic.summary()
    # 64 chunks of KV; activations of 1,024 tokens, of which the decode uses a part again; one chunk grows
    activations = -(-1024 * (4096 + 3 * 14336) * 2 // (2 << 20))
    each = small().machine["map_chunk"]
    assert found.ttft.mean == pytest.approx(ttft + (64 + activations) * each)
    assert found.map_calls == 64 + activations + 1
    assert elastic.counters["map_seconds"] == pytest.approx((64 + activations + 1) * each)
    assert elastic.counters["map_exposed"] == pytest.approx((64 + activations) * each)


def test_what_is_parked_crosses_the_link_twice_and_its_return_is_waited_for() -> None:
    params = replace(FORMS["inter"], context=16_384, controller=False, size=1.0)
    seen: list[Executed] = []
    found = run(params, list(load(40.0, 30)), watch=seen.append)
    parked = [part.new for each in seen for part in each.plan.own.parts if part.leaves]
    assert found.counters["parked"] == len(parked) > 0
    moved = sum(parked) * small().token_bytes
    summary = found.summary()
    assert (summary.link_in_bytes, summary.link_out_bytes) == (moved, moved)
    assert summary.stalls["link_in"] > summary.stalls["link_out"] == 0.0
    for each in seen:
        step = each.plan.own
        phase = each.plan.phases[-2]
        assert phase.link_in == small().load(sum(tokens for _, tokens in step.fetch), None, "ce")
        assert phase.link_out == small().evict(sum(part.new for part in step.parts if part.leaves), None, "ce")
        assert {key for key, _ in step.fetch} <= {live.request.id for live in each.plan.decode}


def test_elastic_gains_nothing_at_a_short_context_and_more_the_longer_it_is() -> None:
    gaps = []
    for context in (1280, 8192, 24_576):
        isolated, _ = played(replace(SMALL, context=context))
        elastic, _ = played(replace(FORMS["intra"], context=context))
        assert isolated.finished == elastic.finished == 100
        assert isolated.token_rate
        assert elastic.token_rate
        gaps.append(elastic.token_rate / isolated.token_rate)
    assert gaps[0] == pytest.approx(1.0, abs=0.03)
    assert gaps[0] < gaps[1] < gaps[2]
    assert gaps[2] > 1.1


def test_no_gain_where_memory_is_never_full_and_none_left_with_chunked_prefill() -> None:
    for form in ("none", "intra"):
        summary, found = played(replace(FORMS[form], context=24_576), rate=1.0)
        assert (found.counters["stalls"], found.counters["preemptions"]) == (0, 0)
        assert summary.attainment == 1.0
    rates = []
    for params in (SMALL, FORMS["intra"]):
        summary, found = played(replace(params, context=24_576, chunk=512))
        rates.append(summary.token_rate)
        assert found.counters["reserved_bytes"] < 300e6
    assert rates[1] == pytest.approx(rates[0], rel=0.06)


def test_the_ablation_has_the_order_of_the_paper() -> None:
    found = {name: played(replace(FORMS[name], context=24_576)) for name in ("none", "intra", "inter", "both")}
    rate = {name: summary.token_rate or 0.0 for name, (summary, _) in found.items()}
    ttft = {name: summary.ttft.mean or 0.0 for name, (summary, _) in found.items()}
    goodput = {name: summary.goodput or 0.0 for name, (summary, _) in found.items()}
    assert rate["intra"] > 1.1 * rate["none"]
    assert rate["intra"] > rate["inter"]
    assert ttft["inter"] < 0.5 * ttft["none"]
    assert goodput["both"] == max(goodput.values()) > goodput["none"]
    assert rate["both"] < 1.03 * rate["intra"]  # the two do not add up
    tpot = {name: summary.tpot.mean or 0.0 for name, (summary, _) in found.items()}
    assert tpot["both"] > tpot["none"]  # the price: larger batches, parked requests


def test_the_controller_moves_the_buffer_and_a_fixed_one_stays() -> None:
    tight = replace(FORMS["both"], context=24_576, slo=3.0)
    _, moved = played(tight, rate=40.0)
    assert moved.counters["changes"] > 0
    assert moved.counters["mean_size"] > 0
    _, fixed = played(replace(tight, controller=False), rate=40.0)
    assert "changes" not in fixed.counters
    assert fixed.digest != moved.digest


def test_what_can_never_fit_is_rejected_and_counted() -> None:
    trace = [Request(0, 0.0, 4096, 1), Request(1, 0.0, 4000, 96), Request(2, 0.0, 100, 10)]
    for form in ("none", "both"):
        summary = run(FORMS[form], trace).summary()
        assert (summary.rejected, summary.finished) == (1, 2)
    huge = [Request(0, 0.0, 60_000, 10)]
    for params in (ElasticParams(context=262_144), IsolatedParams(context=262_144, chunk=512)):
        assert run(params, huge).summary().rejected == 1


def test_a_reserve_that_leaves_nothing_is_refused_with_its_mend() -> None:
    with pytest.raises(UsageError, match="activations of the longest prefill") as caught:
        make("ellm_isolated", small(), IsolatedParams(context=262_144))
    assert "24.7 GB" in str(caught.value)
    assert "chunk=512" in str(caught.value)
    with pytest.raises(UsageError, match="two chunks"):
        make("ellm_elastic", small(), ElasticParams(tokens_per_chunk=40_000))
    with pytest.raises(UsageError, match="smaller than a prompt"):
        make("ellm_elastic", small(), ElasticParams(buffer_gb=0.1))


@pytest.mark.parametrize(
    "words",
    [
        ["context=1"], ["watermark=1"], ["size=0"], ["cpu_buffer=no"], ["chunk=512"], ["slo_prompt=32768"],
        ["law=divide"], ["victims=oldest"], ["order=newest"], ["threshold=6"], ["alpha=1"], ["sequences=0"],
        ["buffer_gb=0"], ["batched=-1"], ["tokens_per_chunk=-1"], ["nope=1"],
    ],
)  # fmt: skip
def test_parameters_out_of_range(words: list[str]) -> None:
    with pytest.raises(UsageError):
        make("ellm_elastic", small(), parse_params("ellm_elastic", words))
