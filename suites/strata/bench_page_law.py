"""The law of the page size (Strata 3.1): what a fragment costs a transport, and from which page on it is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value
from kvbench.systems.strata import pairs
from kvbench.systems.strata.pairs import BY_PAIR, MODELS, exists

if TYPE_CHECKING:
    from kvbench.analysis.page_law import PageLaw
    from kvbench.contract.result import Result, Status

SWEEPS = {"coarse": (1, 4, 16, 64, 512), "fine": tuple(1 << k for k in range(10))}
ROUNDS = {"smoke": 5, "quick": 9, "full": 51}  # passes of each page size, taken in turns
RETAKES = 3  # of a disturbed pass: then it counts
Submit = Callable[[int], float | None]


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file a case writes."""
    return pairs.scratch_bytes(str(axes["pair"]), largest_pass(axes))


def setup_seconds(axes: Mapping[str, Value]) -> float:
    """Return what making and checking large pools takes beyond the ``seconds`` of the bench."""
    return pairs.setup_seconds(largest_pass(axes))


def largest_pass(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the largest pass of the sweep, 0 for a case that will be skipped."""
    from kvbench.systems.strata.transfer import far_name, pass_bytes

    pages, nbytes, far = SWEEPS[str(axes["sweep"])], int(axes["bytes"]), far_name(str(axes["pair"]))
    return pass_bytes(str(axes["model"]), "layer_first", pages, nbytes, far)


@bench(
    version=2, metric="bandwidth", unit="B/s", better="higher", where=exists, disk=scratch_bytes, limit=300.0,
    setup=setup_seconds,
    extra_metrics=["per_fragment", "asymptote", "residual", "n_half", "page_90"],
    seconds={"smoke": 2.5, "quick": 9.0, "full": 45.0},
    pair=axis.choice(*BY_PAIR, smoke=["dram:dram", "dram:file"], quick=["dram:dram", "dram:file", "hbm:pinned"]),
    transport=axis.choice("cpu", "batch", "staged", "direct", "ce", "sm", "torch", smoke=["cpu"],
                          quick=["cpu", "batch", "ce", "sm"]),
    model=axis.choice(*MODELS, smoke=MODELS[:1], quick=MODELS[:1], full=["Llama-3.1-8B", "DeepSeek-V3"]),
    direction=axis.choice("fetch", "evict", smoke=["fetch"], quick=["fetch"]),
    sweep=axis.choice("coarse", "fine", smoke=["coarse"], quick=["fine"], full=["fine"]),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["all"]),
    bytes=axis.bytes(smoke=["64MiB"], quick=["128MiB"], full=["512MiB"], low="64KiB", high="64GiB"),
)  # fmt: skip
def page_law(case: Case, measure: Measure) -> None:
    """Pages of 1 to 512 tokens by one transport, layer first on both sides; c + S/B or max(c, S/B) over the sweep.

    The primary row is the rate at the largest page. per_fragment is c, asymptote B, residual the law's (rms, relative),
    n_half = c x B, page_90 the tokens a page needs for 90 % of B. The detail of per_fragment names the law that wins
    and any step: a jump between two sizes that no such law has. Page sizes are measured in turns. `bytes` is what a
    pass moves at most, but one page: detail `pass_bytes`, flag `larger_pass`, skipped beyond four times as many.
    """
    from kvbench.analysis.page_law import page_law as fit

    times, tainted = by_gpu(case, measure) if case.pair == "hbm:pinned" else by_host(case, measure)
    pages = sorted(times)
    law = fit(pages, [times[page][0] for page in pages], [times[page][1] for page in pages])
    rows(measure, law, {page: times[page] for page in pages}, tainted)


def rows(measure: Measure, law: PageLaw, times: Mapping[int, tuple[float, float]], tainted: str) -> None:
    """Add the rows of the law; a number the sweep does not determine is a row without value that says why.

    ``tainted``: why the primary row is, empty where it is not; what was taken beside it is no better.
    """
    why = law.reason or "not determined by this sweep"
    good: Status = "tainted" if tainted else "ok"
    detail = {
        "law": law.law, "winner": law.winner, "points": law.points, "holds": law.holds, "step": law.step_text or None,
        "reason": law.reason or None, **{f"page_{page}_Bps": size / time for page, (size, time) in times.items()},
    }  # fmt: skip

    def add(metric: str, value: float | None, unit: str, better: str, error: float | None = None) -> None:
        low, high = (None, None) if value is None or error is None else (value - 1.96 * error, value + 1.96 * error)
        measure.extra(
            metric, value, unit=unit, better="higher" if better == "higher" else "lower", low=low, high=high,
            n=law.points, reason=tainted if value is not None else why,
            status=good if value is not None else "skipped", detail=detail if metric == "per_fragment" else None,
        )  # fmt: skip

    add("per_fragment", law.c, "s", "lower", law.c_se)
    add("asymptote", law.bandwidth, "B/s", "higher", law.bandwidth_se)
    add("residual", law.residual, "1", "lower")
    add("n_half", law.n_half, "B", "lower")
    add("page_90", None if law.page_90 is None else float(law.page_90), "1", "lower")
    measure.note("page_90_measured", law.measured_page_90)
    if not law.holds:
        measure.flag("no_law")


def by_host(case: Case, measure: Measure) -> tuple[dict[int, tuple[float, float]], str]:
    """Return fragment bytes and seconds a fragment by page size, and :func:`taint`; add the primary row."""
    from functools import partial

    from kvbench.measure import Reference
    from kvbench.model.geometry import geometry
    from kvbench.systems.strata.ends import ceiling, delivered, ends, fastest, require_room
    from kvbench.systems.strata.transfer import far_name, pages_for, plan
    from kvbench.transport.host_job import HostJob, HostTransport
    from kvbench.transport.host_open import open_host

    shape, seed, far = geometry(case.model), measure.context.seed, far_name(case.pair)
    team, best = measure.team(case.threads), partial(measure.best, rounds=2)
    plans = {
        page: plan(shape, "layer_first", page, pages_for(shape, "layer_first", page, case.bytes, far), "shuffled", seed)
        for page in SWEEPS[case.sweep]
    }
    widest = max(plans.values(), key=lambda each: each.far.nbytes)
    require_room(widest.near, widest.far, measure.context.arena.nbytes)
    source, target = ends(case.pair, widest.near, widest.far, case.direction, measure, measure.context.scratch, seed)
    jobs: dict[int, HostJob] = {}
    ways: dict[int, HostTransport] = {}
    for page, chosen in plans.items():
        moves = chosen.moves(case.direction)
        jobs[page] = HostJob(moves, source, target, team, measure.enter, seed)
        ways[page] = fastest(open_host(case.transport, jobs[page]), best)
    last = max(ways)
    describe(case, measure, jobs[last].total)
    way, job, top = ways[last], jobs[last], ceiling(jobs[last], best, seed)
    if far == "dram":
        measure.working_set(min(each.total for each in jobs.values()))
    for flag in dict.fromkeys(flag for each in ways.values() for flag in each.flags):
        measure.flag(flag)
    for name, value in way.detail.items():
        measure.note(name, value)

    def verify() -> None:
        job.verify(way.submit)

    link = way.link if isinstance(way.link, int) else None
    common = partial(
        measure.pair if top is not None else measure, link=link, unique=job.total, rate_of="unique", verify=verify,
        kernel=way.kernel, transport=way.name,
    )  # fmt: skip
    row = common(way.submit, *([Reference(top.name, top.run, top.amount, top.verify)] if top is not None else []))
    found = in_turns(
        {page: each.submit for page, each in ways.items()}, team.tids, ROUNDS[measure.context.profile], seed
    )
    for page, each in ways.items():
        jobs[page].arrived(each.submit)
    for page, each in ways.items():
        storage = delivered(each, jobs[page].total, case.direction)
        if storage is None:
            continue
        for flag in storage.flags:
            measure.flag(flag)
        if page == last:
            measure.note("link_counted", storage.counted)
            measure.note("link_reason", storage.reason or None)
    counts = {page: len(each.moves) for page, each in jobs.items()}
    return {page: (jobs[page].total / counts[page], found[page] / counts[page]) for page in ways}, taint(row)


def describe(case: Case, measure: Measure, moved: int) -> None:
    """Note the bytes ``moved`` by a pass over the largest page, which the primary row is about."""
    measure.note("pass_bytes", moved)
    if moved > case.bytes:
        measure.flag("larger_pass")


def taint(row: Result) -> str:
    """Return why ``row`` is tainted, empty where it is not."""
    return (row.reason or "tainted") if row.status == "tainted" else ""


def in_turns(runs: Mapping[int, Submit], tids: tuple[int, ...], rounds: int, seed: int) -> dict[int, float]:
    """Return the median seconds of a pass of each of ``runs``, taken in turns in an order that changes every round.

    The first round warms up. A pass during which a measuring thread waited for a CPU is taken again, some times.
    """
    from statistics import median

    import numpy as np

    from kvbench.timing.clock import now_ns
    from kvbench.timing.gate import DelayGate

    rng, taken = np.random.default_rng(seed), {name: list[float]() for name in runs}
    gate = DelayGate(tids)
    try:
        for _ in range(rounds + 1):
            for name in rng.permutation(list(runs)).tolist():
                for _ in range(RETAKES):
                    gate.rebase()
                    before = now_ns()
                    own = runs[name](1)
                    wall = now_ns() - before
                    if not gate.disturbed(wall):
                        break
                taken[name].append(wall * 1e-9 if own is None else own)
    finally:
        gate.close()
    return {name: median(values[1:]) for name, values in taken.items()}


def by_gpu(case: Case, measure: Measure) -> tuple[dict[int, tuple[float, float]], str]:
    """Return fragment bytes and seconds a fragment by page size, and :func:`taint`; add the primary row.

    One page size after the other: each has page-locked buffers of its own.
    """
    from contextlib import ExitStack
    from statistics import median

    from kvbench.model.geometry import geometry
    from kvbench.systems.strata.transfer import far_name, pages_for, plan
    from kvbench.timing.gpu_rows import on_gpu
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.transport.paged import open_paged

    shape, seed, far = geometry(case.model), measure.context.seed, far_name(case.pair)
    found: dict[int, tuple[float, float]] = {}
    spoilt = ""
    with GpuSession(0) as gpu:
        on_gpu(measure, gpu, link=True)
        for page in SWEEPS[case.sweep]:
            pages = pages_for(shape, "layer_first", page, case.bytes, far)
            chosen = plan(shape, "layer_first", page, pages, "shuffled", seed)
            moves = chosen.moves(case.direction)
            with ExitStack() as stack:
                lane = open_paged(
                    case.transport, gpu.service, gpu.kernels, moves, case.direction, chosen.near, chosen.far,
                    stack.enter_context, seed,
                )  # fmt: skip
                mover = lane.mover
                timed = gpu.clock.submission(mover.submit, mover.operations)
                timed(1)
                taken = [float(timed(1)) for _ in range(ROUNDS[measure.context.profile])]
                lane.check()
                found[page] = (moves.total / len(moves), median(taken) / len(moves))
                if page == max(SWEEPS[case.sweep]):
                    describe(case, measure, moves.total)

                    def verify(lane: object = lane, run: Submit = timed) -> None:
                        lane.check()  # type: ignore[attr-defined]
                        lane.spoil()  # type: ignore[attr-defined]
                        run(1)
                        lane.check()  # type: ignore[attr-defined]

                    row = measure(
                        timed, link=mover.link_bytes, unique=mover.link_bytes, verify=verify, kernel=mover.kernel,
                        transport=case.transport, ceilings=[gpu.link_ceiling(1)],
                    )  # fmt: skip
                    spoilt = taint(row)
    return found, spoilt
