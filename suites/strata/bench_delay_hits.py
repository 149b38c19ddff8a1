"""How much is computed again because a prefix was still being made (S9), simulated."""

from kvbench import Case, Measure, axis, bench

SEED = 1


@bench(
    version=1, metric="delayed_share", unit="1", better="lower", basis="simulated",
    extra_metrics=["delayed_requests", "delayed_pages"], seconds={"smoke": 0.1, "quick": 0.2, "full": 2.0},
    trace=axis.choice("agentic", "loogle", smoke=["agentic"], quick=["agentic", "loogle"]),
    resolve_ms=axis.integer(
        smoke=["100", "1000", "10000"], quick=["100", "300", "1000", "3000", "10000"],
        full=["10", "30", "100", "300", "1000", "3000", "10000", "100000"], low=0, high=1_000_000_000,
    ),
    rate=axis.integer(smoke=["4"], quick=["1", "4", "16"], full="1..64", high=100_000),
    requests=axis.integer(smoke=["500"], quick=["1000"], full=["2000", "20000"], low=10, high=1_000_000),
)  # fmt: skip
def delay_hits(case: Case, measure: Measure) -> None:
    """Share of repeated pages that miss only because they are still being made, resolve_ms after they were asked for.

    An unlimited cache in pages of 512 tokens. The trace is drawn once at 1 request a second; its times are divided by
    `rate`, as the paper scales its trace. Repeats are pages asked for before; at an endless resolve time all of them
    miss. delayed_requests: share of the requests with such a miss; delayed_pages: their number. Simulated.
    """
    from kvbench.replay.generate.presets import preset
    from kvbench.systems.strata import delay_hits as simulation

    trace = preset(case.trace).requests(case.requests, 1.0, SEED)
    pages = ((request.arrival, request.hash_ids or ()) for request in trace)
    found = simulation.delay_hits(pages, case.resolve_ms / 1e3, speed=float(case.rate))
    share = found.share_of_repeats
    if share is None:
        measure.skip(f"no page of {case.requests} requests is asked for twice")
    source = f"kvbench.systems.strata.delay_hits on generated {case.trace}, seed {SEED}"
    measure.simulated(
        share, source=source,
        detail={
            "pages": found.asked, "first_asked": found.first, "repeats": found.repeats, "hit_rate": found.hit_rate,
            "paper": "Mooncake tool-agent trace: rises with resolve time and throughput (Fig. 12, no values given)",
        },
    )  # fmt: skip
    measure.extra(
        "delayed_requests", found.requests / found.total, unit="1", better="lower", basis="simulated", kernel=source,
        n=found.total,
    )  # fmt: skip
    measure.extra(
        "delayed_pages", float(found.delayed), unit="1", better="lower", basis="simulated", kernel=source, n=found.total
    )
