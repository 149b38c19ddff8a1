"""What each call of virtual memory management costs, on the host's proxy and on a GPU."""

from collections.abc import Mapping
from typing import Any

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

DRIVER = axis.choice("host", "cuda")
ORDERED = ("map", "set_access", "unmap")


def meaningful(axes: Mapping[str, Value]) -> bool:
    """Return whether order, pages and threads say something about that call."""
    ordered = axes["op"] in ORDERED
    if axes["order"] == "scattered" and not ordered:
        return False
    one_call = ordered and axes["op"] != "map" and axes["order"] == "contiguous"
    return (axes["driver"] == "host" or axes["pages"] == "4k") and (axes["threads"] == 1 or not one_call)


@bench(
    version=1, metric="call_time", unit="s", better="lower", where=meaningful, limit=120.0,
    extra_metrics=["call_p99", "time_per_mib"], seconds={"smoke": 0.3, "quick": 1.1, "full": 4.0},
    driver=DRIVER,
    op=axis.choice(
        "reserve", "create", "map", "set_access", "unmap", "release", "free",
        smoke=["map", "set_access", "unmap", "release"], quick=["map", "set_access", "unmap", "release"],
    ),
    chunk_bytes=axis.bytes(
        smoke=["2MiB"], quick=["2MiB"], full=["64KiB", "2MiB", "20MiB", "64MiB"], low="4KiB", high="1GiB"
    ),
    count=axis.integer(smoke=["16"], quick=["32"], full=["64"], low=1, high=1 << 15),
    order=axis.choice("contiguous", "scattered"),
    pages=axis.choice("4k", "thp", "huge", smoke=["4k"], quick=["4k"], full=["4k", "thp"]),
    threads=axis.threads(smoke=["1"], quick=["1"], full=["1", "all"]),
)  # fmt: skip
def vmm_calls(case: Case, measure: Measure) -> None:
    """Seconds of one call on chunks of a size, made from compiled code; call_p99 the slowest of a hundred of them.

    Contiguous chunks are made accessible and unmapped by one call for all, scattered ones by one call each;
    time_per_mib is what a MiB then costs. With several threads it is the time from the first to the last call divided
    by the calls of all: what one costs while the others call too. Host calls are a proxy in kind, not in cost.
    """
    import numpy as np

    from kvbench.kernels.call_loop import TeamRunner
    from kvbench.memory.vmm.calls import CallWork

    team = measure.team(case.threads)
    if case.count < len(team):
        measure.skip(f"{case.count} calls are fewer than one a thread")
    runner = TeamRunner(team, stamps=True)
    total = case.chunk_bytes * case.count
    vmm, touch = opened(case, measure, runner, total)
    work = CallWork(
        vmm, runner, touch, case.op, case.chunk_bytes, case.count, case.order, measure.context.seed
    )  # fmt: skip
    taken: dict[float, list[Any]] = {}

    def run(reps: int) -> float:
        seconds = work.run(reps)
        taken.setdefault(seconds / reps, []).append(np.concatenate(work.each))  # two may take the same nanoseconds
        return seconds

    row = measure(run, ops=work.calls, verify=work.verify, kernel=work.kernel)
    measure.note("calls", work.calls)
    measure.note("granularity", vmm.granularity())
    if row.value is None:
        return
    behind = set(row.samples)  # the samples behind the primary row, and none that were set aside
    each = np.concatenate([calls for seconds in behind for calls in taken[seconds]])
    measure.extra(
        "call_p99", float(np.quantile(each, 0.99)), unit="s", better="lower", n=len(each), status=row.status,
        reason=row.reason, kernel=work.kernel,
    )  # fmt: skip
    share = work.calls / (total / (1 << 20))
    measure.extra(
        "time_per_mib", row.value * share, low=None if row.low is None else row.low * share,
        high=None if row.high is None else row.high * share, n=row.n, unit="s", better="lower", status=row.status,
        reason=row.reason, kernel=work.kernel,
    )  # fmt: skip


def opened(case: Case, measure: Measure, runner: Any, total: int) -> tuple[Any, Any]:
    """Return the case's driver with room for ``total`` bytes and one chunk more, and who touches what it maps."""
    from kvbench.errors import UsageError
    from kvbench.memory.vmm.cuda import CudaVmm
    from kvbench.memory.vmm.host import HostVmm
    from kvbench.memory.vmm.touch import CudaTouch, HostTouch

    try:
        if case.driver == "host":
            vmm = measure.enter(HostVmm(total, case.pages, granularity=case.chunk_bytes, runner=runner))
            return vmm, HostTouch()
        from kvbench.timing.gpu_rows import on_gpu
        from kvbench.timing.gpu_session import GpuSession

        gpu = measure.enter(GpuSession(0))
        on_gpu(measure, gpu, link=False)
        vmm = measure.enter(CudaVmm(gpu.device, granularity=case.chunk_bytes, runner=runner))
        return vmm, CudaTouch(vmm, gpu.service)
    except UsageError as error:
        measure.skip(str(error))  # a chunk smaller than a page, or than the GPU's granularity
