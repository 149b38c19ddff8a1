"""How many tiles of B to load ahead (D4): time by the number of slots, the bytes being the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.systems.directkv.demands import demands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvbench.contract.axis import Value
    from kvbench.contract.result import Basis, Better, Status
    from kvbench.systems.directkv.host_gemm import Stamps
    from kvbench.systems.directkv.host_needs import Needs
    from kvbench.systems.directkv.shapes import Method

LIMIT, PASSES_LEAST = 300.0, 10  # over the loads of both products: warm-up, probes, three samples, proof
PREDICTED = "tile counts x rates of some loads and products alone, same moments; recurrence over slots, hand-over"


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether pair and device belong together."""
    return (axes["device"] == "gpu") == (axes["pair"] == "hbm:pinned")


def needs(axes: Mapping[str, Value]) -> Needs:
    """Return what a host case needs; the product with one slot beside the case has a layout of its own."""
    from kvbench.systems.directkv.host_needs import Needs, Want, tiled

    n = int(axes["n"])
    wants = (Want("cpu_aware_pipelined"), Want("cpu_aware_pipelined"))
    problem = tiled(int(axes["m"]) or n, n, n, str(axes["tile"]))
    return Needs(problem, wants, LIMIT, PASSES_LEAST, axes["pair"] == "dram:file")


scratch_bytes, setup_seconds = demands(needs)


@bench(
    version=1, metric="time", unit="s", better="lower", where=exists, disk=scratch_bytes, setup=setup_seconds,
    limit=LIMIT,
    extra_metrics=["gain", "predicted_time", "link_ratio", "overlap"],
    seconds={"smoke": 0.9, "quick": 2.5, "full": 30.0},
    device=axis.choice("cpu", "gpu"),
    pair=axis.choice(
        "dram:file", "dram:dram", "dram@0:dram@1", "hbm:pinned", smoke=["dram:file", "hbm:pinned"],
        quick=["dram:file", "hbm:pinned"],
    ),
    n=axis.integer(smoke=["512"], quick=["1024"], full=["1024", "2048", "4096"], high=1 << 20),
    m=axis.integer(smoke=["0"], quick=["0", "128"], full=["0", "128"], low=0, high=1 << 20),
    tile=axis.integer(smoke=["128"], quick=["128"], full=["128", "256"], high=1 << 16),
    depth=axis.integer(smoke=["1", "2"], quick=["1", "2"], full=["1", "2", "3", "4"], high=64),
)  # fmt: skip
def pipeline_depth(case: Case, measure: Measure) -> None:
    """Seconds of the B-stationary product with `depth` slots of tiles: 1 loads and multiplies in turns, more run ahead.

    Ceiling: the longer of its two sides alone, in turns. gain: seconds of one slot over these, in turns in the same
    case; predicted_time: by rates of the same moments; link_ratio: measured over algebra, the same at every depth;
    overlap: share of the loads' time during which a product ran. A load alone is longest against the product at few
    rows (m).
    """
    from statistics import median

    from kvbench.measure import Reference
    from kvbench.systems.directkv.host_rig import Sample, open_rig, sides, take
    from kvbench.systems.directkv.host_rows import link_ratio, warmed

    if case.device == "gpu":
        on_gpu(case, measure)
        return
    context, needed = measure.context, needs(case.axes)
    needed.require()
    rig = open_rig(measure, needed.gemm, case.pair, context.topology, context.scratch, context.seed)
    work, turns = rig.make("cpu_aware_pipelined", depth=case.depth), rig.make("cpu_aware_pipelined", depth=1)
    store = work.store
    assert store is not None
    loads, products = sides(work)
    taken: list[Sample] = []
    beside: list[float] = []
    serial: list[Sample] = []

    def run(reps: int) -> float:
        for _ in range(reps):
            serial.append(Sample(turns.run(), 0.0, 0.0, 0.0))
            taken.append(take(work))
            beside.append(overlapped(*work.stamps))
        return sum(one.measured for one in taken[-reps:])

    link = warmed(measure, work)
    longer = work.loads_alone if loads > products else work.products_alone
    moved = work.plan.traffic
    row = measure.pair(
        run, Reference("loads alone" if loads > products else "products alone", longer, 1.0), verify=work.verify,
        kernel=work.kernel, transport=store.transport, link=link, unique=moved.unique, demand=moved.demand,
        near=moved.near,
    )  # fmt: skip
    measure.note("bound", "link" if loads > products else "compute")
    measure.note("slots", case.depth)
    if row.value is None:
        return
    used = taken[-row.n :]
    state: Status = "tainted" if row.status == "tainted" else "ok"
    ratios = [before.measured / after.measured for before, after in zip(serial[-row.n :], used, strict=True)]
    rows: tuple[tuple[str, str, Sequence[float], Basis], ...] = (
        ("gain", "1", ratios, "measured"),
        ("predicted_time", "s", [one.predicted for one in used], "modelled"),
        ("overlap", "1", beside[-row.n :], "measured"),
    )
    for metric, unit, values, basis in rows:
        better: Better = "lower" if unit == "s" else "higher"
        measure.extra(
            metric, median(values), unit=unit, better=better, n=row.n, basis=basis, status=state, reason=row.reason,
            kernel=PREDICTED if basis == "modelled" else None,
        )  # fmt: skip
    link_ratio(measure, work, row.n)


def overlapped(loads: Stamps, products: Stamps) -> float:
    """Return the share of the loads' nanoseconds during which a product ran; both are (n, 2), in order."""
    spans = products.tolist()
    inside, at = 0, 0
    for begin, end in loads.tolist():
        while at < len(spans) and spans[at][1] <= begin:
            at += 1
        look = at
        while look < len(spans) and spans[look][0] < end:
            inside += min(end, spans[look][1]) - max(begin, spans[look][0])
            look += 1
    total = int((loads[:, 1] - loads[:, 0]).sum())
    return inside / total if total else 0.0


def on_gpu(case: Case, measure: Measure) -> None:
    """Measure the GPU form, in FP32: `depth` stages of tiles in shared memory. gain and overlap are not rows there:
    one stage is a case of its own."""
    from kvbench.measure import Reference
    from kvbench.systems.directkv.gpu_ceilings import link_of, reader
    from kvbench.systems.directkv.gpu_gemm import Asked, GpuGemm
    from kvbench.timing.gpu_rows import on_gpu as describe_gpu
    from kvbench.timing.gpu_rows import proof
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession() as gpu:
        describe_gpu(measure, gpu, link=True)
        method: Method = "cpu_aware" if case.depth == 1 else "cpu_aware_pipelined"
        asked = Asked(case.m or case.n, case.n, case.n, method, "simt", case.tile, depth=case.depth)
        work = GpuGemm(gpu.service, gpu.enter, asked, measure.context.seed)
        moved = work.traffic
        for flag in work.flags:
            measure.flag(flag)
        for name, value in work.notes().items():
            measure.note(name, value)
        run = gpu.clock.cold(work.submit, work.operations, work.also)
        threads = min(8, measure.context.cores)
        lane = reader(
            gpu.service, gpu.kernels, gpu.enter, moved.unique, "direct", threads, measure.context.seed + 31
        )  # fmt: skip
        read = gpu.clock.cold(lane.mover.submit, lane.mover.operations)

        def verify_read() -> None:
            lane.spoil()
            read(1)
            lane.check()

        top = Reference("link bytes read in place", read, lane.mover.link_bytes / moved.link, verify_read)
        row = measure.pair(
            run, top, verify=proof(measure, work, run), kernel=work.kernel, transport="direct", unique=moved.unique,
            demand=moved.demand, near=moved.near,
        )  # fmt: skip
        if row.value is None:
            return
        boards = gpu.board()[0].indices
        board = boards[0] if boards else None
        found = link_of(gpu.service, gpu.enter, gpu.clock.stream, board, work, measure.context.seed)
        measure.extra(
            "link_ratio", None if found.value is None else found.value / moved.link, unit="1", better="lower",
            n=found.passes, status="skipped" if found.value is None else "ok", reason=found.reason,
            detail={"link_source": found.source, "link_low": found.low, "link_high": found.high},
        )  # fmt: skip
