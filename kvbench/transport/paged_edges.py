"""The event edges between a copy on a stream of its own and the stream whose work it must not overtake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.transport.gpu_pieces import Mover

Enter = Callable[[AbstractContextManager[Any]], Any]


class OnSide:
    """A mover: ``mover`` on a side stream, behind all that the caller's stream was given and ahead of what comes next.

    Without the first edge a store reads before the forward pass has written, without the second a load overwrites
    blocks that are still read: silent garbage in both (vLLM 45704, 46278, 47282; sglang 8991). As in SGLang's cache
    controller the host waits for neither. ``side`` is to be named to the clock (``also``).
    """

    def __init__(self, device: Device, enter: Enter, mover: Mover) -> None:
        self._mover = mover
        self.side: Stream = enter(Stream(device))
        self._start: Event = enter(Event(device))
        self._done: Event = enter(Event(device))
        self.operations, self.link_bytes = mover.operations + 4, mover.link_bytes
        self.kernel = f"{mover.kernel}, on a stream of its own"

    def submit(self, stream: Stream) -> None:
        """Queue the work on the side stream between both edges. Raises CudaError when the driver refuses a call."""
        stream.record(self._start)
        self.side.wait(self._start)
        self._mover.submit(self.side)
        self.side.record(self._done)
        stream.wait(self._done)
