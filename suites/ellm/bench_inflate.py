"""The KV cache takes memory from idle activations (eLLM, section 2.2): nothing is copied, and what the calls cost."""

from typing import Any

from kvbench import Case, Measure, axis, bench


@bench(
    version=1, metric="inflation_time", unit="s", better="lower", limit=180.0,
    extra_metrics=["time_per_chunk", "settle_time", "bytes_copied"],
    seconds={"smoke": 0.3, "quick": 1.4, "full": 8.0},
    driver=axis.choice("host", "cuda"),
    chunks=axis.integer(
        smoke=["64"], quick=["16", "512"], full=["1", "4", "16", "64", "256", "1024", "4096"],
        high=1 << 16,
    ),
    unmap=axis.choice("sync", "alias"),
    chunk_bytes=axis.bytes(smoke=["2MiB"], quick=["2MiB"], full=["64KiB", "2MiB"], low="4KiB", high="1GiB"),
)  # fmt: skip
def inflate(case: Case, measure: Measure) -> None:
    """Seconds until a KV cache of that many chunks can be written; an idle activation slot had all of them mapped.

    sync: reclaim (unmap), change the owner, map at the new addresses. alias: the chunks are mapped at the new addresses
    at once and unmapped from the old ones in the background; settle_time is how long that then still takes. The ceiling
    is the same driver calls alone, in turns. Each chunk carries its number: bytes_copied counts those found elsewhere.
    """
    import threading

    from kvbench.measure import Reference
    from kvbench.systems.ellm.alone import CallsAlone
    from kvbench.systems.ellm.backing import Policy, Sizes
    from kvbench.systems.ellm.drivers import case_pool, open_driver

    size, count = case.chunk_bytes, case.chunks
    gpu = None
    if case.driver == "cuda":
        from kvbench.timing.gpu_rows import on_gpu
        from kvbench.timing.gpu_session import GpuSession

        gpu = measure.enter(GpuSession(0))
        on_gpu(measure, gpu, link=False)
    vmm, touch = open_driver(measure.enter, count * size, size, None if gpu is None else gpu.service)
    alias = case.unmap == "alias"
    pool = measure.enter(case_pool(vmm, Sizes(size, 0, count, 2, count * size, count * size), Policy(alias=alias)))
    work = Inflation(pool, touch, count)
    if alias:
        measure.threads([threading.get_native_id(), pool.start_background()])
    calls = measure.enter(CallsAlone(vmm, pool.chunks))
    alone = Alone(calls, unmap=not alias)
    names = "map, set_access" if alias else "unmap, map, set_access"
    row = measure.pair(
        work.run, Reference(f"{names} alone", alone.run, 1.0), verify=work.verify, kernel=f"{vmm.name} cuMem order"
    )
    measure.note("maps", work.maps)
    measure.note("unmap_calls", work.unmaps)
    for name, seconds in alone.medians().items():
        measure.note(f"{name}_alone", seconds)
    calls.close()
    pool.close()
    if row.value is not None:
        _extras(measure, row, work, count)


def _extras(measure: Measure, row: Any, work: Any, count: int) -> None:
    from statistics import median

    measure.extra(
        "time_per_chunk", row.value / count, low=None if row.low is None else row.low / count,
        high=None if row.high is None else row.high / count, n=row.n, unit="s", better="lower", status=row.status,
        reason=row.reason,
    )  # fmt: skip
    settled = [value for seconds in set(row.samples) for value in work.settled[seconds]]
    measure.extra(
        "settle_time", median(settled), low=min(settled), high=max(settled), n=len(settled), unit="s", better="lower",
        status=row.status, reason=row.reason,
    )  # fmt: skip
    measure.extra("bytes_copied", float(work.copied), unit="B", better="lower", n=1)


class Inflation:
    """Lends all ``count`` chunks of ``pool`` from an idle activation slot to a KV slot, again and again."""

    def __init__(self, pool: Any, touch: Any, count: int) -> None:
        from kvbench.systems.ellm.identity import moved_bytes, stamp

        self.pool, self.touch, self.nbytes = pool, touch, count * pool.sizes.chunk_bytes
        self.settled: dict[float, list[float]] = {}  # by the seconds a pass of the run they were in; two may be equal
        self.maps = self.unmaps = self.copied = 0
        self._moved = moved_bytes
        first = pool.open_act(self.nbytes)
        stamp(pool, first, touch)
        pool.close_act(first)

    def run(self, reps: int) -> float:
        """Return the seconds of ``reps`` inflations; giving the memory back is not in them."""
        from kvbench.timing.clock import now_ns

        spent = 0
        settled: list[float] = []
        for _ in range(reps):
            self._prepare()
            tally = self.pool.tally
            maps, unmaps = tally.mapped, tally.unmap_calls
            began = now_ns()
            slot = self.pool.open_kv(self.nbytes)
            done = now_ns()
            self.pool.settle()
            settled.append((now_ns() - done) * 1e-9)
            spent += done - began
            self.maps, self.unmaps = tally.mapped - maps, tally.unmap_calls - unmaps
            self.pool.close_kv(slot)
        self.settled.setdefault(spent * 1e-9 / reps, []).extend(settled)
        return spent * 1e-9

    def _prepare(self) -> None:
        """Let activations hold everything again, mapped and idle."""
        self.pool.close_act(self.pool.open_act(self.nbytes))
        self.pool.settle()

    def verify(self) -> None:
        """Raise VerifyError when a chunk is not where the pool says, or was copied there."""
        from kvbench.errors import VerifyError

        self._prepare()
        slot = self.pool.open_kv(self.nbytes)
        self.copied = self._moved(self.pool, slot, self.touch)
        self.pool.close_kv(slot)
        self.pool.settle()
        self.pool.check()
        if self.copied:
            raise VerifyError(
                "memory was not remapped", where="inflate", got=f"{self.copied} bytes elsewhere", expected="0"
            )


class Alone:
    """The same calls, each timed by itself and summed; without the unmap where the pool leaves it to the background."""

    def __init__(self, calls: Any, *, unmap: bool) -> None:
        self.calls = calls
        self.parts: dict[str, list[float]] = {name: [] for name in ("unmap", "map", "access")[not unmap :]}

    def run(self, reps: int) -> float:
        """Return the seconds of ``reps`` times the calls."""
        from kvbench.timing.clock import now_ns

        total = 0.0
        for _ in range(reps):
            self.calls.prepare()
            for name, taken in self.parts.items():
                began = now_ns()
                getattr(self.calls, name)()
                taken.append((now_ns() - began) * 1e-9)
                total += taken[-1]
        return total

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each call."""
        from statistics import median

        return {name: median(taken) for name, taken in self.parts.items() if taken}
