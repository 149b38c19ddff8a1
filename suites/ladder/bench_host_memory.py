"""Host memory as the cores see it: sequential bandwidth by operation, latency alone and under load."""

from kvbench import Case, Measure, axis, bench

SECONDS = {"smoke": 0.3, "quick": 1.0, "full": 4.0}


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", seconds=SECONDS,
    op=axis.choice("read", "write", "copy_plain", "memcpy", "nt_copy", "triad"),
    pages=axis.choice("4k", "thp", "huge", smoke=["thp"], quick=["thp"]),
    bytes=axis.bytes(smoke=["256MiB"], quick=["256MiB"], full="4KiB..1GiB", low="4KiB", high="64GiB"),
    threads=axis.threads(),
)  # fmt: skip
def host_bandwidth(case: Case, measure: Measure) -> None:
    """Sequential bandwidth of one operation on arrays of the given size, split over pinned threads.

    Counted the STREAM way: read and write 1x, copies 2x, triad 3x, no write-allocate. Several sizes give the curve
    through the caches; rows whose arrays fit four last-level caches carry the flag in_llc.
    """
    from kvbench.kernels.stream import ARRAYS, Stream

    team = measure.team(case.threads)
    writes = case.op != "read"
    buffers = [measure.target(case.bytes, case.pages)] if writes else []
    buffers += measure.sources(
        ARRAYS[case.op] - len(buffers), case.bytes, case.pages, kind="float64" if case.op == "triad" else "bits"
    )
    measure.working_set(len(buffers) * case.bytes)
    work = Stream(case.op, [buffer.address for buffer in buffers], case.bytes, team)
    ceilings = measure.dram_ceilings(len(buffers) * case.bytes)
    measure(work.run, link=work.link_bytes, verify=work.verify, kernel=work.kernel, ceilings=ceilings)


@bench(
    version=1, metric="latency", unit="s", better="lower", seconds=SECONDS,
    pages=axis.choice("4k", "thp", "huge", smoke=["thp"], quick=["4k", "thp"]),
    bytes=axis.bytes(
        smoke=["16KiB", "4MiB", "256MiB"], quick=["16KiB", "1MiB", "16MiB", "256MiB"], full="4KiB..1GiB",
        low="4KiB", high="64GiB",
    ),
)  # fmt: skip
def host_latency(case: Case, measure: Measure) -> None:
    """Time of one dependent load on a random cycle through every cache line of the buffer, one thread.

    With base pages the far sizes include the TLB misses a paged KV cache pays too; compare pages=4k with pages=thp.
    """
    from kvbench.kernels.chase import Chase

    team = measure.team(1)
    buffer = measure.target(case.bytes, case.pages)
    work = Chase(buffer.address, case.bytes, team, seed=measure.context.seed)
    # Where caches take part a sample is whole tours: a thousand hops would visit lines no cache holds yet.
    hops = work.nodes if measure.working_set(case.bytes) else 1
    measure(lambda reps: work.run(reps * hops), ops=hops, verify=work.verify, kernel=work.kernel)


@bench(
    version=1, metric="latency", unit="s", better="lower", extra_metrics=["load_bandwidth"],
    seconds={"smoke": 0.5, "quick": 1.4, "full": 5.0},
    pages=axis.choice("4k", "thp", "huge", smoke=["thp"], quick=["thp"], full=["4k", "thp"]),
    bytes=axis.bytes(smoke=["256MiB"], quick=["256MiB"], full=["256MiB", "1GiB"], low="1MiB", high="64GiB"),
    delay=axis.integer(smoke=["0"], quick=["0", "1000"], full="1..65536", low=0, high=1 << 20),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["all"]),
)  # fmt: skip
def host_loaded_latency(case: Case, measure: Measure) -> None:
    """Latency of a chase on one thread while the others stream reads with `delay` pauses between 16 KiB blocks.

    The load is known by the bytes it achieved in the same window (row load_bandwidth), never by its delay.
    """
    from statistics import median

    from kvbench.kernels.chase import Chase, LoadedChase

    team = measure.team(case.threads)
    if len(team) < 2:
        measure.skip("loaded latency needs a second CPU in the affinity mask; this process may use one")
    chased = measure.target(case.bytes, case.pages)
    loaded = measure.sources(1, case.bytes, case.pages)[0]
    measure.working_set(case.bytes)
    work = LoadedChase(
        Chase(chased.address, case.bytes, team, seed=measure.context.seed), loaded.address, case.bytes, team,
        delay=case.delay,
    )  # fmt: skip
    rates: list[float] = []

    def run(hops: int) -> float:
        taken = work.sample(hops)
        rates.append(taken.load_rate)
        return taken.seconds

    row = measure(run, verify=work.verify, kernel=work.kernel)
    if row.value is not None:
        # the last n windows are the sampled ones: the calls before them warmed up and found the block length
        measure.extra(
            "load_bandwidth", median(rates[-row.n :]), unit="B/s", better="higher", n=row.n, status=row.status,
            reason=row.reason, kernel="streaming reads of the other threads", rate_of="demand",
        )  # fmt: skip
