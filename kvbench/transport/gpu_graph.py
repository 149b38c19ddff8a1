"""Kernels recorded once as a CUDA graph and launched by one call: what N launches cost once the driver knows them.

The graph is built node by node, not captured: a capture would also hold what other code queued meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from kvbench.errors import Unavailable, UsageError
from kvbench.memory.cuda.buffers import hbm
from kvbench.memory.cuda.device import Device, Launch, Stream
from kvbench.memory.cuda.driver import CudaError, PoisonedDevice
from kvbench.memory.cuda.entries import KernelNodeParams
from kvbench.memory.cuda.kernels import Kernels, ramp
from kvbench.memory.cuda.service import Service
from kvbench.transport.gpu_ce import StreamCalls

LAUNCH = "cuGraphLaunch"
PROBE_ITEM = 16  # bytes each node of the probe writes
FIRST, STEP = 0x0123456789ABCDEF, 0xD1342543DE82EF95


class KernelGraph:
    """``launches`` as one graph, each after the one before it. Use as a context manager: it gives the graph back.

    ``calls`` launches it, counted as one operation a kernel, the most a driver can make of it in its queue. Raises
    UsageError for no launches, Unavailable where the driver is older than CUDA 12, CudaError when it refuses a call.
    """

    def __init__(self, device: Device, launches: Sequence[Launch]) -> None:
        if not launches:
            raise UsageError("a graph of nothing", where="graph", expected="at least one launch")
        for key in ("cuGraphAddKernelNode", "cuGraphInstantiateWithFlags", LAUNCH):
            device.driver.address(key)
        self.kernels = len(launches)
        with ExitStack() as stack:
            graph, made = ctypes.c_void_p(), ctypes.c_void_p()
            device.call("cuGraphCreate", ctypes.byref(graph), 0)
            stack.callback(device.release, "cuGraphDestroy", graph)
            before: ctypes.c_void_p | None = None
            for launch in launches:
                before = _add(device, graph, launch, before)
            device.call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
            stack.callback(device.release, "cuGraphExecDestroy", made)
            rows = np.array([[made.value or 0, 0]], np.int64)
            self.calls = StreamCalls(device, LAUNCH, rows, operations=self.kernels, keep=tuple(launches))
            self._stack = stack.pop_all()

    def submit(self, stream: Stream) -> None:
        """Launch the graph; errors as of :class:`gpu_ce.StreamCalls`."""
        self.calls(stream)

    def close(self) -> None:
        """Give the graph back. Closing twice is fine."""
        self._stack.close()

    def __enter__(self) -> KernelGraph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _add(device: Device, graph: ctypes.c_void_p, launch: Launch, before: ctypes.c_void_p | None) -> ctypes.c_void_p:
    node = ctypes.c_void_p()
    values = KernelNodeParams(
        func=launch.function.value, gridDimX=launch.grid, gridDimY=1, gridDimZ=1, blockDimX=launch.block, blockDimY=1,
        blockDimZ=1, sharedMemBytes=launch.shared, kernelParams=ctypes.addressof(launch.packed),
    )  # fmt: skip
    after = None if before is None else ctypes.byref(before)
    count = 0 if before is None else 1
    device.call("cuGraphAddKernelNode", ctypes.byref(node), graph, after, count, ctypes.byref(values))
    return node


def probe(service: Service, kernels: Kernels, count: int) -> None:
    """Launch a graph of ``count`` kernels that each write a place of their own, and look at every place.

    A graph of empty kernels leaves nothing behind by which one could tell that its nodes ran. Raises Unavailable,
    with why, unless all of them did.
    """
    device, size = service.device, PROBE_ITEM * count
    with hbm(service, size, seed=13) as target:
        at = target.copy_address
        places = range(at, at + size, PROBE_ITEM)
        launches = [kernels.launch("write", 1, to, PROBE_ITEM, FIRST + i, STEP) for i, to in enumerate(places)]
        try:
            with KernelGraph(device, launches) as graph:
                graph.submit(service.stream)
                service.stream.synchronize()
        except PoisonedDevice:
            raise
        except CudaError as error:
            raise Unavailable(f"the driver does not serve a graph of {count} kernels", got=str(error)) from error
        found = service.read(at, size).reshape(count, PROBE_ITEM)
    wanted = np.stack([ramp(0, PROBE_ITEM, FIRST + i, STEP) for i in range(count)])
    wrong = int(np.count_nonzero((found != wanted).any(axis=1)))
    if wrong:
        raise Unavailable(
            "a graph launch reports success and does something else", where="graph",
            got=f"{wrong} of {count} kernels left nothing or something else", mend="launch kernels one by one",
        )  # fmt: skip
