"""Transport ``direct``: the kernel that needs the bytes reads them in host memory, or writes its results there."""

from __future__ import annotations

from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.kernels import Kernels

READ, WRITE = "link_read", "write"
FIRST, STEP = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95  # of what is written: odd 64-bit constants, incompressible words


class ReadInPlace:
    """A mover: one launch of ``link_read``, which leaves a sum a block at address ``sums``, 8 x ``grid`` bytes."""

    def __init__(self, kernels: Kernels, sums: int, source: int, nbytes: int, grid: int) -> None:
        self.operations, self.link_bytes, self.grid = 1, nbytes, grid
        self._launch: Launch = kernels.launch(READ, grid, sums, source, nbytes)
        self.kernel = f"{READ} {grid} x {self._launch.block}"

    def submit(self, stream: Stream) -> None:
        """Queue the launch. Raises CudaError when the driver refuses it."""
        stream.launch(self._launch)


class WriteInPlace:
    """A mover: one launch of ``write``: word k of the target becomes FIRST + k x STEP."""

    def __init__(self, kernels: Kernels, target: int, nbytes: int, grid: int) -> None:
        self.operations, self.link_bytes = 1, nbytes
        self._launch: Launch = kernels.launch(WRITE, grid, target, nbytes, FIRST, STEP)
        self.kernel = f"{WRITE} {grid} x {self._launch.block}"

    def submit(self, stream: Stream) -> None:
        """Queue the launch. Raises CudaError when the driver refuses it."""
        stream.launch(self._launch)
