"""Persistent, pinned threads that run one kernel together and time it from a common release to the last arrival."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from kvbench.errors import KvbenchError, UsageError
from kvbench.kernels import libc, sync

Kernel = Callable[..., int]


def pin(cpu: int) -> str | None:
    """Pin the calling thread to ``cpu`` and read it back; return None, or why it is not pinned."""
    try:
        os.sched_setaffinity(0, {cpu})
        now = os.sched_getaffinity(0)
    except OSError as error:
        return f"cpu {cpu}: {error.strerror}"
    return None if now == {cpu} else f"cpu {cpu}: the kernel gave {sorted(now)}"


Replies = queue.SimpleQueue[BaseException | None]
Work = tuple[Kernel, tuple[Any, ...], Replies]
_BACK_S = 60.0  # a kernel runs seconds at most; a thread silent for longer is lost


@dataclass(frozen=True, slots=True)
class _Follower:
    thread: threading.Thread
    inbox: queue.SimpleQueue[Work | None]


def _nothing(*_: object) -> int:
    return 0


class Team:
    """``len(cpus)`` members, one pinned to each CPU in order; the thread that builds the team is member 0.

    ``tids`` are native thread ids and ``cpus`` the CPUs, both in member order. ``pinned`` is False when a member could
    not be pinned (``pin_reason`` says which and why): the team works, the caller flags the number. ``close`` ends the
    followers and gives the first thread its affinity back.

    Raises UsageError for an empty list.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        if not cpus:
            raise UsageError("a team needs at least one CPU", where="kernels.team", got="[]")
        self.cpus = tuple(int(c) for c in cpus)
        self._owner = threading.get_ident()
        self._owner_tid = threading.get_native_id()
        self._affinity = os.sched_getaffinity(0)
        self._followers: list[_Follower] = []
        self._closed = self._lost = False
        words = sync.OUTPUT // 8 + 8 * len(self.cpus)
        self._memory = np.zeros(words + 8, np.int64)
        skip = -self._memory.ctypes.data % 64 // 8
        self._control = self._memory[skip : skip + words]
        self._control[sync.CLOCK // 8] = libc.address_of("clock_gettime")
        self._control[sync.YIELD // 8] = libc.address_of("sched_yield")
        self._control[sync.CLOCK_ID // 8] = libc.CLOCK
        self.control = int(self._control.ctypes.data)
        reasons = [pin(self.cpus[0])]
        tids = [self._owner_tid]
        try:
            for member, cpu in enumerate(self.cpus[1:], 1):
                tid, reason = self._start(member, cpu)
                tids.append(tid)
                reasons.append(reason)
        except BaseException:
            self.close()
            raise
        self.tids = tuple(tids)
        self.pin_reason = "; ".join(r for r in reasons if r is not None) or None
        self.pinned = self.pin_reason is None

    def __len__(self) -> int:
        return len(self.cpus)

    @property
    def outputs(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The members' output lines, shape (members, 8): what kernels leave so that their work can be checked."""
        return self._control[sync.OUTPUT // 8 :].reshape(len(self.cpus), 8)

    def _start(self, member: int, cpu: int) -> tuple[int, str | None]:
        ready: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

        def serve() -> None:
            ready.put((threading.get_native_id(), pin(cpu)))
            while (work := inbox.get()) is not None:
                kernel, args, replies = work
                failure: BaseException | None = None
                try:
                    kernel(self.control, member, len(self.cpus), *args)
                except BaseException as error:  # handed to the caller by run(); member 0 must not wait for this one
                    self._control[sync.ABORT // 8] = 1
                    failure = error
                replies.put(failure)

        thread = threading.Thread(target=serve, name=f"kvbench-{member}", daemon=True)
        thread.start()
        self._followers.append(_Follower(thread, inbox))
        return ready.get()

    def run(self, kernel: Kernel, *args: Any) -> float:
        """Run ``kernel(control, member, members, *args)`` on every member; return seconds, release to last arrival.

        The kernel brackets its work with ``sync.enter`` and ``sync.leave`` and returns the nanoseconds ``leave`` gave.
        Raises KvbenchError when a member failed, the team is closed, or another thread calls; an exception of member 0
        (KeyboardInterrupt too) releases the others and is raised once they are back.
        """
        if self._closed or self._lost:
            raise KvbenchError("the team of measuring threads is closed", where="kernels.team")
        if threading.get_ident() != self._owner:
            raise KvbenchError("a team runs only from the thread that built it", where="kernels.team")
        self._control[: sync.CLOCK // 8] = 0
        replies: Replies = queue.SimpleQueue()
        try:
            for follower in self._followers:
                follower.inbox.put((kernel, args, replies))
            elapsed = kernel(self.control, 0, len(self.cpus), *args)
            failures = [replies.get() for _ in self._followers]
        except BaseException:
            self._abandon()
            raise
        for failure in failures:
            if failure is not None:
                raise KvbenchError(
                    "a measuring thread failed", where="kernels.team", got=f"{type(failure).__name__}: {failure}"
                ) from failure
        if elapsed < 0:
            raise KvbenchError("the run was aborted before its clock stopped", where="kernels.team")
        return elapsed * 1e-9

    def _abandon(self) -> None:
        """Release followers that wait for member 0, and return once each has left the abandoned kernel."""
        self._lost = True  # until proven otherwise: a follower still in the old kernel would take the next release
        self._control[sync.ABORT // 8] = 1
        back: Replies = queue.SimpleQueue()
        for follower in self._followers:
            follower.inbox.put((_nothing, (), back))  # served in order, so after the abandoned kernel
        try:
            for _ in self._followers:
                back.get(timeout=_BACK_S)
        except queue.Empty:
            raise KvbenchError("a measuring thread does not come back", where="kernels.team") from None
        self._lost = False

    def close(self) -> None:
        """End the followers and restore the affinity of the thread that built the team. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._control[sync.ABORT // 8] = 1
        for follower in self._followers:
            follower.inbox.put(None)
        for follower in self._followers:
            follower.thread.join(timeout=_BACK_S)
        os.sched_setaffinity(self._owner_tid, self._affinity)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
