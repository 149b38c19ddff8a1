"""How long until memory that was asked for can be used: mapped chunks beside what programs do without them."""

from collections.abc import Mapping
from typing import Any

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value


def possible(axes: Mapping[str, Value]) -> bool:
    """Return whether the driver has that way, and whether pages are a choice there."""
    if axes["driver"] == "host":
        return axes["way"] != "torch"
    return axes["pages"] == "4k"


@bench(
    version=1, metric="ready_time", unit="s", better="lower", where=possible, limit=120.0,
    extra_metrics=["back_time", "bare_time"], seconds={"smoke": 0.4, "quick": 1.4, "full": 4.0},
    driver=axis.choice("host", "cuda"),
    way=axis.choice("cold", "created", "plain", "torch", smoke=["cold", "created", "plain"]),
    chunk_bytes=axis.bytes(
        smoke=["2MiB"], quick=["64KiB", "2MiB"], full=["64KiB", "2MiB", "20MiB", "64MiB"], low="4KiB", high="1GiB"
    ),
    count=axis.integer(smoke=["16"], quick=["32"], full=["32", "512"], low=1, high=1 << 15),
    pages=axis.choice("4k", "thp", "huge", smoke=["4k"], quick=["4k", "thp"]),
)  # fmt: skip
def remap(case: Case, measure: Measure) -> None:
    """Seconds per chunk from asking to the first touch: cold, with chunks created before, and without chunks.

    cold creates, maps and makes accessible; created maps chunks whose pages exist already; plain is an anonymous mmap
    (its pages come with the touch) or cuMemAlloc; torch its caching allocator. Host touches write a byte a base page,
    those of a GPU a byte a chunk. back_time gives back again; bare_time is the calls without kvbench's bookkeeping and
    without the touch.
    """
    from kvbench.kernels.call_loop import TeamRunner
    from kvbench.memory.vmm.remap import Remap
    from kvbench.timing.gpu_rows import add_series

    runner = TeamRunner(measure.team(1))
    way, touch = chosen(case, measure, runner)
    work = Remap(way, runner, touch, case.chunk_bytes)
    row = measure(work.run, ops=case.count, verify=work.verify, kernel=way.calls)
    if row.value is None:
        return
    behind = set(row.samples)  # the samples behind the primary row
    passes = [found for seconds in behind for found in work.taken[seconds]]
    for name, found in zip(("back_time", "bare_time"), zip(*passes, strict=True), strict=True):
        if not any(found):
            measure.extra(
                name, None, unit="s", better="lower", status="skipped", reason="torch makes its calls itself"
            )  # fmt: skip
            continue
        add_series(
            measure, name, found, unit="s", better="lower", amount=case.count, kernel=way.calls, status=row.status,
            reason=row.reason,
        )  # fmt: skip


def chosen(case: Case, measure: Measure, runner: Any) -> tuple[Any, Any]:
    """Return the way of the case, and who touches what it gives."""
    from contextlib import closing

    from kvbench.errors import UsageError
    from kvbench.memory.vmm import remap as ways
    from kvbench.memory.vmm.cuda import CudaVmm
    from kvbench.memory.vmm.host import HostVmm
    from kvbench.memory.vmm.touch import CudaTouch, HostTouch

    size, count = case.chunk_bytes, case.count
    try:
        if case.driver == "host":
            near = HostTouch()
            if case.way == "plain":
                return ways.Mmaps(runner, near, size, count, case.pages), near
            host = measure.enter(HostVmm(size * count, case.pages, granularity=size, runner=runner))
            return ways.Chunks(host, near, size, count, cold=case.way == "cold"), near
        from kvbench.timing.gpu_rows import on_gpu
        from kvbench.timing.gpu_session import GpuSession

        gpu = measure.enter(GpuSession(0))
        on_gpu(measure, gpu, link=False)
        vmm = measure.enter(CudaVmm(gpu.device, runner=runner))
        touch = CudaTouch(vmm, gpu.service)
        if case.way == "torch":
            return measure.enter(closing(ways.TorchCache(runner, touch, size, count, gpu.service))), touch
        if case.way == "plain":
            return ways.Allocs(runner, touch, size, count, vmm), touch
        return ways.Chunks(vmm, touch, size, count, cold=case.way == "cold"), touch
    except UsageError as error:
        measure.skip(str(error))  # less than a page or than the GPU's granularity, or no torch
