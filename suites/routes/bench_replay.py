"""Schedulers replayed on a trace: what each policy makes of the same requests on the same machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.result import Better

if TYPE_CHECKING:
    from kvbench.replay.machine import Number

POLICIES = ("strata", "neo", "ellm_isolated", "ellm_elastic", "directkv", "recompute", "preempt", "lru")
WORKLOADS = ("loogle", "narrativeqa", "reviewmt", "sharegpt", "agentic", "osc", "synthetic")
MACHINES = ("t4", "a10g", "a100", "h100", "h200", "gh200", "this")
MODELS = ("mpt-30b", "llama-3-8b", "opt-13b", "qwen2.5-14b", "llama-2-7b", "llama-3-70b")
CAUSES = ("link_in", "link_out", "cpu", "until", "serial")
SPREADS = ("mean", "p50", "p90", "p99")


@bench(
    version=1, metric="request_rate", unit="req/s", better="higher", basis="simulated", limit=3600.0,
    extra_metrics=[
        "token_rate", *(f"ttft_{each}" for each in SPREADS), *(f"tpot_{each}" for each in SPREADS), "goodput",
        "attainment", "hit_rate", "stall_share", *(f"stall_{each}" for each in CAUSES), "link_in_bytes",
        "link_out_bytes", "map_calls", "rejected",
    ],
    seconds={"smoke": 0.2, "quick": 1.0, "full": 8.0},
    workload=axis.choice(*WORKLOADS, smoke=["loogle"], quick=["loogle", "sharegpt"]),
    policy=axis.choice(*POLICIES),
    params=axis.choice("default"),
    machine=axis.choice(*MACHINES, smoke=["h200"], quick=["h200"], full=["a10g", "h200", "gh200"]),
    model=axis.choice(*MODELS, smoke=["llama-3-8b"], quick=["llama-3-8b"], full=["llama-3-8b"]),
    rate_milli=axis.integer(smoke=["1000"], quick=["1000", "4000"], full=["500", "1000", "2000", "4000"], low=0,
                            high=10**9),
    requests=axis.integer(smoke=["60"], quick=["400"], full=["2000"], low=0, high=10_000_000),
    seed=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0),
    in_flight=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=1_000_000),
    slo_ttft_us=axis.integer(smoke=["2000000"], quick=["2000000"], full=["2000000"], low=0, high=10**10),
    slo_tpot_us=axis.integer(smoke=["100000"], quick=["100000"], full=["100000"], low=0, high=10**10),
)  # fmt: skip
def replay(case: Case, measure: Measure) -> None:
    """Requests a second that a policy finishes when a workload is replayed on a machine's costs.

    `rate_milli`: requests that arrive in 1000 s, 0 for what the workload has; `in_flight`: requests inside at once, 0
    for no limit; objectives in microseconds, 0 for none. `kvbench replay` makes cases of this bench with any trace
    file, options of presets and parameters. Simulated: nothing is measured here. detail.digest is that of the event
    log; the same case has the same digest everywhere.
    """
    from kvbench.replay import job as jobs
    from kvbench.replay.watch import watcher

    job = jobs.Job.of(case.axes)
    outcome, costs = jobs.run(job, watcher())
    found = outcome.summary(jobs.slo_of(job))
    if found.request_rate is None or not found.finished:
        why = f"; the first, {found.rejection}" if found.rejected else ""
        measure.skip(f"no request finished: {found.rejected} of {found.requests} rejected{why}")
    if found.rejected:
        measure.flag("rejected")
    source = f"event replay, costs of {job.machine}"
    trace = jobs.trace_of(job.workload)
    measure.simulated(
        found.request_rate, source=source,
        detail={
            "digest": outcome.digest, "events": outcome.events, "requests": found.requests, "finished": found.finished,
            "rejected": found.rejected, "rejection": found.rejection or None, "within": found.within,
            "span": found.span, "busy": found.busy,
            "near": found.near, "idle": found.idle, "iterations": found.iterations, "mean_batch": found.mean_batch,
            "prompt_tokens": found.prompt_tokens, "output_tokens": found.output_tokens, "reused": found.reused,
            "computed": found.computed, "dropped": found.dropped, "restored": found.restored,
            "trace_sha256": None if trace is None else trace.facts.sha256,
            "trace_format": None if trace is None else trace.format.name,
            "numbers_measured": _measured(costs.machine.numbers),
            "cost_notes": "; ".join(costs.notes)[:400] or None, "contention": _contention(costs.contention.sources),
            **{f"count_{name}": value for name, value in sorted(outcome.counters.items())},
        },
    )  # fmt: skip

    def add(metric: str, value: float | None, unit: str, better: Better, why: str) -> None:
        measure.extra(
            metric, value, unit=unit, better=better, basis="simulated", kernel=source, n=found.finished,
            status=None if value is not None else "skipped", reason="" if value is not None else why,
        )  # fmt: skip

    add("token_rate", found.token_rate, "tok/s", "higher", "no time passed")
    for name, spread, why in (
        ("ttft", found.ttft, "no request finished"),
        ("tpot", found.tpot, "no request had a second output token"),
    ):
        for each in SPREADS:
            add(f"{name}_{each}", getattr(spread, each), "s", "lower", why)
    add("goodput", found.goodput, "req/s", "higher", "no time passed")
    add("attainment", found.attainment, "1", "higher", "no request")
    add("hit_rate", found.hit_rate, "1", "higher", "no request started")
    add("stall_share", found.stall_share, "1", "lower", "no iteration took time")
    for cause in CAUSES:
        share = found.stalls[cause] / found.busy if found.busy else None
        add(f"stall_{cause}", share, "1", "lower", "no iteration took time")
    add("link_in_bytes", float(found.link_in_bytes), "B", "lower", "")
    add("link_out_bytes", float(found.link_out_bytes), "B", "lower", "")
    add("map_calls", float(found.map_calls), "1", "lower", "")
    add("rejected", float(found.rejected), "1", "lower", "")


def _measured(numbers: Mapping[str, Number]) -> str | None:
    """Return the names of the machine's numbers that were measured on it, None where all are a preset's."""
    return " ".join(name for name, number in numbers.items() if number.source.startswith("run ")) or None


def _contention(sources: Mapping[str, str]) -> str | None:
    """Return where the factors between resources come from, one text."""
    return "; ".join(f"{name}: {text}" for name, text in sources.items())[:400] or None
