"""The service kernels on one device: payload written and summed there as kvbench.memory.payload does on the host."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvbench.errors import VerifyError
from kvbench.memory import payload
from kvbench.memory.cuda.device import Device, Launch, Module, Stream, allocate
from kvbench.memory.payload import BLOCK_BYTES, Kind

THREADS = 256
BLOCKS_PER_SM = 8
SUMS = 1 << 15  # payload blocks whose sums fit into the scratch: 32 GiB; larger buffers get their own
WINDOW = 64 << 10  # bytes per place looked at by `check`
WINDOWS = 8
_BASE, _WEIGHTS, _SUMS = 0, BLOCK_BYTES, 2 * BLOCK_BYTES
_TOTAL = _SUMS + 8 * SUMS


class Service:
    """Loaded service kernels, a stream of their own and 2.25 MiB of device scratch; for one thread at a time.

    ``image``: the compiled ``service.cu`` (default: compiled now for this device by NVRTC). Everything here waits for
    its own work before it returns, so no error of it surfaces in a timed region.
    """

    def __init__(self, device: Device, image: bytes | None = None) -> None:
        if image is None:
            from kvbench.kernels.cuda.build import service_image

            image = service_image(*device.facts.arch)
        self.device = device
        self._payload: tuple[int, Kind] | None = None
        self._weighed = False
        with ExitStack() as stack:
            module = stack.enter_context(Module(device, image))
            self.block, self.flush, self._fill, self._checksum, self._end = (
                module.function(name) for name in ("kv_block", "kv_flush", "kv_fill", "kv_checksum", "kv_checksum_end")
            )
            self.stream: Stream = stack.enter_context(Stream(device))
            self._scratch = allocate(device, _TOTAL + 8, stack)
            self._stack = stack.pop_all()

    def grid(self, items: int) -> int:
        """Return how many blocks of THREADS serve ``items``: enough to fill the device, none without work."""
        return max(1, min(BLOCKS_PER_SM * self.device.facts.sms, -(-items // THREADS)))

    def write(self, address: int, data: npt.NDArray[np.generic]) -> None:
        """Copy a C-contiguous host array to a device address and wait."""
        self.stream.copy(address, data.ctypes.data, data.nbytes)
        self.stream.synchronize()

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the bytes at a device address."""
        out = np.empty(nbytes, np.uint8)
        self.stream.copy(out.ctypes.data, address, nbytes)
        self.stream.synchronize()
        return out

    def fill(self, address: int, nbytes: int, seed: int = 1, kind: Kind = "bits") -> None:
        """Write what :func:`payload.fill` writes to ``nbytes`` at an 8-byte aligned device address."""
        if self._payload != (seed, kind):
            self._payload = None
            self.write(self._scratch + _BASE, payload.base_words(seed, kind))
            self._payload = (seed, kind)
        mask = payload.MANTISSA if kind == "float64" else payload.MASK64
        arguments = (address, nbytes, self._scratch + _BASE, payload.splitmix(seed), mask)
        self._run(self._fill, self.grid(nbytes // 8), arguments)
        self.stream.synchronize()

    def checksum(self, address: int, nbytes: int) -> int:
        """Return :func:`payload.checksum` of ``nbytes`` at an 8-byte aligned device address, read by the device."""
        if not self._weighed:
            self.write(self._scratch + _WEIGHTS, payload.word_weights())
            self._weighed = True
        blocks = -(-nbytes // BLOCK_BYTES)
        with ExitStack() as stack:
            own = blocks > SUMS
            sums = allocate(self.device, 8 * blocks, stack) if own else self._scratch + _SUMS
            total = self._scratch + _TOTAL
            self.stream.set_bytes(sums, 0, 8 * blocks)
            self.stream.set_bytes(total, 0, 8)
            grid = max(1, min(blocks, BLOCKS_PER_SM * self.device.facts.sms))
            self._run(self._checksum, grid, (address, nbytes, self._scratch + _WEIGHTS, sums))
            self._run(self._end, self.grid(blocks), (sums, blocks, total))
            found = int(self.read(total, 8).view(np.uint64)[0])
        return (found + payload.splitmix(nbytes)) & payload.MASK64

    def _run(self, function: ctypes.c_void_p, grid: int, arguments: tuple[int, ...]) -> None:
        self.stream.launch(Launch(function, grid, THREADS, [ctypes.c_uint64(value) for value in arguments]))

    def check(self, address: int, nbytes: int, where: str, seed: int = 1, kind: Kind = "bits") -> None:
        """Raise VerifyError unless the device reads the payload of ``seed`` at both ends of a buffer and in between.

        The end counts most: beyond 2 GiB a 32-bit size covers the front and leaves the tail (trap T55).
        """
        for offset in windows(nbytes):
            size = min(WINDOW, nbytes - offset)
            found = self.checksum(address + offset, size)
            if found != payload.checksum(payload.expected(size, seed, kind, offset)):
                raise VerifyError(
                    "the device does not read what was written", where=where,
                    got=f"another checksum at byte {offset} of {nbytes}", expected="the payload that was written",
                )  # fmt: skip

    def close(self) -> None:
        """Give everything back. Closing twice is fine."""
        self._stack.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def windows(nbytes: int) -> tuple[int, ...]:
    """Return the offsets `check` looks at: multiples of 8, the last window reaching the end."""
    last = max(0, -(-(nbytes - WINDOW) // 8) * 8)
    return tuple(sorted({last * i // (WINDOWS - 1) // 8 * 8 for i in range(WINDOWS)} | {last}))
