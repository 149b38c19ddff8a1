"""What coarse pages cost a prefix cache (S7), simulated."""

from kvbench import Case, Measure, axis, bench

NEAR = 300_000  # tokens: 40 GB of an 8B model's KV, the paper's example
FAR = {"none": 0, "ratio2": 2 * NEAR, "unlimited": 1 << 50}  # 2 is HiCache's default ratio
SEED = 1


@bench(
    version=1, metric="hit_rate", unit="1", better="higher", basis="simulated",
    extra_metrics=["padding_share", "hit_loss"],
    seconds={"smoke": 0.3, "quick": 1.2, "full": 4.0}, limit=120.0,
    trace=axis.choice("sharegpt", "loogle", "reviewmt", smoke=["sharegpt"], quick=["sharegpt", "loogle"]),
    page_tokens=axis.integer(smoke=["1", "32", "512"], quick=["1", "8", "32", "128", "512"], full="1..512", high=4096),
    far=axis.choice("none", "ratio2", "unlimited", smoke=["none"], quick=["none", "unlimited"]),
    requests=axis.integer(smoke=["300"], quick=["400"], full=["1000"], low=10, high=1_000_000),
)  # fmt: skip
def hit_rate(case: Case, measure: Measure) -> None:
    """Share of prompt tokens a radix cache finds when it matches whole pages of page_tokens tokens.

    Requests run one after the other through 300,000 tokens of near KV (far=ratio2: twice as many far; unlimited: any
    number), least recently used first out. A page is matched whole or not at all, so each point where two prompts part
    loses half a page on average. hit_loss: share of prompt tokens found at page 1 and not at this page; padding_share:
    near memory that only fills up last pages, of what requests hold behind the whole pages of their prompts. Simulated:
    no KV is touched.
    """
    from kvbench.replay.generate.presets import preset
    from kvbench.replay.visits import Visits, visit_all
    from kvbench.systems.strata.tiers import TieredCache
    from kvbench.systems.strata.writes import Writes

    def run(page: int) -> Visits:
        trace = preset(f"{case.trace}:block=1").requests(case.requests, seed=SEED)
        cache = TieredCache(NEAR, FAR[case.far], page, Writes("write_through"), named=True)
        return visit_all(trace, cache, page)

    found = run(case.page_tokens)
    finest = found if case.page_tokens == 1 else run(1)
    assert found.hit_rate is not None
    assert finest.hit_rate is not None
    source = f"kvbench.systems.strata.tiers on generated {case.trace}, seed {SEED}"
    measure.simulated(
        found.hit_rate, source=source,
        detail={
            "near_tokens": NEAR, "prompt_tokens": found.prompt, "near_hits": found.near, "far_hits": found.far,
            "requests_with_hit": found.with_hit, "lost_a_request": (finest.near + finest.far - found.near - found.far)
            / found.requests,
            "paper": "Mistral-24B on ShareGPT: falls monotonically, no values given; page 512 of HiCache 2.4 % below "
            "page 1 (Fig. 2, Fig. 10)",
        },
    )  # fmt: skip
    measure.extra(
        "hit_loss", finest.hit_rate - found.hit_rate, unit="1", better="lower", basis="simulated", kernel=source,
        n=found.requests,
    )  # fmt: skip
    measure.extra(
        "padding_share", found.padding / found.asked, unit="1", better="lower", basis="simulated", kernel=source,
        n=found.requests,
    )  # fmt: skip
