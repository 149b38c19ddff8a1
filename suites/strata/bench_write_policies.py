"""What each write policy writes, and how long evictions wait for it (S10), simulated."""

from collections.abc import Mapping

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

NEAR = 300_000  # tokens: 40 GB of an 8B model's KV
SEED, MODEL = 1, "llama-3-8b"


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the number of uses means something: only the selective policy counts them."""
    return axes["write"] == "write_through_selective" or axes["uses"] == 1


@bench(
    version=1, metric="written", unit="B", better="lower", basis="simulated", where=exists,
    extra_metrics=["eviction_wait", "loads_per_write", "hit_rate"],
    seconds={"smoke": 0.1, "quick": 0.3, "full": 0.6},
    trace=axis.choice("one_shot", "multi_turn"),
    write=axis.choice("write_back", "write_through", "write_through_selective"),
    uses=axis.integer(smoke=["1", "2"], quick=["1", "2", "4"], full=["1", "2", "4", "8"], high=1000),
    far=axis.integer(smoke=["2"], quick=["2"], full=["1", "2", "8"], low=0, high=1000),
    machine=axis.choice("h200", "gh200", "a100", smoke=["h200"], quick=["h200"]),
    requests=axis.integer(smoke=["300"], quick=["1000"], full=["2000", "5000"], low=10, high=1_000_000),
)  # fmt: skip
def write_policies(case: Case, measure: Measure) -> None:
    """Bytes of KV written to the far tier when requests run one after the other through a cache of 300,000 tokens.

    one_shot: documents nobody asks for again; multi_turn: dialogues of about eleven turns about one paper each.
    write_back writes on eviction, which waits for it (eviction_wait: seconds at the machine's rate of SM copies, KV of
    Llama-3-8B); write_through writes at once; selective after `uses` uses. far: its size as a multiple of the near
    tier. loads_per_write: bytes loaded back over bytes written. Simulated: no KV is touched.
    """
    from collections.abc import Iterator
    from dataclasses import replace

    from kvbench.replay.costs import costs
    from kvbench.replay.generate.presets import preset
    from kvbench.replay.machine import preset as machine
    from kvbench.replay.request import Request
    from kvbench.replay.visits import visit_all
    from kvbench.systems.strata.tiers import TieredCache
    from kvbench.systems.strata.writes import Writes

    def one_shot() -> Iterator[Request]:
        first = 0
        for request in preset("loogle").requests(case.requests, seed=SEED):
            assert request.hash_ids is not None
            first += len(request.hash_ids)
            yield replace(request, hash_ids=tuple(range(first - len(request.hash_ids), first)))

    prices = costs(machine(case.machine), MODEL)
    trace = one_shot() if case.trace == "one_shot" else preset("reviewmt").requests(case.requests, seed=SEED)
    cache = TieredCache(NEAR, case.far * NEAR, 512, Writes(case.write, case.uses), named=True)
    found, moved = visit_all(trace, cache, 1), cache.moved
    written = moved.written + moved.flushed
    assert found.hit_rate is not None
    source = f"kvbench.systems.strata.tiers, generated requests, seed {SEED}; rates of {case.machine}"
    measure.simulated(
        float(written * prices.token_bytes), source=source,
        detail={
            "near_tokens": NEAR, "written_tokens": moved.written, "flushed_tokens": moved.flushed,
            "loaded_tokens": moved.loaded, "evicted_tokens": moved.evicted, "lost_tokens": moved.lost,
            "dropped_tokens": moved.dropped, "model": MODEL,
            "paper": "selective with threshold 2 is Strata's default; no bytes are given (section 4.1)",
        },
    )  # fmt: skip
    waited = prices.layers * prices.evict(moved.flushed)

    def add(metric: str, value: float, unit: str, higher: bool = False) -> None:
        measure.extra(
            metric, value, unit=unit, better="higher" if higher else "lower", basis="simulated", kernel=source,
            n=found.requests,
        )  # fmt: skip

    add("eviction_wait", waited, "s")
    add("hit_rate", found.hit_rate, "1", True)
    if written:
        add("loads_per_write", moved.loaded / written, "1", True)
    else:
        measure.extra(
            "loads_per_write", None, unit="1", better="higher", basis="simulated", status="skipped",
            reason="nothing was written",
        )  # fmt: skip
