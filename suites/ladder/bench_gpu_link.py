"""The link between GPU memory and everything farther away: by copy engine, batched call, GPU threads, or in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.contract.result import Bytes, Ceiling
    from kvbench.measure import RateOf, Reference
    from kvbench.timing.gpu_both import Together
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.timing.sampler import Run
    from kvbench.transport.gpu_lane import Lane
    from kvbench.transport.gpu_link import Link

FULL = ["4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB", "1GiB", "4GiB", "16GiB"]
BY_THREADS = ("sm", "direct")
NO_BLOCKER = {
    "pageable": "a pageable copy waits for the device, so it cannot be queued behind a blocker",
    "managed": "pages move by faults that the host serves",
    "file": "the file sets the pace",
}
ALONE_SHARE = 0.05  # trap T37: an overlap below 95 % is not both directions at once


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the values describe a path there is; a size that is a word is taken for a large one."""
    from kvbench.transport.gpu_paths import makes_sense

    far = str(axes["pair"]).partition(":")[2]
    own_pages = axes["alloc"] == "register" or far == "pageable"
    if (axes["alloc"] == "plain") == (far == "pinned") or (axes["pages"] != "4k" and not own_pages):
        return False
    if far == "managed" and axes["node"] != "near":
        return False  # where its pages are on the host is for the driver to say
    size = axes["bytes"] if isinstance(axes["bytes"], int) else 1 << 30
    return makes_sense(far, str(axes["transport"]), str(axes["direction"]), size, int(axes["pieces"]))


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file a case writes."""
    nbytes = axes["bytes"]
    return nbytes if axes["pair"] == "hbm:file" and isinstance(nbytes, int) else 0


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", where=exists, disk=scratch_bytes, limit=300.0,
    extra_metrics=["device_only", "fetch_bandwidth", "evict_bandwidth", "second_pass"],
    seconds={"smoke": 0.2, "quick": 0.5, "full": 20.0},
    pair=axis.choice("hbm:pinned", "hbm:pageable", "hbm:managed", "hbm:file", smoke=["hbm:pinned"]),
    alloc=axis.choice("register", "hostalloc", "plain", smoke=["register", "plain"], quick=["register", "plain"]),
    transport=axis.choice("ce", "batch", "sm", "direct", "staged", smoke=["ce", "sm", "staged"]),
    direction=axis.choice("fetch", "evict", "both"),
    bytes=axis.bytes(smoke=["64MiB"], quick=["64MiB"], full=FULL, low="4KiB", high="64GiB"),
    pieces=axis.integer(smoke=["1"], quick=["1"], full=["1", "64", "1024"], high=4096),
    pages=axis.choice("4k", "thp", smoke=["4k"], quick=["4k"]),
    node=axis.choice("near", "0", "1", "2", "3", "4", "5", "6", "7", smoke=["near"], quick=["near"], full=["near"]),
    device=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=63),
)  # fmt: skip
def link(case: Case, measure: Measure) -> None:
    """One transfer between GPU memory and a farther tier, from the first submission on an idle device to completion.

    In `both` equal bytes go either way at once: the primary row is the total until both are done, fetch_bandwidth and
    evict_bandwidth are each stream's while the other runs all the time. device_only is the device's part, timed by
    events behind a blocker. Transports by GPU threads (sm, direct) begin with a flushed L2. Managed memory is brought
    back to the host before each pass; second_pass is the one after it, wherever the pages then are.
    """
    from kvbench.contract.result import Bytes
    from kvbench.timing.gpu_rows import on_gpu
    from kvbench.timing.gpu_session import GpuSession, before_each, link_notes

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=True)
        asked = asked_for(case, measure)
        lanes = lanes_of(case, measure, gpu, asked)
        movers, prepare = [lane.mover for lane in lanes], lanes[0].prepare
        if prepare is not None:
            prepare()
        timed, both = submission(gpu, lanes)
        run = timed if prepare is None else before_each(timed, prepare)
        if case.transport in BY_THREADS:
            run = gpu.flushed(run)

        def verify() -> None:
            for lane in lanes:
                lane.check()
                lane.spoil()  # and once more: what only the first pass had moved would be no transfer
            if prepare is not None:
                prepare()
            timed(1)
            for lane in lanes:
                lane.check()

        total = sum(mover.link_bytes for mover in movers)
        # What managed memory and files send over the link is whole pages and read-ahead: not known from here.
        counted: RateOf = "link" if case.pair in ("hbm:pinned", "hbm:pageable") else "unique"
        moved = Bytes(unique=total, link=total if counted == "link" else None)
        kernel = " | ".join(dict.fromkeys(mover.kernel for mover in movers))
        law, beside = physical(gpu, len(lanes)), reference(measure, gpu, asked, lanes)
        with gpu.link_watch() as looks:
            if beside is None:
                row = measure(
                    run, link=moved.link, unique=total, rate_of=counted, verify=verify, transport=case.transport,
                    kernel=kernel, ceilings=[law],
                )  # fmt: skip
            else:
                row = measure.pair(
                    run, beside, link=moved.link, unique=total, rate_of=counted, verify=verify,
                    transport=case.transport, kernel=kernel, ceilings=[law],
                )  # fmt: skip
        for name, value in link_notes(looks.results).items():
            measure.note(name, value)
        if row.value is None:
            return
        device_only(case, measure, gpu, lanes, both, moved)
        if asked.far == "managed" and prepare is not None:
            second_pass(measure, gpu, timed, prepare, row.seconds, moved)
        if both is not None:
            timed(1)
            each_stream(case, measure, gpu, lanes, both.seconds())
        for lane in lanes:
            lane.check()


def asked_for(case: Case, measure: Measure) -> Link:
    """Return what the case asks of the transports."""
    from kvbench.transport.gpu_link import Link

    return Link(
        case.pair.partition(":")[2], case.transport, case.direction, case.bytes, case.pieces,
        "hostalloc" if case.alloc == "hostalloc" else "register", case.pages,
        None if case.node == "near" else int(case.node), min(8, measure.context.cores), measure.context.seed,
        measure.context.scratch,
    )  # fmt: skip


def lanes_of(case: Case, measure: Measure, gpu: GpuSession, asked: Link) -> list[Lane]:
    """Return the case's lanes, their placement flags on the row."""
    from kvbench.transport.gpu_link import open_lanes

    lanes = open_lanes(gpu.service, gpu.kernels, gpu.enter, asked)
    for flag in dict.fromkeys(flag for lane in lanes for flag in lane.flags):
        measure.flag(flag)
    placed = lanes[0].placement
    if placed is not None:
        measure.working_set(len(lanes) * case.bytes)  # what the host's caches hold is not read from its memory
        measure.note("page_bytes", placed.page_bytes)
        measure.note("nodes", None if placed.nodes is None else "+".join(map(str, sorted(placed.nodes))))
    return lanes


def submission(gpu: GpuSession, lanes: list[Lane]) -> tuple[Run, Together | None]:
    """Return the timed pass of one lane, or of two at once, and what holds the two together."""
    from kvbench.timing.gpu_both import Together

    first = lanes[0].mover
    if len(lanes) == 1:
        return gpu.clock.submission(first.submit, first.operations), None
    second = lanes[1].mover
    both = Together(gpu, first.submit, second.submit, (first.operations, second.operations))
    return gpu.clock.submission(both.submit, both.operations, [both.other]), both


def physical(gpu: GpuSession, directions: int) -> Ceiling:
    """Return what the link can carry by law in 1 or 2 directions at once; value None, with why, where unknown."""
    from kvbench.contract.result import Ceiling
    from kvbench.machine.physical import c2c_bytes_per_s

    found = gpu.link_ceiling(directions)
    board = gpu.board()[1]
    if found.name != "nvlink-c2c" or found.value is not None or board is None:
        return found
    if not board.c2c_links or not board.c2c_mb_s:
        return found
    rate = directions * c2c_bytes_per_s(board.c2c_links, board.c2c_mb_s)
    source = f"{board.c2c_links} links of {board.c2c_mb_s:g} MB/s (NVML), {directions} direction{'s'[: directions - 1]}"
    return Ceiling("nvlink-c2c", rate, "physical", source)


def reference(measure: Measure, gpu: GpuSession, asked: Link, lanes: list[Lane]) -> Reference | None:
    """Return the measured ceiling to take in turns with the case; None, noted why, where there is none.

    For a file it is the file's side alone, else one large copy by the copy engine in the same directions.
    """
    from kvbench.errors import Unavailable
    from kvbench.measure import Reference
    from kvbench.timing.gpu_session import before_each
    from kvbench.transport.gpu_link import open_lanes, peak_of
    from kvbench.transport.gpu_staged import Staged
    from kvbench.units import compact_bytes

    mover, prepare = lanes[0].mover, lanes[0].prepare
    if isinstance(mover, Staged):
        alone = gpu.clock.submission(mover.alone, 1)
        run = alone if prepare is None else before_each(alone, prepare)
        return Reference(f"file_{mover.verb}_alone", run, mover.link_bytes)
    peak = peak_of(asked)
    if peak is None:
        measure.note("no_reference", "the case itself is the largest fragment")
        return None
    try:
        large = open_lanes(gpu.service, gpu.kernels, gpu.enter, peak)
    except Unavailable as error:
        measure.note("no_reference", str(error))
        return None

    def verify() -> None:
        for lane in large:
            lane.check()

    name = f"ce_{compact_bytes(peak.nbytes)}"
    return Reference(name, submission(gpu, large)[0], sum(lane.mover.link_bytes for lane in large), verify)


def second_pass(
    measure: Measure, gpu: GpuSession, timed: Run, prepare: Callable[[], None], first: float | None, moved: Bytes
) -> None:
    """Add the row of the pass after the first one: fast where pages have moved, as slow where they stay (trap T56)."""
    from kvbench.timing.gpu_rows import add_sampled
    from kvbench.timing.gpu_session import before_each
    from kvbench.timing.traps.gpu_memory import judge_migration

    def once_before() -> None:
        prepare()
        timed(1)

    measure.note("pass", "first after the host wrote; second_pass is the next one")
    run = before_each(timed, once_before)
    add_sampled(
        measure, gpu, "second_pass", run, unit="B/s", better="higher", amount=moved.unique or 0, moved=moved,
        rate_of="unique",
    )  # fmt: skip
    later = next(row.seconds for row in measure.rows() if row.metric == "second_pass")
    if first is None or later is None:
        return
    measure.note("first_over_second", round(first / later, 4))
    measure.note("pages", "moved" if judge_migration(first, later).verdict == "pass" else "stayed, or had moved before")


def device_only(
    case: Case, measure: Measure, gpu: GpuSession, lanes: list[Lane], both: Together | None, moved: Bytes
) -> None:
    """Add the row of the same work behind a blocker: what the device takes, submission hidden."""
    from kvbench.errors import Unavailable
    from kvbench.timing.gpu_rows import add_sampled

    work = both or lanes[0].mover
    behind = gpu.clock.cold if case.transport in BY_THREADS else gpu.clock.hot
    try:
        far = case.pair.partition(":")[2]
        if far in NO_BLOCKER:
            raise Unavailable(NO_BLOCKER[far])
        events = behind(work.submit, work.operations, [both.other] if both else [])
    except Unavailable as error:
        measure.extra("device_only", None, unit="B/s", better="higher", status="skipped", reason=str(error))
        return
    add_sampled(
        measure, gpu, "device_only", events, unit="B/s", better="higher", amount=moved.unique or 0, events=events,
        ceilings=[physical(gpu, len(lanes))], kernel=lanes[0].mover.kernel, moved=moved, rate_of="link",
    )  # fmt: skip


def each_stream(case: Case, measure: Measure, gpu: GpuSession, lanes: list[Lane], ends: tuple[float, float]) -> None:
    """Add a row a direction: its rate while the other is busy from before its start to after its end."""
    from kvbench.contract.result import Bytes
    from kvbench.errors import Unavailable
    from kvbench.timing.gpu_both import Loaded
    from kvbench.timing.gpu_rows import add_sampled

    measure.note("overlap", round(min(ends) / max(ends), 4))
    for own, other in ((0, 1), (1, 0)):
        a, b = lanes[own].mover, lanes[other].mover
        metric = f"{lanes[own].way}_bandwidth"
        try:
            loaded = Loaded(
                gpu, a.submit, b.submit, (a.operations, b.operations), (ends[own], ends[other]),
                cold=case.transport in BY_THREADS,
            )  # fmt: skip
        except Unavailable as error:
            measure.extra(metric, None, unit="B/s", better="higher", status="skipped", reason=str(error))
            continue
        add_sampled(
            measure, gpu, metric, loaded, unit="B/s", better="higher", amount=a.link_bytes, events=loaded,
            ceilings=[physical(gpu, 1)], kernel=a.kernel, moved=Bytes(unique=a.link_bytes, link=a.link_bytes),
            rate_of="link",
        )  # fmt: skip
        if loaded.alone > ALONE_SHARE * loaded.passes:
            measure.flag("overlap_partial")
            measure.note(f"{lanes[own].way}_alone", round(loaded.alone / loaded.passes, 4))
