"""How many threads decode attention needs before memory is the bound, by query heads a KV head (N10)."""

from kvbench import Case, Measure, axis, bench

LEAST_BYTES = 256 << 20


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["flops"], limit=120.0,
    seconds={"smoke": 1.4, "quick": 7.0, "full": 50.0},
    threads=axis.threads(smoke=["1", "all"], quick=["1", "all"]),
    group=axis.integer(smoke=["8"], quick=["8"], full=["1", "4", "8", "16"], low=1, high=16),
    dtype=axis.choice("fp32", "fp16", "bf16", smoke=["bf16"], quick=["bf16"], full=["fp16", "bf16"]),
    pages=axis.choice("4k", "thp", smoke=["thp"], quick=["thp"], full=["4k", "thp"]),
)  # fmt: skip
def threads(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second by threads; 4 sequences of 16k tokens, page 16, 8 KV heads of 128.

    One query head a KV head needs few cores to saturate memory, eight need more: `bound` and `resident_rate`, what the
    cores reach with KV in their caches, say which side of it a row is on. `pages`: of the operating system.
    """
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape
    from kvbench.measure import Reference

    shape = Shape(case.dtype, 8 * case.group, 8, 128, 16)
    lengths = [16384] * 4
    team = measure.team(case.threads)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(shape, lengths, layers), case.pages)
    work = DecodeWork(shape, lengths, layers, team, buffer.address, seed=measure.context.seed)
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
