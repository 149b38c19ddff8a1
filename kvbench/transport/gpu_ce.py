"""Transport ``ce``: the copy engine, one asynchronous copy call a fragment, in a compiled loop."""

from __future__ import annotations

import numpy as np

from kvbench.errors import KvbenchError
from kvbench.memory.cuda.device import Device, Stream
from kvbench.transport.gpu_pieces import Scatter, Words

COPY = "cuMemcpyAsync"


class StreamCalls:
    """Compiled calls of the driver entry ``call``, one a row of ``rows``; the stream's place among the arguments is
    ``place``, and a call counts as ``operations`` queued there. ``keep`` is what the rows hold addresses of."""

    def __init__(
        self, device: Device, call: str, rows: Words, *, place: int = -1, operations: int = 1, keep: object = None
    ) -> None:
        from kvbench.kernels.driver_loop import CallLoop

        self._device, self._call, self._stream = device, call.partition("@")[0], 0
        self._place, self._operations, self._keep = place, operations, keep
        self._loop = CallLoop(device.driver.address(call), rows)

    def __call__(self, stream: Stream, times: int | None = None) -> None:
        """Make the calls on ``stream``, or ``times`` times the first one, and count them there.

        Raises CudaError at the first the driver refuses, PoisonedDevice once the device is lost.
        """
        driver = self._device.driver
        if driver.poisoned is not None:
            raise driver.poisoned
        address = None if stream.handle is None else stream.handle.value
        if not address:
            raise KvbenchError("the stream is closed", where=self._call)
        if address != self._stream:
            self._loop.rows[:, self._place] = self._stream = address
        driver.check(self._call, self._loop() if times is None else self._loop.repeat(times))
        stream.count(self._operations * (len(self._loop.rows) if times is None else times))


class CopyEngine:
    """A mover: one cuMemcpyAsync a fragment."""

    def __init__(self, device: Device, pieces: Scatter) -> None:
        self.operations, self.link_bytes = pieces.count, pieces.nbytes
        self.kernel = f"{COPY} x {pieces.count}"
        rows = np.zeros((pieces.count, 4), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = pieces.targets(), pieces.sources(), pieces.fragment
        self.calls = StreamCalls(device, COPY, rows)

    def submit(self, stream: Stream) -> None:
        """Queue the copies; errors as of :class:`StreamCalls`."""
        self.calls(stream)
