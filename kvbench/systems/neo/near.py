"""The near side without a GPU: a thread that holds each stage for as long as a named GPU would need, by its rates.

A stage over n tokens takes max(bytes / bandwidth, operations / FLOP rate): a roofline at the published rates, so faster
than that GPU really is. Transfers take bytes / link. The three queues of a GPU (compute, copies down, copies up) run in
order and beside each other; the times in them are followed exactly, and the thread only publishes each end when its
moment has come. What it copies between host buffers at both ends of a transfer is real.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

import numpy as np

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.systems.neo.schedule import Batch, Lane, Schedule, Stage

if TYPE_CHECKING:
    from kvbench.model.layers import LayerShape

SPIN_NS = 150_000  # the last part of a wait is spun: sleeps end some 60 us late
BACK_S = 60.0  # a pass takes milliseconds
ELEMENT = 2  # bytes of a weight, an activation and an element of KV: bfloat16 or float16
OUTPUT = 4  # bytes of an element of attention output on its way up: float32


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU does at best: bytes/s of its memory, FLOP/s of dense 16-bit products, bytes/s of its link, one way."""

    name: str
    bandwidth: float
    flops: float
    link: float
    source: str


RATES: Mapping[str, Rates] = MappingProxyType(
    {
        rates.name: rates
        for rates in (
            Rates(
                "T4", 320e9, 65e12, 12.35e9,
                "datasheet: 320 GB/s, 65 TFLOP/s fp16 (unconfirmed); PCIe 3 x16: 12.35 GB/s measured on a V100",
            ),
            Rates(
                "A10G", 600e9, 125e12, 25e9,
                "NEO section 2.2 (cited there, not measured): 600 GB/s, 125 TFLOP/s; PCIe 4 x16: 25 GB/s measured",
            ),
            Rates(
                "H100", 3350e9, 990e12, 50e9,
                "datasheet, SXM: 3350 GB/s, 990 TFLOP/s bf16; PCIe 5 x16: about 50 GB/s measured",
            ),
        )
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What one stage of one layer moves and computes."""

    nbytes: float
    flops: float

    def seconds(self, bandwidth: float, flops: float) -> float:
        return max(self.nbytes / bandwidth, self.flops / flops)


def load_of(kind: str, batch: Batch, of: LayerShape, context: int) -> Load:
    """Return the bytes and operations of stage ``kind`` of one layer over ``batch``, its decodes at ``context`` tokens.

    ``pr``, ``po``: weights and activations once; ``ga``: KV of the near decodes, and the prompt's causal square;
    ``qkv`` and ``o``: what crosses the link (as NEO's code has it: q, k, v of a token in 16 bits, the output in 32).
    Raises UsageError for a stage the near side does not have.
    """
    n = batch.tokens
    if kind == "pr":
        return Load(ELEMENT * (of.hidden * of.qkv + n * (of.hidden + of.qkv)), 2.0 * n * of.hidden * of.qkv)
    if kind == "po":
        weights = of.attended * of.hidden + of.hidden * of.up + of.ffn * of.hidden
        moved = n * (of.attended + 2 * of.hidden + of.up + of.ffn)
        return Load(ELEMENT * (weights + moved), 2.0 * n * weights)
    if kind == "ga":
        pairs = batch.prefill * (batch.prefill + 1) / 2
        prompt = batch.prefill * (of.qkv + of.attended)
        return Load(
            of.kv_bytes(batch.gpu * context, ELEMENT) + ELEMENT * prompt,
            4.0 * of.attended * (batch.gpu * context + pairs),
        )
    if kind == "qkv":
        return Load(ELEMENT * batch.cpu * of.qkv, 0.0)
    if kind == "o":
        return Load(OUTPUT * batch.cpu * of.attended, 0.0)
    raise UsageError("not a stage of the near side", where="near", got=kind, expected="pr po ga qkv o")


def stage_seconds(kind: str, batch: Batch, of: LayerShape, context: int, rates: Rates) -> float:
    """Return what ``kind`` takes on a GPU of ``rates``; see :func:`load_of`."""
    load = load_of(kind, batch, of, context)
    return load.seconds(rates.link if kind in ("qkv", "o") else rates.bandwidth, rates.flops)


def near_seconds(schedule: Schedule, of: LayerShape, context: int, rates: Rates) -> dict[str, float]:
    """Return the seconds of each stage of the near side by kind and batch number: ``pr0``, ``ga1``, ``o1``..."""
    kinds = dict.fromkeys((s.kind, s.batch) for s in schedule.stages if s.lane != "cpu")
    return {f"{k}{b}": stage_seconds(k, schedule.batches[b], of, context, rates) for k, b in kinds}


Carry = Callable[[Stage], None]
_Message = tuple[Stage, int]


class PacedNear:
    """The near side as a thread pinned to ``cpu`` (None: not pinned) that takes ``seconds`` (``pr0``...) a stage.

    ``carry`` is called in that thread when a transfer begins and moves its bytes. ``tid`` is its native id,
    ``pin_reason`` why it is not pinned. :meth:`spans` are begin and end of the latest pass's stages, seconds since its
    begin; ``late``: by how many seconds the ends somebody waited for were published after their moment. One pass at a
    time.
    """

    def __init__(self, seconds: Mapping[str, float], carry: Carry, cpu: int | None = None) -> None:
        from kvbench.kernels import pace
        from kvbench.kernels.team import pin

        self._pace, self._carry = pace, carry
        self._ns: dict[str, int] = {}
        self._block = pace.make_block()
        self._at = int(self._block.ctypes.data)
        self._inbox: deque[_Message] = deque()
        self._passes: queue.SimpleQueue[Schedule | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._over.set()
        self._error: BaseException | None = None
        self._words = np.zeros(1, np.int64)
        self._place: dict[str, int] = {}
        self._begin = 0
        self._spans: dict[str, tuple[int, int]] = {}
        self.late: list[float] = []
        self.retime(seconds)
        ready: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()

        def serve() -> None:
            ready.put((threading.get_native_id(), None if cpu is None else pin(cpu)))
            while (schedule := self._passes.get()) is not None:
                try:
                    self._run(schedule)
                except BaseException as error:  # handed to the submitting thread by arrived() and finish()
                    self._error = error
                    self._block[pace.ABORT // 8] = 1
                self._over.set()

        self._thread = threading.Thread(target=serve, name="kvbench-near", daemon=True)
        self._thread.start()
        self.tid, self.pin_reason = ready.get()
        self._closed = False

    # -- the submitting thread ---------------------------------------------------------------------------------------

    def retime(self, seconds: Mapping[str, float]) -> None:
        """Let the stages of further passes take ``seconds``. Raises UsageError for what is no duration of a stage."""
        if any(not 0.0 <= s < BACK_S for s in seconds.values()):
            raise UsageError("not a duration", where="near", got=dict(seconds), expected=f"0 to {BACK_S:g} s")
        self._ns = {name: round(s * 1e9) for name, s in seconds.items()}

    def begin(self, schedule: Schedule) -> None:
        """Begin a pass. Raises UsageError when closed, while another is under way, or for a stage without a time."""
        now = self._pace.ring(self._at)
        unknown = sorted({f"{s.kind}{s.batch}" for s in schedule.stages if s.lane != "cpu"} - set(self._ns))
        if self._closed or not self._over.is_set() or unknown:
            raise UsageError("a pass cannot begin", where="near", got=f"no time for {unknown}" if unknown else "busy")
        self._place = {stage.name: i for i, stage in enumerate(schedule.stages)}
        self._words = np.zeros(len(schedule.stages), np.int64)
        self._inbox.clear()
        self._spans, self.late, self._error = {}, [], None
        self._block[self._pace.ABORT // 8] = 0
        self._over.clear()
        self._begin = now
        self._passes.put(schedule)

    def submit(self, stage: Stage) -> None:
        """Queue ``stage`` behind those of its lane: it can begin from now on."""
        self._inbox.append((stage, self._pace.ring(self._at)))
        self._pace.ring(self._at)

    def finished(self, stage: Stage) -> None:
        """Say that ``stage``, of the CPU, has just ended."""
        self.submit(stage)

    def arrived(self, name: str) -> None:
        """Wait for the stage called ``name``. Raises KvbenchError when the thread failed or is silent for a minute."""
        word = int(self._words.ctypes.data) + 8 * self._place[name]
        if self._pace.await_word(self._at, word, round(BACK_S * 1e9)) < 0:
            self._raise()

    def finish(self) -> None:
        """Wait for the end of the pass, all stages of which have been submitted. Raises as :meth:`arrived`."""
        for name in self._place:
            self.arrived(name)
        if not self._over.wait(BACK_S) or self._error is not None:
            self._raise()

    def abort(self) -> None:
        """Give the pass up; the next one begins afresh."""
        self._block[self._pace.ABORT // 8] = 1
        self._over.wait(BACK_S)

    def spans(self) -> dict[str, tuple[float, float]]:
        """Return begin and end of every near stage of the latest pass, seconds since it began."""
        return {name: ((b - self._begin) * 1e-9, (e - self._begin) * 1e-9) for name, (b, e) in self._spans.items()}

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self.abort()
            self._passes.put(None)
            self._thread.join(BACK_S)

    def _raise(self) -> None:
        error = self._error
        if error is None:
            raise KvbenchError("the near side does not come back", where="near", got=f"{BACK_S:g} s of silence")
        if isinstance(error, KvbenchError):
            raise error
        raise KvbenchError("the near side failed", where="near", got=f"{type(error).__name__}: {error}") from error

    # -- its own thread ----------------------------------------------------------------------------------------------

    def _run(self, schedule: Schedule) -> None:
        pace, at = self._pace, self._at
        done: dict[str, int] = {}
        waiting: dict[Lane, deque[_Message]] = {"near": deque(), "down": deque(), "up": deque()}
        running: dict[Lane, tuple[int, int, Stage]] = {}
        free: dict[Lane, int] = dict.fromkeys(waiting, self._begin)
        left = len(schedule.stages)
        awaited = {name for stage in schedule.stages if stage.lane == "cpu" for name in stage.after}
        awaited.add(schedule.stages[-1].name)
        now = self._begin
        while left:
            seen = int(self._block[pace.BELL // 8])  # read first: a message that comes later rings again
            while self._inbox:
                stage, when = self._inbox.popleft()
                if stage.lane == "cpu":
                    left -= self._ended(stage, when, done)
                else:
                    waiting[stage.lane].append((stage, when))
            for lane, stages in waiting.items():
                if stages and lane not in running and all(name in done for name in stages[0][0].after):
                    stage, when = stages.popleft()
                    begin = max(free[lane], when, *(done[name] for name in stage.after))
                    end = begin + self._ns[f"{stage.kind}{stage.batch}"]
                    self._check(schedule, stage, done)
                    running[lane] = (end, begin, stage)
                    if lane != "near":
                        self._carry(stage)
            deadline = min((end for end, _, _ in running.values()), default=pace.FOREVER)
            if "near" in running:
                # all the submitting thread waits for comes behind the near lane: until then no bell matters
                seen = -1
                if deadline - now > SPIN_NS:
                    time.sleep((deadline - now - SPIN_NS) * 1e-9)
            now = pace.hold(at, deadline, seen)
            if self._block[pace.ABORT // 8]:
                return
            for lane, (end, begin, stage) in sorted(running.items(), key=lambda item: item[1][0]):
                if end <= now:
                    del running[lane]
                    free[lane] = end
                    self._spans[stage.name] = (begin, end)
                    if stage.name in awaited:
                        self.late.append((now - end) * 1e-9)
                    left -= self._ended(stage, end, done)

    def _check(self, schedule: Schedule, stage: Stage, done: Mapping[str, int]) -> None:
        missing = [name for name in schedule.inputs(stage) if name not in done]
        if missing:
            raise VerifyError("ran before its input existed", where=stage.name, got=f"no {' '.join(missing)}")

    def _ended(self, stage: Stage, when: int, done: dict[str, int]) -> int:
        done[stage.name] = when
        self._pace.publish(int(self._words.ctypes.data) + 8 * self._place[stage.name], 1)
        return 1

    def __enter__(self) -> PacedNear:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
