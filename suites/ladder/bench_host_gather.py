"""Reading and copying scattered fragments: the ceiling of every paged reader and mover on the host."""

from kvbench import Case, Measure, axis, bench


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", seconds={"smoke": 0.8, "quick": 1.8, "full": 8.0},
    op=axis.choice("read", "copy"),
    fragment=axis.bytes(
        smoke=["4KiB", "64KiB"], quick=["4KiB", "64KiB"], full="64..1MiB", low="64", high="64MiB"
    ),
    pages=axis.choice("4k", "thp", "huge", smoke=["thp"], quick=["thp"], full=["4k", "thp"]),
    bytes=axis.bytes(smoke=["256MiB"], quick=["256MiB"], full=["1GiB"], low="1MiB", high="64GiB"),
    threads=axis.threads(smoke=["all"], quick=["all"]),
)  # fmt: skip
def host_gather(case: Case, measure: Measure) -> None:
    """Fragments in random order, each exactly once, payload counted once; the best of the prefetch variants.

    Its measured ceiling is the sequential stream of the same kind on the same memory: a read, or the payload of a copy
    with non-temporal stores. The fraction is what being scattered costs at this fragment size.
    """
    import numpy as np

    from kvbench.kernels.gather import Gather, variants
    from kvbench.kernels.stream import Stream
    from kvbench.measure import Reference

    if case.fragment % 64:
        measure.skip(f"fragment {case.fragment} is not a multiple of 64 bytes, one cache line")
    count = case.bytes // case.fragment
    if count < 2 * case.threads:
        measure.skip(f"{count} fragments of {case.fragment} B are fewer than two a thread: nothing to gather")
    team = measure.team(case.threads)
    copying = case.op == "copy"
    source = measure.sources(1, case.bytes, case.pages)[0].address
    target = measure.target(case.bytes, case.pages).address if copying else None
    payload = count * case.fragment
    measure.working_set(payload * (2 if copying else 1))
    index = np.random.default_rng(measure.context.seed).permutation(count).astype(np.int64)
    works = {
        name: Gather(name, source, payload, case.fragment, index, team, dst=target)
        for name in variants(case.op, case.fragment)
    }
    best = measure.best({name: work.run for name, work in works.items()})
    work = works[best]
    measure.note("variant", best)
    if target is not None:
        stream = Stream("nt_copy", [target, source], payload, team)
        reference = Reference("nt_copy stream, payload once", stream.run, payload, stream.verify)
    else:
        stream = Stream("read", [source], payload, team)
        reference = Reference("read stream", stream.run, payload, stream.verify)
    measure.note("order", "random permutation")
    measure.pair(
        work.run, reference, link=work.link_bytes, unique=payload, verify=work.verify, kernel=work.kernel,
        transport="cpu" if copying else "direct", ceilings=measure.dram_ceilings(payload),
    )  # fmt: skip
