"""Pages that change their layout on the way (Strata S5), in host memory."""

from collections.abc import Mapping

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value
from kvbench.systems.strata.pairs import MODELS

ROUNDS = 2  # of each way to copy, before the fastest is measured
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


def setup_seconds(axes: Mapping[str, Value]) -> float:
    """Return what making and checking large pools takes beyond the ``seconds`` of the bench."""
    from kvbench.systems.strata.transfer import setup_seconds

    return setup_seconds(int(axes["bytes"]))


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", limit=300.0, setup=setup_seconds,
    seconds={"smoke": 2.0, "quick": 5.0, "full": 30.0},
    source=axis.choice(*LAYOUTS, smoke=["layer_first"], quick=["layer_first", "page_first"]),
    target=axis.choice(*LAYOUTS, smoke=["layer_first", "page_first"]),
    model=axis.choice(*MODELS, smoke=MODELS[:1], quick=MODELS[:1], full=["Llama-3.1-8B", "DeepSeek-V3"]),
    page_tokens=axis.integer(smoke=["32"], quick=["32"], full=["1", "8", "32", "128", "512"], high=1 << 16),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["all"]),
    bytes=axis.bytes(smoke=["128MiB"], quick=["128MiB"], full=["1GiB"], low="64KiB", high="64GiB"),
)  # fmt: skip
def layout_change(case: Case, measure: Measure) -> None:
    """Whole pages from a pool of one layout to a pool of another by host threads, payload counted once.

    A fragment is what both layouts keep together: a page of a layer, a token, or one head of it. Its measured ceiling
    is a plain copy of the same fragments in the same order: the fraction is what changing the layout costs. `bytes` is
    what a pass moves at most, but one page: detail `pass_bytes`, flag `larger_pass`, skipped beyond four times as many.
    """
    from functools import partial

    from kvbench.measure import Reference
    from kvbench.memory.tiers import parse_tier
    from kvbench.model.geometry import geometry
    from kvbench.model.layout import Pool, page_fragments
    from kvbench.systems.strata.ends import ceiling, end, fastest, require_room
    from kvbench.systems.strata.transfer import CAPS, change, check_page
    from kvbench.transport.host_cpu import open_cpu
    from kvbench.transport.host_job import HostJob

    shape, seed = geometry(case.model), measure.context.seed
    layouts, (cap, limit) = (case.source, case.target), CAPS["dram"]
    a, b = (Pool(shape, layout, case.page_tokens, 3) for layout in layouts)
    one = page_fragments(a, b)
    if one > limit:
        measure.skip(f"a page of {one} fragments is more than a sample takes")
    check_page(shape, case.page_tokens, case.bytes)
    pages = max(1, min(case.bytes // shape.page_bytes(case.page_tokens), cap // one))
    source_pool, target_pool, work = change(shape, layouts, case.page_tokens, pages, seed)
    require_room(source_pool, target_pool, measure.context.arena.nbytes)
    team, dram, scratch = measure.team(case.threads), parse_tier("dram"), measure.context.scratch
    source = end(dram, source_pool.nbytes, True, measure, scratch, seed)
    target = end(dram, target_pool.nbytes, False, measure, scratch, seed)
    job = HostJob(work, source, target, team, measure.enter, seed)
    best = partial(measure.best, rounds=ROUNDS)
    top, way = ceiling(job, best, seed), fastest(open_cpu(job), best)
    measure.working_set(job.total)
    if work.total > case.bytes:
        measure.flag("larger_pass")
    notes = {"pass_bytes": work.total, "pages": work.pages, "fragments": len(work), "fragment_bytes": work.fragment,
             "item_bytes": shape.item_bytes()}  # fmt: skip
    for name, value in notes.items():
        measure.note(name, value)
    for flag in way.flags:
        measure.flag(flag)

    def verify() -> None:
        job.verify(way.submit)

    if top is None:
        measure.note("no_ceiling", "fragments differ in size or are no whole cache lines")
        measure(way.submit, link=job.total, unique=job.total, verify=verify, kernel=way.kernel, transport=way.name)
        return
    measure.pair(
        way.submit, Reference(top.name, top.run, top.amount, top.verify), link=job.total, unique=job.total,
        verify=verify, kernel=way.kernel, transport=way.name, ceilings=measure.dram_ceilings(job.total),
    )  # fmt: skip
