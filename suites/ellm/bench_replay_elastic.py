"""Static pools, one elastic pool, a CPU buffer, and both, replayed over load and longest context (E3, E9)."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value
from kvbench.contract.result import Better

# name -> tokens in and out, every request alike; sharegpt is the preset of that name
LENGTHS = {
    "2k-2k": (2048, 2048), "8k-2k": (8192, 2048), "16k-2k": (16384, 2048), "32k-4k": (32768, 4096),
    "128k-4k": (131072, 4096),
}  # fmt: skip
SHORT = 2048  # tokens of a prompt that counts as short
SMALL = 0.3  # of the longest context: a prefill below it counts as small
SLO = 25.0  # times the unloaded TTFT and TPOT (section 4.1)
BUFFER_GB = 52.0  # 400,000 tokens of an 8B model; the paper states no size
PAPER = {
    "none": "vLLM 0.5.5, the baseline",
    "intra": "about 1.2 times the throughput of none (Fig. 2); the best throughput of the four at times (4.5)",
    "inter": "lifts the prefill bottleneck that intra leaves at high load (4.5, Fig. 8); no values given",
    "both": "TTFT up to 295 times shorter than none, goodput up to 2.5 times, TPOT longer (Fig. 5, 4.2); 1.82 times "
    "the throughput offline (Fig. 7); 1 to 5 % of the time in mapping calls (4.6)",
}


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the paper's system has the case: its buffer takes whole prompts."""
    return axes["prefill"] == "whole" or axes["pools"] in ("none", "intra")


@bench(
    version=1, metric="token_rate", unit="tok/s", better="higher", basis="simulated", where=exists, limit=1800.0,
    extra_metrics=[
        "request_rate", "decode_rate", "ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "attainment",
        "goodput", "stall_share", "map_share", "map_wait", "largest_batch", "preempted", "parked",
        "small_prefills", "short_prompts",
    ],
    seconds={"smoke": 0.2, "quick": 0.3, "full": 3.0},
    pools=axis.choice("none", "intra", "inter", "both"),
    workload=axis.choice(*LENGTHS, "sharegpt", smoke=["2k-2k"], quick=["2k-2k"]),
    context=axis.integer(smoke=["262144"], quick=["4608", "65536", "262144"],
                         full=["4608", "32768", "65536", "131072", "262144"], low=2048, high=1 << 20),
    prefill=axis.choice("whole", "chunk512", smoke=["whole"]),
    rate_milli=axis.integer(smoke=["2000"], quick=["700", "1500"], full=["500", "700", "900", "1100", "1300", "1500"],
                            low=0, high=10**9),
    machine=axis.choice("a10g", "a100", "h100", "h200", "gh200", smoke=["a100"], quick=["a100"], full=["a100"]),
    model=axis.choice("llama-3-8b", "opt-13b", smoke=["llama-3-8b"], quick=["llama-3-8b"], full=["llama-3-8b"]),
    requests=axis.integer(smoke=["120"], quick=["200"], full=["600"], low=1, high=1_000_000),
    seed=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0),
)  # fmt: skip
def replay_elastic(case: Case, measure: Measure) -> None:
    """Output tokens a second with two static pools (none), one pool (intra), a CPU buffer (inter), or both.

    `context`: the longest prompt an isolated engine reserves activations for, the same requests at each. `rate_milli`:
    requests that arrive in 1000 s, 0: all at once. attainment and goodput: within 25 times the unloaded TTFT and TPOT.
    decode_rate: tokens of iterations that only decode over their time. map_share: time of mapping calls over that of
    iterations, map_wait the part that is waited for. Simulated: nothing is measured here.
    """
    from dataclasses import replace

    from kvbench.errors import UsageError
    from kvbench.replay.costs import costs
    from kvbench.replay.engine import Executed, replay
    from kvbench.replay.generate.presets import preset
    from kvbench.replay.machine import preset as machine
    from kvbench.replay.metrics import Slo
    from kvbench.replay.policies import make
    from kvbench.replay.policies.ellm import unloaded
    from kvbench.replay.policies.ellm_params import ElasticParams, IsolatedParams

    tokens = LENGTHS.get(case.workload)
    name = "sharegpt" if tokens is None else f"synthetic:input={tokens[0]},output={tokens[1]},spread=0"
    prompt = SHORT if tokens is None else tokens[0]
    trace = list(preset(name).requests(case.requests, case.rate_milli / 1000 if case.rate_milli else None, case.seed))
    if not case.rate_milli:
        trace = [replace(request, arrival=0.0) for request in trace]
    if all(request.total_tokens > case.context for request in trace):
        measure.skip(f"every request has more tokens than the longest context, {case.context}")
    buffer = case.pools in ("inter", "both")
    kind = ElasticParams if case.pools in ("intra", "both") else IsolatedParams
    params = kind(
        context=case.context, chunk=0 if case.prefill == "whole" else int(case.prefill.removeprefix("chunk")),
        cpu_buffer=buffer, controller=buffer, size=0.25 if buffer else 1.0, buffer_gb=BUFFER_GB, slo=SLO,
        slo_prompt=min(prompt, case.context - 1),
    )  # fmt: skip
    decoding = [0.0, 0]
    prefills = [0, 0]

    def watch(done: Executed) -> None:
        new = sum(chunk.new for chunk in done.plan.prefill)
        if new:
            prefills[0] += new < SMALL * case.context
            prefills[1] += 1
        else:
            decoding[0] += done.end - done.begin
            decoding[1] += done.steps * len(done.plan.decode)

    try:
        priced = costs(machine(case.machine), case.model)
        policy = make("ellm_elastic" if kind is ElasticParams else "ellm_isolated", priced, params)
    except UsageError as error:
        measure.skip(str(error))
    ttft, tpot = (SLO * alone for alone in unloaded(priced, prompt))
    outcome = replay(trace, policy, priced, watch=watch)
    found, counts = outcome.summary(Slo(ttft, tpot)), outcome.counters
    if not found.finished or found.token_rate is None:
        first = f"; the first, {found.rejection}" if found.rejected else ""
        measure.skip(f"no request finished: {found.rejected} of {found.requests} rejected{first}")
    if found.rejected:
        measure.flag("rejected")
    source = f"event replay, costs of {case.machine}"
    measure.simulated(
        found.token_rate, source=source,
        detail={
            "digest": outcome.digest, "finished": found.finished, "iterations": found.iterations, "span": found.span,
            "busy": found.busy, "paper": PAPER[case.pools], "ttft_slo": ttft, "tpot_slo": tpot,
            "near_tokens": priced.near_tokens, "map_calls": found.map_calls, "rejected": found.rejected,
            "link_in_bytes": found.link_in_bytes, "link_out_bytes": found.link_out_bytes,
            **{f"count_{key}": value for key, value in sorted(counts.items())},
        },
    )  # fmt: skip

    def add(metric: str, value: float | None, unit: str, better: Better, why: str = "") -> None:
        measure.extra(
            metric, value, unit=unit, better=better, basis="simulated", kernel=source, n=found.finished,
            status=None if value is not None else "skipped", reason="" if value is not None else why,
        )  # fmt: skip

    add("request_rate", found.request_rate, "req/s", "higher")
    rate = decoding[1] / decoding[0] if decoding[0] else None
    add("decode_rate", rate, "tok/s", "higher", "no iteration only decoded")
    for metric in ("mean", "p99"):
        add(f"ttft_{metric}", getattr(found.ttft, metric), "s", "lower")
    for metric in ("mean", "p99"):
        add(f"tpot_{metric}", getattr(found.tpot, metric), "s", "lower", "no request had a second output token")
    add("attainment", found.attainment, "1", "higher")
    add("goodput", found.goodput, "req/s", "higher")
    add("stall_share", found.stall_share, "1", "lower")
    add("map_share", counts["map_seconds"] / found.busy, "1", "lower")
    add("map_wait", counts["map_exposed"] / found.busy, "1", "lower")
    add("largest_batch", counts["largest_batch"], "1", "higher")
    add("preempted", counts["preemptions"], "1", "lower")
    add("parked", counts["parked"], "1", "lower")
    add("small_prefills", prefills[0] / prefills[1], "1", "higher")
    add("short_prompts", sum(r.input_tokens <= SHORT for r in trace) / len(trace), "1", "higher")
