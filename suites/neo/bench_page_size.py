"""What the size of a KV page and the order of the table cost decode attention on cores (N4)."""

from kvbench import Case, Measure, axis, bench

LEAST_BYTES = 256 << 20


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["flops"], limit=120.0,
    seconds={"smoke": 1.4, "quick": 7.0, "full": 50.0},
    page_tokens=axis.integer(smoke=["16", "64"], quick=["16", "256"], full="8..256", low=8, high=256),
    order=axis.choice("shuffled", "sorted", smoke=["shuffled"], quick=["shuffled"]),
    group=axis.integer(smoke=["4"], quick=["4"], full=["1", "4", "8"], low=1, high=16),
    threads=axis.threads(smoke=["1"], quick=["1"], full=["1", "all"]),
)  # fmt: skip
def page_size(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second by tokens a page; bf16, 4 sequences of 16k tokens, 8 KV heads of 128.

    The gather ceiling reads fragments of the same size in the same order, so its own column shows what memory loses to
    small pages and the fraction what the kernel loses beyond it. `sorted` tables lie in order.
    """
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape
    from kvbench.measure import Reference

    shape = Shape("bf16", 8 * case.group, 8, 128, case.page_tokens)
    lengths = [16384] * 4
    team = measure.team(case.threads)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(shape, lengths, layers), "thp")
    seed = measure.context.seed
    work = DecodeWork(shape, lengths, layers, team, buffer.address, order=case.order, seed=seed)
    measure.working_set(work.nbytes)
    measure.note("layers", layers)
    gathers = work.gathers()
    best = measure.best({name: gather.run for name, gather in gathers.items()}, rounds=1)
    measure.note("gather_variant", best)
    row = measure.pair(
        work.run, [Reference(*ceiling) for ceiling in work.ceilings(gathers[best])], unique=work.kv_bytes,
        rate_of="unique", verify=work.verify, kernel=work.kernel, transport="direct",
        ceilings=measure.dram_ceilings(work.nbytes),
    )  # fmt: skip
    if row.value is None or row.seconds is None:
        return
    for name, value in work.detail(row.value, row.ceilings[0].value, row.ceilings[1].value).items():
        measure.note(name, value)
    measure.extra(
        "flops", work.flops / row.seconds, unit="FLOP/s", better="higher", n=row.n, status=row.status,
        reason=row.reason, kernel=row.kernel,
    )  # fmt: skip
