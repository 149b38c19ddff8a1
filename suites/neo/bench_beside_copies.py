"""Decode attention on cores while the link is busy: what the copies of a pipeline take from it (NEO 3.1)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.memory.cuda.device import Stream
    from kvbench.timing.gpu_session import GpuSession

LEAST_BYTES = 256 << 20
BATCH, CONTEXT, PAGE, KV_HEADS, HEAD_DIM = 4, 16384, 16, 8, 128
PIECE = 256 << 10  # bytes of one copy of the paced thread: half of a common L2
COPIED = 64 << 20  # bytes it goes round in, so that its source comes out of memory
LINK_COPY = 16 << 20
MOST_COPIES = 400  # queued on a stream at a time
TRIES = 5
BEHIND = 0.9  # of the rate asked for: below, the copies were another load than their label says


@dataclass(frozen=True, slots=True)
class Moved:
    """``nbytes`` copied in ``seconds``."""

    nbytes: int
    seconds: float


class Copies(Protocol):
    """Copies that run between ``start`` and ``stop``; ``stop`` returns what they moved, None when they ended early."""

    kernel: str

    def start(self) -> None: ...
    def stop(self) -> Moved | None: ...
    def verify(self) -> None: ...


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: the stand-in is paced, a link goes as fast as it can."""
    return (axes["copies"] == "h2d_d2h") == (axes["rate"] == 0)


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", where=exists, limit=120.0,
    extra_metrics=["copy_bandwidth", "slowdown"], seconds={"smoke": 1.2, "quick": 3.0, "full": 40.0},
    copies=axis.choice("host_stand_in", "h2d_d2h"),
    rate=axis.integer(smoke=["0", "2"], quick=["0", "2"], full=["0", "1", "2", "4", "8", "16"], low=0, high=1000),
    group=axis.integer(smoke=["4"], quick=["4"], full=["1", "4", "8"], low=1, high=16),
    threads=axis.threads(smoke=["1"], quick=["1"], full=["1", "2", "4", "8"]),
)  # fmt: skip
def beside_copies(case: Case, measure: Measure) -> None:
    """Unique KV bytes a second of decode attention beside copies; its ceiling is the same attention alone, in turns.

    h2d_d2h: copies between page-locked memory and the GPU in both directions at once, as fast as the link goes (rate
    0). host_stand_in, which needs no GPU: a thread on a CPU of its own copies `rate` GB/s in host memory, each byte
    read once and written once (flag stand_in). copy_bandwidth: what was copied, payload once.
    """
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape
    from kvbench.measure import Reference

    if case.copies == "h2d_d2h":
        from kvbench.timing.gpu_session import GpuSession

        gpu = measure.enter(GpuSession(0))  # raises Unavailable, with the reason, where there is no GPU
        for name, value in gpu.facts().items():
            measure.note(name, value)
        cpus = measure.context.topology.measuring_cpus(case.threads)
        copies: Copies = LinkCopies(gpu, measure.context.seed)
    else:
        measure.flag("stand_in")
        cpus = measure.context.topology.measuring_cpus(case.threads + 1)
        source = measure.sources(1, COPIED, "thp")[0].array()
        copies = measure.enter(PacedCopies(source, 1e9 * case.rate, cpus[-1]))
        cpus = cpus[:-1]
    shape = Shape("bf16", KV_HEADS * case.group, KV_HEADS, HEAD_DIM, PAGE)
    lengths = [CONTEXT] * BATCH
    team = measure.team_on(cpus)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    address = measure.target(nbytes_for(shape, lengths, layers), "thp").address
    work = DecodeWork(shape, lengths, layers, team, address, seed=measure.context.seed)
    measure.working_set(work.nbytes)
    moved: list[Moved] = []

    def beside(reps: int) -> float:
        return sum(covered(work.run, copies, moved) for _ in range(reps))

    def verify() -> None:
        work.verify()
        copies.verify()

    row = measure.pair(
        beside, Reference("the same attention alone", work.run, work.kv_bytes, work.verify), unique=work.kv_bytes,
        rate_of="unique", verify=verify, kernel=work.kernel, transport="direct",
        ceilings=measure.dram_ceilings(work.nbytes),
    )  # fmt: skip
    measure.note("copy_kernel", copies.kernel)
    if row.value is None:
        return
    tainted = row.status == "tainted"
    # of all samples together: a single one holds a few pieces
    found = sum(each.nbytes for each in moved) / sum(each.seconds for each in moved)
    if case.copies == "host_stand_in" and found < BEHIND * 1e9 * case.rate:
        measure.flag("copies_behind")
    alone = row.ceilings[0].value
    for metric, value, unit, why in (
        ("copy_bandwidth", found or None, "B/s", "nothing was copied in the windows"),
        ("slowdown", None if alone is None else alone / row.value - 1.0, "1", "no value alone"),
    ):
        measure.extra(
            metric, value, unit=unit, better="higher" if unit == "B/s" else "lower", n=row.n,
            status="failed" if value is None else "tainted" if tainted else "ok",
            reason=why if value is None else row.reason if tainted else "", kernel=copies.kernel,
        )  # fmt: skip


def covered(run: Callable[[int], float], copies: Copies, moved: list[Moved]) -> float:
    """Return the seconds of one pass during all of which the copies ran. Raises KvbenchError when none was."""
    from kvbench.errors import KvbenchError

    for _ in range(TRIES):
        copies.start()
        seconds = run(1)
        found = copies.stop()
        if found is not None:
            moved.append(found)
            return seconds
    raise KvbenchError("the copies ended before the attention", where="beside_copies", got=f"{TRIES} void samples")


class PacedCopies:
    """A thread on ``cpu`` that copies ``rate`` bytes a second of ``source`` (uint8) to memory of its own, round and
    round: behind time it catches up, so that the rate holds over a window.

    A context manager; leaving it ends the thread.
    """

    def __init__(self, source: Any, rate: float, cpu: int) -> None:
        import numpy as np

        self._source, self._target = source, np.zeros_like(source)
        self._rate, self._cpu = rate, cpu
        self._copied, self._began, self._first = 0, 0.0, 0
        self._on, self._end, self._ready = threading.Event(), False, threading.Event()
        self.kernel = f"memcpy of {PIECE} B by one thread, paced to {rate / 1e9:g} GB/s"
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._serve, name="kvbench-paced-copy", daemon=True)

    def _serve(self) -> None:
        import numpy as np

        os.sched_setaffinity(0, {self._cpu})
        self._ready.set()
        at, pieces = 0, len(self._source) // PIECE
        while not self._end:
            self._on.wait()
            begin, done = time.monotonic(), 0
            while self._on.is_set() and not self._end:
                ahead = begin + done / self._rate - time.monotonic()
                if ahead > 0.0:
                    time.sleep(ahead)
                    continue
                piece = slice(at * PIECE, (at + 1) * PIECE)
                np.copyto(self._target[piece], self._source[piece])
                at = (at + 1) % pieces
                done += PIECE
                self._copied += PIECE

    def start(self) -> None:
        """Start copying; returns once it copies."""
        self._on.set()
        before = self._copied
        while self._copied == before:
            time.sleep(0.0)
        self._began, self._first = time.monotonic(), self._copied

    def stop(self) -> Moved:
        """End it and return what was copied since :meth:`start`."""
        found = Moved(self._copied - self._first, time.monotonic() - self._began)
        self._on.clear()
        return found

    def verify(self) -> None:
        """Raise VerifyError unless the thread was where it should be and what it copied has arrived."""
        import numpy as np

        from kvbench.errors import VerifyError

        self._on.clear()
        time.sleep(0.01)
        size = min(self._copied, len(self._source) // PIECE * PIECE)
        if not np.array_equal(self._target[:size], self._source[:size]):
            raise VerifyError("a copy did not arrive", where=self.kernel)

    def __enter__(self) -> PacedCopies:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *failure: object) -> None:
        self._end = True
        self._on.set()
        self._thread.join(timeout=10.0)


class LinkCopies:
    """Copies of 16 MiB from page-locked memory to the GPU and back at once, on two streams, queued ahead."""

    def __init__(self, gpu: GpuSession, seed: int) -> None:
        from kvbench.memory.cuda.buffers import hbm, pinned
        from kvbench.memory.cuda.device import Event, Stream

        self._streams: list[Stream] = [gpu.enter(Stream(gpu.device)) for _ in range(2)]
        self._events = [gpu.enter(Event(gpu.device)) for _ in range(2)]
        near = [gpu.enter(hbm(gpu.service, LINK_COPY, seed=seed + i)) for i in range(2)]
        far = [gpu.enter(pinned(gpu.service, LINK_COPY, seed=seed + 2 + i)) for i in range(2)]
        self._ways = [(near[0], far[0]), (far[1], near[1])]  # target, source: fetch, then evict
        self._count, self._began = 8, 0.0
        self.kernel = f"cuMemcpyAsync of {LINK_COPY} B, both directions at once"

    def start(self) -> None:
        """Queue the copies of both directions; returns when the first of each has arrived."""
        self._began = time.monotonic()
        for stream, event, (target, source) in zip(self._streams, self._events, self._ways, strict=True):
            for number in range(self._count):
                stream.copy(target.copy_address, source.copy_address, LINK_COPY)
                if not number:
                    stream.record(event)
        for event in self._events:
            event.synchronize()

    def stop(self) -> Moved | None:
        """Wait for the rest; return what both directions moved, None when one had ended already."""
        ended = any(stream.idle for stream in self._streams)
        for stream in self._streams:
            stream.synchronize()
        seconds = time.monotonic() - self._began
        copied = 2 * self._count * LINK_COPY
        if ended:
            self._count = min(MOST_COPIES, 2 * self._count)
            return None
        return Moved(copied, seconds)

    def verify(self) -> None:
        """Raise VerifyError unless both targets hold their sources' bytes."""
        from kvbench.transport.gpu_lane import same_content

        for way, (target, source) in zip(("fetch", "evict"), self._ways, strict=True):
            same_content(source, target, way)
