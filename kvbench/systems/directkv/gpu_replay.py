"""A decode step's fetch of KV blocks as a CUDA graph, block ids new at every replay (DirectKV, OSDI 2026, 2.4).

Copies have their addresses in the graph: it is updated node by node, or recorded again. A kernel that reads a table of
block ids is recorded once and takes whatever the table holds.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any, Literal, get_args

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.gpu.catalogue import fragments_kernel
from kvbench.memory.cuda import portable
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, pinned
from kvbench.memory.cuda.device import Device, Stream
from kvbench.memory.cuda.entries import CONSTANTS, Memcpy3D
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.gpu_operands import Enter
from kvbench.transport.gpu_ce import StreamCalls
from kvbench.transport.gpu_graph import LAUNCH, KernelGraph

Mode = Literal["update", "rerecord", "kernel"]
MODES: tuple[Mode, ...] = get_args(Mode)
ADD, SET = "cuGraphAddMemcpyNode", "cuGraphExecMemcpyNodeSetParams"
POISON = 0xA5
Words = np.ndarray[Any, np.dtype[np.int64]]


class CopyGraph:
    """``count`` copies of ``nbytes`` as nodes of one graph, none after another. Use as a context manager.

    :meth:`record` makes graph and exec of the addresses in ``sources`` and ``targets``, :meth:`update` gives the
    exec's nodes new ones; both by compiled loops over the driver's calls. Raises UsageError for no copies, Unavailable
    where the driver lacks a call, CudaError where it refuses one.
    """

    def __init__(self, device: Device, count: int, nbytes: int) -> None:
        if count < 1 or nbytes < 1:
            raise UsageError("a graph of nothing", where="graph", got=(count, nbytes), expected="at least one copy")
        from kvbench.kernels.driver_loop import CallLoop

        for key in (ADD, SET, LAUNCH, "cuGraphInstantiateWithFlags"):
            device.driver.address(key)
        self._device, self.count = device, count
        self._structs = (Memcpy3D * count)()
        for one in self._structs:
            one.srcMemoryType = one.dstMemoryType = CONSTANTS["CU_MEMORYTYPE_UNIFIED"]
            one.WidthInBytes, one.Height, one.Depth = nbytes, 1, 1
        size = ctypes.sizeof(Memcpy3D)
        raw = np.ctypeslib.as_array((ctypes.c_ubyte * (size * count)).from_buffer(self._structs)).reshape(count, size)
        words = raw.view(np.int64)
        self.sources: Words = words[:, Memcpy3D.srcDevice.offset // 8]
        self.targets: Words = words[:, Memcpy3D.dstDevice.offset // 8]
        context = ctypes.c_void_p()
        device.bind()
        device.call("cuCtxGetCurrent", ctypes.byref(context))
        self._nodes = np.zeros(count, np.int64)
        places = ctypes.addressof(self._structs) + size * np.arange(count, dtype=np.int64)
        add = np.zeros((count, 6), np.int64)
        add[:, 0] = self._nodes.ctypes.data + 8 * np.arange(count, dtype=np.int64)
        add[:, 4], add[:, 5] = places, context.value or 0
        change = np.zeros((count, 4), np.int64)
        change[:, 2], change[:, 3] = places, context.value or 0
        self._add = CallLoop(device.driver.address(ADD), add)
        self._change = CallLoop(device.driver.address(SET), change)
        self._launch: StreamCalls | None = None
        self._stack = ExitStack()

    def record(self) -> None:
        """Give the last graph back and record a new one of the addresses there are now."""
        self.close()
        device = self._device
        with ExitStack() as stack:
            graph, made = ctypes.c_void_p(), ctypes.c_void_p()
            device.call("cuGraphCreate", ctypes.byref(graph), 0)
            stack.callback(device.release, "cuGraphDestroy", graph)
            self._add.rows[:, 1] = graph.value or 0
            device.driver.check(ADD, self._add())
            device.call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
            stack.callback(device.release, "cuGraphExecDestroy", made)
            self._change.rows[:, 0], self._change.rows[:, 1] = made.value or 0, self._nodes
            launch = np.array([[made.value or 0, 0]], np.int64)
            self._launch = StreamCalls(device, LAUNCH, launch, operations=self.count)
            self._stack = stack.pop_all()

    def update(self) -> None:
        """Give every node of the exec the addresses there are now. Raises CudaError where a change is refused."""
        self._device.driver.check(SET, self._change())

    def submit(self, stream: Stream) -> None:
        """Launch it. Raises UsageError before :meth:`record`, CudaError when the driver refuses."""
        if self._launch is None:
            raise UsageError("a graph that was never recorded", where="graph")
        self._launch(stream)

    def close(self) -> None:
        """Give graph and exec back. Closing twice is fine."""
        self._stack.close()

    def __enter__(self) -> CopyGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Replay:
    """Fetches ``blocks`` of ``nbytes`` a step out of a far pool of ``pool`` blocks, by ``mode``.

    :meth:`change` makes the next step's block ids known (the host's work), :meth:`submit` queues the step
    (``operations`` on one stream), :meth:`check` compares every byte. The far pool lies in page-locked memory. Raises
    UsageError for sizes that make no sense, Unavailable without memory, triton or a driver that has the calls.
    """

    def __init__(
        self, service: Service, enter: Enter, mode: Mode, blocks: int, nbytes: int, pool: int, seed: int = 1
    ) -> None:
        if mode not in MODES:
            raise UsageError("unknown way to replay", where="graph_replay", got=mode, expected=", ".join(MODES))
        if blocks < 1 or nbytes < 16 or nbytes % 16 or pool < blocks:
            raise UsageError("not blocks of a pool", where="graph_replay", got=f"{blocks} of {pool} x {nbytes} bytes",
                             expected="a pool of at least as many, blocks of whole 16 bytes")  # fmt: skip
        self.mode, self.blocks, self.nbytes, self.pool = mode, blocks, nbytes, pool
        self.link_bytes = blocks * nbytes
        self._service, device = service, service.device
        self._far: GpuBuffer = enter(pinned(service, pool * nbytes, seed=seed))
        self._near: GpuBuffer = enter(hbm(service, blocks * nbytes, seed=seed + 1))
        self.flags = self._far.flags
        self._random = np.random.default_rng(seed)
        self.ids: Words = np.arange(blocks, dtype=np.int64)
        self._graph: CopyGraph | None = None
        if mode == "kernel":
            self._by_table(enter, seed)
        else:
            self._graph = enter(CopyGraph(device, blocks, nbytes))
            self._graph.targets[:] = self._near.copy_address + nbytes * np.arange(blocks, dtype=np.int64)
            self._graph.sources[:] = self._far.copy_address + nbytes * self.ids
            self._graph.record()
            self.operations = blocks
            self.kernel = f"{blocks} copy nodes, {'updated' if mode == 'update' else 'recorded again'} each replay"

    def _by_table(self, enter: Enter, seed: int) -> None:
        """Record the one kernel, and have a table of ids on either side."""
        service, device = self._service, self._service.device
        slots = np.arange(self.blocks, dtype=np.int64)
        table: GpuBuffer = enter(hbm(service, 8 * self.blocks, seed=seed + 2))
        own: GpuBuffer = enter(hbm(service, 8 * self.blocks, seed=seed + 3))
        self._table, self._host = table, enter(pinned(service, 8 * self.blocks, seed=seed + 4))
        service.write(own.copy_address, slots)
        service.write(table.copy_address, self.ids)
        form = fragments_kernel(self.nbytes, False, "i64")
        grid = min(self.blocks, 4 * device.facts.sms)
        near, far = self._near.copy_address, self._far.device_address or 0
        launch = portable.launch(
            device, enter, form, grid, near, near, far, far, own.copy_address, table.copy_address, self.blocks,
            self.nbytes // 16, self.nbytes // 16, self.nbytes // 16,
        )  # fmt: skip
        self._kernel: KernelGraph = enter(KernelGraph(device, [launch]))
        self.operations = 2  # the table's copy and the kernel
        self.kernel = f"a copy of the table, then a graph of {form.name} {grid} x {form.block}"

    def draw(self) -> Words:
        """Return other block ids than the last, no block twice."""
        return self._random.permutation(self.pool)[: self.blocks].astype(np.int64)

    def change(self, ids: Words) -> None:
        """Let the next step fetch ``ids``: all the host does for a step before it launches."""
        self.ids = ids
        if self._graph is None:
            self._host.array(np.int64)[:] = ids
            return
        np.multiply(ids, self.nbytes, out=self._graph.sources)
        self._graph.sources += self._far.copy_address
        if self.mode == "update":
            self._graph.update()
        else:
            self._graph.record()

    def submit(self, stream: Stream) -> None:
        """Queue the step. Raises CudaError when the driver refuses it."""
        if self._graph is not None:
            self._graph.submit(stream)
            return
        stream.copy(self._table.copy_address, self._host.copy_address, 8 * self.blocks)
        self._kernel.submit(stream)

    def spoil(self) -> None:
        """Make every near block wrong, and wait for it."""
        self._service.stream.set_bytes(self._near.copy_address, POISON, self._near.nbytes)
        self._service.stream.synchronize()

    def check(self) -> None:
        """Raise VerifyError unless each near block holds the far block the last :meth:`change` named."""
        far = self._far.array().reshape(self.pool, self.nbytes)
        found = self._service.read(self._near.copy_address, self._near.nbytes).reshape(self.blocks, self.nbytes)
        wrong = np.flatnonzero((found != far[self.ids]).any(axis=1))
        if len(wrong):
            raise VerifyError("a replay fetched another block than was asked for", where=f"graph_replay {self.mode}",
                              got=f"{len(wrong)} of {self.blocks} blocks, slot {int(wrong[0])} first")  # fmt: skip
