"""Transport ``staged``: a file comes to the GPU through page-locked buffers, reads and copies overlapping."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType

from kvbench.errors import UsageError, VerifyError
from kvbench.memory.cuda.buffers import GpuBuffer
from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.memory.file import ScratchFile


class StagedRead:
    """A mover: the file in chunks as large as a buffer, as many reads in flight as there are ``buffers``.

    Reads bypass the page cache where the file system can (``direct``); elsewhere its pages are dropped with
    :meth:`prepare` before each pass. Use as a context manager: it ends its threads and events.
    """

    def __init__(self, device: Device, file: ScratchFile, target: int, buffers: Sequence[GpuBuffer]) -> None:
        self._chunk = buffers[0].nbytes if buffers else 0
        if not buffers or any(b.nbytes != self._chunk or b.tier != "pinned" for b in buffers) or self._chunk % 4096:
            raise UsageError("not staging buffers", where="staged", expected="pinned ones of one size, whole 4 KiB")
        self.direct = file.direct_fd is not None
        self.chunks = -(-file.nbytes // self._chunk)
        self.operations, self.link_bytes = 2 * self.chunks, file.nbytes
        how = "O_DIRECT" if self.direct else "page cache"
        self.kernel = f"preadv ({how}) {len(buffers)} x {self._chunk} B + cuMemcpyAsync"
        self._file, self._target, self._buffers = file, target, list(buffers)
        self._fd = file.fd if file.direct_fd is None else file.direct_fd
        self._views = [memoryview((ctypes.c_ubyte * b.nbytes).from_address(b.host_address or 0)) for b in buffers]
        with ExitStack() as stack:
            self._free = [stack.enter_context(Event(device)) for _ in buffers]
            self._sent = [False] * len(buffers)
            self._pool = stack.enter_context(ThreadPoolExecutor(len(buffers), "kvbench-staged"))
            self._stack = stack.pop_all()

    def prepare(self) -> None:
        """Make the next pass come from storage: drop the file's pages. Outside any timed window."""
        if not self.direct:
            self._file.drop_cache()

    def submit(self, stream: Stream) -> None:
        """Read and queue every chunk; returns when the last copy is queued, not when it is done.

        Raises KvbenchError when a read fails or ends early, CudaError when the driver refuses a call.
        """
        waiting: deque[tuple[int, int, Future[int]]] = deque()
        try:
            for chunk in range(self.chunks):
                if len(waiting) == len(self._buffers):
                    self._send(stream, *waiting.popleft())
                slot = chunk % len(self._buffers)
                if self._sent[slot]:
                    self._free[slot].synchronize()  # the copy out of it is done: else it would send the next chunk (T9)
                waiting.append((chunk, slot, self._pool.submit(self._read, chunk, slot)))
            while waiting:
                self._send(stream, *waiting.popleft())
        finally:
            for _, _, read in waiting:
                read.exception()  # no read may go on in a buffer that somebody else gets

    def _size(self, chunk: int) -> int:
        return min(self._chunk, self._file.nbytes - chunk * self._chunk)

    def _read(self, chunk: int, slot: int) -> int:
        size, done = self._size(chunk), 0
        while done < size:
            got = os.preadv(self._fd, [self._views[slot][done:size]], chunk * self._chunk + done)
            if got <= 0:
                break
            done += got
        return done

    def _send(self, stream: Stream, chunk: int, slot: int, read: Future[int]) -> None:
        try:
            got = read.result()
        except OSError as error:
            raise self._file.failed(error) from error
        if got != self._size(chunk):
            raise VerifyError(
                "a read ended early", where="staged", got=f"{got} bytes", expected=f"{self._size(chunk)} bytes"
            )
        stream.copy(self._target + chunk * self._chunk, self._buffers[slot].copy_address, got)
        stream.record(self._free[slot])
        self._sent[slot] = True

    def close(self) -> None:
        """End the threads and events. Closing twice is fine."""
        self._stack.close()

    def __enter__(self) -> StagedRead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
