"""A fixed set of threads that start a pass together and stamp its first start and last end themselves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from kvbench.errors import Unavailable


class Crew:
    """``size`` persistent threads, each calling ``body(index)`` once per :meth:`run_pass`.

    The threads are for work that waits with the GIL released (file reads): Python's cost per call, about 1 us and one
    thread at a time, is inside the window. ``cpus`` pins thread i to ``cpus[i % len(cpus)]``; ``pinned`` says whether
    every pin held. ``stopping`` turns True on close: long bodies look at it.
    """

    def __init__(self, size: int, body: Callable[[int], None], cpus: Sequence[int] = ()) -> None:
        self._body, self._cpus = body, tuple(cpus)
        self._go, self._end = threading.Barrier(size + 1), threading.Barrier(size + 1)
        self._starts, self._stops = [0] * size, [0] * size
        self._errors: list[BaseException] = []
        self.stopping = False
        self.pinned = bool(self._cpus)
        self._threads = [threading.Thread(target=self._loop, args=(i,), daemon=True) for i in range(size)]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # RLIMIT_NPROC or a cgroup's pids.max
            self.close()
            raise Unavailable(
                "cannot start reader threads", where=f"depth={size}", got=str(error), mend="see ulimit -u and pids.max"
            ) from error
        self.tids = tuple(thread.native_id or 0 for thread in self._threads)

    def _loop(self, index: int) -> None:
        if self._cpus:
            try:
                os.sched_setaffinity(0, {self._cpus[index % len(self._cpus)]})
            except OSError:
                self.pinned = False
        try:
            while True:
                self._go.wait()
                self._starts[index] = time.perf_counter_ns()
                try:
                    self._body(index)
                except BaseException as error:  # handed to the caller of run_pass
                    self._errors.append(error)
                self._stops[index] = time.perf_counter_ns()
                self._end.wait()
        except threading.BrokenBarrierError:
            return

    def run_pass(self) -> float:
        """Run one pass; return seconds from the first thread's start to the last one's end. Raises what a body did."""
        self._errors.clear()
        try:
            self._go.wait()
            self._end.wait()
        except BaseException:  # Ctrl-C: the threads are somewhere inside a pass and cannot be used again
            self.close()
            raise
        if self._errors:
            raise self._errors[0]
        return (max(self._stops) - min(self._starts)) / 1e9

    def close(self) -> None:
        """Stop the threads after the read they are in. Closing twice is fine."""
        self.stopping = True
        self._go.abort()
        self._end.abort()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
