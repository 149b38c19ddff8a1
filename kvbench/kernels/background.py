"""Copies that run beside something else until they are told to stop, and can say at any time how far they are.

One thread a copier, pinned to its CPU, over its own part of an index set, over and over. Each publishes how many
fragments it has copied, and the times of its first and last moment, so that a measurement beside it can prove that the
copy was under way all the time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.kernels import libc
from kvbench.kernels.gather import Index, parse
from kvbench.kernels.gather_passes import READ, copy_fragments
from kvbench.kernels.intrinsics import atomic_load, atomic_store, barrier, call_clock, drain, word_load, word_store
from kvbench.kernels.jit import kernel, part
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.team import pin

EDGE = 64
LINE_WORDS = 8
STOP, CLOCK, CLOCK_ID = 0, 8, 16  # byte offsets in the shared line; then a line each of work and of time a copier
COPIED, BEGAN, ENDED, TIMESPEC = 0, 64, 72, 80  # byte offsets in a copier's lines
STARTED_S = 10.0


@part
def now_ns(shared: int, own: int) -> int:
    barrier()
    call_clock(word_load(shared + CLOCK), word_load(shared + CLOCK_ID), own + TIMESPEC)
    barrier()
    now: int = word_load(own + TIMESPEC) * 1_000_000_000 + word_load(own + TIMESPEC + 8)
    return now


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def copy_until(
    shared: int, own: int, kind: int, dst: int, src: int, index: int, lo: int, hi: int, fragment: int, locality: int,
    distance: int, group: int, memcpy: int,
) -> int:  # fmt: skip
    """Copy entries ``lo..hi`` of the index over and over, ``group`` at a time, until the shared line says stop.

    Returns the fragments copied.
    """
    word_store(own + BEGAN, now_ns(shared, own))
    done = 0
    at = lo
    while atomic_load(shared + STOP) == 0:
        end = min(at + group, hi)
        copy_fragments(kind, dst, src, index, at, end, fragment, locality, distance, memcpy)
        drain()
        done += end - at
        at = lo if end == hi else end
        atomic_store(own + COPIED, done)
    word_store(own + ENDED, now_ns(shared, own))
    return done


@dataclass(frozen=True, slots=True)
class Stretch:
    """How long a copy was under way: from the latest first moment to the earliest last one of its copiers, in
    nanoseconds of the monotonic clock, and the fragments of each."""

    began: int
    ended: int
    copied: tuple[int, ...]

    def covers(self, begin: int, end: int) -> bool:
        """Return whether all copiers were busy from before ``begin`` to after ``end``."""
        return self.began <= begin and end <= self.ended


class Background:
    """Copies ``index`` (int64, units of ``fragment`` bytes of ``src``, each once) to ``dst``, packed, on ``cpus``.

    ``start`` returns once every copier has copied something, ``copied`` is how many fragments so far, ``stop`` ends it
    and returns its :class:`Stretch`. Between, nothing in Python runs on the copiers' CPUs. ``tids`` are native thread
    ids; ``pin_reason`` says why one is not pinned. Use as a context manager: leaving it ends the threads.

    Raises UsageError without CPUs or for fewer fragments than copiers.
    """

    GROUP_BYTES = 256 << 10  # copied between two looks at the stop word

    def __init__(
        self, cpus: Sequence[int], variant: str, src: int, dst: int, fragment: int, index: Index, nbytes: int
    ) -> None:
        if not cpus or len(index) < len(cpus):
            raise UsageError("copiers", where="background copy", got=f"{len(cpus)} of {len(index)} fragments")
        chosen = parse(variant)
        if chosen.kind == READ or fragment % 64:
            raise UsageError("no copy", where="background copy", got=f"{variant}, fragments of {fragment} B")
        if int(index.min()) < 0 or (int(index.max()) + 1) * fragment > nbytes or dst % 64:
            raise UsageError("the index or the target does not fit", where="background copy", got=hex(dst))
        self.fragment, self.kernel = fragment, f"numba copy, {variant}, {len(cpus)} x {fragment} B"
        self._index, self._src, self._dst = np.ascontiguousarray(index, np.int64), src, dst
        count = len(cpus)
        memory = np.zeros((1 + 2 * count) * LINE_WORDS + LINE_WORDS, np.int64)
        skip = -memory.ctypes.data % 64 // 8
        self._lines = memory[skip : skip + (1 + 2 * count) * LINE_WORDS].reshape(-1, LINE_WORDS)
        self._lines[0, 1:3] = libc.address_of("clock_gettime"), libc.CLOCK
        base = int(self._lines.ctypes.data)
        group = max(1, self.GROUP_BYTES // fragment)
        self._calls = [
            (
                base, base + 64 * (1 + 2 * k), chosen.kind, dst, src, int(self._index.ctypes.data),
                len(index) * k // count, len(index) * (k + 1) // count, fragment, chosen.locality, chosen.distance,
                group, libc.address_of("memcpy"),
            )
            for k in range(count)
        ]  # fmt: skip
        self._inboxes = [queue.SimpleQueue[bool]() for _ in cpus]
        self._replies = queue.SimpleQueue[BaseException | None]()
        ready = queue.SimpleQueue[tuple[int, int, str | None]]()
        self._threads = [
            threading.Thread(target=self._serve, args=(k, cpu, ready), name=f"kvbench-copier-{k}", daemon=True)
            for k, cpu in enumerate(cpus)
        ]
        for thread in self._threads:
            thread.start()
        told = sorted(ready.get() for _ in cpus)
        self.tids = tuple(tid for _, tid, _ in told)
        self.pin_reason = "; ".join(reason for _, _, reason in told if reason is not None) or None
        self._running = False

    def _serve(self, k: int, cpu: int, ready: queue.SimpleQueue[tuple[int, int, str | None]]) -> None:
        ready.put((k, threading.get_native_id(), pin(cpu)))
        while self._inboxes[k].get():
            failure: BaseException | None = None
            try:
                copy_until(*self._calls[k])
            except BaseException as error:  # handed to whoever calls stop()
                failure = error
            self._replies.put(failure)

    @property
    def copied(self) -> int:
        """Fragments copied since the start, by all copiers."""
        return int(self._lines[1::2, 0].sum())

    def start(self) -> None:
        """Start copying, the target spoilt; return when every copier has copied something."""
        if self._running:
            raise KvbenchError("the background copy already runs", where=self.kernel)
        self.spoil()
        self._lines[0, 0] = 0
        self._lines[1:] = 0
        self._running = True
        for inbox in self._inboxes:
            inbox.put(True)
        deadline = time.monotonic() + STARTED_S
        while not self._lines[1::2, 0].all():
            if time.monotonic() > deadline:
                self.stop()
                raise KvbenchError("a copier did not start", where=self.kernel, got=f"nothing in {STARTED_S:g} s")
            time.sleep(0)

    def stop(self) -> Stretch:
        """End the copy and return how long it was under way. Raises KvbenchError when it does not run or failed."""
        if not self._running:
            raise KvbenchError("the background copy does not run", where=self.kernel)
        self._lines[0, 0] = 1
        failures = [self._replies.get() for _ in self._inboxes]
        self._running = False
        for failure in failures:
            if failure is not None:
                raise KvbenchError("a copier failed", where=self.kernel, got=str(failure)) from failure
        times = self._lines[2::2, :2]
        return Stretch(int(times[:, 0].max()), int(times[:, 1].min()), tuple(self._lines[1::2, 0].tolist()))

    def _rows(self) -> tuple[Any, Any]:
        count = len(self._index)
        source = bytes_at(self._src, (int(self._index.max()) + 1) * self.fragment).reshape(-1, self.fragment)
        return source, bytes_at(self._dst, count * self.fragment).reshape(-1, self.fragment)

    def spoil(self) -> None:
        """Make both ends of every fragment in the target wrong."""
        source, target = self._rows()
        for edge in (slice(0, EDGE), slice(-EDGE, None)):
            target[:, edge] = ~source[self._index, edge]

    def verify(self, stretch: Stretch) -> None:
        """Raise VerifyError unless every fragment that ``stretch`` says was copied is in the target, to the byte."""
        source, target = self._rows()
        for copied, call in zip(stretch.copied, self._calls, strict=True):
            lo, hi = call[6], call[7]
            done = min(copied, hi - lo)
            if not done:
                raise VerifyError("a copier copied nothing", where=self.kernel)
            bad = np.flatnonzero((target[lo : lo + done] != source[self._index[lo : lo + done]]).any(axis=1))
            if len(bad):
                raise VerifyError("a fragment was not copied", where=self.kernel, got=f"entry {lo + bad[0]}")

    def close(self) -> None:
        """End the threads. May be called twice."""
        if self._running:
            self.stop()
        for inbox in self._inboxes:
            inbox.put(False)
        for thread in self._threads:
            thread.join(timeout=STARTED_S)
        self._inboxes = []

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
