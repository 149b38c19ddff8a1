"""Every policy on small traces: nothing is lost, nothing hangs, and steps, seeds and hash seeds change nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs, costs
from kvbench.replay.engine import Outcome, replay
from kvbench.replay.machine import preset
from kvbench.replay.models import model, weight_bytes
from kvbench.replay.policies import POLICIES, make, params_class, parse_params
from kvbench.replay.request import Request

from .rigs import documents, requests

ROOT = Path(__file__).resolve().parents[2]
BASELINES = ("recompute", "preempt", "lru", "directkv")


# an engine that sets activations aside for a long context has no memory left on so small a machine
WORDS = {
    "ellm_isolated": ("context=512", "slo_prompt=64", "batched=512"),
    "ellm_elastic": ("context=512", "slo_prompt=64", "batched=512"),
}
ASIDE = {"ellm_isolated": 4000, "ellm_elastic": 4000}


def small(near_tokens: int, far_tokens: int = 100_000) -> Costs:
    """Return an H200 with memory for so many tokens of KV."""
    of = model("llama-3-8b")
    token = 131_072
    memory = (weight_bytes(of) + (near_tokens + 0.5) * token) / 0.9
    made = costs(preset("h200").with_(memory=memory, host_memory=far_tokens * token), "llama-3-8b")
    assert made.near_tokens == near_tokens
    return made


def run(name: str, trace: list[Request], on: Costs, *words: str, **options: Any) -> Outcome:
    return replay(
        trace,
        make(name, on, parse_params(name, words or WORDS.get(name, ()))),
        on,
        audit="every",
        keep_log=True,
        **options,
    )


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Draw a few requests, some of which share prefixes, at times that are often equal."""
    count = draw(st.integers(1, 12))
    now, made = 0.0, []
    for i in range(count):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.4]))
        doc, tokens = draw(st.integers(0, 2)), draw(st.integers(1, 300))
        blocks = -(-tokens // 16)
        shared = min(draw(st.integers(0, 20)), tokens // 16)
        ids = tuple(doc * 1000 + k if k < shared else 10_000 + i * 100 + k for k in range(blocks))
        made.append(Request(i, round(now, 6), tokens, draw(st.integers(1, 40)), block_tokens=16, hash_ids=ids))
    return made


VARIANTS = (
    *((name,) for name in POLICIES),
    ("recompute", "chunked=no", "budget=64"), ("recompute", "max_batch=2", "budget=40"),
    ("preempt", "chunked=no", "overlap=yes"), ("preempt", "far_tokens=160", "budget=100"),
    ("lru", "chunked=no", "budget=64"), ("lru", "far_tokens=200", "overlap=no"), ("lru", "far=no", "max_batch=3"),
    ("directkv", "route=layer_swap", "budget=100"), ("directkv", "far_tokens=400", "order=q_outer"),
    ("directkv", "route=layer_swap", "far_tokens=400", "chunked=no"),
)  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces(), near=st.sampled_from([336, 500, 4000]))
def test_nothing_is_lost_and_every_request_ends(variant: tuple[str, ...], trace: list[Request], near: int) -> None:
    name, *words = variant
    on = small(near + ASIDE.get(name, 0))
    outcome = run(name, trace, on, *words)
    found = outcome.summary()
    assert found.finished + found.rejected == len(trace) == found.requests
    log = outcome.log or ()
    ended = {int(line.split()[1]) for line in log if line.startswith("f ")}
    assert len(ended) == found.finished
    assert found.output_tokens == sum(r.output_tokens for r in trace if r.id in ended)
    assert found.computed + found.reused + found.restored - found.dropped == sum(
        r.input_tokens + r.output_tokens - 1 for r in trace if r.id in ended
    )
    single = run(name, trace, on, *words, single_steps=True)
    assert single.log == outcome.log


@pytest.mark.parametrize("name", BASELINES)
def test_under_pressure_something_gives_way_and_all_end(name: str) -> None:
    trace = requests(60, 200.0, 5, tokens=(20, 200), out=(50, 150))
    found = run(name, trace, small(1000), *(["far_tokens=1000"] if name == "directkv" else []))
    summary = found.summary()
    assert summary.finished == 60
    assert found.counters["preemptions"] > 0
    assert (summary.dropped > 0) is (name != "preempt")


def test_swapped_requests_keep_their_kv_and_pay_the_link_both_ways() -> None:
    found = run("preempt", requests(40, 200.0, 6, tokens=(20, 200), out=(50, 150)), small(1000)).summary()
    assert found.dropped == 0
    assert found.link_in_bytes == found.link_out_bytes > 0
    assert found.stalls["link_out"] > 0.0


def test_without_room_on_the_far_side_a_swap_becomes_a_drop() -> None:
    found = run("preempt", requests(40, 200.0, 6, tokens=(20, 200), out=(50, 150)), small(1000), "far_tokens=200")
    assert found.summary().dropped > 0


def test_a_prefix_cache_finds_what_a_document_left_near_and_far() -> None:
    trace = list(documents(60, 50.0, 2, docs=6, length=600))
    roomy, tight, alone = (
        run("lru", trace, small(near), *words) for near, words in ((20_000, ()), (1200, ()), (1200, ("far=no",)))
    )
    hits = [outcome.summary().hit_rate or 0.0 for outcome in (roomy, tight, alone)]
    assert hits[0] >= hits[1] > hits[2]
    assert roomy.counters["loaded_tokens"] == 0
    assert tight.counters["loaded_tokens"] > 0
    token = 131_072
    assert tight.summary().link_in_bytes == tight.counters["loaded_tokens"] * token
    assert tight.summary().link_out_bytes == tight.counters["offloaded_tokens"] * token
    assert alone.summary().link_in_bytes == alone.summary().link_out_bytes == 0


def test_whole_prompts_are_never_cut_without_chunking() -> None:
    trace = requests(30, 100.0, 7, tokens=(20, 900), out=(1, 20))
    cut, whole = (run("recompute", trace, small(30_000), f"chunked={word}", "budget=256") for word in ("yes", "no"))
    starts = [[line for line in outcome.log or () if line.startswith("i ")] for outcome in (cut, whole)]
    tokens = {r.id: r.input_tokens for r in trace}

    def chunks(lines: list[str]) -> list[tuple[int, int]]:
        words = [word.split(":") for line in lines for word in line.split() if word.count(":") == 2]
        return [(int(number), int(new)) for number, new, _ in words]

    assert any(new < tokens[number] for number, new in chunks(starts[0]))
    assert sum(new for _, new in chunks(starts[0])) == sum(tokens.values())
    assert sorted(chunks(starts[1])) == sorted(tokens.items())


def test_far_memory_bounds_the_batch_that_is_read_in_place() -> None:
    trace = [Request(i, 0.0, 400, 60) for i in range(24)]
    on = small(1000)
    near, place = run("recompute", trace, on).summary(), run("directkv", trace, on).summary()
    assert near.mean_batch is not None
    assert place.mean_batch is not None
    assert place.mean_batch > 3 * near.mean_batch
    assert place.link_in_bytes > 0
    assert near.link_in_bytes == 0


def test_in_place_reads_every_token_of_context_once_a_step() -> None:
    outcome = run("directkv", [Request(0, 0.0, 100, 5)], small(1000)).summary()
    token = 131_072
    assert outcome.link_in_bytes == (100 + 101 + 102 + 103) * token
    assert outcome.link_out_bytes == (100 + 4) * token


def test_the_swap_needs_two_layers_of_the_batch_near() -> None:
    on = small(336)  # 16 times as many tokens in two of 32 layers
    found = run("directkv", [Request(0, 0.0, 6000, 2), Request(1, 0.0, 5000, 2)], on, "route=layer_swap").summary()
    assert (found.finished, found.rejected) == (1, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_larger_than_all_memory_is_rejected(name: str) -> None:
    trace = [Request(0, 0.0, 200_000, 2), Request(1, 0.0, 50, 2)]
    found = run(name, trace, small(1000 + ASIDE.get(name, 0))).summary()
    assert (found.finished, found.rejected) == (1, 1)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.replay.rigs import documents
from tests.replay.test_policies import run, small
from kvbench.replay.policies import POLICIES
trace = list(documents(40, 30.0, 4, docs=5, length=500))
print(*(run(name, trace, small(2500)).digest for name in POLICIES))
"""


def test_digests_do_not_depend_on_the_seed_of_hashes() -> None:
    told = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(ROOT)], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT,
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        told.append(done.stdout.split())
    assert told[0] == told[1]
    assert len(set(told[0])) > 4


def test_parameters_are_read_from_words() -> None:
    params = parse_params("preempt", ["budget=512", "chunked=no", "transport=sm"])
    assert (params.budget, params.chunked, params.transport) == (512, False, "sm")
    assert parse_params("lru", []) == params_class("lru")()


@pytest.mark.parametrize(
    ("name", "word", "text"),
    [
        ("recomput", "budget=1", "did you mean 'recompute'"),
        ("lru", "budget", "not NAME=VALUE"),
        ("lru", "bugdet=1", "did you mean 'budget'"),
        ("lru", "budget=many", "a whole number"),
        ("lru", "budget=0", "budget.*out of range"),
        ("lru", "overlap=perhaps", "true or false"),
        ("lru", "transport=mail", "unknown transport"),
        ("preempt", "transport=mail", "unknown transport"),
        ("directkv", "route=detour", "in_place, layer_swap"),
        ("directkv", "order=none", "kv_outer, q_outer"),
        ("directkv", "transport=mail", "ce, batch, sm, ideal"),
    ],
)
def test_wrong_words_are_one_line_errors(name: str, word: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        parse_params(name, [word])
    assert "\n" not in str(caught.value)


def test_parameters_of_another_policy_are_refused() -> None:
    with pytest.raises(UsageError, match="parameters of another policy"):
        make("lru", small(1000), parse_params("recompute", []))


@pytest.mark.parametrize("name", [name for name in POLICIES if not name.startswith("ellm")])
@pytest.mark.parametrize("tier", ["near", "far"])
def test_memory_that_is_not_there_is_refused(name: str, tier: str) -> None:
    on = small(1000, 5000)
    held = {"near": 1000, "far": 5000}[tier]
    make(name, on, parse_params(name, [f"{tier}_tokens={held}"]))
    with pytest.raises(UsageError, match=rf"{name}, {tier}_tokens.*{held + 1}.*at most {held}"):
        make(name, on, parse_params(name, [f"{tier}_tokens={held + 1}"]))
    more = small(1001, 5001)  # the machine has it
    assert make(name, more, parse_params(name, [f"{tier}_tokens={held + 1}"])).name == name


@pytest.mark.parametrize("name", ["ellm_isolated", "ellm_elastic"])
def test_a_buffer_larger_than_the_host_is_refused(name: str) -> None:
    on, words = small(8000, 100_000), [*WORDS[name], "cpu_buffer=yes"]  # 13.1 GB; the default takes what there is
    make(name, on, parse_params(name, words))
    make(name, on, parse_params(name, [*words, "buffer_gb=13"]))
    with pytest.raises(UsageError, match=r"buffer_gb.*14.*at most 13\.1"):
        make(name, on, parse_params(name, [*words, "buffer_gb=14"]))


@pytest.mark.parametrize(
    ("name", "words", "admits"),
    [("neo", ("tokens=200",), "tokens=300"), ("ellm_isolated", ("context=256", "slo_prompt=64"), "context=305"),
     ("ellm_elastic", ("context=256", "slo_prompt=64"), "context=305")],
)  # fmt: skip
def test_a_rejection_names_what_would_admit_the_request(name: str, words: tuple[str, ...], admits: str) -> None:
    trace, on = [Request(0, 0.0, 300, 5)], small(20_000)
    found = run(name, trace, on, *words).summary()
    assert (found.finished, found.rejected) == (0, 1)
    assert f"; {admits} would admit it" in found.rejection
    key = admits.partition("=")[0]
    other = [admits if word.startswith(key) else word for word in words]
    assert run(name, trace, on, *other).summary().finished == 1


def test_a_request_larger_than_memory_is_told_how_much_there_is() -> None:
    for name in ("strata", *BASELINES):
        words = ["near_tokens=160", "far_tokens=160"]
        found = run(name, [Request(0, 0.0, 300, 5)], small(1000), *words).summary()
        assert found.rejection.startswith("request 0: needs 304 tokens of KV, the "), name
        assert found.rejection.endswith(" tier holds 160"), name
