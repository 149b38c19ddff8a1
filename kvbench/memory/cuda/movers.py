"""Sequential kernels over GPU memory: their buffers, one launch, and what they must have left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.memory import payload
from kvbench.memory.cuda.buffers import GpuBuffer, hbm
from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.kernels import Kernels, payload_sum, ramp, ramp_sum
from kvbench.memory.cuda.service import WINDOW, Service, windows
from kvbench.memory.host import preflight

Op = Literal["read", "write", "copy", "triad"]
OPS: tuple[Op, ...] = get_args(Op)
ARRAYS: dict[str, int] = {"read": 1, "write": 1, "copy": 2, "triad": 3}
BLOCKS_PER_SM = 4  # of 512 threads: as many threads as a multiprocessor holds
FIRST, STEP, SCALE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 2.0  # a power of two: exact on any machine
OTHER = 0x5EED  # added to the seed of what an output holds before the work

Enter = Callable[[AbstractContextManager[Any]], Any]


class MemoryWork:
    """``op`` over arrays of ``nbytes`` in GPU memory, one launch a pass.

    ``moved`` are the bytes of a pass the STREAM way: one array for read and write, two for copy, three for triad.
    Raises UsageError for another op or a triad of no whole doubles, Unavailable without memory, and what
    :func:`buffers.hbm` raises.
    """

    def __init__(self, op: str, nbytes: int, service: Service, kernels: Kernels, enter: Enter, seed: int) -> None:
        if op not in OPS:
            raise UsageError("unknown operation", where="device memory", got=op, expected=" ".join(OPS))
        if op == "triad" and nbytes % 8:
            raise UsageError("triad adds whole doubles", where="device memory", got=nbytes, expected="a multiple of 8")
        self.op, self.nbytes, self.moved = op, nbytes, ARRAYS[op] * nbytes
        self._service, self._kernels = service, kernels
        kind: payload.Kind = "float64" if op == "triad" else "bits"
        self._grid = BLOCKS_PER_SM * service.device.facts.sms
        self._sums: GpuBuffer = enter(hbm(service, 8 * self._grid, seed=seed))
        inputs = {"read": 1, "write": 0, "copy": 1, "triad": 2}[op]
        self._inputs: list[GpuBuffer] = [enter(hbm(service, nbytes, kind=kind, seed=seed + i)) for i in range(inputs)]
        self._output: GpuBuffer | None = None if op == "read" else enter(hbm(service, nbytes, kind=kind, seed=seed + 9))
        self._launch = self._made()
        self.kernel = f"{op} {self._grid} x {self._launch.block}"
        self.spoil()

    def _made(self) -> Launch:
        near = [buffer.copy_address for buffer in self._inputs]
        if self._output is None:
            return self._kernels.launch("read", self._grid, self._sums.copy_address, near[0], self.nbytes)
        to = self._output.copy_address
        if self.op == "write":
            return self._kernels.launch("write", self._grid, to, self.nbytes, FIRST, STEP)
        if self.op == "copy":
            return self._kernels.launch("copy", self._grid, to, near[0], self.nbytes)
        return self._kernels.launch("triad", self._grid, to, near[0], near[1], self.nbytes, SCALE)

    def submit(self, stream: Stream) -> None:
        """Queue one pass."""
        stream.launch(self._launch)

    def spoil(self) -> None:
        """Make what a pass leaves wrong, so that a pass that does nothing shows (trap T21)."""
        target = self._output or self._sums
        target.refill(target.seed + OTHER)

    def check(self) -> None:
        """Raise VerifyError unless the last pass left what it must.

        read: the sum of every word; write: the same of what was written, and places compared; copy: the checksum of
        all; triad: places at both ends and between compared bit by bit. Inputs must still hold their payload.
        """
        for buffer in self._inputs:
            buffer.verify()
        if self.op == "read":
            source = self._inputs[0]
            self._expect_sum(self._sum_of_blocks(), payload_sum(self.nbytes, source.seed, source.kind))
        elif self.op == "write":
            self._places(lambda offset, size: ramp(offset, size, FIRST, STEP))
            assert self._output is not None
            again = self._kernels.launch(
                "read", self._grid, self._sums.copy_address, self._output.copy_address, self.nbytes
            )
            self._service.stream.launch(again)
            self._service.stream.synchronize()
            self._expect_sum(self._sum_of_blocks(), ramp_sum(self.nbytes, FIRST, STEP))
        elif self.op == "copy":
            assert self._output is not None
            if self._output.checksum() != self._inputs[0].checksum():
                raise VerifyError("the copy differs from its source", where="device memory copy")
        else:
            self._places(self._triad_at)

    def _sum_of_blocks(self) -> int:
        parts = self._service.read(self._sums.copy_address, self._sums.nbytes).view(np.uint64)
        return int(parts.sum(dtype=np.uint64))

    def _expect_sum(self, found: int, wanted: int) -> None:
        if found != wanted:
            raise VerifyError(
                "not every word was visited", where=f"device memory {self.op}", got=f"sum {found:016x}",
                expected=f"{wanted:016x}",
            )  # fmt: skip

    def _triad_at(self, offset: int, size: int) -> payload.Bytes:
        b, c = (payload.expected(size, buffer.seed, buffer.kind, offset).view(np.float64) for buffer in self._inputs)
        return np.asarray(b + SCALE * c, np.float64).view(np.uint8)

    def _places(self, expected: Callable[[int, int], payload.Bytes]) -> None:
        assert self._output is not None
        for offset in windows(self.nbytes):
            size = min(WINDOW, self.nbytes - offset)
            found = self._service.read(self._output.copy_address + offset, size)
            if not np.array_equal(found, expected(offset, size)):
                raise VerifyError(
                    "the kernel left something else", where=f"device memory {self.op}", got=f"at byte {offset}"
                )


class DeviceChase:
    """Dependent loads by one GPU thread over a random cycle through every ``stride`` bytes of GPU memory.

    ``run(reps)``: seconds of ``reps`` windows of ``loads`` loads by the device's own clock, after ``warm`` further
    ones outside the window; each goes on where the one before ended, so a long cycle is never walked from caches.
    ``cycles`` holds the SM cycles a load of each window. Raises UsageError for less than two nodes.
    """

    STRIDE = 128  # a line of L2: every load is another one

    def __init__(
        self, nbytes: int, loads: int, warm: int, service: Service, kernels: Kernels, enter: Enter, seed: int
    ) -> None:
        self.nodes = nbytes // self.STRIDE
        if self.nodes < 2 or loads < 1:
            raise UsageError("no cycle to walk", where="chase", got=nbytes, expected=f"{2 * self.STRIDE} bytes")
        self.loads, self.warm, self.cycles = loads, warm, list[float]()
        self._service, self._kernels = service, kernels
        self._memory: GpuBuffer = enter(hbm(service, self.nodes * self.STRIDE, seed=seed))
        self._out: GpuBuffer = enter(hbm(service, 24, seed=seed))
        base = self._memory.copy_address
        self._order = base + np.random.default_rng(seed).permutation(self.nodes).astype(np.int64) * self.STRIDE
        preflight(2 * self.nodes * self.STRIDE)  # the chain is made on the host, and pages for its copy come on top
        chain = np.zeros(self.nodes * self.STRIDE // 8, np.uint64)
        chain[(self._order - base) // 8] = np.roll(self._order, -1).astype(np.uint64)
        service.write(base, chain)
        self._steps = 0
        self.kernel = f"chase stride {self.STRIDE}, {loads} loads"
        kernels.launch("chase", 1, self._out.copy_address, base, 0, 1)  # loads the code before anything is timed

    def window(self, stream: Stream) -> float:
        """Return the seconds of one window. Raises VerifyError when the walk did not end where its steps lead."""
        head = int(self._order[self._steps % self.nodes])
        launch = self._kernels.launch("chase", 1, self._out.copy_address, head, self.warm, self.loads)
        stream.launch(launch)
        stream.synchronize()
        self._steps += self.warm + self.loads
        words = self._service.read(self._out.copy_address, 24).view(np.uint64)
        last, cycles, nanoseconds = (int(word) for word in words)
        if last != int(self._order[self._steps % self.nodes]):
            raise VerifyError(
                "the walk ended at another node", where="device_latency", got=f"{last:#x}",
                expected=f"{int(self._order[self._steps % self.nodes]):#x}",
            )  # fmt: skip
        self.cycles.append(cycles / self.loads)
        return nanoseconds * 1e-9
