"""Transport ``batch``: all fragments in one call of the batched copy API (CUDA 12.8; other arguments since 13.0)."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import numpy as np

from kvbench.errors import Unavailable
from kvbench.memory import payload
from kvbench.memory.cuda.device import Device, Stream, allocate
from kvbench.memory.cuda.driver import CudaError, PoisonedDevice
from kvbench.memory.cuda.entries import MemcpyAttributes
from kvbench.memory.cuda.service import Service
from kvbench.transport.gpu_ce import StreamCalls
from kvbench.transport.gpu_pieces import Pieces, Scatter

NEW, OLD = "cuMemcpyBatchAsync", "cuMemcpyBatchAsync@12080"
STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the order of the stream
PROBE_BYTES = 4096


class BatchCopy:
    """A mover: one batched call. Raises Unavailable where the driver has neither interface.

    Counted as one operation a fragment, the most a driver can make of it in its queue.
    """

    def __init__(self, device: Device, pieces: Scatter) -> None:
        driver = device.driver
        self._key = NEW if driver.has(NEW) else OLD
        if not driver.has(self._key):
            driver.address(OLD)  # raises, naming the version that has it
        self.operations, self.link_bytes = pieces.count, pieces.nbytes
        self.kernel = f"{self._key.partition('@')[0]} of {pieces.count}"
        # Descriptors are made once and in arrays: Python lists of 16 thousand items cost more than the copies.
        arrays = (pieces.targets(), pieces.sources(), np.full(pieces.count, pieces.fragment, np.int64))
        attributes = MemcpyAttributes(srcAccessOrder=STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        row = [array.ctypes.data for array in arrays]
        row += [pieces.count, ctypes.addressof(attributes), ctypes.addressof(first), 1]
        if self._key == OLD:
            row.append(ctypes.addressof(failed))
        rows = np.array([[*row, 0]], np.int64)
        keep = (arrays, attributes, first, failed)
        self.calls = StreamCalls(device, self._key, rows, operations=pieces.count, keep=keep)

    def submit(self, stream: Stream) -> None:
        """Queue the batch; errors as of :class:`gpu_ce.StreamCalls`."""
        self.calls(stream)


def probe(service: Service) -> None:
    """Move two items by the batched call and look at what arrived. Raises Unavailable, with why, unless both did.

    The interface changed its arguments under one name (trap T40), and some drivers list a call they do not serve.
    """
    device = service.device
    with ExitStack() as stack:
        source, target = (allocate(device, 4 * PROBE_BYTES, stack) for _ in range(2))
        service.fill(source, 4 * PROBE_BYTES, seed=11)
        service.fill(target, 4 * PROBE_BYTES, seed=12)
        order = np.array([3, 1], np.int64)
        mover = BatchCopy(device, Pieces(target, source, PROBE_BYTES, order))
        try:
            mover.submit(service.stream)
            service.stream.synchronize()
        except PoisonedDevice:
            raise
        except CudaError as error:
            raise Unavailable("the batched copy call does not serve two items", got=str(error)) from error
        found = service.read(target, 4 * PROBE_BYTES)
    wanted = payload.expected(4 * PROBE_BYTES, 12)
    for slot, origin in enumerate(order.tolist()):
        part = slice(slot * PROBE_BYTES, (slot + 1) * PROBE_BYTES)
        wanted[part] = payload.expected(PROBE_BYTES, 11, offset=origin * PROBE_BYTES)
    if not np.array_equal(found, wanted):
        raise Unavailable(
            "the batched copy call reports success and moves something else", where="batch",
            got=f"{int(np.count_nonzero(found != wanted))} wrong bytes of {found.size}", mend="use transport ce",
        )  # fmt: skip
