"""The case study of DirectKV (D1): C = A B with B in the far tier, by every method, and which of them wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.systems.directkv.demands import demands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvbench.contract.axis import Value
    from kvbench.contract.result import Basis, Result, Scalar
    from kvbench.machine.link_bytes import LinkBytes
    from kvbench.measure import Reference
    from kvbench.systems.directkv.gpu_gemm import GpuGemm
    from kvbench.systems.directkv.host_gemm import HostGemm
    from kvbench.systems.directkv.host_needs import Needs
    from kvbench.systems.directkv.host_rig import Rig, Sample
    from kvbench.timing.gpu_session import GpuSession

ON_BOARD = "the algebra's bytes and operations at rates of the same round; recurrence over swap's buffers; no cache"
PREDICTED = "tile counts x rates of some loads and products alone, same moments; recurrence over slots, hand-over"
HOST_PAIRS = ("dram:file", "dram:dram", "dram@0:dram@1")
HOST_TILES = ("64", "128", "256", "384", "panel")
GPU_NONE = ("384", "panel")
LEAST_OF_VENDOR, VENDOR = 0.8, "cuBLAS fp32, no TF32"
TOO_LARGE = 1 << 31  # for BLAS: skipped, with its sizes, before anything is written
LIMIT = 1800.0
PASSES_LEAST, ROUNDS_LEAST = 14, 7  # over the loads of a case: warm-up, probes, three samples in turns, proof
PASSES_BEFORE, CORE_FLOPS = 10, 1e11  # of a host case before it is sampled; what a core multiplies in a second
SIZE = 1 << 40  # the algebra has no limit; what cannot run is skipped with its sizes
DEVICE = axis.choice("cpu", "gpu")
PAIR = axis.choice(*HOST_PAIRS, "hbm:pinned", smoke=["dram:file", "hbm:pinned"], quick=["dram:file", "hbm:pinned"])
COMPUTE = axis.choice("fp32", "simt", "tf32", "bf16", smoke=["fp32", "simt"])
# 0: as n. Few rows are what decode has: with one row of tiles nothing is read twice.
M = axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=SIZE)
K = axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=SIZE)


def on_its_device(axes: Mapping[str, Value]) -> bool:
    """Return whether pair and arithmetic are those of the device."""
    host = axes["device"] == "cpu"
    return host == (axes["pair"] in HOST_PAIRS) and host == (axes.get("compute", "fp32" if host else "simt") == "fp32")


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: staging is swap's, tiles matter neither to it nor to a resident B."""
    if not on_its_device(axes) or (axes["device"] == "gpu" and axes["tile"] in GPU_NONE):
        return False
    if axes["method"] in ("resident", "swap"):
        return axes["tile"] == "128" and (axes["method"] == "swap" or plain(axes))
    return plain(axes)


def plain(axes: Mapping[str, Value]) -> bool:
    """Return whether the axes of a staging buffer are at their first values."""
    return axes["staging"] == 100 and axes["buffering"] == "single"


def sizes(axes: Mapping[str, Value]) -> tuple[int, int, int]:
    """Return (m, n, k)."""
    m, n, k = (int(axes[name]) for name in ("m", "n", "k"))
    return m or n, n, k or n


def needs(axes: Mapping[str, Value]) -> Needs:
    """Return what a host case needs: scratch space, seconds, and the loads it may make in its time."""
    from kvbench.systems.directkv.host_needs import Needs, Want, contenders, tiled

    problem = tiled(*sizes(axes), str(axes["tile"]))
    file = axes["pair"] == "dram:file"
    if "method" not in axes:
        return Needs(problem, contenders(problem), LIMIT, ROUNDS_LEAST, file)
    want = Want(axes["method"], int(axes["staging"]), axes["buffering"] == "double")  # type: ignore[arg-type]
    return Needs(problem, (want,), LIMIT, PASSES_LEAST, file)


scratch_bytes, _ = demands(needs)


def setup_seconds(axes: Mapping[str, Value]) -> float:
    """Return what writing B, warm-up, probes and proof of a large product take beyond the ``seconds`` of the bench."""
    m, n, k = sizes(axes)
    if axes["device"] == "gpu" or max(m, n, k) >= TOO_LARGE:
        return 0.0
    return PASSES_BEFORE * 2.0 * m * n * k / CORE_FLOPS + needs(axes).setup


@bench(
    version=1, metric="time", unit="s", better="lower", where=exists, disk=scratch_bytes, setup=setup_seconds,
    limit=LIMIT,
    extra_metrics=["link_ratio", "near_buffer", "predicted_time", "error", "vendor_share"],
    seconds={"smoke": 1.0, "quick": 3.0, "full": 30.0},
    device=DEVICE, pair=PAIR, compute=COMPUTE,
    n=axis.integer(smoke=["1024"], quick=["1024"], full=["1000", "1024", "2048", "4096", "8192", "10240"], high=SIZE),
    m=M, k=K,
    tile=axis.choice(*HOST_TILES, smoke=["128"], quick=["128", "panel"]),
    method=axis.choice("resident", "swap", "naive", "cpu_aware", "cpu_aware_pipelined"),
    staging=axis.integer(smoke=["100"], quick=["100"], full=["25", "50", "100"], high=100),
    buffering=axis.choice("single", "double", smoke=["single"]),
)  # fmt: skip
def gemm(case: Case, measure: Measure) -> None:
    """Seconds of C = A B with B far, by method: near, swapped in, read in place by row or once, loads running ahead.

    Ceiling, in turns: the side that bounds it, the same loads alone or the product with B near. link_ratio: link bytes
    measured over those of the algebra, padding included; near_buffer: what the kernel says the buffers hold;
    predicted_time: by rates of the same moments; error: against float64, of the norm. On a host one core multiplies and
    another one loads; m and k of 0 are n; staging is swap's buffer in per cent of B, double: in two halves.
    """
    if case.device == "gpu":
        on_gpu(case, measure)
        return
    from kvbench.measure import Reference
    from kvbench.systems.directkv.host_rig import sides, take, typical
    from kvbench.systems.directkv.host_rows import link_ratio, warmed

    rig = host(case, measure)
    work = rig.make(case.method, staging=case.staging, double=case.buffering == "double")
    moved, store = work.plan.traffic, work.store
    taken: list[Sample] = []

    def run(reps: int) -> float:
        taken.extend(take(work) for _ in range(reps))
        return sum(one.measured for one in taken[-reps:])

    loads, products = sides(work)
    link = warmed(measure, work)
    describe(measure, work)
    if case.method == "resident":
        row = measure(
            run,
            verify=work.verify,
            kernel=work.kernel,
            unique=moved.unique,
            demand=moved.demand,
            near=moved.near,
            link=link,
        )
    else:
        if loads > products:
            top = Reference("the same loads alone", work.loads_alone, 1.0)
        else:
            top = Reference("the product with B near", rig.make("resident").run, 1.0)
        transport = None if store is None else store.transport
        row = measure.pair(
            run, top, verify=work.verify, kernel=work.kernel, transport=transport, unique=moved.unique,
            demand=moved.demand, near=moved.near, link=link,
        )  # fmt: skip
    if row.value is None:
        return
    used = taken[-row.n :]
    measure.note("bound", typical(used).bound)
    add(measure, row, "predicted_time", [one.predicted for one in used], basis="modelled", kernel=PREDICTED)
    held(case, measure, work)
    link_ratio(measure, work, row.n)
    measure.extra("error", work.error, unit="1", better="lower", n=1, detail={"against": "float64 rows of C"})


@bench(
    version=1, metric="round_time", unit="s", better="lower", where=on_its_device, disk=scratch_bytes,
    setup=setup_seconds, limit=LIMIT,
    extra_metrics=["winner_time", "regret", "predicted_time"], seconds={"smoke": 2.0, "quick": 4.0, "full": 40.0},
    device=DEVICE, pair=PAIR,
    n=axis.integer(smoke=["512"], quick=["512", "1024"], full=["1000", "1024", "2048", "4096"], high=SIZE),
    m=axis.integer(smoke=["0"], quick=["0", "64"], full=["0", "64", "256"], low=0, high=SIZE), k=K,
    tile=axis.choice("64", "128", "256", smoke=["128"], quick=["128"]),
)  # fmt: skip
def gemm_winner(case: Case, measure: Measure) -> None:
    """Which method is fastest at a point and which one should be: all of them in turns; a sample is one round.

    winner_time: of the fastest by median; predicted_time: what the predicted winner should have taken; regret: measured
    seconds of the predicted winner over those of the fastest, 1 where the prediction is right. detail holds the seconds
    of each. Methods within 5 % of each other count as tied: agree says so, agree_strictly does not.
    """
    if case.device == "gpu":
        winner_on_gpu(case, measure)
        return
    from kvbench.systems.directkv.host_rig import contenders, take

    works = contenders(host(case, measure))
    taken: dict[str, list[Sample]] = {name: [] for name in works}

    def once() -> float:
        for name, work in works.items():
            taken[name].append(take(work))
        return sum(samples[-1].measured for samples in taken.values())

    def verify() -> None:
        for work in works.values():
            work.verify()

    once()
    kernel = next(iter(works.values())).kernel
    row = measure(lambda reps: sum(once() for _ in range(reps)), verify=verify, kernel=kernel)
    decide(measure, row, taken, PREDICTED)


def decide(measure: Measure, row: Result, taken: Mapping[str, Sequence[Sample]], predicted: str) -> None:
    """Add winner, predicted winner and regret of the rounds of the primary ``row``; ``predicted``: by what."""
    from kvbench.systems.directkv.host_rig import typical
    from kvbench.systems.directkv.predict import TIE, regret, winner

    if row.value is None:
        return
    found = {name: typical(samples[-row.n :]) for name, samples in taken.items()}
    times = {name: one.measured for name, one in found.items()}
    forecast = {name: one.predicted for name, one in found.items()}
    best, chosen = winner(times), winner(forecast)
    cost = regret(chosen, times)
    for name, one in found.items():
        measure.note(f"seconds_{name}", one.measured)
        measure.note(f"predicted_{name}", one.predicted)
    measure.note("winner", best)
    measure.note("predicted_winner", chosen)
    measure.note("agree", cost <= 1.0 + TIE)
    measure.note("agree_strictly", best == chosen)
    measure.note("bound", found[best].bound)
    add(measure, row, "winner_time", [one.measured for one in taken[best][-row.n :]])
    add(
        measure, row, "predicted_time", [one.predicted for one in taken[chosen][-row.n :]], basis="modelled",
        kernel=predicted,
    )  # fmt: skip
    measure.extra("regret", cost, unit="1", better="lower", n=row.n, status=row.status, reason=row.reason)


def winner_on_gpu(case: Case, measure: Measure) -> None:
    """Measure the GPU form of a round: rates of link, copy engine, GPU memory and product, then every method once."""
    from kvbench.systems.directkv.gpu_gemm import Asked, usual_depth
    from kvbench.systems.directkv.gpu_winner import Board, forecast
    from kvbench.systems.directkv.host_rig import Sample
    from kvbench.timing.gpu_rows import on_gpu as describe_gpu
    from kvbench.timing.gpu_rows import resolved
    from kvbench.timing.gpu_session import GpuSession

    m, n, k = sizes(case.axes)
    context = measure.context
    with GpuSession() as gpu:
        describe_gpu(measure, gpu, link=True)
        asked = Asked(m, n, k, "naive", "simt", int(case.tile), depth=usual_depth(gpu.device, "naive"))
        board = Board(gpu.service, gpu.kernels, gpu.enter, asked, min(8, context.cores), context.seed)
        runs = {name: gpu.clock.cold(part.submit, part.operations, part.also) for name, part in board.parts.items()}
        taken: dict[str, list[Sample]] = {name: [] for name in board.works}

        def once() -> float:
            spent = {name: run(1) for name, run in runs.items()}
            rates = board.rates(spent)
            for name, work in board.works.items():
                told = forecast(work, rates)
                taken[name].append(Sample(spent[name], told.seconds, told.link, told.inside))
            return sum(spent[name] for name in board.works)

        def verify() -> None:
            for name, part in board.parts.items():
                why = resolved(runs[name])
                if why:
                    measure.skip(f"{name}: {why}")
                part.spoil()
                runs[name](1)
                part.check()

        once()
        kernels = " | ".join(work.kernel for work in board.works.values())
        row = measure(lambda reps: sum(once() for _ in range(reps)), verify=verify, kernel=kernels)
        decide(measure, row, taken, ON_BOARD)


def host(case: Case, measure: Measure) -> Rig:
    """Return the operands of the case on the host's tiers, with a core for products and another one for loads."""
    from kvbench.systems.directkv.host_rig import open_rig

    context, needed = measure.context, needs(case.axes)
    needed.require()
    return open_rig(measure, needed.gemm, case.pair, context.topology, context.scratch, context.seed)


def describe(measure: Measure, work: HostGemm) -> None:
    """Keep what the plan is made of."""
    plan, gemm = work.plan, work.plan.gemm
    measure.note("tiles", f"{gemm.rows} x {gemm.columns} x {gemm.steps}")
    measure.note("loads", len(plan.loads))
    measure.note("slots", plan.depth)
    measure.note("asked_bytes", work.asked_bytes)
    measure.note("amplification", plan.traffic.amplification)
    if plan.method == "swap":
        measure.note("staged_share", plan.near_buffer / plan.store)
    if work.store is not None:
        measure.note("file_system", work.store.system)
        for flag in work.store.flags:
            measure.flag(flag)


def held(case: Case, measure: Measure, work: HostGemm) -> None:
    """Add the row of the near buffer; ``predicted``: by the ledger's bytes, not by the plan."""
    from kvbench.systems.directkv.ledger import Held, near_memory

    plan = work.plan
    told = near_memory(plan.gemm, plan.method, staging=case.staging, double=plan.depth > 1, depth=plan.depth)
    found = Held(told.buffer, work.near_bytes)
    measure.extra(
        "near_buffer", found.measured, unit="B", better="lower", n=0 if found.measured is None else 1,
        reason="" if found.measured is not None else "the kernel does not tell which pages are in memory",
        detail={"predicted": found.predicted, "counted_by": found.source},
    )  # fmt: skip


def add(
    measure: Measure, row: Result, metric: str, values: Sequence[float], *, basis: Basis = "measured",
    kernel: str | None = None,
) -> None:  # fmt: skip
    """Add a row of the median of ``values``, which were taken with the primary row and are disturbed as it is."""
    import numpy as np

    from kvbench.timing.summary import summarise

    found = summarise(np.asarray(values, np.float64))
    tainted = row.status == "tainted"
    measure.extra(
        metric, found.median, unit="s", better="lower", low=found.low, high=found.high, n=found.n, basis=basis,
        kernel=kernel, status="tainted" if tainted else "ok", reason=row.reason if tainted else "",
    )  # fmt: skip


def on_gpu(case: Case, measure: Measure) -> None:
    """Measure the GPU form: timed by events, the L2 flushed before each pass; link bytes by the board's counters."""
    from kvbench.systems.directkv.gpu_gemm import Asked, GpuGemm, usual_depth
    from kvbench.timing.gpu_rows import on_gpu as describe_gpu
    from kvbench.timing.gpu_rows import resolved
    from kvbench.timing.gpu_session import GpuSession

    m, n, k = sizes(case.axes)
    with GpuSession() as gpu:
        describe_gpu(measure, gpu, link=case.method != "resident")
        asked = Asked(
            m, n, k, case.method, case.compute, int(case.tile), depth=usual_depth(gpu.device, case.method),
            staging=case.staging, double=case.buffering == "double",
        )  # fmt: skip
        work = GpuGemm(gpu.service, gpu.enter, asked, measure.context.seed)
        moved = work.traffic
        for flag in work.flags:
            measure.flag(flag)
        for name, value in work.notes().items():
            measure.note(name, value)
        run = gpu.clock.cold(work.submit, work.operations, work.also)
        errors: list[float] = []

        def verify() -> None:
            why = resolved(run)
            if why:
                measure.skip(why)
            work.check()
            work.spoil()
            run(1)
            errors.append(work.check())

        tops, transport = gpu_ceilings(measure, gpu, work), "ce" if case.method == "swap" else "direct"
        link = 0 if case.method == "resident" else None  # counted after the timing: link_ratio
        if not tops:
            row = measure(
                run, verify=verify, kernel=work.kernel, unique=moved.unique, demand=moved.demand, near=moved.near,
                link=link,
            )  # fmt: skip
        else:
            row = measure.pair(
                run, tops, verify=verify, kernel=work.kernel, unique=moved.unique, demand=moved.demand,
                near=moved.near, link=link, transport=None if case.method == "resident" else transport,
            )  # fmt: skip
        if row.value is None:
            return
        gpu_rows(measure, gpu, work, row, errors[-1])


def gpu_ceilings(measure: Measure, gpu: GpuSession, work: GpuGemm) -> list[Reference]:
    """Return what bounds the product, in seconds; for a resident one the vendor's, if there is one.

    B once over the link, by a full grid that reads host memory in place or for swap the copy engine: what crosses at
    least, whatever the L2 keeps. And the same launch with B near.
    """
    from kvbench.errors import Unavailable
    from kvbench.measure import Reference
    from kvbench.systems.directkv.gpu_ceilings import VendorProduct, reader, with_b_near

    context, asked = measure.context, work.asked
    if asked.method == "resident":
        try:
            vendor = VendorProduct(gpu.enter, work, gpu.service)
        except Unavailable as error:
            measure.note("no_reference", str(error))
            return []
        product = gpu.clock.cold(vendor.submit, vendor.operations)

        def verify_vendor() -> None:
            vendor.spoil()
            product(1)
            vendor.check()

        return [Reference(VENDOR, product, 1.0, verify_vendor)]
    way, unique = "ce" if asked.method == "swap" else "direct", work.traffic.unique
    lane = reader(gpu.service, gpu.kernels, gpu.enter, unique, way, min(8, context.cores), context.seed + 31)
    read = gpu.clock.cold(lane.mover.submit, lane.mover.operations)

    def verify() -> None:
        lane.spoil()
        read(1)
        lane.check()

    near = with_b_near(gpu.service, gpu.enter, work, context.seed)
    multiply = gpu.clock.cold(near.submit, near.operations)

    def verify_near() -> None:
        near.spoil()
        multiply(1)
        near.check()

    return [
        Reference(f"B once by {way}", read, lane.mover.link_bytes / unique, verify),
        Reference("the product with B near", multiply, 1.0, verify_near),
    ]


def gpu_rows(measure: Measure, gpu: GpuSession, work: GpuGemm, row: Result, error: float) -> None:
    """Add the rows beside a product's time: its near buffers, its error, its link bytes and what was predicted."""
    from kvbench.systems.directkv.gpu_ceilings import link_of

    measure.extra(
        "near_buffer", float(work.staging_bytes), unit="B", better="lower", n=1,
        detail={"counted_by": "buffers allocated for B in GPU memory"},
    )  # fmt: skip
    measure.extra("error", error, unit="1", better="lower", n=1, detail={"against": "float64, on random vectors"})
    tops = [ceiling.value for ceiling in row.ceilings]
    if work.asked.method == "resident":
        beside_vendor(measure, row)
        measure.extra(
            "link_ratio", None, unit="1", better="lower", status="skipped", reason="B lies near: nothing crosses"
        )
        return
    moved = work.traffic
    if tops[0] is not None and tops[1] is not None:
        link = tops[0] * moved.link / moved.unique
        measure.note("bound", "link" if link > tops[1] else "compute")
        measure.extra(
            "predicted_time", max(link, tops[1]), unit="s", better="lower", basis="modelled",
            kernel="the longer of its link bytes at that reader's rate and the product with B near",
        )  # fmt: skip
    boards = gpu.board()[0].indices
    board = boards[0] if boards else None
    counted(
        measure, link_of(gpu.service, gpu.enter, gpu.clock.stream, board, work, measure.context.seed), moved.link
    )  # fmt: skip


def beside_vendor(measure: Measure, row: Result) -> None:
    """Add the row of the vendor's seconds over a resident product's; below 0.8 of them the product is `suspect`, as a
    slow resident product makes any ratio to it look good."""
    top = next((ceiling.value for ceiling in row.ceilings if ceiling.name == VENDOR), None)
    if top is None or row.value is None:
        why = "no vendor's product stands beside it: see no_reference"
        measure.extra("vendor_share", None, unit="1", better="higher", status="skipped", reason=why)
        return
    share, tainted = top / row.value, row.status == "tainted"
    if share < LEAST_OF_VENDOR:
        measure.suspect(f"{share:.2f} of {VENDOR}: at least {LEAST_OF_VENDOR} expected")
    measure.extra(
        "vendor_share", share, unit="1", better="higher", n=row.n, status="tainted" if tainted else "ok",
        reason=row.reason if tainted else "",
    )  # fmt: skip


def counted(measure: Measure, found: LinkBytes, predicted: int) -> None:
    """Add the row of a GPU's link bytes over those of the algebra without a cache; below 1 where the L2 keeps some."""
    detail: dict[str, Scalar] = {
        "link_source": found.source, "link_low": found.low, "link_high": found.high, "probe_ratio": found.probe_ratio,
        "measured": found.value, "predicted": predicted, "not_by": found.reason or None,
    }  # fmt: skip
    if found.value is None:
        why = f"nobody counts link bytes here ({found.reason}); between {found.low:.3g} and {found.high:.3g}"
        measure.extra("link_ratio", None, unit="1", better="lower", status="skipped", reason=why, detail=detail)
        return
    measure.extra("link_ratio", found.value / predicted, unit="1", better="lower", n=found.passes, detail=detail)
