"""A copy beside other work (Strata S4): what each takes from the other, with proof that both ran at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvbench.contract.axis import Value
    from kvbench.contract.result import Better, Result

GEMM_N = 1024  # of the product on the host: about 20 ms on a core
READ_BYTES = COPY_BYTES = 256 << 20
GPU_READ_BYTES, GPU_COPY_BYTES = 1 << 30, 64 << 20
GPU_SLICES = 4  # of the copied memory: what the host's caches hold of one is gone when it comes again
VICTIM_SECONDS, MOST_REPEATS = 0.015, 200  # of the victim on a GPU: ten passes of the copy
TRIES = 5  # of a sample whose copy was not under way all the time
COPY_ALONE_SECONDS = 0.02
VARIANT = "nt l2+4096"


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the transport belongs to the form; a copy engine has no blocks, so its quota is 0 or 1."""
    host = axes["form"] == "host"
    return host == (axes["transport"] == "cpu") and (axes["transport"] != "ce" or int(axes["quota"]) <= 1)


@bench(
    version=1, metric="victim_time", unit="s", better="lower", where=exists, limit=180.0,
    extra_metrics=["victim_slowdown", "copy_bandwidth", "copy_alone", "copy_slowdown"],
    seconds={"smoke": 1.5, "quick": 5.0, "full": 32.0},
    form=axis.choice("host", "gpu"),
    victim=axis.choice("gemm", "reader"),
    transport=axis.choice("cpu", "sm", "ce", smoke=["cpu", "sm"]),
    quota=axis.integer(smoke=["0", "1"], quick=["0", "1", "2"], full=["0", "1..128"], low=0, high=4096),
    fragment=axis.bytes(smoke=["64KiB"], quick=["64KiB"], full=["64KiB"], low="64B", high="64MiB"),
)  # fmt: skip
def interference(case: Case, measure: Measure) -> None:
    """A matrix product or a memory-bound reader beside a copy by `quota` threads (host) or blocks (GPU); 0: no copy.

    Victim alone and beside the copy are taken in turns. A sample counts only when the copy was under way from before
    the victim's begin to after its end; where it was not, it is taken again. Rows: the victim's time beside the copy
    (the ceiling is its time alone), its slowdown, the copy's bandwidth inside the window and alone, and its slowdown;
    0.05 means 5 % longer. With quota 0 the slowdown is that of the victim against itself.
    """
    if case.form == "gpu":
        on_device(case, measure)
    else:
        on_host(case, measure)


def on_host(case: Case, measure: Measure) -> None:
    """Measure the host form: victim and copiers are threads on CPUs of their own."""
    import time

    from kvbench.kernels.background import Background
    from kvbench.kernels.blas import Sgemm, one_thread
    from kvbench.kernels.stream import Stream
    from kvbench.timing.clock import now_ns
    from kvbench.transport.gpu_pieces import scattered

    if case.fragment % 64:
        measure.skip(f"fragment {case.fragment} is not a multiple of 64 bytes, one cache line")
    cpus = measure.context.topology.measuring_cpus(1 + case.quota)
    team = measure.team_on(cpus[:1])
    if case.victim == "gemm":
        product = Sgemm(GEMM_N, measure.context.seed, measure.enter(one_thread()))
        work: Callable[[], object] = product.run
        check, kernel = product.verify, product.kernel
        measure.note("flops", product.flops)
    else:
        stream = Stream("read", [measure.sources(2, READ_BYTES, "thp")[1].address], READ_BYTES, team)
        work, check, kernel = stream.run, stream.verify, stream.kernel
        measure.note("victim_bytes", READ_BYTES)
    beside: list[float] = []  # bytes a second of the copy inside the victim's windows
    alone: list[float] = []
    copier: Background | None = None
    if case.quota:
        count = COPY_BYTES // case.fragment
        source = measure.sources(1, COPY_BYTES, "thp")[0].address
        target = measure.target(COPY_BYTES, "thp").address
        measure.working_set(2 * COPY_BYTES)
        copier = measure.enter(
            Background(
                cpus[1:], VARIANT, source, target, case.fragment, scattered(count, measure.context.seed), COPY_BYTES
            )
        )
        measure.threads((*team.tids, *copier.tids))
        if copier.pin_reason is not None:
            measure.flag("unpinned")

    def victim() -> float:
        begin = now_ns()
        work()
        return (now_ns() - begin) * 1e-9

    def copy_rate(seconds: float) -> float:
        assert copier is not None
        copier.start()
        begin, first = now_ns(), copier.copied
        time.sleep(seconds)
        end, last = now_ns(), copier.copied
        copier.stop()
        return float((last - first) * case.fragment / ((end - begin) * 1e-9))

    def once() -> float:
        if copier is None:
            return victim()
        for _ in range(TRIES):
            copier.start()
            begin, first = now_ns(), copier.copied
            work()
            end, last = now_ns(), copier.copied
            stretch = copier.stop()
            if stretch.covers(begin, end) and last > first:
                beside.append((last - first) * case.fragment / ((end - begin) * 1e-9))
                alone.append(copy_rate(COPY_ALONE_SECONDS))
                return (end - begin) * 1e-9
        measure.flag("copy_not_covering")
        raise_void(TRIES)

    def verify() -> None:
        check()
        if copier is not None:
            copier.start()
            time.sleep(COPY_ALONE_SECONDS)
            copier.verify(copier.stop())

    if copier is not None:
        copier.start()
        time.sleep(2 * COPY_ALONE_SECONDS)
        copier.verify(copier.stop())
    report(case, measure, once, victim, verify, kernel, None if copier is None else copier.kernel, beside, alone)


def raise_void(tries: int) -> NoReturn:
    """Raise for a sample that was void every time it was taken."""
    from kvbench.errors import KvbenchError

    raise KvbenchError(
        "the copy was not under way all the time", where="interference", got=f"{tries} void samples",
        mend="end other programs, or choose a longer victim",
    )  # fmt: skip


def on_device(case: Case, measure: Measure) -> None:
    """Measure the GPU form: the copy on a side stream, started before the victim."""
    from math import ceil

    from kvbench.kernels.gpu.cublas import Cublas
    from kvbench.memory.cuda.buffers import hbm, pinned
    from kvbench.memory.cuda.movers import BLOCKS_PER_SM, MemoryWork
    from kvbench.systems.strata.overlap_beside import MOST_PASSES, Beside
    from kvbench.systems.strata.overlap_victim import Gemm, Victim
    from kvbench.timing.gpu_rows import on_gpu
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.transport.gpu_ce import CopyEngine
    from kvbench.transport.gpu_lane import copied
    from kvbench.transport.gpu_pieces import Mover, Pieces, scattered
    from kvbench.transport.gpu_sm import ThreadCopy

    with GpuSession() as gpu:
        on_gpu(measure, gpu, link=True)
        sms, seed = gpu.device.facts.sms, measure.context.seed
        victim: Victim
        if case.victim == "gemm":
            victim = Gemm(gpu.enter(Cublas()), gpu.service, gpu.enter, seed)
        else:
            victim = MemoryWork("read", GPU_READ_BYTES, gpu.service, gpu.kernels, gpu.enter, seed)
        target = gpu.enter(hbm(gpu.service, GPU_SLICES * GPU_COPY_BYTES, seed=seed + 2))
        source = gpu.enter(pinned(gpu.service, GPU_SLICES * GPU_COPY_BYTES, seed=seed + 1))
        for flag in source.flags:
            measure.flag(flag)
        order = scattered(1, seed)
        copies: list[Mover] = []
        for start in range(0, source.nbytes, GPU_COPY_BYTES):
            if case.transport == "sm":
                near, far = target.copy_address + start, (source.device_address or 0) + start
                copies.append(ThreadCopy(gpu.kernels, near, far, GPU_COPY_BYTES, max(1, case.quota)))
            else:
                pieces = Pieces(target.copy_address + start, source.copy_address + start, GPU_COPY_BYTES, order)
                copies.append(CopyEngine(gpu.device, pieces))
        lane = copied("fetch", gpu.service, copies[0], source, target, order)
        work = Beside(gpu.device, victim.submit, copies, gpu.enter)
        stream = gpu.clock.stream
        single = max(work.alone(stream) for _ in range(3))
        work.repeats = max(1, min(MOST_REPEATS, ceil(VICTIM_SECONDS / single)))
        seconds = work.alone(stream)
        measure.note("victim_repeats", work.repeats)
        beside: list[float] = []
        alone: list[float] = []
        passes = 3
        if case.quota:
            each = work.copy_alone(stream, 2 * GPU_SLICES)
            passes = max(GPU_SLICES, 3 + round(2.0 * seconds / each))
            if passes > MOST_PASSES:
                measure.skip(f"the victim takes as long as {passes} copies, more than may be queued")

        def once() -> float:
            nonlocal passes
            if not case.quota:
                return work.alone(stream)
            for _ in range(TRIES):
                found = work.both(stream, passes)
                if found.covered and found.passes:
                    beside.append(found.passes * GPU_COPY_BYTES / found.copy)
                    alone.append(GPU_COPY_BYTES / work.copy_alone(stream, 2 * GPU_SLICES))
                    return found.work
                passes = min(MOST_PASSES, passes + passes // 2)
            raise_void(TRIES)

        def verify() -> None:
            victim.spoil()
            lane.spoil()
            once()
            victim.check()
            if case.quota:
                lane.check()

        measure.note("ctas", case.quota)
        measure.note("sms", sms)
        # cuBLAS does not tell how many blocks it starts; those of the reader stay four to a multiprocessor
        blocks = BLOCKS_PER_SM * sms if case.victim == "reader" else None
        left = BLOCKS_PER_SM * (sms - case.quota * (case.transport == "sm"))
        measure.note("victim_ctas", blocks)
        measure.note("victim_waves", None if blocks is None or left < 1 else round(blocks / left, 3))
        measure.note("launch_order", "copy first; the victim waits for a pass of it")
        measure.note("stream_priority", "both default")
        report(
            case, measure, once, lambda: work.alone(stream), verify, victim.kernel,
            copies[0].kernel if case.quota else None, beside, alone, work.repeats,
        )  # fmt: skip


def report(
    case: Case, measure: Measure, once: Callable[[], float], victim: Callable[[], float], verify: Callable[[], None],
    kernel: str, copy: str | None, beside: list[float], alone: list[float], repeats: int = 1,
) -> None:  # fmt: skip
    """Take the pairs and add the rows; ``beside`` and ``alone`` hold the copy's rates once the pairs are taken.

    ``once`` and ``victim`` return the seconds of ``repeats`` victims beside the copy and alone.
    """
    from kvbench.measure import Reference

    def times(work: Callable[[], float]) -> Callable[[int], float]:
        return lambda reps: sum(work() for _ in range(reps))

    measure.note("copy_kernel", copy)
    row = measure.pair(
        times(once), Reference("victim alone", times(victim), repeats), ops=repeats, verify=verify, kernel=kernel,
        transport=case.transport if case.quota else None,
    )  # fmt: skip
    before = row.ceilings[0].value if row.ceilings else None
    if row.value is None or not before:
        return
    add(measure, row, "victim_slowdown", "1", [row.value / before - 1.0], kernel)
    if not case.quota:  # there is no copy to have a rate
        return
    used = slice(-row.n, None)
    add(measure, row, "copy_bandwidth", "B/s", beside[used], copy, better="higher")
    add(measure, row, "copy_alone", "B/s", alone[used], copy, better="higher")
    slower = [a / b - 1.0 for a, b in zip(alone[used], beside[used], strict=True)]
    add(measure, row, "copy_slowdown", "1", slower, copy)


def add(
    measure: Measure, row: Result, metric: str, unit: str, values: Sequence[float], kernel: str | None, *,
    better: Better = "lower",
) -> None:  # fmt: skip
    """Add a row of the median of ``values``, which come from inside the samples of the primary ``row``."""
    import numpy as np

    from kvbench.timing.summary import median_ranks

    ordered, ranks = sorted(values), median_ranks(len(values))
    low, high = (None, None) if ranks is None else (ordered[ranks[0]], ordered[ranks[1]])
    tainted = row.status == "tainted"
    measure.extra(
        metric, float(np.median(ordered)), unit=unit, better=better, low=low, high=high, n=len(ordered), kernel=kernel,
        status="tainted" if tainted else "ok", reason=row.reason if tainted else "",
    )  # fmt: skip
