"""What a page costs before it holds anything: fault, populate, give back."""

from kvbench import Case, Measure, axis, bench

COMMON = ["first_touch", "unmap"]


@bench(
    version=1, metric="page_time", unit="s", better="lower", seconds={"smoke": 0.3, "quick": 1.2, "full": 4.0},
    extra_metrics=["seconds_per_gib"],
    op=axis.choice("first_touch", "populate", "unmap", "drop", smoke=COMMON, quick=COMMON),
    pages=axis.choice("4k", "thp", "huge", smoke=["4k", "thp"], quick=["4k", "thp"]),
    bytes=axis.bytes(smoke=["64MiB"], quick=["64MiB"], full=["2MiB", "64MiB", "1GiB"], low="4KiB", high="16GiB"),
)  # fmt: skip
def touch(case: Case, measure: Measure) -> None:
    """Seconds per page of first touch, MADV_POPULATE_WRITE, munmap and MADV_DONTNEED, by page type, one thread.

    Every operation works on fresh memory and is checked by the bytes resident around it.
    """
    from kvbench.memory.pages import PageOperation

    work = measure.enter(PageOperation(case.op, case.bytes, case.pages))
    measure.note("page_bytes", work.page_bytes)
    measure.note("pages", work.pages)
    row = measure(work.run, ops=work.pages, unique=work.unique_bytes, verify=work.verify, kernel=work.kernel)
    if row.value is not None and row.low is not None and row.high is not None:
        scale = (1 << 30) / work.page_bytes
        measure.extra(
            "seconds_per_gib", row.value * scale, low=row.low * scale, high=row.high * scale, n=row.n, unit="s",
            better="lower", status=row.status, reason=row.reason, kernel=work.kernel,
        )  # fmt: skip
