"""How many blocks of GPU threads a link needs for pages of one item (Strata S3), and what a quota of them reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value
    from kvbench.measure import Reference
    from kvbench.timing.events import EventRun
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.transport.gpu_lane import Lane
    from kvbench.transport.paged_sm import PageThreads

BLOCKS = ("1", "2", "4", "8", "16", "32")
PLATEAU = "plateau"  # the word for the smallest quota of BLOCKS that reaches PLATEAU_SHARE of the best of them
PLATEAU_SHARE = 0.95
ROUNDS = 5


def setup_seconds(axes: Mapping[str, Value]) -> float:
    """Return what making and checking large pools takes beyond the ``seconds`` of the bench."""
    from kvbench.systems.strata.transfer import setup_seconds

    return setup_seconds(int(axes["bytes"]))


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", limit=300.0, setup=setup_seconds,
    seconds={"smoke": 0.6, "quick": 3.0, "full": 30.0},
    item=axis.bytes(
        smoke=["2KiB"], quick=["128B", "2KiB", "64KiB"], full="128B..64KiB", low="16B", high="16MiB",
    ),
    blocks=axis.choice(*BLOCKS, PLATEAU, smoke=["2", PLATEAU], quick=["2", PLATEAU]),
    threads=axis.choice("256", "1024", smoke=["1024"], quick=["1024"]),
    direction=axis.choice("fetch", "evict"),
    bytes=axis.bytes(smoke=["64MiB"], quick=["64MiB"], full=["64MiB", "1GiB"], low="64KiB", high="64GiB"),
    device=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=63),
)  # fmt: skip
def block_quota(case: Case, measure: Measure) -> None:
    """Items of K and V by a quota of blocks between GPU memory and page-locked host memory, pages in random order.

    Timed by events, the L2 flushed before each pass. Ceilings: the same items in the same order by a block a
    multiprocessor, then host memory read (evict: written) in order by as many. `plateau` takes all quotas in turns and
    measures the smallest that reaches 95 % of the best; `plateau_blocks` and the rate of each are in the detail.
    """
    from kvbench.timing.gpu_rows import on_gpu, proof
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=True)
        lane, quotas = lanes(case, measure, gpu)
        mover = plateau(measure, gpu, quotas) if case.blocks == PLATEAU else quotas[int(case.blocks)]
        run = gpu.clock.cold(mover.submit, mover.operations)

        measure.note("grid", mover.grid)
        measure.note("fragment_bytes", case.item)
        measure.note("in_flight_per_block", mover.in_flight)
        beside = [full_grid(gpu, quotas[0], lane), in_place(case, measure, gpu)]
        verify = proof(measure, lane, run)
        row = measure.pair(
            run, beside, link=mover.link_bytes, unique=mover.link_bytes, verify=verify, kernel=mover.kernel,
            transport="sm", ceilings=[gpu.link_ceiling(1)],
        )  # fmt: skip
        if row.value is not None:
            measure.note("bandwidth_per_block", row.value / mover.grid)
            other = row.ceilings[1]
            measure.note(f"of_{other.name}", None if not other.value else row.value / other.value)


def lanes(case: Case, measure: Measure, gpu: GpuSession) -> tuple[Lane, dict[int, PageThreads]]:
    """Return the lane of the case and its movers by quota, 0 being a block a multiprocessor; all share its buffers."""
    from kvbench.model.geometry import KVGeometry
    from kvbench.model.layout import Pool, check_fragments, moves
    from kvbench.transport.gpu_pieces import scattered
    from kvbench.transport.paged import open_quotas

    pages = case.bytes // (2 * case.item)
    if pages < 4:
        measure.skip(f"{case.bytes} bytes hold {pages} pages of K and V of {case.item} bytes, and 4 are needed")
    check_fragments(2 * pages, f"{case.bytes} bytes of items of {case.item}")  # before an order of them is drawn
    # One layer and one head: a page of one token is one item of K and one of V, in any layout.
    shape = KVGeometry("items", 1, 1, case.item, 2, 1, "one item a page")
    near, far = (Pool(shape, layout, 1, pages) for layout in ("layer_first", "page_first"))
    index = range(pages), scattered(pages, measure.context.seed)
    fetch = case.direction == "fetch"
    chosen = moves(far, near, index[1], index[0]) if fetch else moves(near, far, index[0], index[1])
    wanted = [int(b) for b in BLOCKS] if case.blocks == PLATEAU else [int(case.blocks)]
    lane, made = open_quotas(
        gpu.service, gpu.kernels, chosen, case.direction, near, far, gpu.enter, measure.context.seed,
        [gpu.device.facts.sms, *wanted], threads=int(case.threads), touch=min(8, measure.context.cores),
    )  # fmt: skip
    for flag in lane.flags:
        measure.flag(flag)
    measure.working_set(lane.mover.link_bytes)  # what the host's caches hold is not read from its memory
    return lane, dict(zip([0, *wanted], made, strict=True))


def plateau(measure: Measure, gpu: GpuSession, quotas: dict[int, PageThreads]) -> PageThreads:
    """Return the mover of the smallest quota within PLATEAU_SHARE of the best, each timed in turns; note all rates."""
    from statistics import median

    runs: dict[int, EventRun] = {
        quota: gpu.clock.cold(mover.submit, mover.operations) for quota, mover in quotas.items() if quota
    }
    seconds: dict[int, list[float]] = {quota: [] for quota in runs}
    for turn in range(ROUNDS + 1):
        for quota, run in runs.items():
            spent = run(1)
            if turn:  # the first round warms up
                seconds[quota].append(spent)
    best = min(median(each) for each in seconds.values())
    for quota, each in seconds.items():
        measure.note(f"bandwidth_{quota}", quotas[quota].link_bytes / median(each))
    chosen = min(quota for quota, each in seconds.items() if best >= PLATEAU_SHARE * median(each))
    measure.note("plateau_blocks", chosen)
    if chosen == max(runs):
        measure.flag("no_plateau")  # the largest quota is the first that does: more blocks might reach more
    return quotas[chosen]


def full_grid(gpu: GpuSession, mover: PageThreads, lane: Lane) -> Reference:
    """Return the measured ceiling: the same work by as many blocks as there are multiprocessors."""
    from kvbench.measure import Reference

    run = gpu.clock.cold(mover.submit, mover.operations)

    def verify() -> None:
        lane.spoil()
        run(1)
        lane.check()

    return Reference(f"sm_{mover.grid}_blocks", run, mover.link_bytes, verify)


def in_place(case: Case, measure: Measure, gpu: GpuSession) -> Reference:
    """Return the other measured ceiling: as many bytes of host memory read, or written, where they lie."""
    from kvbench.measure import Reference
    from kvbench.transport.gpu_link import Link, open_lanes

    (lane,) = open_lanes(
        gpu.service, gpu.kernels, gpu.enter,
        Link("pinned", "direct", case.direction, case.bytes, threads=min(8, measure.context.cores),
             seed=measure.context.seed + 31),
    )  # fmt: skip
    run = gpu.clock.cold(lane.mover.submit, lane.mover.operations)
    name = "sm_read" if case.direction == "fetch" else "sm_write"

    def verify() -> None:
        lane.spoil()
        run(1)
        lane.check()

    return Reference(name, run, lane.mover.link_bytes, verify)
