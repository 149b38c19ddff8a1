"""What steering the CPU buffer by service-level objectives does to bursts, simulated."""

from collections.abc import Mapping

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

SEEDS = (1, 2, 3)
PHYSICAL = 400_000  # tokens: 52 GB of an 8B model's KV; the paper states no size


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the values differ from those of another case: a fixed size knows no law and no alpha."""
    return axes["policy"] == "scaled" or (axes["law"] == "multiply" and axes["alpha"] == "2")


@bench(
    version=1, metric="attainment", unit="1", better="higher", basis="simulated", where=exists,
    extra_metrics=["ttft_attainment", "tpot_attainment", "p99_ttft", "reversals", "reaction", "mean_size"],
    seconds={"smoke": 0.3, "quick": 0.4, "full": 0.4},
    policy=axis.choice("scaled", "fixed"),
    law=axis.choice("multiply", "add", smoke=["multiply"], quick=["multiply"]),
    alpha=axis.choice("1.25", "1.5", "2", "4", smoke=["2"]),
    size_percent=axis.integer(smoke=["25"], quick=["25"], full=["5", "10", "25", "50", "100"], high=100),
    slo=axis.integer(smoke=["25"], quick=["5", "25"], full=["5", "10", "25"], high=1000),
    requests=axis.integer(smoke=["200"], quick=["300"], full=["300"], low=10, high=100_000),
)  # fmt: skip
def slo_controller(case: Case, measure: Measure) -> None:
    """Share of requests within both objectives when bursts are replayed in a queue model; mean of three seeds.

    The objectives are `slo` times the TTFT and TPOT of a request that is alone (25 in the paper). scaled: window of 5
    iterations, threshold 3, the buffer starts at size_percent of its physical size and follows the violations; fixed:
    it stays there. The paper leaves the update law open: multiply by alpha, or add alpha sixteenths of the buffer.
    reversals and mean_size tell how the size moved, reaction how many iterations passed from the first TTFT violation
    to the first growth. Simulated: nothing is measured here.
    """
    from statistics import fmean

    from kvbench.systems.ellm.burst import Engine, Load, arrivals, replay
    from kvbench.systems.ellm.slo import Params

    engine, load = Engine(), Load(case.requests)
    ttft, tpot = (case.slo * alone for alone in engine.no_load(load.prompt))
    params = Params(
        PHYSICAL, ttft, tpot, alpha=float(case.alpha), law=case.law, minimum=2 * load.prompt, step=PHYSICAL // 16
    )
    size = PHYSICAL * case.size_percent // 100
    found = [replay(arrivals(load, seed), engine, params, size, scaled=case.policy == "scaled") for seed in SEEDS]
    source = f"queue model of kvbench.systems.ellm.burst, seeds {' '.join(map(str, SEEDS))}"
    measure.simulated(
        fmean(one.attained for one in found), source=source,
        detail={
            "ttft_slo": ttft, "tpot_slo": tpot, "physical_tokens": PHYSICAL, "start_tokens": size,
            "parked": sum(one.parked for one in found), "iterations": sum(one.iterations for one in found),
            "changes": sum(one.changes for one in found), "lowest": min(one.attained for one in found),
            "highest": max(one.attained for one in found), "both_violated": params.both,
        },
    )  # fmt: skip

    def add(metric: str, value: float, unit: str, higher: bool) -> None:
        measure.extra(
            metric, value, unit=unit, better="higher" if higher else "lower", basis="simulated", kernel=source,
            n=len(found),
        )  # fmt: skip

    add("ttft_attainment", fmean(one.ttft_attained for one in found), "1", True)
    add("tpot_attainment", fmean(one.tpot_attained for one in found), "1", True)
    add("p99_ttft", fmean(one.p99_ttft for one in found), "s", False)
    if case.policy == "scaled":
        add("reversals", fmean(one.reversals for one in found), "1", False)
        add("mean_size", fmean(one.mean_size for one in found) / PHYSICAL, "1", False)
        reactions = [one.reaction for one in found if one.reaction is not None]
        if reactions:
            add("reaction", fmean(reactions), "1", False)
        else:
            measure.extra(
                "reaction", None, unit="1", better="lower", basis="simulated", status="skipped",
                reason="the buffer never grew",
            )  # fmt: skip
