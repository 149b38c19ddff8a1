"""The order in which blocks take tiles, and whether the L2 keeps lines of host memory between them (DirectKV D3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value
    from kvbench.contract.result import Scalar
    from kvbench.machine.link_bytes import LinkBytes
    from kvbench.measure import Reference
    from kvbench.systems.directkv.gpu_gemm import Asked
    from kvbench.systems.directkv.shapes import Method
    from kvbench.timing.gpu_session import GpuSession


# CPU-aware: parts of a column of tiles that are handed to blocks in contiguous runs; None: as many as it has tiles.
RUNS: dict[str, int | None] = {"columns": 1, "columns_4": 4, "units": None}


def setup_seconds(axes: Mapping[str, Value]) -> float:
    """Return what making and checking the matrices takes beyond the ``seconds`` of the bench."""
    return 4e-7 * int(axes["n"]) ** 2 / 100


@bench(
    version=1, metric="time", unit="s", better="lower", limit=300.0, setup=setup_seconds,
    extra_metrics=["amplification", "amplification_by_time"],
    seconds={"smoke": 1.0, "quick": 3.0, "full": 30.0},
    n=axis.integer(smoke=["1024"], quick=["4096"], full=["2048", "4096", "8192", "10240"], high=1 << 20),
    tile=axis.choice("64", "128", "256", smoke=["128"], quick=["128"]),
    raster=axis.choice(
        "m_fastest", "n_fastest", "swizzle", *RUNS, smoke=["m_fastest", "n_fastest"],
        quick=["m_fastest", "n_fastest", "swizzle", "units"],
    ),
    compute=axis.choice("simt", "tf32", "bf16", smoke=["simt"], quick=["simt"]),
    device=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=63),
)  # fmt: skip
def raster(case: Case, measure: Measure) -> None:
    """Seconds of the product with B in page-locked host memory, by the order in which blocks take its tiles.

    Timed by events, the L2 flushed before each pass. Naive, a block a tile of C: blocks that run together share
    columns of B (m_fastest), rows of A (n_fastest) or some of each (swizzle, bands of 8 tile rows); if lines of host
    memory stay in the L2, the bytes over the link differ between them, else every order moves as many. CPU-aware, a
    block a multiprocessor with a contiguous run of whole columns, of quarters of them (columns_4) or of single tiles
    (units): the finer, the more even the work and the more often B is read. amplification: link bytes over the bytes
    of B, by the board's counters, whose source is in the detail; amplification_by_time (naive): seconds times
    the rate of reading host memory in place, over the same, at least what crossed; by the algebra without a cache:
    amplification_predicted in the detail. Ceiling: B read once in place.
    """
    from kvbench.kernels.gpu.gemm_kernels import shape_of
    from kvbench.systems.directkv.gpu_gemm import Asked, usual_depth
    from kvbench.timing.gpu_rows import on_gpu
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=True)
        method: Method = "cpu_aware" if case.raster in RUNS else "naive"
        split, tiles = RUNS.get(case.raster), -(-case.n // shape_of(int(case.tile)).m)
        if split is not None and split > tiles:
            measure.skip(f"a column of {tiles} tiles cannot be handed out in {split} parts")
        asked = Asked(
            case.n, case.n, case.n, method, case.compute, int(case.tile), depth=usual_depth(gpu.device, method),
            split=split, raster="n_fastest" if case.raster in RUNS else case.raster,
        )  # fmt: skip
        measured(measure, gpu, asked)


def measured(measure: Measure, gpu: GpuSession, asked: Asked) -> None:
    """Add the rows of one product."""
    from kvbench.systems.directkv.gpu_ceilings import link_of
    from kvbench.systems.directkv.gpu_gemm import GpuGemm
    from kvbench.timing.gpu_rows import resolved

    work = GpuGemm(gpu.service, gpu.enter, asked, measure.context.seed)
    moved = work.traffic
    for flag in work.flags:
        measure.flag(flag)
    for name, value in work.notes().items():
        measure.note(name, value)
    measure.note("amplification_predicted", moved.link / moved.unique)
    run = gpu.clock.cold(work.submit, work.operations, work.also)

    def verify() -> None:
        why = resolved(run)
        if why:
            measure.skip(why)
        measure.note("error", work.check())
        work.spoil()  # and once more: what only the first pass had computed would be no product
        run(1)
        work.check()

    beside = in_place(measure, gpu, moved.unique)
    row = measure.pair(
        run, beside, unique=moved.unique, demand=moved.demand, near=moved.near, verify=verify, kernel=work.kernel,
        transport="direct",
    )  # fmt: skip
    if row.value is None:
        return
    boards = gpu.board()[0].indices
    found = link_of(
        gpu.service, gpu.enter, gpu.clock.stream, boards[0] if boards else None, work, measure.context.seed
    )  # fmt: skip
    amplification(measure, found, moved.unique, work.kernel)
    once = row.ceilings[0].value
    if once and asked.method == "naive":
        measure.extra(
            "amplification_by_time", row.value / once, unit="1", better="lower", basis="modelled", kernel=work.kernel,
            detail={"source": "seconds over those of reading B once in place, in turns: at least what crossed"},
        )  # fmt: skip


def in_place(measure: Measure, gpu: GpuSession, nbytes: int) -> Reference:
    """Return the measured ceiling: ``nbytes`` of host memory read where they lie by a full grid, in seconds."""
    from kvbench.measure import Reference
    from kvbench.systems.directkv.gpu_ceilings import reader

    context = measure.context
    lane = reader(gpu.service, gpu.kernels, gpu.enter, nbytes, "direct", min(8, context.cores), context.seed + 31)
    run = gpu.clock.cold(lane.mover.submit, lane.mover.operations)

    def verify() -> None:
        lane.spoil()
        run(1)
        lane.check()

    return Reference("B read once in place", run, lane.mover.link_bytes / nbytes, verify)


def amplification(measure: Measure, found: LinkBytes, unique: int, kernel: str) -> None:
    """Add the row of link bytes over ``unique``; without a count its bounds, and why, are in the detail."""
    detail: dict[str, Scalar] = {
        "link_source": found.source, "link_low": found.low, "link_high": found.high, "probe_ratio": found.probe_ratio,
        "window_s": found.window_s, "window_passes": found.passes, "not_by": found.reason or None,
    }  # fmt: skip
    if found.value is None:
        measure.extra(
            "amplification", None, unit="1", better="lower", status="skipped",
            reason=f"nobody counts link bytes here ({found.reason}); between {found.low / unique:.3g} and "
            f"{found.high / unique:.3g}", detail=detail,
        )  # fmt: skip
        return
    measure.extra(
        "amplification", found.value / unique, unit="1", better="lower", n=found.passes, kernel=kernel, detail=detail
    )
