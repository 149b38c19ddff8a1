"""One GPU: its facts, its context in every thread that uses it, and streams, events and modules that are given back."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbench.errors import Unavailable, UsageError
from kvbench.machine.probe import ROOT, Fact
from kvbench.memory import numa
from kvbench.memory.cuda.driver import CudaError, Driver
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.memory.limits import read_text


@dataclass(frozen=True, slots=True)
class Facts:
    """What the driver says of a device. ``l2_bytes`` is queried, never looked up by name: one lent H200 had 60 MB where
    public tables say 50. ``node``: the host NUMA node it hangs on, None with the reason."""

    ordinal: int
    name: str
    bus_id: str
    arch: tuple[int, int]
    sms: int
    l2_bytes: int
    total_bytes: int
    node: Fact[int]


class Device:
    """The primary context of device ``ordinal``, the one torch and CuPy use too, held until :meth:`close`.

    A context is current per thread: :meth:`call` makes it so in each thread at its first call. A library that makes
    another context current in the same thread has to be followed by :meth:`bind`.

    Raises UsageError for an ordinal that is none, CudaError when the driver refuses.
    """

    def __init__(self, driver: Driver, ordinal: int = 0, root: Path = ROOT) -> None:
        count = driver.device_count()
        if not 0 <= ordinal < count:
            raise UsageError("no such GPU", where="device", got=ordinal, expected=f"0 to {count - 1}")
        self.driver, self.ordinal = driver, ordinal
        self.queued = 0  # operations given to any stream of this device through this module
        self._local = threading.local()
        self._handle = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(self._handle), ordinal)
        self.facts = self._facts(root)
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle)
        self._context: ctypes.c_void_p | None = context
        try:
            self.bind()
        except BaseException:
            self.close()
            raise

    def _text(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.driver.call(key, buffer, len(buffer), self._handle)
        return buffer.value.decode("utf-8", "replace")

    def attribute(self, name: str) -> int:
        """Return a device attribute by the name it has in :data:`entries.CONSTANTS`."""
        value = ctypes.c_int()
        number = CONSTANTS[f"CU_DEVICE_ATTRIBUTE_{name}"]
        self.driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._handle)
        return value.value

    def _facts(self, root: Path) -> Facts:
        total = ctypes.c_size_t()
        self.driver.call("cuDeviceTotalMem", ctypes.byref(total), self._handle)
        bus = self._text("cuDeviceGetPCIBusId")
        arch = (self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR"))
        return Facts(
            self.ordinal, self._text("cuDeviceGetName"), bus, arch, self.attribute("MULTIPROCESSOR_COUNT"),
            self.attribute("L2_CACHE_SIZE"), total.value, self._node(bus, root),
        )  # fmt: skip

    def _node(self, bus: str, root: Path) -> Fact[int]:
        """Return the host node nearest to the device: the driver's word, else the one of sysfs."""
        try:
            number = self.attribute("HOST_NUMA_ID")
        except CudaError:
            number = -1  # a driver before CUDA 12.2 does not know the question
        path = root / "sys/bus/pci/devices" / bus.lower() / "numa_node"
        if number < 0:
            found = read_text(path)
            if found.value is None:
                return Fact(None, found.reason)
            try:
                number = int(found.value)
            except ValueError:
                return Fact(None, f"{path}: cannot read {found.value[:40]!r}")
        if number < 0:
            return Fact(None, f"driver and {path} name no node")
        listed = numa.nodes(root).value
        if listed is not None and number not in {node.number for node in listed if node.is_dram}:
            return Fact(None, f"node {number}, which the driver names, is no node with CPUs and memory here")
        return Fact(number)

    # -- calls ---------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Make the device's context current in this thread. Raises ValueError once closed."""
        if self._context is None:
            raise ValueError("the device is closed")
        self.driver.call("cuCtxSetCurrent", self._context)
        self._local.bound = True

    def call(self, key: str, *arguments: Any) -> None:
        """Call the driver with this device's context current; errors as from :meth:`Driver.call`."""
        if not getattr(self._local, "bound", False):
            self.bind()
        self.driver.call(key, *arguments)

    def release(self, key: str, *arguments: Any) -> None:
        """Give something back. After a device error nothing can be given back, and the process ends anyway."""
        if self.driver.poisoned is None:
            self.call(key, *arguments)

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of device memory now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait for everything in the context; errors of earlier asynchronous work come up here."""
        self.call("cuCtxSynchronize")

    def close(self) -> None:
        """Release the context. Closing twice is fine; what was made from the device must be closed before."""
        if self._context is not None:
            self._context = None
            self._local = threading.local()
            if self.driver.poisoned is None:
                self.driver.call("cuDevicePrimaryCtxRelease", self._handle)

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Owned:
    """A handle the driver made and takes back by one call; ``handle`` is None once closed."""

    def __init__(self, device: Device, destroy: str, create: str, *arguments: Any) -> None:
        handle = ctypes.c_void_p()
        device.call(create, ctypes.byref(handle), *arguments)
        self.device, self._destroy = device, destroy
        self.handle: ctypes.c_void_p | None = handle

    def close(self) -> None:
        """Give the handle back. Closing twice is fine."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self.device.release(self._destroy, handle)

    def _open(self) -> ctypes.c_void_p:
        if self.handle is None:
            raise ValueError(f"{type(self).__name__.lower()} is closed")
        return self.handle

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Event(_Owned):
    """A timing event."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, "cuEventDestroy", "cuEventCreate", CONSTANTS["CU_EVENT_DEFAULT"])

    def synchronize(self) -> None:
        """Wait until the latest record has been reached."""
        self.device.call("cuEventSynchronize", self._open())

    def since(self, start: Event) -> float:
        """Return the seconds from ``start`` to this event, both reached."""
        milliseconds = ctypes.c_float()
        self.device.call("cuEventElapsedTime", ctypes.byref(milliseconds), start._open(), self._open())
        return milliseconds.value * 1e-3


class Launch:
    """A kernel with its grid, block and arguments, packed once. ``arguments`` are ctypes values, kept alive here.

    ``shared``: bytes of dynamic shared memory a block; beyond 48 KiB the function was opted in (portable.opt_in)."""

    def __init__(
        self, function: ctypes.c_void_p, grid: int, block: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        self.function, self.grid, self.block, self.shared = function, grid, block, shared
        self.arguments = tuple(arguments)
        self.packed = (ctypes.c_void_p * len(self.arguments))(*(ctypes.addressof(a) for a in self.arguments))


class Stream(_Owned):
    """A non-blocking stream. ``queued`` counts the operations given to it, so that a clock can tell whose they were.

    Code that queues work on :attr:`handle` by other means (Triton, a compiled loop) says so with :meth:`count`.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device, "cuStreamDestroy", "cuStreamCreate", CONSTANTS["CU_STREAM_NON_BLOCKING"])
        self.queued = 0

    def count(self, operations: int) -> None:
        """Count operations that were queued by other means."""
        self.queued += operations
        self.device.queued += operations

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between any two addresses the driver knows, or pageable host memory (then it may block)."""
        self.device.call("cuMemcpyAsync", target, source, nbytes, self._open())
        self.count(1)

    def set_bytes(self, target: int, value: int, nbytes: int) -> None:
        """Queue a memset."""
        self.device.call("cuMemsetD8Async", target, value, nbytes, self._open())
        self.count(1)

    def launch(self, launch: Launch) -> None:
        """Queue a kernel."""
        self.device.call(
            "cuLaunchKernel",
            launch.function,
            launch.grid,
            1,
            1,
            launch.block,
            1,
            1,
            launch.shared,
            self._open(),
            launch.packed,
            None,
        )
        self.count(1)

    def record(self, event: Event) -> None:
        """Queue a record of ``event``."""
        self.device.call("cuEventRecord", event._open(), self._open())
        self.count(1)

    def wait(self, event: Event) -> None:
        """Queue a wait for the latest record of ``event``, whichever stream it is on."""
        self.device.call("cuStreamWaitEvent", self._open(), event._open(), 0)
        self.count(1)

    @property
    def idle(self) -> bool:
        """Whether everything queued is done."""
        code = self.device.driver.code("cuStreamQuery", self._open())
        if code not in (0, CONSTANTS["CUDA_ERROR_NOT_READY"]):
            raise self.device.driver.error("cuStreamQuery", code)
        return code == 0

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        self.device.call("cuStreamSynchronize", self._open())


class Module(_Owned):
    """A loaded cubin."""

    def __init__(self, device: Device, image: bytes) -> None:
        self._image = ctypes.create_string_buffer(image)
        super().__init__(device, "cuModuleUnload", "cuModuleLoadData", self._image)

    def function(self, name: str) -> ctypes.c_void_p:
        """Return the kernel ``name``. Raises CudaError where the image has none."""
        found = ctypes.c_void_p()
        self.device.call("cuModuleGetFunction", ctypes.byref(found), self._open(), name.encode())
        return found


def allocate(device: Device, nbytes: int, stack: ExitStack) -> int:
    """Return the address of ``nbytes`` of device memory that ``stack`` gives back.

    Raises Unavailable, naming what is free, when the device has not that much.
    """
    address = ctypes.c_uint64()
    try:
        device.call("cuMemAlloc", ctypes.byref(address), nbytes)
    except CudaError as error:
        if error.code != CONSTANTS["CUDA_ERROR_OUT_OF_MEMORY"]:
            raise
        free, total = device.memory()
        raise Unavailable(
            f"no {nbytes} bytes of GPU memory", where=f"hbm of GPU {device.ordinal}",
            got=f"{error.name}, {free} of {total} bytes free", mend="choose smaller sizes or end other programs",
        ) from error  # fmt: skip
    stack.callback(device.release, "cuMemFree", address.value)
    return address.value
