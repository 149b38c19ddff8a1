"""The smallest operation of each driver call, as work to submit: what is left of a transport without bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, pinned
from kvbench.memory.cuda.device import Event, Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.transport import gpu_batch, gpu_graph
from kvbench.transport.gpu_ce import COPY, StreamCalls
from kvbench.transport.gpu_lane import OTHER, same_content
from kvbench.transport.gpu_pieces import Pieces

ITEM = 16  # bytes of a copy: one access of the widest kind
GRAPHS = {"graph": 1, "graph_64": 64}  # kernels in it, one after the other
Enter = Callable[[AbstractContextManager[Any]], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call: ``calls`` makes it, ``operations`` are queued by it. ``check`` raises VerifyError unless it did what it
    says, ``spoil`` makes that fail again."""

    calls: StreamCalls
    operations: int
    kernel: str
    check: Callable[[], None]
    spoil: Callable[[], None]

    def submit(self, stream: Stream) -> None:
        """Make the call on ``stream``."""
        self.calls(stream)


def open_call(op: str, service: Service, kernels: Kernels, enter: Enter, seed: int) -> Call:
    """Return the call of ``op``. Raises UsageError for an op that is none, Unavailable where the driver does not
    serve its call."""
    device = service.device
    if op == "kernel":
        launch = kernels.launch("empty", 1)
        function = launch.function.value or 0
        rows = np.array([[function, 1, 1, 1, launch.block, 1, 1, 0, 0, 0, 0]], np.int64)
        return Call(StreamCalls(device, "cuLaunchKernel", rows, place=8), 1, "empty kernel", _nothing, _nothing)
    if op in GRAPHS:
        count = GRAPHS[op]
        gpu_graph.probe(service, kernels, count)
        graph = enter(gpu_graph.KernelGraph(device, [kernels.launch("empty", 1)] * count))
        name = f"graph of {count} empty kernel{'s' * (count > 1)}"
        return Call(graph.calls, count, name, _nothing, _nothing)
    if op == "event":
        event = enter(Event(device))
        rows = np.array([[event.handle.value, 0]], np.int64)
        return Call(StreamCalls(device, "cuEventRecord", rows), 1, "cuEventRecord", event.synchronize, _nothing)
    if op == "memset":
        return _memset(service, enter(hbm(service, ITEM, seed=seed)))
    name, _, way = op.partition("_")
    if name not in ("copy", "batch") or way not in ("fetch", "evict", "local"):
        raise UsageError("unknown operation", where="launch", got=op)
    items = 2 if name == "batch" else 1
    near = enter(hbm(service, items * ITEM, seed=seed))
    far = enter((hbm if way == "local" else pinned)(service, items * ITEM, seed=seed + 1))
    source, target = (far, near) if way == "fetch" else (near, far)
    pieces = Pieces(target.copy_address, source.copy_address, ITEM, np.arange(items, dtype=np.int64))
    if name == "batch":
        gpu_batch.probe(service)
        batch = gpu_batch.BatchCopy(device, pieces)
        calls, kernel = batch.calls, batch.kernel
    else:
        row = np.array([[target.copy_address, source.copy_address, ITEM, 0]], np.int64)
        calls, kernel = StreamCalls(device, COPY, row), COPY

    def spoil() -> None:
        target.refill(source.seed + OTHER)

    spoil()
    return Call(calls, items, kernel, lambda: same_content(source, target, op), spoil)


def _memset(service: Service, target: GpuBuffer) -> Call:
    rows = np.array([[target.copy_address, 0x5A, ITEM, 0]], np.int64)

    def check() -> None:
        if bytes(service.read(target.copy_address, ITEM)) != b"\x5a" * ITEM:
            raise VerifyError("the memset left something else", where="launch memset")

    def spoil() -> None:
        target.refill(target.seed + OTHER)

    return Call(StreamCalls(service.device, "cuMemsetD8Async", rows), 1, "cuMemsetD8Async", check, spoil)


def _nothing() -> None:
    """An empty kernel and a record leave nothing behind; that they were queued is what the clock counts.

    That every kernel of a graph runs is looked at before (gpu_graph.probe).
    """
