"""A replay carried out: the same iterations with real copies and real CPU attention, the near side paced or real.

What a plan's phases say happens beside each other does: one thread copies (less than 1 MiB the attending ones do
themselves, before they attend), the team attends, and the near side takes what it takes; a phase ends with the last of
them. Layers follow each other, and within a layer its phases; what is swapped moves before the layers. A plan begins
when the one before has ended and its requests have arrived. Everything that can be made before (tables, lists of
fragments, checks) is made before: a pass is the schedule and nothing else.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.replay.executor_course import Placed, Turn, place
from kvbench.replay.executor_pair import PairMemory

if TYPE_CHECKING:
    from kvbench.attention.cpu import DecodeAttention, Step
    from kvbench.attention.shapes import Array
    from kvbench.kernels.moves import FragmentCopy
    from kvbench.kernels.team import Team
    from kvbench.replay.executor_near import BlasNear
    from kvbench.replay.policies.neo import Part
    from kvbench.replay.protocol import Phase

SPIN_NS = 200_000  # the last part of a wait is spun: sleeps end some 60 us late
BACK_S = 60.0
SMALL = 1 << 20  # bytes: less is copied by the attending threads themselves, handing it over takes longer


class Clock:
    """Nanoseconds, and waiting for a moment, without the interpreter's lock."""

    def __init__(self) -> None:
        from kvbench.kernels import pace

        self._hold = pace.hold
        self._block = pace.make_block()
        self._at = int(self._block.ctypes.data)

    def now(self) -> int:
        return int(self._hold(self._at, 0, -1))

    def until(self, moment: int) -> int:
        """Return once it is ``moment``."""
        left = moment - self.now() - SPIN_NS
        if left > 0:
            time.sleep(left * 1e-9)
        return int(self._hold(self._at, moment, -1))


class Mover:
    """A thread pinned to ``cpu`` that copies; ``team`` is its own. Close it, or use it as a context manager."""

    def __init__(self, cpu: int) -> None:
        self._work: queue.SimpleQueue[FragmentCopy | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()
        ready: queue.SimpleQueue[Team | BaseException] = queue.SimpleQueue()

        def serve() -> None:
            from kvbench.kernels.team import Team

            try:
                team = Team([cpu])
            except BaseException as error:  # handed to the thread that made this one
                ready.put(error)
                return
            ready.put(team)
            while (copy := self._work.get()) is not None:
                try:
                    self._done.put(copy.run())
                except BaseException as error:  # handed on by wait()
                    self._done.put(error)
            team.close()

        self._thread = threading.Thread(target=serve, name="kvbench-mover", daemon=True)
        self._thread.start()
        made = ready.get()
        if isinstance(made, BaseException):
            raise made
        self.team: Team = made
        self.tid = made.tids[0]

    def begin(self, copy: FragmentCopy) -> None:
        """Let the thread do ``copy``; one at a time."""
        self._work.put(copy)

    def wait(self) -> float:
        """Return the seconds of the copy begun last, once it is over. Raises its error, KvbenchError after a minute."""
        try:
            back = self._done.get(timeout=BACK_S)
        except queue.Empty:
            raise KvbenchError("the copying thread does not come back", where="executor") from None
        if isinstance(back, BaseException):
            raise back
        return back

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join(BACK_S)

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Task:
    """One phase of one layer: nanoseconds of the near side, what is copied and attended to beside it; ``part`` says
    what the near side does; ``simulated``: seconds the phase takes in the replay, ``charged``: those of what is real of
    it."""

    near: int
    copy: FragmentCopy | None
    step: Step | None
    part: Part
    layer: int
    simulated: float
    charged: float


@dataclass(frozen=True, slots=True)
class Spans:
    """A pass: ``total`` seconds, ``turns`` seconds of each iteration (waits for arrivals left out), ``late``: by how
    much phases ended after the longest of what they were made of (of a real near side: what it should take), on
    average; ``attention`` and ``copies``: seconds. ``worked``: seconds that what is real took in
    each iteration (copies, CPU attention, a real near side), whether a paced near side hides it or not."""

    total: float
    turns: tuple[float, ...]
    late: float
    attention: float
    copies: float
    worked: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Errors:
    """A pass over the replay, each less 1. ``whole``: end to end. ``work``: what copies, CPU attention and a real near
    side took over what the replay charges for them. ``iteration``: the median of that over the ``iterations`` that have
    any. None: there is nothing of the kind. A paced near side takes no clock and has no error."""

    whole: float
    work: float | None
    iteration: float | None
    iterations: int


class Executor:
    """``turns`` over ``memory``: CPU attention by ``attention``'s team (member 0 is this thread), copies by ``mover``.

    ``real``: the near side; None: it is waited for. ``verify`` and ``spans`` speak of the latest pass. Raises
    UsageError for a course without an iteration, where the memory is too small for it, and for near work that ``real``
    cannot do.
    """

    def __init__(
        self, turns: Sequence[Turn], memory: PairMemory, attention: DecodeAttention, mover: Mover,
        real: BlasNear | None = None,
    ) -> None:  # fmt: skip
        if not turns:
            raise UsageError("nothing to carry out", where="executor", got="no iteration")
        self.turns, self.memory, self.attention, self.mover, self.real = turns, memory, attention, mover, real
        self._clock = Clock()
        self.placed = place(turns, memory.blocks, memory.shape.page_tokens)
        self.tasks = [tuple(self._tasks(turn, placed)) for turn, placed in zip(turns, self.placed, strict=True)]
        self._gates = [max(0, round((turn.gate - turns[0].begin) * 1e9)) for turn in turns]
        self.spans: Spans | None = None

    @property
    def simulated(self) -> float:
        """Seconds the replay says: from the begin of the first iteration to the end of the last."""
        return self.turns[-1].end - self.turns[0].begin

    @property
    def kernel(self) -> str:
        near = "near side paced" if self.real is None else "near side by BLAS"
        return f"{near}; {self.attention.kernel}; libc memcpy a fragment"

    # -- making ----------------------------------------------------------------------------------------------------

    def _tasks(self, turn: Turn, placed: tuple[Placed, ...]) -> Iterator[Task]:
        """Yield the phases of ``turn`` in the order in which they run."""
        phases = zip(turn.phases, turn.parts, placed, strict=True)
        # what is swapped moves before any layer; other phases of as many repeats take turns, layer by layer
        for _, group in groupby(phases, key=lambda one: (one[0].repeat, _moves_only(one[0]))):
            members = list(group)
            tables = [self.memory.tables(what.decodes) if what.decodes else None for _, _, what in members]
            for _, part, _ in members:
                if self.real is not None:
                    self.real.check(part)
            for layer in range(members[0][0].repeat):
                for position, (phase, part, what) in enumerate(members):
                    batch = 1 if position == 0 and len(members) > 1 else 0
                    yield self._task(phase, part, what, tables[position], batch, layer)

    def _task(
        self, phase: Phase, part: Part, what: Placed, table: tuple[Array, Array] | None, batch: int, layer: int
    ) -> Task:
        step = None
        rows = [self.memory.rows(what.copies, layer)] if what.copies else []
        if table is not None:
            step = self.memory.step(self.attention, batch, layer, *table)
            rows.append(self.memory.shipped(batch, len(table[1])))
        copy = None
        if rows:
            moved = np.concatenate(rows)
            small = int(moved[:, 2].sum()) < SMALL
            copy = self.memory.copy(moved, self.attention.team if small else self.mover.team)
        near, work = max(phase.compute, phase.hbm), max(phase.link_in, phase.link_out, phase.cpu)
        whole = max(near, work) + phase.serial
        return Task(round(near * 1e9), copy, step, part, layer, whole, work if self.real is None else whole)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, reps: int = 1) -> float:
        """Carry out the course ``reps`` times; return the seconds of all."""
        total = 0.0
        for _ in range(reps):
            total += self._pass()
        return total

    def _pass(self) -> float:
        clock, mover, real, ours = self._clock, self.mover, self.real, self.attention.team
        turns: list[float] = []
        late = attention = copies = 0.0
        worked: list[float] = []
        count = 0
        now = begin = clock.now()
        for tasks, gate in zip(self.tasks, self._gates, strict=True):
            first = now = max(now, begin + gate)
            clock.until(first)
            real_ns = 0
            for task in tasks:
                start = now
                busy = real if task.near else None
                longest = task.near * 1e-9
                if busy is not None:
                    busy.begin(task.part, task.layer)
                handed = task.copy is not None and task.copy.team is not ours
                own = 0.0
                if task.copy is not None:
                    if handed:
                        mover.begin(task.copy)
                    else:
                        own = task.copy.run()
                        copies += own
                if task.step is not None:
                    seconds = task.step.run()
                    attention += seconds
                    own += seconds
                longest = max(longest, own)
                if busy is not None:
                    busy.wait()
                if handed:
                    seconds = mover.wait()
                    copies += seconds
                    longest = max(longest, seconds)
                # a paced near side goes on at its very moment, however late this thread, which only watches it, is
                alone = self._paced(task)
                now = start if alone else clock.now()
                real_ns += now - start
                if real is None:
                    now = max(now, start + task.near)
                    clock.until(now)
                late += (now - start) * 1e-9 - longest
                count += 1
            turns.append((now - first) * 1e-9)
            worked.append(real_ns * 1e-9)
        total = (clock.now() - begin) * 1e-9
        self.spans = Spans(total, tuple(turns), late / max(1, count), attention, copies, tuple(worked))
        return total

    def _paced(self, task: Task) -> bool:
        """Return whether nothing of ``task`` is real: its end is a moment of the simulation."""
        return self.real is None and task.copy is None and task.step is None

    @property
    def paced(self) -> float:
        """Share of the simulated time of all phases in those that are merely paced."""
        each = [(task.simulated, self._paced(task)) for tasks in self.tasks for task in tasks]
        whole = sum(seconds for seconds, _ in each)
        return sum(seconds for seconds, paced in each if paced) / whole if whole > 0.0 else 0.0

    def errors(self) -> Errors:
        """Return how the latest pass compares with the replay. Raises KvbenchError before the first one."""
        spans = self.spans
        if spans is None:
            raise KvbenchError("nothing was carried out", where="executor", expected="run() first")
        charged = [sum(task.charged for task in tasks if not self._paced(task)) for tasks in self.tasks]
        each = [took / said - 1.0 for took, said in zip(spans.worked, charged, strict=True) if said > 0.0]
        return Errors(
            spans.total / self.simulated - 1.0, sum(spans.worked) / sum(charged) - 1.0 if each else None,
            median(each) if each else None, len(each),
        )  # fmt: skip

    # -- checks ----------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise VerifyError unless the latest pass left every page where it belongs, and one more, in which nothing
        overlaps and what it should bring is spoilt before, attends to what was copied in every step. A real near side
        checks its products."""
        self.memory.check(self._wanted())
        if self.real is not None:
            self.real.verify()
        self.memory.fill()
        for out in self.memory.outputs:
            out.fill(np.nan)
        for tasks in self.tasks:
            for task in tasks:
                if task.copy is not None and task.copy.team is self.attention.team:
                    task.copy.run()
                elif task.copy is not None:
                    self.mover.begin(task.copy)
                    self.mover.wait()
                if task.step is not None:
                    task.step.out.fill(np.nan)
                    task.step.run()
                    if not np.isfinite(task.step.out).all():
                        raise VerifyError(
                            "attention to KV that is not there", where=f"executor, layer {task.layer}",
                            got="an output that is not finite", expected="numbers",
                        )  # fmt: skip
        self.memory.check(self._wanted())

    def _wanted(self) -> dict[int, tuple[int, int]]:
        """Return whose page each far block holds in the end, without those a token was appended to."""
        found: dict[int, tuple[int, int]] = {}
        for placed in self.placed:
            for what in placed:
                for copied in what.copies:
                    if copied.out:
                        found.update((block, (copied.key, i)) for i, block in enumerate(copied.blocks))
                for one in what.decodes:
                    found.pop(one.blocks[-1], None)
        return found


def _moves_only(phase: Phase) -> bool:
    """Return whether ``phase`` is a transfer nothing runs beside."""
    return not (phase.compute or phase.hbm or phase.cpu)
