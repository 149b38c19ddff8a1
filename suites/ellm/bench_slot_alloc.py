"""What a slot costs when its memory is mapped every time, kept mapped, or mapped ahead (eLLM, sections 2.1 and 3.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbench.systems.ellm.mixed import Event
    from kvbench.systems.ellm.pool import ElasticPool

SPARE = 1.0  # chunks, of the most that are in use at one time: what lies idle is wanted elsewhere now and then
STREAMS = 8  # a pass plays all of them: one that repeats would find every slot as it left it, and they differ
ASKING = frozenset({"open", "act", "grow"})
READ = 512 << 10  # bytes of each running sequence that a decode step reads


@bench(
    version=1, metric="alloc_time", unit="s", better="lower", limit=120.0,
    extra_metrics=["alloc_p50", "alloc_p99", "maps_per_1000", "slack_bytes", "crossing_p99"],
    seconds={"smoke": 0.7, "quick": 2.5, "full": 10.0},
    driver=axis.choice("host", "cuda"),
    mode=axis.choice("every_time", "pooled", "premap"),
    chunk_bytes=axis.bytes(
        smoke=["2MiB"], quick=["64KiB", "2MiB"], full=["64KiB", "2MiB", "20MiB"], low="4KiB", high="1GiB"
    ),
    sequences=axis.integer(smoke=["4"], quick=["8"], full=["8", "32"], high=1024),
    steps=axis.integer(smoke=["64"], quick=["128"], full=["256"], high=65536),
)  # fmt: skip
def slot_alloc(case: Case, measure: Measure) -> None:
    """Seconds a caller waits per allocation in a mixed stream of prompts, activations and growing sequences.

    every_time maps what is asked for and unmaps what is given back; pooled keeps it mapped for the next (best fit);
    premap also maps the chunk of the next step in the background while this one is computed (a read of each sequence).
    The wait for giving back and for submitting what is mapped ahead is part of the time, spread over the allocations;
    alloc_p50 and alloc_p99 are of the calls that ask alone, crossing_p99 of those of sequences that enter a new chunk.
    slack_bytes: mapped and not needed, the median over the steps. The bookkeeping is Python's. A pass is 8 streams.
    """
    import threading

    from kvbench.systems.ellm import mixed
    from kvbench.systems.ellm.backing import Policy, Sizes
    from kvbench.systems.ellm.drivers import case_pool, open_driver

    size = case.chunk_bytes
    seed = measure.context.seed
    streams = [mixed.stream(case.steps, case.sequences, seed + number) for number in range(STREAMS)]
    kv, act = (max(peaks) for peaks in zip(*(mixed.peak_chunks(events, size) for events in streams), strict=True))
    gpu = None
    if case.driver == "cuda":
        from kvbench.timing.gpu_rows import on_gpu
        from kvbench.timing.gpu_session import GpuSession

        gpu = measure.enter(GpuSession(0))
        on_gpu(measure, gpu, link=False)
    chunks = (round(SPARE * kv) + 1, round(SPARE * act) + 1)
    vmm, touch = open_driver(measure.enter, sum(chunks) * size, size, None if gpu is None else gpu.service)
    context = mixed.kv_bytes(mixed.LONGEST_PROMPT + mixed.LONGEST_OUTPUT + 2 * mixed.TOKENS_PER_CHUNK, size)
    sizes = Sizes(size, *chunks, 2 * case.sequences, context, 4 * sum(chunks) * size)
    pool = measure.enter(case_pool(vmm, sizes, Policy(reuse=case.mode != "every_time")))
    player = Player(pool, streams, touch, ahead=case.mode == "premap", on_host=gpu is None)
    # Pages are taken from the system once, when a chunk is first made accessible: not what an allocation costs.
    everything = pool.grant(act=sum(chunks) * size).act
    assert everything is not None
    pool.close_act(everything)
    if case.mode == "premap":
        measure.threads([threading.get_native_id(), pool.start_background()])
    row = measure(player.run, verify=player.verify, kernel=f"{vmm.name} {case.mode}")
    for name, value in player.notes().items():
        measure.note(name, value)
    pool.close()
    if row.value is not None:
        player.add_rows(measure, row)


@dataclass(slots=True)
class Played:
    """What was seen while streams were played: seconds of each call that asked, and of those that entered a new chunk;
    idle bytes at each step; calls that asked, chunks mapped, nanoseconds waited in all."""

    each: list[float] = field(default_factory=list)
    crossing: list[float] = field(default_factory=list)
    slack: list[int] = field(default_factory=list)
    maps: int = 0
    waited_ns: int = 0


class Player:
    """Plays ``streams`` on ``pool``. ``taken`` has what each :meth:`run` saw, by seconds a pass (some are equal)."""

    def __init__(
        self, pool: ElasticPool, streams: Sequence[list[Event]], touch: Any, *, ahead: bool, on_host: bool
    ) -> None:
        import numpy as np

        from kvbench.kernels.raw import bytes_at

        self.pool, self.touch, self.ahead = pool, touch, ahead
        self.on_host, self.bytes_at = on_host, bytes_at
        self.streams = streams
        self.taken: dict[float, list[Played]] = {}
        self._np = np

    def run(self, reps: int) -> float:
        """Play all streams ``reps`` times; return the seconds the caller waited per allocation, summed over passes."""
        played = Played()
        total, asked, waited = 0.0, 0, 0
        for _ in range(reps):
            for events in self.streams:
                self._play(events, played)
            total += (played.waited_ns - waited) * 1e-9 / (len(played.each) - asked)
            asked, waited = len(played.each), played.waited_ns
        self.taken.setdefault(total / reps, []).append(played)
        return total

    def _play(self, events: Sequence[Event], played: Played) -> None:
        from kvbench.systems.ellm.mixed import act_bytes, kv_bytes
        from kvbench.timing.clock import now_ns

        pool, size = self.pool, self.pool.sizes.chunk_bytes
        kv: dict[int, Any] = {}
        act: dict[int, Any] = {}
        ahead: list[tuple[Any, int]] = []
        before = pool.tally.mapped
        for event in events:
            if event.kind == "ahead":
                ahead.append((kv[event.key], kv_bytes(event.tokens, size)))
                continue
            began = now_ns()
            if event.kind == "open":
                kv[event.key] = pool.open_kv(kv_bytes(event.tokens, size))
            elif event.kind == "act":
                act[event.key] = pool.open_act(act_bytes(event.tokens, size))
            elif event.kind == "grow":
                pool.grow(kv[event.key], kv_bytes(event.tokens, size))
            elif event.kind == "free":
                pool.close_act(act.pop(event.key))
            elif event.kind == "close":
                pool.close_kv(kv.pop(event.key))
            elif self.ahead and ahead:
                pool.premap(ahead)
            took = now_ns() - began
            if event.kind != "step" or (self.ahead and ahead):
                played.waited_ns += took
            if event.kind in ASKING:
                played.each.append(took * 1e-9)
            if event.kind == "grow":
                played.crossing.append(took * 1e-9)
            if event.kind == "step":
                ahead.clear()
                self._compute(kv.values())
                played.slack.append(pool.slack_bytes())
        played.maps += pool.tally.mapped - before

    def _compute(self, slots: Any) -> None:
        """Read part of every sequence, as the attention of a step does; on a GPU through its copy engine."""
        for slot in slots:
            nbytes = min(READ, self.pool.sizes.chunk_bytes)
            if self.on_host:
                self.bytes_at(slot.address, nbytes).view(self._np.uint64).sum()
            else:
                self.touch.read(slot.address, nbytes)

    def verify(self) -> None:
        """Raise VerifyError unless what is opened can be written and read back at both ends."""
        from kvbench.errors import VerifyError

        size = self.pool.sizes.chunk_bytes
        slot = self.pool.open_kv(3 * size)
        for at, chunk in enumerate(self.pool.chunks_of(slot)):
            for place in (at * size, (at + 1) * size - 8):
                self.touch.write(slot.address + place, (place ^ chunk).to_bytes(8, "little"))
        for at, chunk in enumerate(self.pool.chunks_of(slot)):
            for place in (at * size, (at + 1) * size - 8):
                if self.touch.read(slot.address + place, 8) != (place ^ chunk).to_bytes(8, "little"):
                    raise VerifyError("a slot does not hold what was written", where="slot_alloc", got=f"byte {place}")
        self.pool.close_kv(slot)
        self.pool.check()

    def notes(self) -> dict[str, Any]:
        """Return what the row says of the pool."""
        tally, sizes = self.pool.tally, self.pool.sizes
        return {
            "kv_chunks": sizes.kv_chunks, "act_chunks": sizes.act_chunks,
            "mapped_ahead": tally.ahead, "ahead_failed": tally.ahead_failed, "ahead_skipped": tally.ahead_skipped,
        }  # fmt: skip

    def add_rows(self, measure: Measure, row: Any) -> None:
        """Add the distribution and the counts, of the samples behind ``row`` and none that were set aside."""
        np = self._np
        behind = [played for seconds in set(row.samples) for played in self.taken[seconds]]
        each, crossing, slack = (
            np.concatenate([getattr(played, name) for played in behind]) for name in ("each", "crossing", "slack")
        )

        def add(metric: str, value: float, unit: str, n: int) -> None:
            measure.extra(
                metric, value, unit=unit, better="lower", n=n, status=row.status, reason=row.reason, kernel=row.kernel
            )

        add("alloc_p50", float(np.quantile(each, 0.5)), "s", len(each))
        add("alloc_p99", float(np.quantile(each, 0.99)), "s", len(each))
        add("maps_per_1000", 1000.0 * sum(played.maps for played in behind) / len(each), "1", len(behind))
        add("slack_bytes", float(np.median(slack)), "B", len(slack))
        if len(crossing):
            add("crossing_p99", float(np.quantile(crossing, 0.99)), "s", len(crossing))
