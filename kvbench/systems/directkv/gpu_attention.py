"""Decode attention on a GPU over KV in page-locked host memory: read in place by its alias, or swapped a layer ahead.

The kernel is that of :mod:`kvbench.attention.gpu`; what differs is the memory it reads. DirectKV, OSDI 2026: in place
every byte crosses once (all query heads of a KV head share a tile), and batch x KV heads x parts programs pull it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from kvbench.attention.gpu import Cache, CacheReader, TritonDecode
from kvbench.attention.shapes import Shape
from kvbench.errors import UsageError
from kvbench.machine.link_bytes import LinkBytes, LinkCounters, link_bytes
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, pinned
from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.model.paged import Order

Enter = Callable[[AbstractContextManager[Any]], Any]
METHODS = ("in_place", "swap", "near")
PROBE_BYTES = 64 << 20  # of the known copy a counter has to tell


def far_pointer(buffer: GpuBuffer, address: int | None = None) -> int:
    """Return the address kernels use for far ``buffer``; ``address``, where given, must be it.

    Raises UsageError for memory the device has no address for, and for a host address that is not the device's alias:
    a kernel that reads it faults, or reads something else.
    """
    alias = buffer.device_address
    if alias is None:
        raise UsageError(
            "a kernel cannot read this memory", where="far tier", got=buffer.tier,
            expected="pinned memory, by its alias",
        )  # fmt: skip
    if address is not None and address != alias:
        raise UsageError(
            "not the device's alias of far memory", where="far tier", got=hex(address), expected=hex(alias),
            mend="use the buffer's device_address",
        )  # fmt: skip
    return alias


class LayerSwap:
    """Copies of layers into two near slots on a side stream, one layer ahead of the work that reads them.

    ``sources[l]`` goes to slot l modulo 2 before ``work[l]`` is queued; a slot is filled again only after the work that
    read it. All order is by events between the two streams, none by the host. ``operations`` counts what one pass
    queues on both.
    """

    def __init__(
        self, device: Device, sources: Sequence[int], slots: tuple[int, int], nbytes: int,
        work: Sequence[Callable[[Stream], None]], launches: int, enter: Enter,
    ) -> None:  # fmt: skip
        if len(sources) != len(work) or not sources:
            raise UsageError("layers", where="swap", got=f"{len(sources)} copies, {len(work)} pieces of work")
        self.sources, self.slots, self.nbytes, self.work = list(sources), slots, nbytes, list(work)
        self.side: Stream = enter(Stream(device))
        self._start = enter(Event(device))
        self._loaded, self._done = ([enter(Event(device)) for _ in sources] for _ in range(2))
        # start and its wait; a copy, two records and a wait a layer; a wait before a slot is filled again
        self.operations = 2 + 4 * len(sources) + max(0, len(sources) - 2) + launches

    def submit(self, stream: Stream) -> None:
        """Queue one pass; the caller's stream goes on when the last work is done."""
        stream.record(self._start)
        self.side.wait(self._start)
        for layer, source in enumerate(self.sources):
            if layer >= 2:
                self.side.wait(self._done[layer - 2])
            self.side.copy(self.slots[layer % 2], source, self.nbytes)
            self.side.record(self._loaded[layer])
            stream.wait(self._loaded[layer])
            self.work[layer](stream)
            stream.record(self._done[layer])


class _SwapCache(Cache):
    """A far cache whose steps read two near slots."""

    slots: tuple[int, int] = (0, 0)
    near: GpuBuffer | None = None

    def keys(self, layer: int) -> int:
        """Return the near slot a step reads."""
        return self.slots[layer % 2]

    def take_slots(self, near: GpuBuffer) -> None:
        """Use the two halves of ``near`` as slots."""
        self.near = near
        self.slots = (near.copy_address, near.copy_address + near.nbytes // 2)


class FarDecode:
    """A decode step over all layers by ``method``; otherwise like :class:`kvbench.attention.gpu.TritonDecode`.

    ``demand_bytes`` the programs ask far memory for, ``near_traffic`` bytes of KV moved in GPU memory, ``buffer`` GPU
    memory held for KV. ``streams``: those beside the caller's. Raises UsageError for another method.
    """

    def __init__(
        self, method: str, service: Service, kernels: Kernels, enter: Enter, shape: Shape, lengths: Sequence[int], *,
        least_bytes: int, order: Order = "shuffled", seed: int = 0,
    ) -> None:  # fmt: skip
        if method not in METHODS:
            raise UsageError("unknown method on a GPU", where="decode.method", got=method, expected=", ".join(METHODS))
        make = hbm if method == "near" else partial(pinned, pages="thp")
        kind = _SwapCache if method == "swap" else Cache
        cache = kind(service, enter, shape, lengths, least_bytes, order, seed, make)
        self.method, self.cache, self._kernels, self._enter = method, cache, kernels, enter
        self.transport = "staged" if method == "swap" else "direct"
        layer_bytes = 2 * cache.half
        self.buffer = cache.nbytes if method == "near" else 0
        self.streams: tuple[Stream, ...] = ()
        if isinstance(cache, _SwapCache):
            cache.take_slots(enter(hbm(service, 2 * layer_bytes, seed=seed + 1)))
            self.buffer = 2 * layer_bytes
        elif method == "in_place":
            far_pointer(cache.buffer, cache.address)
        self.work = TritonDecode(cache, kernels, enter)
        self.layers, self.kv_bytes, self.work_items = self.work.layers, self.work.kv_bytes, self.work.work_items
        self.kernel = f"{self.work.kernel}, {method}"
        self.demand_bytes = 0 if method == "near" else self.kv_bytes
        self.near_traffic = {"in_place": 0, "near": self.kv_bytes, "swap": cache.nbytes + self.kv_bytes}[method]
        self.operations = self.work.operations
        self.submit: Callable[[Stream], None] = self.work.submit
        if isinstance(cache, _SwapCache):
            sources = [cache.home(layer) for layer in range(cache.layers)]
            swap = LayerSwap(
                service.device, sources, cache.slots, layer_bytes, self.work.by_layer(), self.work.operations, enter
            )
            self.submit, self.operations, self.streams = swap.submit, swap.operations, (swap.side,)

    def spoil(self) -> None:
        """Make outputs, and the near slots of a swap, wrong."""
        self.work.spoil()
        if isinstance(self.cache, _SwapCache) and self.cache.near is not None:
            stream = self.cache.service.stream
            stream.set_bytes(self.cache.near.copy_address, 0xFF, self.cache.near.nbytes)
            stream.synchronize()

    def check(self) -> None:
        """Raise VerifyError unless some query groups are those of float64 over what far memory holds."""
        self.work.check()

    def reader(self) -> CacheReader:
        """Return the plain read of the cache where it is kept, by a full grid: this reader's ceiling."""
        return CacheReader(self.cache, self._kernels, self._enter)


def open_far_decode(
    method: str, service: Service, kernels: Kernels, enter: Enter, shape: Shape, lengths: Sequence[int], *,
    least_bytes: int, seed: int = 0,
) -> FarDecode:  # fmt: skip
    """Return decode attention by ``method``; errors as of :class:`FarDecode` and its buffers."""
    return FarDecode(method, service, kernels, enter, shape, lengths, least_bytes=least_bytes, seed=seed)


def link_of(
    service: Service, enter: Enter, stream: Stream, board: int | None, submit: Callable[[Stream], None],
    bounds: tuple[int, int],
) -> LinkBytes:  # fmt: skip
    """Return the link bytes of one pass that ``submit`` queues: by counters of NVML's ``board``, else ``bounds``.

    ``bounds`` are (unique, demand) bytes; a counter is used once it has told a known copy right.
    """
    source: GpuBuffer = enter(pinned(service, PROBE_BYTES, seed=51))
    target: GpuBuffer = enter(hbm(service, PROBE_BYTES, seed=52))

    def copy() -> None:
        stream.copy(target.copy_address, source.copy_address, PROBE_BYTES)
        stream.synchronize()

    def one() -> None:
        submit(stream)
        stream.synchronize()

    with LinkCounters(board) as counters:
        return link_bytes(counters, one, bounds, copy, PROBE_BYTES)
