"""GPU memory as its own threads see it: sequential bandwidth by operation, and the latency of one load."""

from kvbench import Case, Measure, axis, bench

SECONDS = {"smoke": 0.2, "quick": 0.5, "full": 16.0}
DEVICE = axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=63)
LEAST_LOADS = 20_000  # 1 ms and more at 50 ns a load: the device's clock ticks every microsecond on some boards


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", seconds=SECONDS, extra_metrics=["one_way"], limit=120.0,
    op=axis.choice("read", "write", "copy", "triad", smoke=["read", "copy"]),
    cache=axis.choice("cold", "hot", smoke=["cold"], quick=["cold"]),
    bytes=axis.bytes(smoke=["1GiB"], quick=["1GiB"], full="64KiB..16GiB", low="4KiB", high="256GiB"),
    device=DEVICE,
)  # fmt: skip
def device_bandwidth(case: Case, measure: Measure) -> None:
    """Sequential bandwidth of GPU memory by one operation on arrays of the given size, timed by events.

    Counted the STREAM way: read and write 1x, copy 2x, triad 3x; one_way counts the bytes axis once. cold flushes the
    L2 the driver reports before each pass; rows whose arrays the L2 serves in part carry the flag in_l2.
    """
    from kvbench.memory.cuda.movers import MemoryWork
    from kvbench.timing.gpu_rows import on_gpu, proof
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=False)
        work = MemoryWork(case.op, case.bytes, gpu.service, gpu.kernels, gpu.enter, measure.context.seed)
        measure.note("working_set", work.moved)
        # A flush empties the cache of what will be read; what is written stays in it, whatever came before.
        cached = gpu.in_l2(work.moved) and (case.cache == "hot" or case.op != "read")
        if cached:
            measure.flag("in_l2")
        run = (gpu.clock.cold if case.cache == "cold" else gpu.clock.hot)(work.submit)

        verify = proof(measure, work, run)
        row = measure(
            run, near=work.moved, unique=work.moved, rate_of="near", verify=verify, kernel=work.kernel,
            ceilings=[] if cached else [gpu.memory_ceiling()],
        )  # fmt: skip
        if row.value is not None:
            share = case.bytes / work.moved
            measure.extra(
                "one_way", row.value * share, low=None if row.low is None else row.low * share,
                high=None if row.high is None else row.high * share, n=row.n, unit="B/s", better="higher",
                status=row.status, reason=row.reason, kernel=work.kernel,
            )  # fmt: skip


@bench(
    version=1, metric="latency", unit="s", better="lower", seconds=SECONDS, extra_metrics=["cycles"], limit=120.0,
    bytes=axis.bytes(
        smoke=["1GiB"], quick=["32KiB", "16MiB", "1GiB"], full="16KiB..4GiB", low="4KiB", high="64GiB",
    ),
    device=DEVICE,
)  # fmt: skip
def device_latency(case: Case, measure: Measure) -> None:
    """Time of one dependent load of one GPU thread on a random cycle through every 128-byte line of the buffer.

    The window is the device's own clock inside the kernel; cycles are the multiprocessor's. A buffer that caches hold
    is walked once before the window.
    """
    from statistics import median

    from kvbench.memory.cuda.movers import DeviceChase
    from kvbench.timing.gpu_rows import on_gpu
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=False)
        nodes = case.bytes // DeviceChase.STRIDE
        cached = gpu.in_l2(case.bytes)
        if cached:
            measure.flag("in_l2")
        work = DeviceChase(
            case.bytes, LEAST_LOADS if not cached else -(-LEAST_LOADS // nodes) * nodes, nodes if cached else 0,
            gpu.service, gpu.kernels, gpu.enter, measure.context.seed,
        )  # fmt: skip
        row = measure(
            lambda reps: sum(work.window(gpu.clock.stream) for _ in range(reps)), ops=work.loads, kernel=work.kernel
        )
        if row.value is not None:
            taken = work.cycles[-row.n :]
            measure.extra(
                "cycles", median(taken), low=min(taken), high=max(taken), n=len(taken), unit="1", better="lower",
                status=row.status, reason=row.reason, kernel=work.kernel,
            )  # fmt: skip
