"""What the methods lose when something else takes near-memory bandwidth (D9): the CPU-aware order most, swap least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value

COPY_BYTES = 128 << 20


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether pair and device belong together."""
    return (axes["device"] == "gpu") == (axes["pair"] == "hbm:pinned")


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file of a case."""
    return 5 * int(axes["n"]) ** 2 if axes["pair"] == "dram:file" else 0


@bench(
    version=1, metric="time", unit="s", better="lower", where=exists, disk=scratch_bytes, limit=300.0,
    extra_metrics=["slowdown", "copy_rate"], seconds={"smoke": 1.2, "quick": 3.5, "full": 30.0},
    device=axis.choice("cpu", "gpu"),
    pair=axis.choice(
        "dram:file", "dram:dram", "dram@0:dram@1", "hbm:pinned", smoke=["dram:file", "hbm:pinned"],
        quick=["dram:file", "hbm:pinned"],
    ),
    n=axis.integer(smoke=["512"], quick=["1024"], full=["2048", "4096"], high=1 << 20),
    tile=axis.integer(smoke=["128"], quick=["128"], full=["128"], high=1 << 16),
    method=axis.choice(
        "resident", "swap", "naive", "cpu_aware", "cpu_aware_pipelined", smoke=["cpu_aware"],
        quick=["resident", "swap", "cpu_aware"],
    ),
    share=axis.integer(smoke=["50"], quick=["50"], full=["25", "50", "75"], high=100),
)  # fmt: skip
def near_contention(case: Case, measure: Measure) -> None:
    """Seconds of a product while a copy takes `share` per cent of what one core copies in near memory.

    Ceiling, in turns: the same product without the copy. slowdown: seconds beside the copy over those without, sample
    by sample; copy_rate: what the copy had meanwhile, its bytes counted once. The copy has a core of its own: next to
    loads that run ahead it needs a third one.
    """
    from statistics import median

    from kvbench.kernels.paced_copy import PacedCopy
    from kvbench.measure import Reference
    from kvbench.memory.tiers import parse_pair
    from kvbench.systems.directkv.host_rig import cores, open_rig, tiled

    if case.device == "gpu":
        from kvbench.timing.gpu_session import open_driver

        open_driver()
        measure.skip(
            "a copy beside a product is measured on hosts only: which of a GPU's blocks it takes is not controlled"
        )
    context, pair = measure.context, parse_pair(case.pair)
    gemm = tiled(case.n, case.n, case.n, str(case.tile))
    # in turns one core loads and multiplies, and the second one is free for the copy
    needed = 3 if case.method == "cpu_aware_pipelined" else 2
    cpus = cores(context.topology, pair.near.node, needed)
    rig = open_rig(measure, gemm, case.pair, context.topology, context.scratch, context.seed)
    work = rig.make(case.method)
    source = measure.sources(1, COPY_BYTES, "thp", node=pair.near.node)[0]
    target = measure.target(COPY_BYTES, "thp", node=pair.near.node)
    copy: PacedCopy = measure.enter(PacedCopy(cpus[-1], target.address, source.address, COPY_BYTES))
    copy.verify()
    full = median(copy.full_rate() for _ in range(3))
    wanted = full * case.share / 100
    rates: list[float] = []
    alone: list[float] = []
    ratios: list[float] = []

    def run(reps: int) -> float:
        copy.start(wanted)
        try:
            seconds = work.run(reps)
        finally:
            rates.append(copy.stop())
        if alone:
            ratios.append(seconds / reps / alone[-1])
        return seconds

    def without(reps: int) -> float:
        seconds = work.run(reps)
        alone.append(seconds / reps)
        return seconds

    without(1)
    moved, store = work.plan.traffic, work.store
    if store is not None:
        store.forget()  # pages of code that were read for the first pass
        without(3)
    row = measure.pair(
        run, Reference("the same without the copy", without, 1.0), verify=work.verify, kernel=work.kernel,
        transport=None if store is None else store.transport, link=0 if store is None else store.link,
        unique=moved.unique, demand=moved.demand, near=moved.near,
    )  # fmt: skip
    measure.note("copy_alone", full)
    measure.note("copy_wanted", wanted)
    measure.note("near_bytes_a_flop", moved.near / gemm.flops)
    if row.value is None:
        return
    tainted = row.status == "tainted"
    for metric, unit, values in (("slowdown", "1", ratios), ("copy_rate", "B/s", rates)):
        measure.extra(
            metric, median(values[-row.n :]), unit=unit, better="higher" if unit == "B/s" else "lower", n=row.n,
            status="tainted" if tainted else "ok", reason=row.reason if tainted else "",
        )  # fmt: skip
