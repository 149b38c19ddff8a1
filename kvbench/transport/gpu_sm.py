"""Transport ``sm``: GPU threads copy between device memory and the device's alias of host memory."""

from __future__ import annotations

from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.kernels import Kernels

COPY = "link_copy"


class ThreadCopy:
    """A mover: one launch of ``link_copy`` by ``grid`` blocks over ``nbytes`` at device addresses.

    ``grid`` is how much of the device it takes: two at a time must share it, or the second waits for the first.
    """

    def __init__(self, kernels: Kernels, target: int, source: int, nbytes: int, grid: int) -> None:
        self.operations, self.link_bytes = 1, nbytes
        self._launch: Launch = kernels.launch(COPY, grid, target, source, nbytes)
        self.kernel = f"{COPY} {grid} x {self._launch.block}"

    def submit(self, stream: Stream) -> None:
        """Queue the launch. Raises CudaError when the driver refuses it."""
        stream.launch(self._launch)
