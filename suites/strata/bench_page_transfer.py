"""KV pages between two tiers (Strata S1, S2): what a page size costs each transport."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value
from kvbench.systems.strata import pairs
from kvbench.systems.strata.pairs import BY_PAIR, MODELS, exists

if TYPE_CHECKING:
    from kvbench.model.geometry import KVGeometry
    from kvbench.model.layout import Moves
    from kvbench.systems.strata.transfer import Plan

PAGES = ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512"]
ROUNDS = 2  # of each way a transport has, before the fastest is measured
BY_THREADS = ("sm", "torch")  # GPU threads move the bytes, so a cache of the GPU may hold them


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file a case writes."""
    return pairs.scratch_bytes(str(axes["pair"]), largest_pass(axes))


def setup_seconds(axes: Mapping[str, Value]) -> float:
    """Return what making and checking large pools takes beyond the ``seconds`` of the bench."""
    return pairs.setup_seconds(largest_pass(axes))


def largest_pass(axes: Mapping[str, Value]) -> int:
    """Return the bytes a pass moves, 0 for a case that will be skipped."""
    from kvbench.systems.strata.transfer import far_name, pass_bytes

    pages, nbytes, far = [int(axes["page_tokens"])], int(axes["bytes"]), far_name(str(axes["pair"]))
    return pass_bytes(str(axes["model"]), str(axes["layout"]), pages, nbytes, far)


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", where=exists, disk=scratch_bytes, limit=300.0,
    extra_metrics=["device_only", "submit_time"], seconds={"smoke": 1.2, "quick": 4.5, "full": 30.0},
    setup=setup_seconds,
    pair=axis.choice(*BY_PAIR, smoke=["dram:dram", "dram:file", "hbm:pinned"]),
    model=axis.choice(*MODELS, smoke=MODELS[:1], quick=MODELS[:1]),
    page_tokens=axis.integer(smoke=["32"], quick=["32"], full=PAGES, high=1 << 16),
    transport=axis.choice(
        "cpu", "batch", "staged", "direct", "ce", "sm", "torch", smoke=["cpu", "batch", "direct", "ce", "sm"],
        quick=["cpu", "batch", "direct", "ce", "sm", "torch"],
    ),
    layout=axis.choice(
        "layer_first", "page_first", "page_first_direct", "page_head", smoke=["layer_first"],
        quick=["layer_first", "page_first"],
    ),
    direction=axis.choice("fetch", "evict", smoke=["fetch"], quick=["fetch"]),
    order=axis.choice("shuffled", "sorted", smoke=["shuffled"], quick=["shuffled"]),
    threads=axis.threads(smoke=["all"], quick=["all"]),
    bytes=axis.bytes(smoke=["128MiB"], quick=["128MiB"], full=["1GiB"], low="64KiB", high="64GiB"),
)  # fmt: skip
def page_transfer(case: Case, measure: Measure) -> None:
    """KV pages between a layer-first near pool and a far pool of `layout`, payload counted once.

    The far pool holds twice the pages moved, so no two of them are neighbours; near pages ascend. `bytes` is what a
    pass moves at most: fewer where fragments are small, one page where it is larger (flag `larger_pass`, skipped beyond
    four times the bytes); detail `pass_bytes` has the real ones. Ceilings: a plain gather copy of the same
    fragments in the same order (memory), the best large sequential call of as many bytes (file), the link (GPU).
    """
    from kvbench.model.geometry import geometry
    from kvbench.systems.strata.ends import require_room
    from kvbench.systems.strata.transfer import far_name, pages_for, plan

    shape, far = geometry(case.model), far_name(case.pair)
    pages = pages_for(shape, case.layout, case.page_tokens, case.bytes, far)
    chosen = plan(shape, case.layout, case.page_tokens, pages, case.order, measure.context.seed)
    if far != "pinned":
        require_room(chosen.near, chosen.far, measure.context.arena.nbytes)
    moves = chosen.moves(case.direction)
    describe(case, measure, shape, chosen, moves)
    if far == "pinned":
        by_gpu(case, measure, chosen, moves)
    else:
        by_host(case, measure, chosen, moves)


def describe(case: Case, measure: Measure, shape: KVGeometry, chosen: Plan, moves: Moves) -> None:
    """Note what one pass moves."""
    measure.note("pass_bytes", moves.total)
    if moves.total > case.bytes:
        measure.flag("larger_pass")
    measure.note("pages", moves.pages)
    measure.note("tokens", moves.pages * chosen.near.page_tokens)
    measure.note("fragments", len(moves))
    measure.note("fragment_bytes", moves.fragment)
    measure.note("item_bytes", shape.item_bytes())


def by_host(case: Case, measure: Measure, chosen: Plan, moves: Moves) -> None:
    """Measure a transport of the host."""
    from kvbench.measure import Reference
    from kvbench.systems.strata.ends import ceiling, delivered, ends, fastest
    from kvbench.timing.gpu_rows import add_series
    from kvbench.transport.host_job import HostJob
    from kvbench.transport.host_open import open_host

    team, seed = measure.team(case.threads), measure.context.seed
    source, target = ends(
        case.pair, chosen.near, chosen.far, case.direction, measure, measure.context.scratch, seed
    )  # fmt: skip
    job = HostJob(moves, source, target, team, measure.enter, seed)
    ways = open_host(case.transport, job)
    best = partial(measure.best, rounds=ROUNDS)
    top, way = ceiling(job, best, seed), fastest(ways, best)
    in_memory = not case.pair.endswith(":file")
    if in_memory:
        measure.working_set(job.total)  # what the caches may hold of the source; non-temporal stores pass them
    for flag in way.flags:
        measure.flag(flag)
    for name, value in way.detail.items():
        measure.note(name, value)
    measure.note("calls", way.calls)
    link = way.link if isinstance(way.link, int) else None
    walls = measure.dram_ceilings(job.total) if in_memory else ()

    def verify() -> None:
        job.verify(way.submit)

    if top is not None:
        held = Reference(top.name, top.run, top.amount, top.verify)
        row = measure.pair(
            way.submit, held, link=link, unique=job.total, rate_of="unique", verify=verify, kernel=way.kernel,
            transport=way.name, ceilings=walls,
        )  # fmt: skip
    else:
        measure.note("no_ceiling", "fragments differ in size or are no whole cache lines")
        row = measure(
            way.submit, link=link, unique=job.total, rate_of="unique", verify=verify, kernel=way.kernel,
            transport=way.name, ceilings=walls,
        )  # fmt: skip
    found = delivered(way, job.total, case.direction)
    if found is not None:
        measure.note("link_counted", found.counted)
        measure.note("link_reason", found.reason or None)
        for flag in found.flags:
            measure.flag(flag)
    submitted = way.submitted()
    measure.note("completion_s", row.seconds)
    measure.note("submit", "before completion" if submitted else "calls return when the bytes have arrived")
    if submitted:
        add_series(
            measure, "submit_time", submitted, unit="s", better="lower", kernel=way.kernel, status=row.status,
            reason=row.reason,
        )  # fmt: skip


def by_gpu(case: Case, measure: Measure, chosen: Plan, moves: Moves) -> None:
    """Measure a transport of the GPU, from the first submission on an idle device to completion."""
    from kvbench.errors import Unavailable
    from kvbench.timing.gpu_rows import add_sampled, on_gpu
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.transport.paged import open_paged

    with GpuSession(0) as gpu:
        on_gpu(measure, gpu, link=True)
        lane = open_paged(
            case.transport, gpu.service, gpu.kernels, moves, case.direction, chosen.near,
            chosen.far, gpu.enter, measure.context.seed,
        )  # fmt: skip
        for flag in lane.flags:
            measure.flag(flag)
        mover = lane.mover
        timed = gpu.clock.submission(mover.submit, mover.operations)
        run = gpu.flushed(timed) if case.transport in BY_THREADS else timed

        def verify() -> None:
            lane.check()
            lane.spoil()  # and once more: what only the first pass had moved would be no transfer
            timed(1)
            lane.check()

        row = measure(
            run, link=mover.link_bytes, unique=mover.link_bytes, verify=verify, kernel=mover.kernel,
            transport=case.transport, ceilings=[gpu.link_ceiling(1)],
        )  # fmt: skip
        measure.note("completion_s", row.seconds)
        if row.value is None:
            return
        behind = gpu.clock.cold if case.transport in BY_THREADS else gpu.clock.hot
        try:
            events = behind(mover.submit, mover.operations)
        except Unavailable as error:  # more operations than may be queued behind a blocker
            measure.extra("device_only", None, unit="B/s", better="higher", status="skipped", reason=str(error))
            return
        add_sampled(
            measure, gpu, "device_only", events, unit="B/s", better="higher", amount=mover.link_bytes, events=events,
            ceilings=[gpu.link_ceiling(1)], kernel=mover.kernel, rate_of="link",
        )  # fmt: skip
