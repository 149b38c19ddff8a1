"""NEO in the engine: what its plans cost, that nothing is lost, and the shape of its gains from presets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs, costs
from kvbench.replay.engine import Executed, Outcome, replay
from kvbench.replay.machine import preset
from kvbench.replay.policies import make, parse_params
from kvbench.replay.policies.neo import Neo, Params
from kvbench.replay.request import Request

A10G = costs(preset("a10g"), "llama-3-8b")
SMALL = Params(near_tokens=640, far_tokens=4000, tokens=600, requests=64, floor=16)


def batch(count: int, prompt: int, output: int) -> list[Request]:
    """All at once; lengths within a tenth of their means, as the synthetic workloads of NEO's section 5.4."""
    return [
        Request(
            i, 0.0, prompt - prompt // 10 + i * 7 % (prompt // 5 + 1), output - output // 10 + i * 5 % (output // 5 + 1)
        )
        for i in range(count)
    ]


def run(trace: list[Request], params: Params, machine: Costs = A10G, **more: object) -> Outcome:
    return replay(iter(trace), Neo(machine, params), machine, **more)  # type: ignore[arg-type]


def rate(outcome: Outcome) -> float:
    found = outcome.summary().request_rate
    assert found is not None
    return found


# -- plans ---------------------------------------------------------------------------------------------------------


def executed(trace: list[Request], params: Params, machine: Costs = A10G) -> list[Executed]:
    seen: list[Executed] = []
    run(trace, params, machine, watch=seen.append, audit="every")
    return seen


def test_a_layer_takes_what_the_formula_says() -> None:
    """T = L (max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0)), section 3.2, and one head a batch."""
    ideal = replace(SMALL, transport="ideal")
    quick = Costs(A10G.machine.with_(link_in=1e15, link_out=1e15, host_bandwidth=2e12, cpu_flops=1e14), A10G.shape)
    pipelined = [one for one in executed(batch(40, 150, 30), ideal, quick) if one.plan.note.startswith("pipelined")]
    assert pipelined
    for one in pipelined:
        swap = len(one.plan.phases) - 3
        long, short, head = one.plan.phases[swap:]
        parts = one.plan.own[swap:]
        prefills = [(chunk.new, 0) for chunk in one.plan.prefill]
        second, first = parts[0].decodes, parts[1].decodes
        near = len(one.plan.decode) - len(first) - len(second)
        l0 = quick.linear(sum(new for new, _ in prefills) + near + len(first)).seconds
        ca1 = quick.cpu_attention(len(second), sum(n for _, n in second)) + quick.launch
        assert max(long.compute, long.hbm) == pytest.approx(l0)
        assert long.cpu == pytest.approx(ca1)
        assert long.repeat == short.repeat == quick.layers
        assert max(short.compute, short.hbm) > quick.linear(len(second)).seconds
        total = sum(max(p.compute, p.hbm, p.cpu) * p.repeat for p in (long, short, head))
        moved = sum(max(p.link_in, p.link_out) * p.repeat for p in one.plan.phases)
        assert total * (1 - 1e-9) <= one.end - one.begin <= (total + moved) * (1 + 1e-9)
        assert l0 >= ca1


def test_kv_that_goes_far_crosses_the_link_once_and_q_k_v_o_every_time() -> None:
    trace = batch(30, 150, 20)
    seen = executed(trace, SMALL)
    policy = Neo(A10G, SMALL)
    outcome = replay(iter(trace), policy, A10G)
    shipped = A10G.shipped_bytes(int(outcome.counters["cpu_decodes"]))
    moved = [sum(n for part in one.plan.own for _, n in getattr(part, way)) for way in ("out", "into") for one in seen]
    half = len(seen)
    found = outcome.summary()
    assert found.link_out_bytes == sum(moved[:half]) * A10G.token_bytes + shipped[1]
    assert found.link_in_bytes == sum(moved[half:]) * A10G.token_bytes + shipped[0]
    assert outcome.counters["far_prefills"] > 0
    assert outcome.counters["cpu_decodes"] > 0


def test_decodes_in_a_row_are_the_same_as_single_iterations() -> None:
    trace = [replace(r, arrival=0.02 * r.id) for r in batch(25, 150, 40)]
    for offload in ("none", "part", "all"):
        params = replace(SMALL, offload=offload)
        fast, slow = run(trace, params), run(trace, params, single_steps=True, audit="every")
        assert fast.digest == slow.digest
        assert fast.counters == slow.counters
    one = executed(trace, replace(SMALL, offload="none"))
    assert max(each.steps for each in one) > 5


def test_a_request_larger_than_memory_is_rejected() -> None:
    outcome = run([Request(0, 0.0, 100, 600), Request(1, 0.0, 601, 1), Request(2, 0.0, 100, 5)], SMALL)
    found = outcome.summary()
    assert (found.finished, found.rejected) == (1, 2)


def test_words_of_the_command_line() -> None:
    made = make("neo", A10G, parse_params("neo", ["near_tokens=26400", "offload=all", "order=symmetric"]))
    assert made.name == "neo"
    assert made.ledger.capacity("near") == 0
    for word in ("offload=some", "transport=mail", "page=0", "near_tokens=0", "order=simple"):
        with pytest.raises(UsageError):
            parse_params("neo", [word])
    # one layer's blocks stage what goes far
    assert Neo(A10G, Params(near_tokens=26_400)).blocks.near_blocks == 1650 * 32 // 33
    assert Neo(A10G, Params(near_tokens=26_400, offload="none")).blocks.near_blocks == 1650


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=20),
    st.sampled_from(
        [("part", "pipelined"), ("none", "pipelined"), ("all", "pipelined"), ("all", "simple"), ("all", "symmetric")]
    ),
    st.integers(320, 900), st.integers(0, 2000), st.sampled_from(["ce", "sm"]),
)  # fmt: skip
def test_any_trace_is_served_and_adds_up(
    rows: list[tuple[int, int, int]], how: tuple[str, str], near: int, far: int, transport: str
) -> None:
    at, trace = 0.0, []
    for i, (gap, prompt, output) in enumerate(rows):
        at += gap / 100
        trace.append(Request(i, at, prompt, output))
    params = replace(
        SMALL, near_tokens=near, far_tokens=max(far, 64), offload=how[0], order=how[1], transport=transport
    )  # fmt: skip
    outcome = run(trace, params, audit="every")
    found = outcome.summary()
    assert found.finished + found.rejected == len(trace)
    assert outcome.digest == run(trace, params).digest


def test_a_useless_cpu_is_not_asked_but_prompts_still_go_far() -> None:
    """Step 3 sends prompts where blocks are, not where a CPU is; step 6 then never decodes them there."""
    useless = Costs(A10G.machine.with_(cpu_flops=1e3, host_bandwidth=1e3), A10G.shape)
    trace = batch(40, 150, 30)
    counts = run(trace, SMALL, useless).counters
    assert counts["cpu_decodes"] == counts["pipelined"] == 0
    assert counts["far_prefills"] > 0
    assert counts["far_undecoded"] == counts["far_prefills"]
    helped = run(trace, SMALL, Costs(A10G.machine.with_(host_bandwidth=2e12, cpu_flops=1e14), A10G.shape)).counters
    assert helped["cpu_decodes"] > 0
    assert helped["far_undecoded"] < helped["far_prefills"]
    alone = run(trace, replace(SMALL, offload="none"), useless).counters
    assert alone["far_prefills"] == alone["far_undecoded"] == 0


# -- shapes of N7, from presets alone --------------------------------------------------------------------------------


def throughput(priced: Costs, near: int, prompt: int, output: int, offload: str, tokens: int, count: int) -> float:
    params = Params(near_tokens=near, tokens=tokens, offload=offload)
    return rate(run(batch(count, prompt, output), params, priced))


def a10g(cpu: int) -> Costs:
    """The A10G with ``cpu`` times its host's bandwidth and cores (figure 10a: 1, 2, 4)."""
    machine = preset("a10g")
    return costs(
        machine.with_(host_bandwidth=cpu * machine["host_bandwidth"], cpu_flops=cpu * machine["cpu_flops"]),
        "llama-3-8b",
    )


def test_gain_over_output_length_and_cpu_bandwidth() -> None:
    """Figure 10a: nothing at short outputs, a peak that grows with the CPU, decay; 8b: full offload far below."""
    outputs = (10, 100, 300)
    alone = {out: throughput(a10g(1), 26_400, 1000, out, "none", 20_480, 200) for out in outputs}
    gains = {
        cpu: {out: throughput(a10g(cpu), 26_400, 1000, out, "part", 20_480, 200) / alone[out] for out in outputs}
        for cpu in (1, 2, 4)
    }
    for cpu, found in gains.items():
        assert found[10] == pytest.approx(1.0, abs=0.03), cpu
        assert found[300] < found[100], cpu
        assert found[300] > 0.98, cpu
    peaks = [max(found.values()) for found in gains.values()]
    assert peaks == sorted(peaks)
    assert peaks[0] < 1.1 < peaks[2]
    assert throughput(a10g(1), 26_400, 1000, 300, "all", 20_480, 200) / alone[300] < 0.6


def test_gain_is_larger_the_less_memory_the_gpu_has() -> None:
    """Figure 9: T4 before A10G before H100; figures of the presets, NEO's memory configurations."""

    def gain(priced: Costs, near: int, prompt: int, output: int, tokens: int) -> float:
        one, two = (throughput(priced, near, prompt, output, how, tokens, 200) for how in ("part", "none"))
        return one / two

    t4 = gain(costs(preset("t4"), "llama-2-7b"), 864, 200, 50, 832)
    h100 = costs(preset("h100").with_(devices=2), "llama-3-70b")
    large = gain(h100, h100.near_tokens, 1000, 100, 20_480)
    middle = gain(a10g(1), 26_400, 1000, 100, 20_480)
    assert t4 > 2.0 > middle > large
    assert large < 1.05
