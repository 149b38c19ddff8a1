"""The sampler: warm up, find a block length the clock can resolve, take blocks until the budget's rule says stop.

Blocks are written into arrays made beforehand; between two timed calls the loop costs about a microsecond ungated
(``python -m kvbench.timing.overhead`` prints it for this machine).
"""

from __future__ import annotations

import gc
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvbench.errors import KvbenchError
from kvbench.timing.budget import FLOOR_SAMPLES, Budget, StopRule
from kvbench.timing.clock import now_ns, quantum
from kvbench.timing.gate import Gate, GateKind, open_gate
from kvbench.timing.samples import GATED, OK, UNUSABLE, Paired, Raw, Samples, finish, pair_ratios

if TYPE_CHECKING:
    from numpy.typing import NDArray

Run = Callable[[int], float | None]
Marker = Callable[[], Sequence[str]]
Progress = Callable[[int, float], None]

MARK_NS = (
    20_000_000  # machine counters move in 10 ms ticks (steal) to 20 ms windows (NVML): asking oftener sees nothing
)
PROGRESS_NS = 100_000_000
CALIBRATIONS = 12
RESTARTS = 2  # a cold call that was long hid a short one; a second time the first samples were stalls
CALIBRATE_AGAIN_S = 0.010  # a call shorter than this is repeated and the fastest counts: a stall is this long
CALIBRATE_MARGIN = 1.5  # blocks aim this far above the wanted length, so that jitter does not fall below it
MOST_REPS = 1 << 32  # a tenth of a nanosecond a pass would fill a block long before
CALIBRATE_CALL_S = 0.25  # a call is not made longer than this in search of a long enough window
PAIR_BLOCK_S = 0.015  # blocks of a pair are matched in length up to here: 30 of them on each side fit a quick budget
CLOCK_SLACK = 1.02  # two clocks (device, host) on one interval: beyond this it is not the same interval
CLOCK_SLACK_S = 2e-6


def sample(
    run: Run,
    limits: Budget,
    *,
    tids: Sequence[int] = (),
    gate: GateKind | None = "delay",
    marker: Marker | None = None,
    on_progress: Progress | None = None,
    seed: int = 0,
) -> Samples:
    """Time ``run`` within ``limits``.

    ``run(reps)`` performs ``reps`` passes and returns the seconds of its own window, or None: then the clock around the
    call counts. ``tids``: native ids of every measuring thread (default: the calling one), read by ``gate``.
    ``marker()`` is asked at least 20 ms apart and returns words (``steal``, ``throttled``...) for what happened since
    it was asked before; they mark the samples of that stretch, which stay in. ``on_progress(samples, seconds)`` is
    called at most ten times a second outside the timed calls. ``seed`` draws the kept samples.

    Whatever ``run`` raises passes through, Ctrl-C included. Raises KvbenchError when a window ``run`` returns cannot be
    true (negative, not finite, longer than the call).
    """
    started = now_ns()
    side = _Side(run, limits)
    with _quiet(tids, gate) as watch:
        side.warm()
        _loop((side,), limits, watch, marker, on_progress)
        raw = side.raw((now_ns() - started) * 1e-9, watch)
    return finish(raw, seed, FLOOR_SAMPLES, limits.lag1)


def sample_pair(
    run_a: Run,
    run_b: Run,
    limits: Budget,
    *,
    tids: Sequence[int] = (),
    gate: GateKind | None = "delay",
    marker: Marker | None = None,
    on_progress: Progress | None = None,
    seed: int = 0,
) -> Paired:
    """Time two pieces of work in turns A B B A, each within ``limits``; arguments as for :func:`sample`.

    Sampling ends when both sides are done, or when one reaches its cap: going on alone would no longer be interleaved.
    ``tids`` are the threads of both. Returns records that unpack as ``a, b`` and the ratio of adjacent blocks.
    """
    raws = _turns((run_a, run_b), limits, tids, gate, marker, on_progress)
    ratios, ratio = pair_ratios(*raws)
    a, b = (finish(raw, seed, FLOOR_SAMPLES, limits.lag1) for raw in raws)
    return Paired(a, b, ratios, ratio)


def sample_turns(
    runs: Sequence[Run],
    limits: Budget,
    *,
    tids: Sequence[int] = (),
    gate: GateKind | None = "delay",
    marker: Marker | None = None,
    on_progress: Progress | None = None,
    seed: int = 0,
) -> tuple[Samples, ...]:
    """Time any number of pieces of work in turns A B C C B A, as :func:`sample_pair` does two; a record each."""
    raws = _turns(runs, limits, tids, gate, marker, on_progress)
    return tuple(finish(raw, seed, FLOOR_SAMPLES, limits.lag1) for raw in raws)


def _turns(
    runs: Sequence[Run],
    limits: Budget,
    tids: Sequence[int],
    gate: GateKind | None,
    marker: Marker | None,
    on_progress: Progress | None,
) -> tuple[Raw, ...]:
    started = now_ns()
    sides = tuple(_Side(run, limits) for run in runs)
    with _quiet(tids, gate) as watch:
        for side in sides:
            side.warm()
        if limits.fixed_samples is None:
            longest = min(max(side.block_seconds for side in sides), PAIR_BLOCK_S)
            for side in sides:
                side.lengthen(longest)
        _loop(sides, limits, watch, marker, on_progress)
        wall = (now_ns() - started) * 1e-9
        return tuple(side.raw(wall, watch) for side in sides)


class _Side:
    """One piece of work: its block length and its preallocated arrays."""

    def __init__(self, run: Run, limits: Budget) -> None:
        self.run, self.limits = run, limits
        self.target = limits.target_seconds()
        self.reps = 1
        self.block_seconds = self.call_seconds = 0.0  # of the latest warm-up call: its window, and the whole call
        self.warm_calls, self.warm_seconds, self.first_call = 0, 0.0, 0.0
        self.restarts = 0
        self.seconds = array("d", bytes(8 * limits.max_samples))
        self.marks: dict[str, None] = {}
        self.reset()

    def reset(self) -> None:
        self.rule = StopRule(self.limits)
        self.fate = bytearray(self.limits.max_samples)  # OK until found otherwise
        self.marked = bytearray(self.limits.max_samples)
        self.taken, self.accepted, self.spent_ns, self.short = 0, 0, 0, False
        self.unmarked = 0  # first sample no marker call has covered yet
        self.marks.clear()

    def take(self, watch: Gate | None) -> None:
        """Time one block. The hot path: no object that outlives it is made here."""
        before = now_ns()
        own = self.run(self.reps)
        wall = now_ns() - before
        seconds = wall * 1e-9 if own is None else _checked(own, wall)
        i = self.taken
        disturbed = watch is not None and watch.disturbed(wall)
        if seconds <= 0.0:
            self.fate[i] = UNUSABLE
        elif disturbed:
            self.fate[i] = GATED
        else:
            self.accepted += 1
        self.seconds[i] = seconds
        self.spent_ns += wall
        self.taken = i + 1
        if i < FLOOR_SAMPLES and seconds < self.target:
            self.short = True

    def warm(self) -> None:
        """Make the warm-up calls: the first cold, then the block length, then the budget's time and count."""
        seconds = self._warm_call()
        self.first_call = seconds
        limits = self.limits
        # Where one warm-up call is the budget and it was long, the first samples tell whether it was only cold.
        if limits.warm_calls > 1 or seconds < self.target:
            self.calibrate()
        while self.warm_calls < limits.warm_calls or self.warm_seconds < limits.warm_seconds:
            self._warm_call()

    def calibrate(self) -> None:
        """Raise ``reps`` until a block is as long as wanted. Estimates are clamped to one quantum: 0 s is no speed."""
        for _ in range(CALIBRATIONS):
            best = self._warm_call()
            if best < CALIBRATE_AGAIN_S:
                best = min(best, self._warm_call(), self._warm_call())
            self.block_seconds = best
            room = int(self.reps * CALIBRATE_CALL_S / max(self.call_seconds, quantum().seconds))
            if best >= self.target or room <= self.reps:
                return
            if self.reps > MOST_REPS:
                raise KvbenchError(
                    "the work takes no time however often it is repeated", got=f"{best:.3g} s for {self.reps} passes",
                    expected="a run(reps) that does reps passes and returns their seconds, or None",
                )  # fmt: skip
            per_pass = max(best, quantum().seconds) / self.reps
            self.reps = min(room, max(self.reps + 1, math.ceil(CALIBRATE_MARGIN * self.target / per_pass)))

    def lengthen(self, block_seconds: float) -> None:
        """Raise ``reps`` so that a block lasts about ``block_seconds``; never lowers it."""
        per_pass = max(self.block_seconds, quantum().seconds) / self.reps
        self.reps = max(self.reps, round(block_seconds / per_pass))

    def values(self) -> NDArray[np.float64]:
        """Return the accepted seconds per pass so far."""
        fate = np.frombuffer(self.fate, np.uint8, self.taken)
        blocks: NDArray[np.float64] = np.frombuffer(self.seconds, np.float64, self.taken)[fate == OK]
        return blocks / self.reps

    def mark(self, words: Sequence[str]) -> None:
        """Cover the samples since the last call with ``words``."""
        if words:
            self.marks.update(dict.fromkeys(words))
            for i in range(self.unmarked, self.taken):
                self.marked[i] = 1
        self.unmarked = self.taken

    def raw(self, wall_seconds: float, watch: Gate | None) -> Raw:
        n = self.taken
        return Raw(
            seconds=np.frombuffer(self.seconds, np.float64, n) / self.reps,
            fate=np.frombuffer(self.fate, np.uint8, n).copy(),
            marked=np.frombuffer(self.marked, np.uint8, n).astype(np.bool_),
            marks=tuple(self.marks),
            reps=self.reps,
            target_seconds=self.target,
            warm_seconds=self.warm_seconds,
            warm_calls=self.warm_calls,
            first_call_seconds=self.first_call,
            sampled_seconds=self.spent_ns * 1e-9,
            wall_seconds=wall_seconds,
            stop=self.rule.stop,
            gate=None if watch is None else watch.kind,
            gate_reason="" if watch is None else watch.reason,
        )

    def _warm_call(self) -> float:
        before = now_ns()
        own = self.run(self.reps)
        wall = now_ns() - before
        self.call_seconds = wall * 1e-9
        self.block_seconds = self.call_seconds if own is None else _checked(own, wall)
        self.warm_calls += 1
        self.warm_seconds += self.call_seconds
        return self.block_seconds


def _loop(
    sides: tuple[_Side, ...], limits: Budget, watch: Gate | None, marker: Marker | None, on_progress: Progress | None
) -> None:
    """Take blocks of every side in turns, the order reversed each round, until the budget says stop."""
    orders = (sides, sides[::-1])
    cap_ns, least_ns = int(limits.cap_seconds * 1e9), int(limits.min_seconds * 1e9)
    if marker is not None:
        marker()
    marked_at = told_at = now_ns()
    if watch is not None:
        watch.rebase()
    turn = 0
    while True:
        for side in orders[turn & 1]:
            side.take(watch)
        turn += 1
        paused = False
        for side in sides:
            if side.short and side.restarts < RESTARTS:
                _restart(sides)
                turn, paused = 0, True
                break
            if (side.accepted >= side.rule.next_count and side.spent_ns >= least_ns) or (
                side.spent_ns >= cap_ns or side.taken >= limits.max_samples
            ):
                side.rule.look(side.values(), side.taken, side.spent_ns * 1e-9)
                paused = True
        if marker is not None or on_progress is not None:
            now = now_ns()
            if marker is not None and now - marked_at >= MARK_NS:
                _mark(sides, marker)
                marked_at, paused = now, True
            if on_progress is not None and now - told_at >= PROGRESS_NS:
                on_progress(min(s.accepted for s in sides), sum(s.spent_ns for s in sides) * 1e-9)
                told_at, paused = now, True
        if paused:
            if all(s.rule.verdict for s in sides) or any(s.rule.capped for s in sides):
                break
            if watch is not None:
                watch.rebase()  # what the pause did is not the next block's delay
    if marker is not None:
        _mark(sides, marker)


def _mark(sides: tuple[_Side, ...], marker: Marker) -> None:
    words = marker()
    for side in sides:
        side.mark(words)


def _restart(sides: tuple[_Side, ...]) -> None:
    """Some first samples were too short for the clock: calibrate those sides and begin again with all of them."""
    for side in sides:
        if side.short:
            side.restarts += 1
            side.calibrate()
        side.reset()


def _checked(own: float, wall_ns: int) -> float:
    """Return the window ``own``, in seconds, that a run reported for a call of ``wall_ns``."""
    if not 0.0 <= own <= wall_ns * 1e-9 * CLOCK_SLACK + CLOCK_SLACK_S:
        raise KvbenchError(
            "the timed window of a run cannot be true",
            got=f"{own} s inside a call of {wall_ns * 1e-9:.6g} s",
            expected="seconds, not more than the call took",
            mend="return seconds of all passes together, after the work is complete",
        )
    return own


@contextmanager
def _quiet(tids: Sequence[int], kind: GateKind | None) -> Iterator[Gate | None]:
    """Open the gate and keep Python's collector out of the samples; undo both whatever happens."""
    watch = open_gate(kind, tids)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield watch
    finally:
        if collecting:
            gc.enable()
        if watch is not None:
            watch.close()
