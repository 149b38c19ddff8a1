"""The link between GPU memory and everything farther away: by copy engine, batched call, GPU threads, or in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.contract.result import Bytes
    from kvbench.measure import RateOf
    from kvbench.timing.gpu_both import Together
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.transport.gpu_lane import Lane

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
    size = axes["bytes"] if isinstance(axes["bytes"], int) else 1 << 30
    return makes_sense(far, str(axes["transport"]), str(axes["direction"]), size, int(axes["pieces"]))


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file a case writes."""
    nbytes = axes["bytes"]
    return nbytes if axes["pair"] == "hbm:file" and isinstance(nbytes, int) else 0


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", where=exists, disk=scratch_bytes, limit=300.0,
    extra_metrics=["device_only", "fetch_bandwidth", "evict_bandwidth"],
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
    events behind a blocker. Transports by GPU threads (sm, direct) begin with a flushed L2.
    """
    from kvbench.contract.result import Bytes
    from kvbench.timing.gpu_both import Together
    from kvbench.timing.gpu_rows import on_gpu
    from kvbench.timing.gpu_session import GpuSession, before_each, link_notes

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=True)
        lanes = lanes_of(case, measure, gpu)
        movers, prepare = [lane.mover for lane in lanes], lanes[0].prepare
        both: Together | None = None
        submit, operations = movers[0].submit, movers[0].operations
        if len(lanes) == 2:
            both = Together(gpu, movers[0].submit, movers[1].submit, (movers[0].operations, movers[1].operations))
            submit, operations = both.submit, both.operations
        also = [both.other] if both else []
        if prepare is not None:
            prepare()
        timed = gpu.clock.submission(submit, operations, also)
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
        with gpu.link_watch() as looks:
            row = measure(
                run, link=moved.link, unique=total, rate_of=counted, verify=verify, transport=case.transport,
                kernel=" | ".join(dict.fromkeys(mover.kernel for mover in movers)),
                ceilings=[gpu.link_ceiling(len(lanes))],
            )  # fmt: skip
        for name, value in link_notes(looks.results).items():
            measure.note(name, value)
        if row.value is None:
            return
        device_only(case, measure, gpu, lanes, both, moved)
        if both is not None:
            timed(1)
            each_stream(case, measure, gpu, lanes, both.seconds())
        for lane in lanes:
            lane.check()


def lanes_of(case: Case, measure: Measure, gpu: GpuSession) -> list[Lane]:
    """Return the case's lanes, their placement flags on the row."""
    from kvbench.transport.gpu_link import Link, open_lanes

    asked = Link(
        case.pair.partition(":")[2], case.transport, case.direction, case.bytes, case.pieces,
        "hostalloc" if case.alloc == "hostalloc" else "register", case.pages,
        None if case.node == "near" else int(case.node), min(8, measure.context.cores), measure.context.seed,
        measure.context.scratch,
    )  # fmt: skip
    lanes = open_lanes(gpu.service, gpu.kernels, gpu.enter, asked)
    for flag in dict.fromkeys(flag for lane in lanes for flag in lane.flags):
        measure.flag(flag)
    placed = lanes[0].placement
    if placed is not None:
        measure.working_set(len(lanes) * case.bytes)  # what the host's caches hold is not read from its memory
        measure.note("page_bytes", placed.page_bytes)
        measure.note("nodes", None if placed.nodes is None else "+".join(map(str, sorted(placed.nodes))))
    return lanes


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
        ceilings=[gpu.link_ceiling(len(lanes))], kernel=lanes[0].mover.kernel, moved=moved, rate_of="link",
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
            ceilings=[gpu.link_ceiling(1)], kernel=a.kernel, moved=Bytes(unique=a.link_bytes, link=a.link_bytes),
            rate_of="link",
        )  # fmt: skip
        if loaded.alone > ALONE_SHARE * loaded.passes:
            measure.flag("overlap_partial")
            measure.note(f"{lanes[own].way}_alone", round(loaded.alone / loaded.passes, 4))
