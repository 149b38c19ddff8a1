"""What each part of Strata brings at each cache distance (S8), simulated."""

from typing import Any

from kvbench import Case, Measure, axis, bench

NEAR_PERCENT = 40  # of the tokens asked for more than once; all of LooGLE's documents against an H200: 37
FLOOD = 1000.0  # requests a second no machine serves, so that the queue is always full
SEED = 1
BLOCK_TOKENS, LONGEST, CHUNK = 512, 21_600, 4096  # of the trace; a document; tokens the onset is taken at
PARTS = ("io", "defer", "balance", "bubble")
# What the paper's Fig. 11 gives: each part on top of those before it.
PAPER = {
    ("min", "defer"): "+42 %", ("shuffle", "io"): "+76 %", ("max", "io"): "+95 %", ("shuffle", "balance"): "+11 %",
    ("max", "balance"): "+12 %", ("shuffle", "bubble"): "+8 %", ("max", "bubble"): "+3 %",
}  # fmt: skip


@bench(
    version=1, metric="speedup", unit="1", better="higher", basis="simulated",
    extra_metrics=["request_rate", "ttft_mean", "stall_share", "hit_rate"],
    seconds={"smoke": 0.3, "quick": 0.5, "full": 2.5}, limit=120.0,
    part=axis.choice(*PARTS, "all", smoke=["defer", "all"]),
    distance=axis.choice("min", "shuffle", "max", smoke=["min", "max"]),
    machine=axis.choice("h200", "gh200", "a100", smoke=["h200"], quick=["h200"]),
    model=axis.choice("llama-3-8b", "qwen2.5-14b", smoke=["llama-3-8b"], quick=["llama-3-8b"]),
    ratio=axis.choice("onset", "paper", smoke=["onset"]),
    in_flight=axis.integer(smoke=["32"], quick=["32"], full=["8", "32", "128"], high=100_000),
    requests=axis.integer(smoke=["300"], quick=["500"], full=["2410"], low=100, high=1_000_000),
)  # fmt: skip
def scheduler_ablation(case: Case, measure: Measure) -> None:
    """Throughput with one more part of Strata over the throughput without it, LooGLE-like documents and questions.

    The parts come in the paper's order, each on top of those before: io (SM copies from a page-first pool in pages of
    one token, instead of a copy engine's call a fragment in pages of 32), defer (delay-hit deferral), balance
    (Algorithm 1 with `ratio`), bubble; all: the four against none of them. `distance`: how far apart questions about
    one document come. `ratio`: tokens loaded a computed one above which a batch is loading bound: the paper's 100, or
    the onset that the machine's numbers give. Near KV for 40 % of the documents, written through; `in_flight` requests
    inside, the queue always full. The detail has the paper's figure. Simulated from the numbers of a preset machine.
    """
    from collections import Counter

    from kvbench.replay.costs import costs
    from kvbench.replay.engine import replay
    from kvbench.replay.generate.presets import preset
    from kvbench.replay.machine import preset as machine
    from kvbench.replay.metrics import Summary
    from kvbench.replay.policies.strata import Params, make

    prices = costs(machine(case.machine), case.model)
    name = f"loogle:distance={case.distance}"
    asked = Counter(page for one in preset(name).requests(case.requests, FLOOD, SEED) for page in one.hash_ids or ())
    near = sum(times > 1 for times in asked.values()) * BLOCK_TOKENS * NEAR_PERCENT // 100
    if near < 2 * LONGEST:
        measure.skip(f"{case.requests} requests repeat too little: {near} near tokens hold no two documents")
    if near > prices.near_tokens:  # the share of the documents is kept, on a GPU with room for it
        share = 1.0 - prices.machine["reserve_share"]
        room = (near * prices.token_bytes + prices.weight_bytes) / share + prices.token_bytes
        prices = costs(prices.machine.with_(why="room for the experiment's share", memory=room), case.model)
    ratio = 100.0
    if case.ratio == "onset":
        computed = prices.layer([(CHUNK, LONGEST)]).seconds / CHUNK
        ratio = computed / (prices.load(CHUNK) / CHUNK)

    def run(count: int) -> tuple[Summary, Any]:
        """Replay with the first ``count`` parts."""
        on = dict(zip(PARTS, (at < count for at in range(len(PARTS))), strict=True))
        how: dict[str, Any] = (
            {"transport": "sm", "layout": "page_first", "page_tokens": 1}
            if on["io"]
            else {"transport": "ce", "layout": "layer_first", "page_tokens": 32}
        )
        params = Params(
            near_tokens=near, write="write_through", ratio=ratio, defer=on["defer"],
            balance=on["balance"], bubble=on["bubble"], **how,
        )  # fmt: skip
        trace = preset(name).requests(case.requests, FLOOD, SEED)
        outcome = replay(trace, make(prices, params), prices, in_flight=case.in_flight)
        return outcome.summary(), outcome.counters

    number = len(PARTS) if case.part == "all" else PARTS.index(case.part) + 1
    without, _ = run(0 if case.part == "all" else number - 1)
    found, counters = run(number)
    rates = found.request_rate, without.request_rate
    if rates[0] is None or rates[1] is None or found.ttft.mean is None:
        measure.skip("no request was served")
    source = f"kvbench.replay, policy strata, generated loogle, seed {SEED}; rates of {case.machine}"
    measure.simulated(
        rates[0] / rates[1], source=source,
        detail={
            "rate_without": rates[1], "ttft_without": without.ttft.mean, "stall_without": without.stall_share,
            "hit_rate_without": without.hit_rate, "rejected": found.rejected,
            "deferred": counters["deferred"], "bundled": counters["bundled"], "bubbles": counters["bubbles"],
            "duplicate_tokens": counters["duplicate_tokens"], "near_tokens": near, "memory": prices.machine["memory"],
            "loading_bound": ratio, "paper": PAPER.get((case.distance, case.part)),
        },
    )  # fmt: skip

    def add(metric: str, value: float | None, unit: str, higher: bool = False) -> None:
        measure.extra(
            metric, value, unit=unit, better="higher" if higher else "lower", basis="simulated", kernel=source,
            n=found.finished,
        )  # fmt: skip

    add("request_rate", rates[0], "1/s", True)
    add("ttft_mean", found.ttft.mean, "s")
    add("stall_share", found.stall_share, "1")
    add("hit_rate", found.hit_rate, "1", True)
