"""Activations take their memory back from the KV cache (eLLM, section 2.2): when they need it, or at once."""

from typing import Any

from kvbench import Case, Measure, axis, bench


@bench(
    version=1, metric="cycle_time", unit="s", better="lower", limit=180.0,
    extra_metrics=["prefill_wait", "decode_wait", "maps_per_cycle", "bytes_copied"],
    seconds={"smoke": 0.25, "quick": 1.2, "full": 8.0},
    driver=axis.choice("host", "cuda"),
    chunks=axis.integer(
        smoke=["64"], quick=["128"], full=["1", "4", "16", "64", "256", "1024", "4096"], high=1 << 16
    ),
    deflate=axis.choice("lazy", "eager"),
    prefill=axis.choice("part", "all"),
    unmap=axis.choice("sync", "alias", smoke=["sync"], quick=["sync"]),
    chunk_bytes=axis.bytes(smoke=["2MiB"], quick=["2MiB"], full=["64KiB", "2MiB"], low="4KiB", high="1GiB"),
)  # fmt: skip
def deflate(case: Case, measure: Measure) -> None:
    """Seconds both phases wait for memory in one cycle of prefill and decode; the decode borrows that many chunks.

    Activations own twice that many at first. A prefill that takes part of its memory (half) can leave the borrowed
    chunks where they are, one that takes all has to have them back. lazy: they go back when they are asked for; eager:
    when the decode ends. alias: given to their next place at once, unmapped from the last one in the background.
    """
    import threading
    from statistics import median

    from kvbench.systems.ellm.backing import Policy, Sizes
    from kvbench.systems.ellm.drivers import case_pool, open_driver

    size, count = case.chunk_bytes, case.chunks
    gpu = None
    if case.driver == "cuda":
        from kvbench.timing.gpu_rows import on_gpu
        from kvbench.timing.gpu_session import GpuSession

        gpu = measure.enter(GpuSession(0))
        on_gpu(measure, gpu, link=False)
    vmm, touch = open_driver(measure.enter, 2 * count * size, size, None if gpu is None else gpu.service)
    sizes = Sizes(size, 0, 2 * count, 2, count * size, 4 * count * size)
    policy = Policy(alias=case.unmap == "alias", lazy=case.deflate == "lazy")
    pool = measure.enter(case_pool(vmm, sizes, policy))
    if policy.alias:
        measure.threads([threading.get_native_id(), pool.start_background()])
    work = Cycle(pool, touch, count, count if case.prefill == "part" else 2 * count)
    row = measure(work.run, verify=work.verify, kernel=f"{vmm.name} {case.deflate}")
    pool.close()
    if row.value is None:
        return
    # The cycles of the samples behind the primary row, and none that were set aside.
    behind = [cycle for seconds in set(row.samples) for cycle in work.taken[seconds]]
    prefill, decode, maps = zip(*behind, strict=True)
    for name, waits in (("prefill_wait", prefill), ("decode_wait", decode)):
        measure.extra(
            name, median(waits), low=min(waits), high=max(waits), n=len(waits), unit="s", better="lower",
            status=row.status, reason=row.reason,
        )  # fmt: skip
    measure.extra("maps_per_cycle", float(median(maps)), unit="1", better="lower", n=len(maps), status=row.status)
    measure.extra("bytes_copied", float(work.copied), unit="B", better="lower", n=1)


class Cycle:
    """A prefill that needs ``pages`` of activations, then a decode that needs ``count`` chunks of KV cache."""

    def __init__(self, pool: Any, touch: Any, count: int, pages: int) -> None:
        from kvbench.systems.ellm.identity import moved_bytes, stamp_all

        self.pool, self.touch = pool, touch
        size = pool.sizes.chunk_bytes
        self.kv_bytes, self.act_bytes = count * size, pages * size
        # (wait of the prefill, of the decode, chunks mapped) of each cycle, by the seconds a cycle of the run it was in
        self.taken: dict[float, list[tuple[float, float, int]]] = {}
        self.copied = 0
        self._moved = moved_bytes
        stamp_all(pool, touch)

    def run(self, reps: int) -> float:
        """Return the seconds that asking for and giving back memory took in ``reps`` cycles."""
        cycles: list[tuple[float, float, int]] = []
        seconds = sum(self._once(cycles) for _ in range(reps))
        self.taken.setdefault(seconds / reps, []).extend(cycles)
        return seconds

    def _once(self, cycles: list[tuple[float, float, int]]) -> float:
        from kvbench.timing.clock import now_ns

        pool = self.pool
        before = pool.tally.mapped
        began = now_ns()
        act = pool.open_act(self.act_bytes)
        opened = now_ns()
        pool.close_act(act)
        between = now_ns()
        slot = pool.open_kv(self.kv_bytes)
        grown = now_ns()
        pool.close_kv(slot)
        end = now_ns()
        pool.settle()  # a phase is long: what is left to the background is done before the next
        cycles.append(((opened - began) * 1e-9, (grown - between) * 1e-9, pool.tally.mapped - before))
        return (end - began) * 1e-9

    def verify(self) -> None:
        """Raise VerifyError when a chunk is not where the pool says, or was copied there."""
        from kvbench.errors import VerifyError

        self._once([])
        self.copied = 0
        for opener, closer, nbytes in (
            (self.pool.open_act, self.pool.close_act, self.act_bytes),
            (self.pool.open_kv, self.pool.close_kv, self.kv_bytes),
        ):
            slot = opener(nbytes)
            self.copied += self._moved(self.pool, slot, self.touch)
            closer(slot)
            self.pool.settle()
        self.pool.check()
        if self.copied:
            raise VerifyError(
                "memory was not remapped", where="deflate", got=f"{self.copied} bytes elsewhere", expected="0"
            )
