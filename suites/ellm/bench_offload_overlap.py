"""How much of moving a request's KV to or from CPU memory hides under the layers' compute."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.contract.result import Basis, Result
    from kvbench.memory.cuda.device import Event, Stream
    from kvbench.model.layers import Stack
    from kvbench.systems.ellm.buffer import ElasticBuffer

LAYERS = 4
CHUNK = {"host": 64 << 10, "cuda": 2 << 20}
PACED = {"half": 0.5, "equal": 1.0, "double": 2.0}
IN_FLIGHT = 0.5  # of what could run beside compute: below it the copies were not in flight while compute ran (T63)
REQUEST = "r"
Hook = Callable[[int], None]


def nothing(_: int) -> None:
    """Do nothing between two layers."""


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: a GPU's copy engine is not paced."""
    return axes["form"] == "host" or axes["link"] == "free"


def basis_of(axes: Mapping[str, Value]) -> Basis:
    """Return the basis: copies that are held back stand for another link."""
    return "measured" if axes["link"] == "free" else "emulated"


@bench(
    version=1, metric="pass_time", unit="s", better="lower", where=exists, basis=basis_of, limit=120.0,
    extra_metrics=["hidden", "slowdown", "copy_rate", "crossover"], seconds={"smoke": 0.9, "quick": 1.6, "full": 8.0},
    phase=axis.choice("prefill", "decode"),
    model=axis.choice("mpt-30b", "llama-3-8b", "opt-13b", "qwen2.5-14b", smoke=["llama-3-8b"], quick=["llama-3-8b"]),
    tokens=axis.integer(smoke=["1024"], quick=["512", "2048"], full=["256..8192"], low=64, high=1 << 18),
    link=axis.choice("free", "half", "equal", "double", smoke=["free"], quick=["free", "equal"]),
    form=axis.choice("host", "cuda"),
)  # fmt: skip
def offload_overlap(case: Case, measure: Measure) -> None:
    """Seconds of a prefill that offloads each layer's fresh KV, or of a decode step that fetches it, layer by layer.

    Ceiling: the same pass without any copy, in turns. hidden: the share of the copies' time during which compute ran.
    slowdown: the pass beside the copies against the pass alone, waiting, asking for copies and sharing memory included;
    copy_rate: of those copies. crossover: the prompt length from which a layer's compute a N + b N^2 is no shorter than
    its copy c N; 0: at any. Of four layers the last one's copy has only the head to hide under in a prefill, and the
    first one's nothing in decode.
    form host: the shape divided by 32 in float32, copies by a thread on a CPU of its own; link free: as fast as it
    goes; half, equal, double: held back until the copies take that share of the pass alone (emulated). form
    cuda: four layers of the full shape in bfloat16, copies on a side stream to pinned memory.
    """
    from kvbench.errors import MissingExtra
    from kvbench.model.layers import load_torch

    if case.form == "cuda":
        from kvbench.timing.gpu_session import open_driver

        open_driver()  # before torch is loaded: without a GPU a case costs next to nothing
    try:
        torch = load_torch("running a layer stack")
    except MissingExtra as error:
        measure.skip(str(error))
    if case.form == "host":
        with host_cpus(measure, torch) as loader_cpu:
            report(case, measure, HostSide(case, measure, loader_cpu))
    else:
        if not torch.cuda.is_available():
            measure.skip("this build of torch has no CUDA; install the extra gpu-cu12 or gpu-cu13")
        report(case, measure, GpuSide(case, measure, torch))


@contextmanager
def host_cpus(measure: Measure, torch: Any) -> Iterator[int]:
    """Keep one CPU for the loader thread and compute on the others; yield the loader's."""
    cpus = measure.context.topology.measuring_cpus("all")
    if len(cpus) < 2:
        measure.skip("compute and loader thread need a core each, there is one")
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, set(cpus[:-1]))
    torch.set_num_threads(len(cpus) - 1)
    measure.note("compute_threads", len(cpus) - 1)
    try:
        yield cpus[-1]
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, affinity)


@dataclass(frozen=True, slots=True)
class Taken:
    """One pass beside its copies, seconds: all of it, the copies, waiting for them, and copying while compute ran."""

    total: float
    copies: float
    stalled: float
    beside: float


class Side(ABC):
    """A request's pass with and without its copies, its KV, and the buffer behind it."""

    def __init__(self, case: Case, stack: Stack, make_buffer: Callable[[int], ElasticBuffer], seed: int) -> None:
        self.phase, self.tokens, self.stack = case.phase, case.tokens, stack
        self.ids = stack.ids(self.tokens, seed)
        self.kv = stack.make_kv(self.tokens + (self.phase == "decode"), seed=seed)
        self.blocks = [(int(kv.data_ptr()), int(kv.nbytes)) for kv in self.kv]
        self.nbytes = sum(nbytes for _, nbytes in self.blocks)
        self.buffer = make_buffer(self.nbytes)
        self.taken: list[Taken] = []
        self.alone: list[float] = []

    @abstractmethod
    def compute(self, tokens: int) -> float:
        """Return the seconds of the pass over ``tokens`` without copies."""

    @abstractmethod
    def copies(self) -> list[tuple[float, float]]:
        """Return begin and end of the latest copies, seconds on the clock of :meth:`both`."""

    @abstractmethod
    def both(self) -> Taken:
        """Run the pass beside its copies."""

    def forward(self, tokens: int, before: Hook = nothing, after: Hook = nothing) -> None:
        """Run the pass over ``tokens``, up to those asked for."""
        if self.phase == "prefill":
            self.stack.prefill(self.ids[:tokens], self.kv, before=before, after=after)
        else:
            self.stack.decode(self.ids[:1], self.kv, tokens, before=before, after=after)

    def park(self) -> None:
        """Let the request's KV be in the buffer only."""
        from kvbench.systems.ellm.buffer import Spill

        spill = Spill(self.buffer, REQUEST, self.blocks)
        for layer in range(LAYERS):
            spill.after(layer)
        spill.evict()
        self.buffer.wait()

    def unpark(self) -> None:
        """Let it be near only."""
        from kvbench.systems.ellm.buffer import Place, Refill

        self.buffer.settle()
        if self.buffer.place((REQUEST, 0)) is Place.FAR:
            Refill(self.buffer, REQUEST, self.blocks).start()
        self.buffer.wait()
        for layer in range(LAYERS):
            if self.buffer.place((REQUEST, layer)) is not None:
                self.buffer.cancel((REQUEST, layer))

    def rest(self) -> None:
        """Return to the state a pass begins in: near before a prefill, parked before a decode step."""
        self.unpark()
        if self.phase == "decode":
            self.park()

    def run(self, reps: int) -> float:
        """Return the seconds of ``reps`` passes beside their copies."""
        seconds = 0.0
        for _ in range(reps):
            self.taken.append(self.both())
            self.rest()
            seconds += self.taken[-1].total
        return seconds

    def run_alone(self, reps: int) -> float:
        """Return the seconds of ``reps`` passes without copies."""
        found = [self.compute(self.tokens) for _ in range(reps)]
        self.alone += found
        return sum(found)

    def verify(self) -> None:
        """Raise VerifyError unless what comes back is bit for bit what left."""
        from kvbench.errors import VerifyError

        self.unpark()
        before = [kv.clone() for kv in self.kv]
        if self.phase == "prefill":
            self.both()
            for kv, was in zip(self.kv, before, strict=True):
                was.copy_(kv)
            for layer in range(LAYERS):
                self.buffer.evict((REQUEST, layer))
        else:
            self.park()
        for kv in self.kv:
            kv.fill_(float("nan"))
        self.unpark()
        for layer, (kv, was) in enumerate(zip(self.kv, before, strict=True)):
            if not bool((kv == was).all()):
                raise VerifyError("KV came back changed", where=f"layer {layer}")
        self.rest()


def overlap(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return how much of ``spans`` lies within begin..end."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)


class Marks:
    """The loader's stages on the host's clock."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        self.seen.append((name, seconds_now()))


def seconds_now() -> float:
    from kvbench.timing.clock import now_ns

    return now_ns() * 1e-9


class Pace:
    """Holds a loader back to ``rate`` bytes a second; None: not at all."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._due = 0.0

    def __call__(self, nbytes: int) -> None:
        if self.rate is None:
            return
        self._due = max(self._due, seconds_now()) + nbytes / self.rate
        time.sleep(max(0.0, self._due - seconds_now()))


class HostSide(Side):
    """Compute by torch on all CPUs but one; copies by a thread on that one."""

    def __init__(self, case: Case, measure: Measure, loader_cpu: int) -> None:
        from kvbench.model.layers import Stack, shape
        from kvbench.systems.ellm.buffer import ElasticBuffer
        from kvbench.systems.ellm.movers import LoaderThread

        self.marks, self.pace = Marks(), Pace()
        loader = measure.enter(LoaderThread(loader_cpu, self.marks, self.pace))
        if loader.pin_reason:
            measure.flag("unpinned")
            measure.note("pin_reason", loader.pin_reason)
        measure.threads([threading.get_native_id(), loader.tid])

        def made(nbytes: int) -> ElasticBuffer:
            physical = LAYERS * CHUNK["host"] * -(-nbytes // (LAYERS * CHUNK["host"]))
            return ElasticBuffer(loader, measure.target(physical, "4k").address, physical, chunk=CHUNK["host"])

        stack = Stack(shape(case.model, "tiny"), layers=LAYERS, seed=measure.context.seed)
        super().__init__(case, stack, made, measure.context.seed)
        self.rest()

    def compute(self, tokens: int) -> float:
        begin = seconds_now()
        self.forward(tokens)
        return seconds_now() - begin

    def run_paced(self, share: float) -> Callable[[int], float]:
        """Return a run whose copies of a layer take ``share`` of a layer's compute, as of the pass just before."""

        def run(reps: int) -> float:
            seconds = 0.0
            for _ in range(reps):
                self.pace.rate = self.nbytes / (share * self.run_alone(1))
                seconds += self.run(1)
            return seconds

        return run

    def rest(self) -> None:
        self.pace.rate = None
        super().rest()

    def copies(self) -> list[tuple[float, float]]:
        times = [at for _, at in self.marks.seen]
        return list(zip(times[::2], times[1::2], strict=True))

    def both(self) -> Taken:
        from kvbench.systems.ellm.buffer import Refill, Spill

        waits: list[tuple[float, float]] = []

        def timed(work: Callable[[], None]) -> None:
            since = seconds_now()
            work()
            waits.append((since, seconds_now()))

        self.marks.seen.clear()
        begin = seconds_now()
        if self.phase == "prefill":
            spill = Spill(self.buffer, REQUEST, self.blocks)
            self.forward(self.tokens, after=lambda layer: timed(lambda: spill.after(layer)))
        else:
            refill = Refill(self.buffer, REQUEST, self.blocks)
            timed(refill.start)
            self.forward(self.tokens, before=lambda layer: timed(lambda: refill.before(layer)))
        end = seconds_now()
        self.buffer.wait()
        found = self.copies()
        last = max(end, found[-1][1])
        # asking for copies is waiting too: a mover that carries them out on the spot hides nothing (trap T63)
        stalled = last - end + sum(b - a for a, b in waits)
        beside = overlap(found, begin, end) - sum(overlap(found, a, b) for a, b in waits)
        return Taken(last - begin, sum(b - a for a, b in found), stalled, beside)


class GpuSide(Side):
    """Compute by torch on one stream of GPU 0; copies on another, to and from pinned memory."""

    def __init__(self, case: Case, measure: Measure, torch: Any) -> None:
        from kvbench.memory.cuda.buffers import pinned
        from kvbench.memory.cuda.device import Stream
        from kvbench.model.layers import Stack, shape
        from kvbench.systems.ellm.buffer import ElasticBuffer
        from kvbench.systems.ellm.movers import StreamMover
        from kvbench.timing.gpu_rows import on_gpu
        from kvbench.timing.gpu_session import GpuSession

        of = shape(case.model)
        need = 2 * LAYERS * of.layer_weights + 4 * of.vocab * of.hidden + 8 * case.tokens * (of.up + of.hidden)
        self.gpu = gpu = measure.enter(GpuSession(0))
        free, _ = gpu.device.memory()
        if need > 0.9 * free:
            measure.skip(f"about {need / 1e9:.0f} GB of GPU memory for {LAYERS} layers, {free / 1e9:.0f} GB are free")
        on_gpu(measure, gpu, link=True)
        self.stream: Stream = gpu.enter(Stream(gpu.device))
        self.events: dict[str, Event] = {}
        mover = gpu.enter(StreamMover(gpu.device, self.stream, self.mark))

        def made(nbytes: int) -> ElasticBuffer:
            physical = LAYERS * CHUNK["cuda"] * -(-nbytes // (LAYERS * CHUNK["cuda"]))
            far = gpu.enter(pinned(gpu.service, physical, seed=measure.context.seed))
            for flag in far.flags:
                measure.flag(flag)
            return ElasticBuffer(mover, far.copy_address, physical, chunk=CHUNK["cuda"])

        handle = self.stream.handle
        assert handle is not None  # just opened
        # everything torch does in this case goes to the stream the mover's events are on
        measure.enter(torch.cuda.stream(torch.cuda.ExternalStream(handle.value)))
        stack = Stack(of, layers=LAYERS, dtype="bfloat16", device="cuda:0", seed=measure.context.seed)
        super().__init__(case, stack, made, measure.context.seed)
        torch.cuda.synchronize()
        gpu.device.bind()
        self.rest()
        self.run_alone(2)

    def mark(self, stream: Stream, name: str) -> None:
        from kvbench.memory.cuda.device import Event

        if name not in self.events:
            self.events[name] = self.gpu.enter(Event(self.gpu.device))
        stream.record(self.events[name])

    def compute(self, tokens: int) -> float:
        self.mark(self.stream, "start")
        self.forward(tokens)
        self.mark(self.stream, "stop")
        self.stream.synchronize()
        return self.events["stop"].since(self.events["start"])

    def copies(self) -> list[tuple[float, float]]:
        act = "offload" if self.phase == "prefill" else "fetch"
        names = [f"{act} {(REQUEST, layer)}" for layer in range(LAYERS)]
        start = self.events["start"]
        return [(self.events[f"begin {n}"].since(start), self.events[f"end {n}"].since(start)) for n in names]

    def both(self) -> Taken:
        from kvbench.systems.ellm.buffer import Refill, Spill

        self.stream.synchronize()
        self.mark(self.stream, "start")
        if self.phase == "prefill":
            self.forward(self.tokens, after=Spill(self.buffer, REQUEST, self.blocks).after)
        else:
            refill = Refill(self.buffer, REQUEST, self.blocks)
            refill.start()
            self.forward(self.tokens, before=refill.before)
        self.mark(self.stream, "stop")
        self.stream.synchronize()
        self.buffer.wait()
        end, found = self.events["stop"].since(self.events["start"]), self.copies()
        last = max(end, found[-1][1])
        stalled = max(0.0, last - median(self.alone))  # where the device waits inside a pass only its length tells
        return Taken(last, sum(b - a for a, b in found), stalled, max(0.0, overlap(found, 0.0, end) - stalled))


def report(case: Case, measure: Measure, side: HostSide | GpuSide) -> None:
    """Take the rows of the case."""
    from kvbench.measure import Reference
    from kvbench.systems.ellm import hiding

    side.run_alone(2)
    del side.alone[:-1]  # the first one warmed up
    measure.note("kv_bytes_a_layer", side.blocks[0][1])
    measure.working_set(side.nbytes)
    host = isinstance(side, HostSide)
    kernel, transport = ("pinned thread, memmove", "cpu") if host else ("side stream, copy engine", "ce")
    if case.link == "free":
        reference = Reference(f"the same {case.phase} without copies", side.run_alone, 1.0)
        row = measure.pair(
            side.run, reference, unique=side.nbytes, verify=side.verify, kernel=kernel, transport=transport
        )
    else:
        assert isinstance(side, HostSide)  # see exists()
        row = measure(
            side.run_paced(PACED[case.link]), unique=side.nbytes, verify=side.verify, kernel=kernel,
            transport=transport, basis="emulated",
        )  # fmt: skip
    if row.value is None:
        return
    taken, alone = side.taken, median(side.alone)
    copies = median(one.copies for one in taken)
    theory = (hiding.offload_time if case.phase == "prefill" else hiding.fetch_time)(
        [alone / LAYERS] * LAYERS, [copies / LAYERS] * LAYERS
    )

    def add(metric: str, value: float, unit: str, higher: bool, **detail: float) -> None:
        measure.extra(
            metric, value, unit=unit, better="higher" if higher else "lower", n=len(taken), basis=row.basis,
            status=row.status, reason=row.reason, kernel=kernel, detail=dict(detail),
        )  # fmt: skip

    hidden = median(one.beside / one.copies for one in taken)
    # one of the copies has nothing to run beside, and none can run longer beside compute than compute takes
    could = median(min(1.0 - 1.0 / LAYERS, (one.total - one.stalled) / one.copies) for one in taken)
    status, reason = row.status, row.reason
    if hidden < IN_FLIGHT * could:
        measure.flag("not_in_flight")
        status, reason = "suspect", f"of the copies {hidden:.0%} ran beside compute, {could:.0%} could have"
    measure.extra(
        "hidden", hidden, unit="1", better="higher", n=len(taken), basis=row.basis, status=status, reason=reason,
        kernel=kernel,
        detail={"predicted": theory.hidden, "copies": copies, "stalled": median(one.stalled for one in taken)},
    )  # fmt: skip
    add("slowdown", median(one.total for one in taken) / alone, "1", False, alone=alone)
    add("copy_rate", side.nbytes / copies, "B/s", True)
    if case.phase == "prefill" and case.link == "free":
        add_crossover(case, measure, side, copies, row)


def add_crossover(case: Case, measure: Measure, side: Side, copies: float, row: Result) -> None:
    """Add the prompt length from which compute is no shorter than the copy, from passes of three lengths."""
    from kvbench.systems.ellm import hiding

    lengths = [case.tokens // 4, case.tokens // 2, case.tokens]
    seconds = [median(side.compute(n) for _ in range(3)) / LAYERS for n in lengths[:2]]
    a, b = hiding.fit_compute(lengths, [*seconds, median(side.alone) / LAYERS])
    c = copies / LAYERS / case.tokens
    found = hiding.crossover(a, b, c)
    never = "compute shows no quadratic part, and its linear one is below the copy's"
    measure.extra(
        "crossover", found, unit="1", better="lower", n=3, status="skipped" if found is None else row.status,
        reason=never if found is None else row.reason,
        detail={"a": a, "b": b, "c": c},
    )  # fmt: skip
