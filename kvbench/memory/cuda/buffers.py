"""The GPU tiers: hbm, pinned, pageable and managed buffers of exact size, placed, written and read back by the device.

What a buffer is called comes from what the driver says of its address, not from who made it (traps T7, T38).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.machine.probe import ROOT
from kvbench.memory import numa, payload
from kvbench.memory.cuda.device import Device, allocate
from kvbench.memory.cuda.driver import CudaError
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.memory.cuda.service import Service, windows
from kvbench.memory.host import Placement, host_buffer, preflight
from kvbench.memory.payload import Kind
from kvbench.memory.region import Pages
from kvbench.units import format_bytes

GpuTier = Literal["hbm", "pinned", "pageable", "managed"]
How = Literal["register", "hostalloc"]
HOWS: tuple[How, ...] = get_args(How)
REGISTER = CONSTANTS["CU_MEMHOSTREGISTER_PORTABLE"] | CONSTANTS["CU_MEMHOSTREGISTER_DEVICEMAP"]
HOSTALLOC = CONSTANTS["CU_MEMHOSTALLOC_PORTABLE"] | CONSTANTS["CU_MEMHOSTALLOC_DEVICEMAP"]


@dataclass(frozen=True, slots=True)
class PointerFacts:
    """What the driver says of an address. ``memory`` 1 host, 2 device, None unknown to it; ``device_pointer`` the
    address kernels use for it; ``ordinal`` the device it belongs to."""

    memory: int | None
    managed: bool
    device_pointer: int | None
    ordinal: int | None

    @property
    def tier(self) -> GpuTier:
        """The only tier such an address can be."""
        if self.managed:
            return "managed"
        if self.memory == CONSTANTS["CU_MEMORYTYPE_DEVICE"]:
            return "hbm"
        return "pinned" if self.memory == CONSTANTS["CU_MEMORYTYPE_HOST"] else "pageable"


def pointer_facts(device: Device, address: int) -> PointerFacts:
    """Ask the driver about ``address``, any address: ordinary host memory is one it does not know."""
    names = ("MEMORY_TYPE", "IS_MANAGED", "DEVICE_POINTER", "DEVICE_ORDINAL")
    which = (ctypes.c_int * len(names))(*(CONSTANTS[f"CU_POINTER_ATTRIBUTE_{name}"] for name in names))
    memory, managed, pointer, ordinal = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint64(), ctypes.c_int()
    out = (ctypes.c_void_p * len(names))(*(ctypes.addressof(v) for v in (memory, managed, pointer, ordinal)))
    device.call("cuPointerGetAttributes", len(names), which, out, address)
    if not memory.value:
        return PointerFacts(None, bool(managed.value), None, None)
    return PointerFacts(memory.value, bool(managed.value), pointer.value or None, ordinal.value)


def _expect(device: Device, address: int, tier: GpuTier, where: str) -> PointerFacts:
    facts = pointer_facts(device, address)
    if facts.tier != tier:
        raise VerifyError(
            "the driver calls this buffer something else",
            where=where,
            got=f"{facts.tier} at {address:#x}",
            expected=tier,
        )
    if tier == "hbm" and facts.ordinal != device.ordinal:
        raise VerifyError(
            "the buffer lies on another GPU", where=where, got=f"GPU {facts.ordinal}", expected=f"GPU {device.ordinal}"
        )
    return facts


class GpuBuffer:
    """``nbytes`` in one GPU tier, holding the payload of (``seed``, ``kind``).

    ``device_address`` is what kernels and copies of the device use, None for pageable memory, which only copy calls
    take; ``host_address`` is what the CPU uses, None for hbm. They are equal only where the driver said so.
    ``placement`` tells where host pages lie, ``flags`` what to put on the row.
    """

    def __init__(
        self, service: Service, tier: GpuTier, nbytes: int, payload_of: tuple[int, Kind],
        addresses: tuple[int | None, int | None], placement: Placement | None, flags: tuple[str, ...], stack: ExitStack,
    ) -> None:  # fmt: skip
        self.tier, self.nbytes, self.placement, self.flags = tier, nbytes, placement, flags
        self.seed, self.kind = payload_of
        self._service, self._stack = service, stack
        self._device_address, self._host_address = addresses
        self._open = True

    def _live(self) -> None:
        if not self._open:
            raise ValueError("the buffer is closed")

    @property
    def device_address(self) -> int | None:
        """Address for the device. Raises ValueError once closed."""
        self._live()
        return self._device_address

    @property
    def host_address(self) -> int | None:
        """Address for the CPU. Raises ValueError once closed."""
        self._live()
        return self._host_address

    @property
    def copy_address(self) -> int:
        """Address for the copy calls: the device's, or for pageable memory the host's."""
        address = self.device_address
        return address if address is not None else self.host_address or 0

    def array(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """Return host-accessible memory as a writable 1-d view, not to be used once the buffer is closed.

        Raises ValueError for hbm, when closed, or when ``nbytes`` is no multiple of ``dtype``.
        """
        address, item = self.host_address, np.dtype(dtype).itemsize
        if address is None:
            raise ValueError("GPU memory has no host view")
        if self.nbytes % item:
            raise ValueError(f"{self.nbytes} bytes are not a multiple of {np.dtype(dtype)} ({item} bytes)")
        return _view(address, self.nbytes).view(dtype)

    def checksum(self) -> int:
        """Return :func:`payload.checksum` of the content, computed by the device; for pageable memory by the host."""
        if self.device_address is None:
            return payload.checksum(self.array())
        return self._service.checksum(self.device_address, self.nbytes)

    def refill(self, seed: int) -> None:
        """Write other payload: on the device for hbm, on the host otherwise."""
        if self.tier == "hbm":
            self._service.fill(self.copy_address, self.nbytes, seed, self.kind)
        else:
            payload.fill(self.array(), seed, self.kind)
        self.seed = seed

    def verify(self) -> None:
        """Raise VerifyError unless both ends and places in between still hold the payload, read by the device."""
        if self.device_address is not None:
            self._service.check(self.device_address, self.nbytes, self.tier, self.seed, self.kind)
            return
        view = self.array()
        for offset in windows(self.nbytes):
            part = view[offset : offset + payload.BLOCK_BYTES // 16]
            if not np.array_equal(part, payload.expected(part.size, self.seed, self.kind, offset)):
                raise VerifyError("host memory does not hold the payload", where=self.tier, got=f"at byte {offset}")

    def close(self) -> None:
        """Give back what was made, last first. Closing twice is fine. Raises CudaError when the driver objects."""
        self._open = False
        self._stack.close()

    def __enter__(self) -> GpuBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def _checked_size(nbytes: int, where: str) -> None:
    if nbytes < 1:
        raise UsageError("a buffer needs at least one byte", where=where, got=nbytes)


def _refused(device: Device, error: CudaError, where: str, nbytes: int) -> Exception:
    """Return what to raise when memory could not be had: Unavailable for a refusal, else the error itself."""
    limits = ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED")
    if error.code not in {CONSTANTS[name] for name in limits}:
        return error
    mend = "choose smaller sizes; kvbench.memory.cuda.pinlimit finds the limit" if where.startswith("pinned") else ""
    return Unavailable(
        f"{format_bytes(nbytes)} could not be had", where=f"{where} on GPU {device.ordinal}",
        got=f"{error.call}: {error.name}", mend=mend or "choose smaller sizes",
    )  # fmt: skip


def hbm(service: Service, nbytes: int, *, kind: Kind = "bits", seed: int = 1) -> GpuBuffer:
    """Return GPU memory, filled by the device; both ends also copied back and compared on the host.

    Raises UsageError for no bytes, Unavailable when the GPU has not that much free, VerifyError when it is not what
    or where it should be, CudaError for other refusals.
    """
    _checked_size(nbytes, "hbm")
    with ExitStack() as stack:
        address = allocate(service.device, nbytes, stack)
        _expect(service.device, address, "hbm", "hbm")
        service.fill(address, nbytes, seed, kind)
        service.check(address, nbytes, "hbm", seed, kind)
        for offset in {0, windows(nbytes)[-1]}:
            size = min(payload.BLOCK_BYTES // 16, nbytes - offset)
            if not np.array_equal(service.read(address + offset, size), payload.expected(size, seed, kind, offset)):
                raise VerifyError(
                    "copied back, GPU memory differs from what was written", where="hbm", got=f"at byte {offset}"
                )
        return GpuBuffer(service, "hbm", nbytes, (seed, kind), (address, None), None, (), stack.pop_all())


def pinned(
    service: Service, nbytes: int, *, how: How = "register", pages: Pages = "4k", node: int | None = None,
    threads: int = 1, kind: Kind = "bits", seed: int = 1, root: Path = ROOT,
) -> GpuBuffer:  # fmt: skip
    """Return page-locked host memory the device reads by the alias the driver names.

    ``how`` "register": our own pages, written by ``threads`` on ``node`` (default: the GPU's), then registered at
    exactly ``nbytes``; "hostalloc": cuMemHostAlloc under a memory policy for the node. Flags ``gpu_node_unknown``,
    ``unbound`` and ``misplaced`` tell what could not be had or confirmed.

    Raises UsageError, Unavailable, VerifyError and CudaError like :func:`hbm`.
    """
    if how not in HOWS:
        raise UsageError("unknown way to pin", where="pinned", got=how, expected=" or ".join(HOWS))
    _checked_size(nbytes, "pinned")
    device, where = service.device, f"pinned ({how})"
    flags: tuple[str, ...] = ()
    if node is None:
        node = device.facts.node.value
        listed = numa.nodes(root).value
        if node is None and (listed is None or len(listed) > 1):
            flags = ("gpu_node_unknown",)
    with ExitStack() as stack:
        if how == "register":
            host, placement = _registered(device, nbytes, pages, node, threads, kind, seed, root, stack)
        else:
            host, placement = _host_allocated(device, nbytes, node, kind, seed, root, stack)
        alias = ctypes.c_uint64()
        device.call("cuMemHostGetDevicePointer", ctypes.byref(alias), host, 0)
        facts = _expect(device, host, "pinned", where)
        if facts.device_pointer is not None and facts.device_pointer != alias.value:
            raise VerifyError(
                "the driver names two device addresses for one buffer", where=where,
                got=f"{alias.value:#x} and {facts.device_pointer:#x}",
            )  # fmt: skip
        service.check(alias.value, nbytes, where, seed, kind)
        every = tuple(dict.fromkeys((*placement.flags, *flags)))
        return GpuBuffer(
            service, "pinned", nbytes, (seed, kind), (alias.value, host), placement, every, stack.pop_all()
        )


def _registered(
    device: Device, nbytes: int, pages: Pages, node: int | None, threads: int, kind: Kind, seed: int, root: Path,
    stack: ExitStack,
) -> tuple[int, Placement]:  # fmt: skip
    # Pages first: registering faults in what is missing one page at a time, on whatever node this thread runs.
    buffer = stack.enter_context(host_buffer(nbytes, pages, node, threads, kind=kind, seed=seed, root=root))
    try:
        device.call("cuMemHostRegister", buffer.address, nbytes, REGISTER)
    except CudaError as error:
        raise _refused(device, error, "pinned (register)", nbytes) from error
    stack.callback(device.release, "cuMemHostUnregister", buffer.address)
    return buffer.address, buffer.placement


def _host_allocated(
    device: Device, nbytes: int, node: int | None, kind: Kind, seed: int, root: Path, stack: ExitStack
) -> tuple[int, Placement]:
    preflight(nbytes, root, node=node)
    pointer = ctypes.c_void_p()

    def ask() -> None:
        try:
            device.call("cuMemHostAlloc", ctypes.byref(pointer), nbytes, HOSTALLOC)
        except CudaError as error:
            raise _refused(device, error, "pinned (hostalloc)", nbytes) from error
        stack.callback(device.release, "cuMemFreeHost", pointer.value)

    flags: list[str] = _on_node(node, ask)
    host = pointer.value or 0
    payload.fill(_view(host, nbytes), seed, kind)
    # Pages that belong to the driver's own mapping have no node the kernel would tell: an empty answer is no answer.
    nodes = numa.histogram(host, nbytes).value or None
    if nodes is None:
        flags.append("nodes_unknown")
    elif node is not None and set(nodes) != {node}:
        flags.append("misplaced")
    return host, Placement("4k", None, None, None, nodes, (*flags, "pages_unverified"))


def _on_node(node: int | None, work: Callable[[], None]) -> list[str]:
    if node is None:
        work()
        return []
    with numa.memory_policy(node) as accepted:
        work()
    return [] if accepted.value else ["unbound"]


def pageable(
    service: Service, nbytes: int, *, pages: Pages = "4k", node: int | None = None, threads: int = 1,
    kind: Kind = "bits", seed: int = 1, root: Path = ROOT,
) -> GpuBuffer:  # fmt: skip
    """Return ordinary host memory, confirmed to be unknown to the driver, its both ends copied to the GPU and compared.

    Raises UsageError, Unavailable, VerifyError and CudaError like :func:`hbm`.
    """
    _checked_size(nbytes, "pageable")
    if node is None:
        node = service.device.facts.node.value
    with ExitStack() as stack:
        buffer = stack.enter_context(host_buffer(nbytes, pages, node, threads, kind=kind, seed=seed, root=root))
        _expect(service.device, buffer.address, "pageable", "pageable")
        for offset in {0, windows(nbytes)[-1]}:
            size = min(payload.BLOCK_BYTES // 16, nbytes - offset)
            with ExitStack() as briefly:
                copy = allocate(service.device, size, briefly)
                service.stream.copy(copy, buffer.address + offset, size)
                if service.checksum(copy, size) != payload.checksum(payload.expected(size, seed, kind, offset)):
                    raise VerifyError(
                        "copied to the GPU, host memory differs", where="pageable", got=f"at byte {offset}"
                    )
        return GpuBuffer(
            service, "pageable", nbytes, (seed, kind), (None, buffer.address), buffer.placement, buffer.placement.flags,
            stack.pop_all(),
        )  # fmt: skip


def managed(service: Service, nbytes: int, *, kind: Kind = "bits", seed: int = 1, root: Path = ROOT) -> GpuBuffer:
    """Return unified memory, written by the host last, so that its pages are the host's when a bench begins.

    Refused before the driver is asked when it would not fit into free GPU memory: beyond that pages move back and
    forth, and the number is of another thing. Raises UsageError, Unavailable, VerifyError and CudaError like hbm.
    """
    _checked_size(nbytes, "managed")
    device = service.device
    if not device.attribute("MANAGED_MEMORY"):
        raise Unavailable("this GPU or driver has no managed memory", where=f"managed on GPU {device.ordinal}")
    free, total = device.memory()
    if nbytes > free:
        raise Unavailable(
            "managed memory beyond free GPU memory is not measured", where=f"managed on GPU {device.ordinal}",
            got=f"{nbytes} bytes asked, {free} of {total} free", mend="choose smaller sizes or end other programs",
        )  # fmt: skip
    preflight(nbytes, root)
    with ExitStack() as stack:
        pointer = ctypes.c_uint64()
        try:
            device.call("cuMemAllocManaged", ctypes.byref(pointer), nbytes, CONSTANTS["CU_MEM_ATTACH_GLOBAL"])
        except CudaError as error:
            raise _refused(device, error, "managed", nbytes) from error
        stack.callback(device.release, "cuMemFree", pointer.value)
        _expect(device, pointer.value, "managed", "managed")
        view = _view(pointer.value, nbytes)
        payload.fill(view, seed, kind)
        service.check(pointer.value, nbytes, "managed", seed, kind)
        payload.fill(view, seed, kind)  # the check moved the windows it read to the GPU
        return GpuBuffer(
            service, "managed", nbytes, (seed, kind), (pointer.value, pointer.value), None, (), stack.pop_all()
        )
