"""What reading one layer's KV costs when all layers share each page of a mapping."""

from kvbench import Case, Measure, axis, bench


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", limit=120.0,
    seconds={"smoke": 1.0, "quick": 4.0, "full": 6.0},
    layout=axis.choice("packed", "strided"),
    pages=axis.choice("4k", "thp", "huge", smoke=["thp"], quick=["4k", "thp"], full=["4k", "thp"]),
    fragment=axis.bytes(smoke=["4KiB"], quick=["4KiB"], full="1KiB..256KiB", low="64", high="64MiB"),
    layers=axis.integer(smoke=["32"], quick=["32"], full=["32", "80"], low=2, high=1024),
    bytes=axis.bytes(smoke=["256MiB"], quick=["256MiB"], full=["1GiB"], low="1MiB", high="64GiB"),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["1", "all"]),
)  # fmt: skip
def stride_cost(case: Case, measure: Measure) -> None:
    """Bandwidth of reading KV layer by layer: strided in one mapping of all layers, or packed layer by layer.

    strided: each block of tokens holds a fragment of every layer, so a layer's fragments lie layers x fragment apart (a
    page group that spans all layers); packed: they follow one another. Both read every byte once, layer after layer, by
    the same reader with the best of its prefetch variants. The ceiling is the sequential read of the same memory, the
    best of the plain stream and the same variants; the difference of 4k and thp is what the page tables add.
    """
    import numpy as np

    from kvbench.kernels.gather import Gather, variants
    from kvbench.kernels.stream import Stream
    from kvbench.measure import Reference

    if case.fragment % 64:
        measure.skip(f"fragment {case.fragment} is not a multiple of 64 bytes, one cache line")
    blocks = case.bytes // (case.fragment * case.layers)
    if blocks < 2 * case.threads:
        measure.skip(f"{blocks} blocks of {case.layers} layers are fewer than two a thread: no stride to see")
    team = measure.team(case.threads)
    payload = blocks * case.layers * case.fragment
    source = measure.sources(1, case.bytes, case.pages)[0].address
    measure.working_set(payload)
    measure.note("stride", case.fragment * (case.layers if case.layout == "strided" else 1))
    packed = index = np.arange(blocks * case.layers, dtype=np.int64)
    if case.layout == "strided":
        index = np.ascontiguousarray(index.reshape(blocks, case.layers).T).reshape(-1)
    names = variants("read", case.fragment)
    works = {name: Gather(name, source, payload, case.fragment, index, team) for name in names}
    best = measure.best({name: work.run for name, work in works.items()})
    work = works[best]
    measure.note("variant", best)
    straight = {name: Gather(name, source, payload, case.fragment, packed, team) for name in names}
    ways: dict[str, Gather | Stream] = {"stream": Stream("read", [source], payload, team), **straight}
    top = measure.best({name: way.run for name, way in ways.items()})
    measure.note("ceiling_variant", top)
    measure.pair(
        work.run, Reference("sequential read", ways[top].run, payload, ways[top].verify), link=work.link_bytes,
        unique=payload, verify=work.verify, kernel=work.kernel, transport="direct",
        ceilings=measure.dram_ceilings(payload),
    )  # fmt: skip
