"""What asking the GPU for something costs when there is next to nothing to do."""

from kvbench import Case, Measure, axis, bench


@bench(
    version=1, metric="round_trip", unit="s", better="lower", extra_metrics=["submit_time", "device_time"],
    seconds={"smoke": 0.2, "quick": 0.5, "full": 16.0},
    op=axis.choice(
        "kernel", "event", "memset", "copy_fetch", "copy_evict", "copy_local", "batch_fetch", "batch_evict", "graph",
        "graph_64", smoke=["kernel", "copy_fetch"], quick=["kernel", "event", "copy_fetch", "batch_fetch", "graph"],
    ),
    device=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=63),
)  # fmt: skip
def launch(case: Case, measure: Measure) -> None:
    """Seconds from asking an idle device for one operation to knowing that it is done, by the host's clock.

    Copies move 16 bytes, batches two items of 16; the kernel is empty, a graph holds one of it or a chain of 64, and
    its seconds are those of the whole graph. submit_time is the host's share of one call, in
    a compiled loop of many onto a stream that a blocker holds; device_time is one of many behind that blocker.
    """
    from kvbench.timing.gpu_rows import add_sampled, on_gpu
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.timing.gpu_submit import Submission
    from kvbench.transport.gpu_calls import open_call

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=False)
        call = open_call(case.op, gpu.service, gpu.kernels, gpu.enter, measure.context.seed)
        timed = gpu.clock.submission(call.submit, call.operations)

        def verify() -> None:
            call.check()
            call.spoil()
            timed(1)
            call.check()

        row = measure(timed, verify=verify, kernel=call.kernel)
        if row.value is None:
            return
        loop = Submission(gpu.clock, call.calls, call.operations)
        add_sampled(
            measure, gpu, "submit_time", loop.run, unit="s", better="lower", amount=loop.count, kernel=call.kernel
        )
        events = gpu.clock.hot(call.submit, call.operations)
        add_sampled(
            measure, gpu, "device_time", events, unit="s", better="lower", amount=1.0, events=events, kernel=call.kernel
        )
        call.check()
