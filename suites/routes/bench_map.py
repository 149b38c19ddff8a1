"""Where which route to a KV cache pays: every policy at each place of a map of link bandwidth and context length."""

from __future__ import annotations

from kvbench import Case, Measure, axis, bench

POLICIES = ("strata", "neo", "ellm_isolated", "ellm_elastic", "directkv", "recompute", "preempt", "lru")
ROUTES = ("recompute", "load", "in_place", "cpu")
MACHINES = ("t4", "a10g", "a100", "h100", "h200", "gh200")
MODELS = ("llama-3-8b", "qwen2.5-14b", "opt-13b", "llama-2-7b", "llama-3-70b")
GB = 10**9
REQUESTS = 30
ALIKE = 1.02  # the model's times this close are one


@bench(
    version=2, metric="route_gain", unit="1", better="higher", basis="simulated", limit=600.0,
    extra_metrics=[
        *(f"rate_{name}" for name in POLICIES), *(f"model_{name}" for name in ROUTES), "load_from", "place_from",
    ],
    seconds={"smoke": 0.4, "quick": 0.6, "full": 1.5},
    link=axis.integer(smoke=["12", "450"], quick=["12", "25", "50", "100", "200", "450"],
                      full=["12", "25", "50", "100", "200", "450"], high=100_000),
    context=axis.integer(smoke=["2048", "32768"], quick=["2048", "8192", "32768", "131072"], full="2048..131072",
                         low=256, high=1 << 20),
    questions=axis.integer(smoke=["1", "3"], quick=["1", "3"], full=["1", "3", "10"], high=30),
    fits=axis.integer(smoke=["4"], quick=["4"], full=["1", "4", "16"], high=1024),
    output=axis.integer(smoke=["64"], quick=["64"], full=["64", "512"], high=1 << 16),
    machine=axis.choice(*MACHINES, smoke=["h200"], quick=["h200"], full=["a10g", "h200", "gh200"]),
    model=axis.choice(*MODELS, smoke=["llama-3-8b"], quick=["llama-3-8b"], full=["llama-3-8b"]),
)  # fmt: skip
def map(case: Case, measure: Measure) -> None:
    """How many times as fast as computing again the best policy serves contexts that do not fit near memory.

    30 requests at once: documents of `context` tokens, each asked `questions` times in turns, `output` tokens an
    answer; near memory holds `fits` requests, far memory all. `link`: GB/s of the link in each direction, for every
    way to use it. rate_*: requests a second of each policy, simulated; model_*: the most a route can reach in order of
    the requests, modelled; load_from, place_from: link bandwidth from which loading a context, and reading it in
    place, beat computing it again, modelled. detail: winner and second of the policies (of those within 1 % of the
    best the simplest), the winner's route, the model's, and whether the model has that route within 2 % of its own
    winner.
    """
    from kvbench.replay.engine import replay
    from kvbench.replay.machine import preset
    from kvbench.replay.policies import make, parse_params
    from kvbench.replay.routes import ROUTE_OF, Cell, estimate, ranking, words

    documents = max(1, REQUESTS // case.questions)
    cell = Cell(case.link * GB, case.context, case.output, case.fits, case.questions, documents)
    costs = cell.costs(preset(case.machine), case.model)
    rates: dict[str, float] = {}
    why: dict[str, str] = {}
    for name in POLICIES:
        found = replay(cell.trace(), make(name, costs, parse_params(name, words(name, cell))), costs).summary()
        if found.finished == cell.requests and found.request_rate is not None:
            rates[name] = found.request_rate
        else:
            first = f", the first, {found.rejection}" if found.rejected else ""
            why[name] = f"{found.rejected} of {found.requests} requests rejected{first}"
    if "recompute" not in rates:
        measure.skip(f"nothing to compare with: recompute, {why['recompute']}")
    order = ranking(rates)
    model = estimate(costs, cell)
    source = f"event replay, costs of {case.machine} with this link and memory"
    formula = "the least a route moves and computes, requests in order, everything that can overlap does"
    measure.simulated(
        rates[order[0]] / rates["recompute"], source=source,
        detail={
            "winner": order[0], "second": order[1], "lead": rates[order[0]] / rates[order[1]],
            "route": ROUTE_OF[order[0]], "model_winner": model.winner,
            "model_gain": model.seconds["recompute"] / model.seconds[model.winner],
            "agree": model.seconds[ROUTE_OF[order[0]]] <= ALIKE * model.seconds[model.winner],
        },
    )  # fmt: skip
    for name in POLICIES:
        measure.extra(
            f"rate_{name}", rates.get(name), unit="req/s", better="higher", basis="simulated", kernel=source,
            status="ok" if name in rates else "skipped", reason=why.get(name, ""), n=cell.requests,
        )  # fmt: skip
    for route in ROUTES:
        rate = cell.requests / model.seconds[route]  # type: ignore[index]  # the four words of the model's type
        measure.extra(f"model_{route}", rate, unit="req/s", better="higher", basis="modelled", kernel=formula)
    for name, link in (("load_from", model.load_from), ("place_from", model.place_from)):
        measure.extra(
            name, link, unit="B/s", better="lower", basis="modelled", kernel=formula,
            status="ok" if link is not None else "skipped", reason="" if link is not None else "at no bandwidth",
        )  # fmt: skip
