"""Transport ``staged``: between a file and the GPU through page-locked buffers, file calls and copies overlapping.

What a pass must have done when it ends: fetch, every byte is in GPU memory; evict, every byte is in the file and
fdatasync has returned, so that the device below has it as far as the file system tells.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType

from kvbench.errors import UsageError, VerifyError
from kvbench.memory.cuda.buffers import GpuBuffer
from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.memory.file import MEMORY_FILE_SYSTEMS, ScratchFile


class Staged(ABC):
    """What both directions share: chunks as large as a buffer, as many file calls in flight as there are ``buffers``.

    File calls bypass the page cache where the file system can (``direct``). Use as a context manager: it ends its
    threads and events. Raises UsageError for other buffers than page-locked ones of one size, whole 4 KiB.
    """

    doing: str
    verb: str

    def __init__(self, device: Device, file: ScratchFile, near: int, buffers: Sequence[GpuBuffer]) -> None:
        self._chunk = buffers[0].nbytes if buffers else 0
        if not buffers or any(b.nbytes != self._chunk or b.tier != "pinned" for b in buffers) or self._chunk % 4096:
            raise UsageError("not staging buffers", where="staged", expected="pinned ones of one size, whole 4 KiB")
        self.direct = file.direct_fd is not None
        self.chunks = -(-file.nbytes // self._chunk)
        self.operations, self.link_bytes = 2 * self.chunks, file.nbytes
        self.how = f"({'O_DIRECT' if self.direct else 'page cache'}) {len(buffers)} x {self._chunk} B"
        self.kernel = ""
        self._file, self._near, self._buffers = file, near, list(buffers)
        self._fd = file.fd if file.direct_fd is None else file.direct_fd
        self._views = [memoryview((ctypes.c_ubyte * b.nbytes).from_address(b.host_address or 0)) for b in buffers]
        with ExitStack() as stack:
            self._done = [stack.enter_context(Event(device)) for _ in buffers]
            self._pool = stack.enter_context(ThreadPoolExecutor(len(buffers), "kvbench-staged"))
            self._stack = stack.pop_all()

    @property
    def flags(self) -> tuple[str, ...]:
        """Return what a row must carry of where the bytes really went."""
        return ("file_in_memory",) if self._file.system.kind in MEMORY_FILE_SYSTEMS else ()

    @abstractmethod
    def _call(self, part: memoryview, offset: int) -> int:
        """Move one part between its buffer and the file; returns the bytes moved, raises OSError."""

    def _size(self, chunk: int) -> int:
        return min(self._chunk, self._file.nbytes - chunk * self._chunk)

    def _transfer(self, chunk: int, slot: int) -> int:
        size, done = self._size(chunk), 0
        while done < size:
            got = self._call(self._views[slot][done:size], chunk * self._chunk + done)
            if got <= 0:
                break
            done += got
        return done

    def _whole(self, chunk: int, transfer: Future[int]) -> int:
        """Return the bytes of a chunk whose file call is over; raises KvbenchError unless they are all of it."""
        try:
            got = transfer.result()
        except OSError as error:
            raise self._file.failed(error, self.doing) from error
        if got != self._size(chunk):
            raise VerifyError(
                f"a {self.verb} ended early", where="staged", got=f"{got} bytes", expected=f"{self._size(chunk)} bytes"
            )
        return got

    def alone(self, stream: Stream) -> None:
        """Make every file call and none of the copies; what a fetch reads is dropped, an evict writes the buffers.

        Queues one record, so that a clock of the device can bracket it. It bounds the pass on the file's side. Raises
        KvbenchError when a call fails or ends early.
        """
        slots = len(self._buffers)
        waiting: deque[tuple[int, Future[int]]] = deque()
        try:
            for chunk in range(self.chunks):
                if len(waiting) == slots:
                    self._whole(*waiting.popleft())
                waiting.append((chunk, self._pool.submit(self._transfer, chunk, chunk % slots)))
            while waiting:
                self._whole(*waiting.popleft())
        finally:
            for _, call in waiting:
                call.exception()
        self._settle()
        stream.record(self._done[0])

    @abstractmethod
    def _settle(self) -> None:
        """Do what ends a pass on the file's side."""

    def close(self) -> None:
        """End the threads and events. Closing twice is fine."""
        self._stack.close()

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StagedRead(Staged):
    """A mover: the file into GPU memory at ``near``. Where its pages are cached, :meth:`prepare` drops them."""

    doing, verb = "reading it", "read"

    def __init__(self, device: Device, file: ScratchFile, near: int, buffers: Sequence[GpuBuffer]) -> None:
        super().__init__(device, file, near, buffers)
        self._sent = [False] * len(buffers)
        self.kernel = f"preadv {self.how} + cuMemcpyAsync"

    def _call(self, part: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [part], offset)

    def _settle(self) -> None:
        """Reads leave nothing that would have to reach a device."""

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
                    self._done[slot].synchronize()  # the copy out of it is done: else it would send the next chunk (T9)
                waiting.append((chunk, slot, self._pool.submit(self._transfer, chunk, slot)))
            while waiting:
                self._send(stream, *waiting.popleft())
        finally:
            for _, _, read in waiting:
                read.exception()  # no read may go on in a buffer that somebody else gets

    def _send(self, stream: Stream, chunk: int, slot: int, read: Future[int]) -> None:
        got = self._whole(chunk, read)
        stream.copy(self._near + chunk * self._chunk, self._buffers[slot].copy_address, got)
        stream.record(self._done[slot])
        self._sent[slot] = True


class StagedWrite(Staged):
    """A mover: GPU memory at ``near`` into the file, ended by fdatasync, which is part of the pass."""

    doing, verb = "writing it", "write"

    def __init__(self, device: Device, file: ScratchFile, near: int, buffers: Sequence[GpuBuffer]) -> None:
        super().__init__(device, file, near, buffers)
        self.kernel = f"cuMemcpyAsync + pwritev {self.how} + fdatasync"

    def _call(self, part: memoryview, offset: int) -> int:
        return os.pwritev(self._fd, [part], offset)

    def submit(self, stream: Stream) -> None:
        """Copy and write every chunk; returns when the file holds them all and fdatasync has returned.

        Raises KvbenchError when a write fails or ends early, CudaError when the driver refuses a call.
        """
        slots = len(self._buffers)
        writing: list[tuple[int, Future[int]] | None] = [None] * slots
        try:
            lag = min(1, slots - 1)  # a slot is copied into while those before it are written; one alone takes turns
            for chunk in range(self.chunks + lag):
                if chunk < self.chunks:
                    self._free(writing, chunk % slots)
                    self._take(stream, chunk)
                before = chunk - lag
                if before >= 0:
                    self._done[before % slots].synchronize()
                    writing[before % slots] = before, self._pool.submit(self._transfer, before, before % slots)
            for slot in range(slots):
                self._free(writing, slot)
            self._settle()
        finally:
            for entry in writing:
                if entry is not None:
                    entry[1].exception()  # no write may go on from a buffer that somebody else gets

    def _settle(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._file.failed(error, self.doing) from error

    def _free(self, writing: list[tuple[int, Future[int]] | None], slot: int) -> None:
        entry = writing[slot]
        if entry is not None:
            self._whole(*entry)
            writing[slot] = None

    def _take(self, stream: Stream, chunk: int) -> None:
        slot = chunk % len(self._buffers)
        stream.copy(self._buffers[slot].copy_address, self._near + chunk * self._chunk, self._size(chunk))
        stream.record(self._done[slot])
