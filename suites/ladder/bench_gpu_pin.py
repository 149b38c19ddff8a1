"""What page-locked memory costs before the first byte is copied."""

from collections.abc import Mapping

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value


def possible(axes: Mapping[str, Value]) -> bool:
    """Return whether the way to pin has that choice: cuMemHostAlloc chooses its pages itself."""
    return axes["alloc"] == "register" or axes["pages"] == "4k"


@bench(
    version=1, metric="pin_time", unit="s", better="lower", where=possible, limit=120.0,
    extra_metrics=["seconds_per_gib", "alloc_time", "touch_time", "register_time", "unpin_time"],
    seconds={"smoke": 0.2, "quick": 0.5, "full": 16.0},
    alloc=axis.choice("register", "hostalloc", smoke=["register"], quick=["register"]),
    pages=axis.choice("4k", "thp", smoke=["4k"]),
    bytes=axis.bytes(
        smoke=["256MiB"], quick=["256MiB"], full=["1MiB", "64MiB", "1GiB", "8GiB"], low="4KiB", high="1TiB"
    ),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["1", "2", "4", "8", "16", "32"]),
    node=axis.choice("near", "0", "1", "2", "3", "4", "5", "6", "7", smoke=["near"], quick=["near"], full=["near"]),
    device=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=63),
)  # fmt: skip
def pin(case: Case, measure: Measure) -> None:
    """Seconds until fresh page-locked host memory is there: mapped, touched by all threads, registered.

    The steps are rows of their own: alloc_time, touch_time, register_time (none with hostalloc, which pins as it
    allocates) and unpin_time, which the primary row does not count. seconds_per_gib is the primary row per GiB.
    """
    from kvbench.memory.cuda.pinning import Pinning
    from kvbench.timing.gpu_rows import add_series, on_gpu
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=False)
        work = gpu.enter(
            Pinning(
                gpu.service, case.bytes, case.alloc, case.pages, case.threads,
                None if case.node == "near" else int(case.node),
            )
        )  # fmt: skip
        calls = {"register": "mmap + touch + cuMemHostRegister", "hostalloc": "cuMemHostAlloc + touch"}[case.alloc]
        row = measure(work.run, verify=work.verify, kernel=calls)
        for flag in work.flags:
            measure.flag(flag)
        if row.value is None:
            return
        scale = (1 << 30) / case.bytes
        measure.extra(
            "seconds_per_gib", row.value * scale, low=None if row.low is None else row.low * scale,
            high=None if row.high is None else row.high * scale, n=row.n, unit="s", better="lower", status=row.status,
            reason=row.reason, kernel=calls,
        )  # fmt: skip
        taken = work.spans[-row.n :]  # those before them warmed up
        for name in ("alloc", "touch", "register", "unpin"):
            steps = [getattr(spans, name) for spans in taken]
            if None in steps:
                measure.extra(
                    f"{name}_time", None, unit="s", better="lower", status="skipped",
                    reason="cuMemHostAlloc pins as it allocates",
                )  # fmt: skip
                continue
            add_series(measure, f"{name}_time", steps, unit="s", better="lower", status=row.status, reason=row.reason)
