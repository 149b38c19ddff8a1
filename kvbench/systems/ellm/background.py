"""One thread for driver calls that nobody has to wait for: mapping ahead, and unmapping addresses given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvbench.errors import KvbenchError, Unavailable


class Job:
    """Work handed to the thread; ``error`` is what it raised, once :meth:`wait` has returned."""

    __slots__ = ("_done", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self.error: KvbenchError | None = None

    def run(self) -> None:
        """Do it; errors are kept for whoever waits."""
        try:
            self._work()
        except KvbenchError as error:
            self.error = error
        except Exception as error:  # a fault of this package must reach the caller too, not die with the thread
            self.error = KvbenchError(f"{type(error).__name__}: {error}", where="background mapping")
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether the work is over."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return once the work is over."""
        self._done.wait()


class Background:
    """Runs jobs in order in one thread, which starts with the first of them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Callable[[], None]) -> Job:
        """Queue ``work``. Raises Unavailable when no thread can be started."""
        self.start()
        job = Job(work)
        self._queue.put(job)
        return job

    def start(self) -> int:
        """Start the thread unless it runs; return its native id. Raises Unavailable when no thread can be started."""
        if self._closed:
            raise KvbenchError("the background thread has ended", where="background mapping")
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name="kvbench-mapping", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise Unavailable(
                    "cannot start a thread", where="background mapping", got=str(error), mend="see ulimit -u"
                ) from error
            self._thread = thread
        found = self._thread.native_id
        assert found is not None  # set before start() returns
        return found

    @property
    def tid(self) -> int | None:
        """The native id of the thread, None before it has started."""
        return None if self._thread is None else self._thread.native_id

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()

    def close(self) -> None:
        """Finish what is queued and end the thread. Closing twice is fine."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
