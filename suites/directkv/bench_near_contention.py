"""What the methods lose when something else takes near-memory bandwidth (D9): the CPU-aware order most, swap least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.systems.directkv.demands import demands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvbench.contract.axis import Value
    from kvbench.contract.result import Result
    from kvbench.systems.directkv.host_needs import Needs

LIMIT, PASSES_LEAST = 300.0, 13  # over the loads of a host case: warm-up, three samples in turns, proof
COPY_BYTES = 128 << 20
PASSES_INSIDE = 8  # of the copy on a GPU while the product runs: its rate is that of whole passes
LEAST_COVERED = 0.5  # of the product's time lies between ends of passes; a pass begins before it and ends after it
TRIES = 5  # of a sample whose copy was not under way all the time
PROBE_PASSES = 16
MOST_SLICE = 1 << 30  # bytes of a pass: its payload is made and compared


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether pair and device belong together."""
    return (axes["device"] == "gpu") == (axes["pair"] == "hbm:pinned")


def needs(axes: Mapping[str, Value]) -> Needs:
    """Return what a host case needs."""
    from kvbench.systems.directkv.host_needs import Needs, Want, tiled

    n = int(axes["n"])
    wants = (Want(axes["method"]),)  # type: ignore[arg-type]
    return Needs(tiled(n, n, n, str(axes["tile"])), wants, LIMIT, PASSES_LEAST, axes["pair"] == "dram:file")


scratch_bytes, setup_seconds = demands(needs)


@bench(
    version=1, metric="time", unit="s", better="lower", where=exists, disk=scratch_bytes, setup=setup_seconds,
    limit=LIMIT,
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
        quick=["resident", "cpu_aware"],
    ),
    share=axis.integer(smoke=["50"], quick=["50"], full=["25", "50", "75"], high=100),
)  # fmt: skip
def near_contention(case: Case, measure: Measure) -> None:
    """Seconds of a product while a copy takes `share` per cent of what one core (GPU: all of it) copies near.

    Ceiling, in turns: the same product without the copy. slowdown: seconds beside the copy over those; copy_rate: what
    the copy had meanwhile, its bytes counted once. On a host the copy has a core of its own: next to loads that run
    ahead it needs a third one. On a GPU it has as many blocks as that rate takes, a sample counts only when it ran from
    before the product to after it, and the L2 is flushed before each.
    """
    if case.device == "gpu":
        on_gpu(case, measure)
    else:
        on_host(case, measure)


def on_host(case: Case, measure: Measure) -> None:
    """Measure the host form."""
    from statistics import median

    from kvbench.kernels.paced_copy import PacedCopy
    from kvbench.measure import Reference
    from kvbench.memory.tiers import parse_pair
    from kvbench.systems.directkv.host_rig import cores, open_rig
    from kvbench.systems.directkv.host_rows import warmed

    context, pair, needed_here = measure.context, parse_pair(case.pair), needs(case.axes)
    needed_here.require()
    gemm = needed_here.gemm
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

    def run(reps: int) -> float:
        copy.start(wanted)
        try:
            seconds = work.run(reps)
        finally:
            rates.append(copy.stop())
        return seconds

    moved, store = work.plan.traffic, work.store
    link = warmed(measure, work)
    row = measure.pair(
        run, Reference("the same without the copy", work.run, 1.0), verify=work.verify, kernel=work.kernel,
        transport=None if store is None else store.transport, link=link,
        unique=moved.unique, demand=moved.demand, near=moved.near,
    )  # fmt: skip
    measure.note("copy_alone", full)
    measure.note("copy_wanted", wanted)
    measure.note("near_bytes_a_flop", moved.near / gemm.flops)
    add(measure, row, rates)


def add(measure: Measure, row: Result, rates: Sequence[float]) -> None:
    """Add the rows of what the product lost, by the primary ``row`` and its ceiling, and of what the copy had."""
    from statistics import median

    before = row.ceilings[0].value if row.ceilings else None
    if row.value is None or not before:
        return
    tainted = row.status == "tainted"
    for metric, unit, value in (("slowdown", "1", row.value / before), ("copy_rate", "B/s", median(rates[-row.n :]))):
        measure.extra(
            metric, value, unit=unit, better="higher" if unit == "B/s" else "lower", n=row.n,
            status="tainted" if tainted else "ok", reason=row.reason if tainted else "",
        )  # fmt: skip


def on_gpu(case: Case, measure: Measure) -> None:
    """Measure the GPU form: float32, the copy on a side stream by the fewest blocks that copy at the rate asked for.

    The blocks take multiprocessors as well as bandwidth: how many is in the detail, which ones is not controlled.
    """
    from math import ceil
    from statistics import median

    from kvbench.errors import KvbenchError
    from kvbench.measure import Reference
    from kvbench.memory.cuda.movers import BLOCKS_PER_SM, MemoryWork
    from kvbench.systems.directkv.gpu_gemm import Asked, GpuGemm, usual_depth
    from kvbench.systems.directkv.gpu_near_copy import L2_MULTIPLE, NearCopy, blocks_for
    from kvbench.systems.strata.overlap_beside import Beside
    from kvbench.timing.events import DEPTH
    from kvbench.timing.gpu_rows import on_gpu as describe
    from kvbench.timing.gpu_rows import resolved
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession() as gpu:
        describe(measure, gpu, link=case.method != "resident")
        seed, stream, sms = measure.context.seed, gpu.clock.stream, gpu.device.facts.sms
        depth = usual_depth(gpu.device, case.method)
        asked = Asked(case.n, case.n, case.n, case.method, "simt", case.tile, depth=depth)
        work = GpuGemm(gpu.service, gpu.enter, asked, seed)
        for flag in work.flags:
            measure.flag(flag)
        for name, value in work.notes().items():
            measure.note(name, value)
        if gpu.in_l2(work.near_bytes):
            measure.flag("in_l2")
        product = gpu.clock.cold(work.submit, work.operations, work.also)
        seconds = median(product(1) for _ in range(3))
        why = resolved(product)
        if why:
            measure.skip(why)
        size = L2_MULTIPLE * gpu.device.facts.l2_bytes
        whole = MemoryWork("copy", size, gpu.service, gpu.kernels, gpu.enter, seed + 11)
        copies = gpu.clock.hot(whole.submit)
        full = size / median(copies(1) for _ in range(3))
        whole.check()
        wanted = full * case.share / 100
        slice_bytes = min(MOST_SLICE, int(wanted * seconds / PASSES_INSIDE))
        copy = NearCopy(gpu.service, gpu.kernels, gpu.enter, slice_bytes, seed + 21)
        copy.slices[0].submit(stream)  # the first launch of a kernel loads it: not behind the blocker
        stream.synchronize()
        beside = Beside(gpu.device, work.submit, copy.slices, gpu.enter, gpu.clock.blocker)

        def rate_of(blocks: int) -> float:
            copy.use(blocks)
            return copy.slice_bytes / beside.copy_alone(stream, PROBE_PASSES)

        blocks, rate = blocks_for(wanted, rate_of, BLOCKS_PER_SM * sms)
        copy.use(blocks)
        most = (DEPTH - work.operations) // 2 - 8  # a pass and its event each, behind one blocker
        passes = 4 + ceil(2.0 * seconds * rate / copy.slice_bytes)
        if passes > most:
            measure.skip(f"the product takes as long as {passes} copies, more than may be queued")
        rates: list[float] = []
        missed = 0

        def window(_: int) -> float:
            found = beside.both(stream, passes)
            # blocks of the product may keep those of the copy waiting: queued all the time is not running all the time
            if not (found.covered and found.passes and found.copy >= LEAST_COVERED * found.work):
                return 0.0
            rates.append(found.passes * copy.slice_bytes / found.copy)
            return found.work

        cold_window, cold_alone = gpu.flushed(window), gpu.flushed(lambda _: beside.alone(stream))

        def once() -> float:
            nonlocal passes, missed
            for _ in range(TRIES):
                taken = cold_window(1) or 0.0
                if taken:
                    return taken
                missed += 1
                passes = min(most, passes + passes // 2)
            raise KvbenchError(
                "the copy was not under way all the time", where="near_contention", got=f"{TRIES} void samples",
                mend="choose another share or a larger n",
            )  # fmt: skip

        def run(reps: int) -> float:
            return sum(once() for _ in range(reps))

        def verify() -> None:
            copy.spoil()
            beside.copy_alone(stream, max(2, len(copy.slices)))
            copy.check()
            work.spoil()
            once()
            work.check()

        moved = work.traffic
        resident = case.method == "resident"
        row = measure.pair(
            run, Reference("the same without the copy", cold_alone, 1.0), verify=verify, kernel=work.kernel,
            transport=None if resident else "ce" if case.method == "swap" else "direct",
            link=0 if resident else None, unique=moved.unique, demand=moved.demand, near=moved.near,
        )  # fmt: skip
        for name, value in {
            "copy_alone": full, "copy_wanted": wanted, "copy_rate_alone": rate, "copy_ctas": blocks,
            "copy_kernel": copy.slices[0].kernel, "copy_passes": passes, "copy_missed": missed,
            "near_bytes_a_flop": moved.near / work.gemm.flops,
        }.items():  # fmt: skip
            measure.note(name, value)
        add(measure, row, rates)
