"""NEO's scheduler replayed: gain over output length (N7) and over the memory the GPU has for KV (N8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.replay.costs import Costs
    from kvbench.replay.engine import Outcome
    from kvbench.replay.metrics import Summary
    from kvbench.replay.request import Request

SOURCE = "kvbench.replay.engine with kvbench.systems.neo.scheduler"
# Model, GPUs, near KV tokens (None: what the weights leave) and most tokens of an iteration: NEO, table 1, and the
# configurations of its code
SETUPS: Mapping[str, tuple[str, int, int | None, int]] = {
    "t4": ("llama-2-7b", 1, 864, 832),
    "a10g": ("llama-3-8b", 1, 26_400, 20_480),
    "h100": ("llama-3-70b", 2, None, 20_480),
}
# Figure 10a, read off the plot to 0.01: A10G, inputs of 1000 tokens, over SwiftLLM; by CPU (4x, 8x, 16xlarge), output
FIGURE_10A = {
    1: {50: 1.03, 100: 1.13, 200: 1.08, 300: 1.04, 400: 1.02},
    2: {50: 1.03, 100: 1.30, 200: 1.23, 300: 1.16, 400: 1.10},
    4: {50: 1.03, 100: 1.30, 200: 1.73, 300: 1.79, 400: 1.46},
}
FIGURE_9 = {"t4": "7.5 at its peak", "a10g": "1.26 at its peak", "h100": "1.14 at its peak"}
SLOWER = 3.0  # times the latency of a request that is alone: there is the knee
RANGE, HALVINGS = 16.0, 6  # the interval of rates in which the knee is looked for, largest over smallest


@dataclass(frozen=True, slots=True)
class Setup:
    """What is replayed: costs, the memory for KV in tokens, and the most tokens of an iteration."""

    priced: Costs
    near: int
    tokens: int

    def run(self, trace: Iterator[Request], offload: str) -> Outcome:
        """Replay ``trace`` with NEO (``part``), GPU-only (``none``) or full offload (``all``)."""
        from kvbench.replay.engine import replay
        from kvbench.replay.policies.neo import Neo, Params

        params = Params(near_tokens=self.near, tokens=self.tokens, offload=offload)
        return replay(trace, Neo(self.priced, params), self.priced)


def setup(case: Case, cpu: int = 1) -> Setup:
    """Return the setup of ``case.machine`` with ``cpu`` times its host's bandwidth and cores."""
    from kvbench.replay.costs import costs
    from kvbench.replay.machine import preset

    model, devices, near, tokens = SETUPS[case.machine]
    machine = preset(case.machine)
    if cpu > 1:
        machine = machine.with_(
            why=f"{cpu} times the preset's", host_bandwidth=cpu * machine["host_bandwidth"],
            cpu_flops=cpu * machine["cpu_flops"],
        )  # fmt: skip
    priced = costs(machine.with_(devices=devices), model)
    return Setup(priced, priced.near_tokens if near is None else near, tokens)


def workload(case: Case, prompt: int, rate: float | None = None, seed: int = 0) -> Iterator[Request]:
    """Yield ``case.requests`` requests, lengths uniform within a tenth of their means (section 5.1); all at once, or
    Poisson at ``rate`` a second."""
    from itertools import repeat

    from kvbench.replay.generate.laws import Arrivals, Uniform, stream
    from kvbench.replay.request import Request

    sizes = [Uniform(mean).draws(stream(seed, what)) for mean, what in ((prompt, "input"), (case.output, "output"))]
    times = repeat(0.0) if rate is None else Arrivals(rate).times(stream(seed, "arrivals"))
    for i, at, into, out in zip(range(case.requests), times, *sizes, strict=False):
        yield Request(i, at, into, out)


def one_cpu(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: the CPU is varied on the A10G, as in figure 10a."""
    return axes["machine"] == "a10g" or axes["cpu"] == 1


@bench(
    version=1, metric="gain", unit="1", better="higher", basis="simulated", where=one_cpu, limit=300.0,
    extra_metrics=["full_offload_gain", "gpu_only_rate", "neo_rate", "cpu_decode_share", "stall_share"],
    seconds={"smoke": 0.4, "quick": 0.8, "full": 6.0},
    machine=axis.choice("t4", "a10g", "h100", smoke=["a10g"]),
    cpu=axis.integer(smoke=["1", "4"], quick=["1", "2", "4"], full=["1", "2", "4"], low=1, high=64),
    output=axis.integer(
        smoke=["10", "100"], quick=["10", "50", "100", "200"], full=["10", "50", "100", "200", "300", "400"],
        high=10_000,
    ),
    requests=axis.integer(smoke=["150"], quick=["200"], full=["1000"], low=10, high=1_000_000),
)  # fmt: skip
def neo_output_length(case: Case, measure: Measure) -> None:
    """Throughput of NEO over that of its GPU-only baseline, by output length; simulated from published numbers.

    All requests come at once; inputs of 1000 tokens (200 on the T4), model and memory for KV as NEO configures them.
    `cpu` multiplies the host's bandwidth and cores: figure 10a compares instances with 1, 2 and 4 times of both.
    full_offload_gain: the same with every KV in host memory (FastDecode+). cpu_decode_share: decodes attended to on
    the CPU; stall_share: time NEO's GPU waits. The detail has the paper's figure beside ours where there is one.
    """
    prompt = 200 if case.machine == "t4" else 1000
    what = setup(case, case.cpu)
    if case.machine == "t4" and 1.1 * (prompt + case.output) > what.near:
        measure.skip(f"{prompt} + {case.output} tokens do not fit the T4's {what.near} of KV")
    found = {how: what.run(workload(case, prompt), how) for how in ("none", "part", "all")}
    rates = {how: request_rate(outcome.summary(), case.requests) for how, outcome in found.items()}
    summary, counts = found["part"].summary(), found["part"].counters
    paper = FIGURE_10A.get(case.cpu, {}).get(case.output) if case.machine == "a10g" else None
    measure.simulated(
        rates["part"] / rates["none"], source=SOURCE,
        detail={
            "paper": paper, "paper_figure": "10a, over SwiftLLM" if paper else f"9: {FIGURE_9[case.machine]}",
            "model": what.priced.shape.name, "near_tokens": what.near, "far_tokens": what.priced.far_tokens,
            "prompt": prompt, "pipelined": counts["pipelined"], "near_only": counts["near_only"],
            "swapped_out": counts["swapped_out"], "swapped_in": counts["swapped_in"],
            "far_prefills": counts["far_prefills"], "far_undecoded": counts["far_undecoded"],
            "cpu_decodes": counts["cpu_decodes"], "digest": found["part"].digest[:12],
            "host_bandwidth": what.priced.machine["host_bandwidth"], "launch": what.priced.launch,
        },
    )  # fmt: skip
    decodes = counts["cpu_decodes"] + counts["near_decodes"]
    add(measure, "full_offload_gain", rates["all"] / rates["none"], "1", "higher")
    add(measure, "gpu_only_rate", rates["none"], "op/s", "higher")
    add(measure, "neo_rate", rates["part"], "op/s", "higher")
    add(measure, "cpu_decode_share", counts["cpu_decodes"] / decodes if decodes else None, "1", "higher")
    add(measure, "stall_share", summary.stall_share, "1", "lower")


@bench(
    version=1, metric="gain", unit="1", better="higher", basis="simulated", limit=300.0,
    extra_metrics=["knee_rate", "gpu_only_knee", "knee_gain"],
    seconds={"smoke": 0.7, "quick": 1.6, "full": 20.0},
    machine=axis.choice("t4", "a10g", "h100", smoke=["a10g"], quick=["t4", "a10g"]),
    blocks=axis.integer(
        smoke=["200", "1650"], quick=["54", "200", "800", "1650", "2600"],
        full=["54", "100", "200", "400", "800", "1650", "2600"], high=1 << 20,
    ),
    output=axis.integer(smoke=["45"], quick=["45"], full=["45", "100"], high=10_000),
    requests=axis.integer(smoke=["60"], quick=["100"], full=["500"], low=10, high=1_000_000),
)  # fmt: skip
def kv_budget(case: Case, measure: Measure) -> None:
    """Throughput of NEO over GPU-only by the blocks of 16 tokens the GPU has for KV; simulated from published numbers.

    What is starved gains: 54 blocks are NEO's configuration of the T4, 1650 of the A10G; the gain goes to 1 as the
    budget stops binding. Inputs of 372 tokens, outputs of 45 by default, as OSC. knee_rate: Poisson requests a second
    up to which the mean latency of an output token stays within three times that of a request that is alone,
    gpu_only_knee the same of the baseline, knee_gain their ratio.
    """
    prompt = 372
    what = setup(case)
    near = 16 * case.blocks
    # NEO keeps one layer's worth of its blocks to stage what goes far
    if 1.1 * (prompt + case.output) > near * 31 / 33:
        measure.skip(f"{prompt} + {case.output} tokens do not fit {case.blocks} blocks")
    if near > what.priced.near_tokens:
        measure.skip(f"{case.blocks} blocks are more than the {what.priced.near_tokens // 16} the weights leave")
    what = Setup(what.priced, near, what.tokens)
    rates = {
        how: request_rate(what.run(workload(case, prompt), how).summary(), case.requests) for how in ("none", "part")
    }
    alone = what.run(workload(case, prompt, min(rates.values()) / 100), "none").summary().per_token.mean
    limit = SLOWER * alone if alone is not None else None
    measure.simulated(
        rates["part"] / rates["none"], source=SOURCE,
        detail={
            "paper": "7.5 on the T4 (figure 9)" if case.machine == "t4" and case.blocks == 54 else None,
            "model": what.priced.shape.name, "near_tokens": near, "prompt": prompt, "latency_limit": limit,
            "gpu_only_rate": rates["none"], "neo_rate": rates["part"],
        },
    )  # fmt: skip
    if limit is None:
        return
    most = 2.0 * max(rates.values())
    knees = {how: knee(case, what, how, prompt, limit, most) for how in ("none", "part")}
    add(measure, "knee_rate", knees["part"], "op/s", "higher")
    add(measure, "gpu_only_knee", knees["none"], "op/s", "higher")
    ratio = knees["part"] / knees["none"] if knees["none"] and knees["part"] else None
    add(measure, "knee_gain", ratio, "1", "higher")


def knee(case: Case, what: Setup, offload: str, prompt: int, limit: float, most: float) -> float | None:
    """Return the highest rate at which the mean latency a token stays within ``limit`` seconds, by halving the
    interval from ``most`` / RANGE to ``most``; None where it lies outside."""

    def within(rate: float) -> bool:
        mean = what.run(workload(case, prompt, rate), offload).summary().per_token.mean
        return mean is not None and mean <= limit

    low, high = most / RANGE, most
    if within(high) or not within(low):
        return None
    for _ in range(HALVINGS):
        middle: float = (low * high) ** 0.5
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def request_rate(summary: Summary, requests: int) -> float:
    """Return requests a second; NoData where not every request was served."""
    from kvbench.errors import NoData

    if summary.finished != requests or summary.request_rate is None:
        raise NoData("not every request was served", where="replay", got=summary.finished, expected=f"{requests}")
    return summary.request_rate


def add(measure: Measure, metric: str, value: float | None, unit: str, better: Any) -> None:
    """Add a simulated row."""
    reason = "" if value is not None else "there is none in the range that was looked at"
    measure.extra(
        metric, value, unit=unit, better=better, basis="simulated", kernel=SOURCE, n=1,
        status=None if value is not None else "skipped", reason=reason,
    )  # fmt: skip
