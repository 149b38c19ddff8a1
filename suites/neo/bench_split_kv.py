"""Cutting a batch by KV pages against giving each thread whole sequences (NEO, section 4; Flash-Decoding; N3)."""

from kvbench import Case, Measure, axis, bench

LEAST_BYTES = 256 << 20
# The first two hold the same bytes; the third is one long request among short ones.
MIXES = {"single": [65536], "uniform": [8192] * 8, "skewed": [16384] + [256] * 15}


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["flops"], limit=120.0,
    seconds={"smoke": 1.4, "quick": 7.0, "full": 50.0},
    split=axis.choice("pages", "sequences", smoke=["pages"]),
    mix=axis.choice(*MIXES, smoke=["single", "uniform"], quick=["skewed"]),
    group=axis.integer(smoke=["4"], quick=["4"], full=["1", "4", "8"], low=1, high=16),
    threads=axis.threads(smoke=["all"], quick=["all"]),
)  # fmt: skip
def split_kv(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second on one sequence of 64k tokens, 8 of 8k, and one of 16k among 15 of 256; bf16, page 16.

    By pages the work of any mix is equal parts, and cut sequences are merged inside the call; by sequences a thread
    waits for the longest. Ceilings as in decode_attention.
    """
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape
    from kvbench.measure import Reference

    shape = Shape("bf16", 8 * case.group, 8, 128, 16)
    lengths = MIXES[case.mix]
    team = measure.team(case.threads)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(shape, lengths, layers), "thp")
    seed = measure.context.seed
    work = DecodeWork(shape, lengths, layers, team, buffer.address, seed=seed, split=case.split)
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
