"""Layer-wise overlap on a GPU: pinned host memory to GPU memory layer after layer, computation on what has arrived."""

from __future__ import annotations

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.memory.cuda.buffers import hbm, pinned
from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.model.layout import Pool, moves
from kvbench.systems.strata.overlap import Pass, Recorder, Schedule, Words
from kvbench.systems.strata.overlap_queue import Enter, EventSet, Layers, Submit, stamps
from kvbench.transport import gpu_batch
from kvbench.transport.gpu_batch import BatchCopy
from kvbench.transport.gpu_ce import CopyEngine
from kvbench.transport.gpu_pieces import Mover
from kvbench.transport.paged_set import Fragments, box
from kvbench.transport.paged_sm import PageThreads, device_table

AHEAD = {"ce": 1}  # a call a fragment; the others queue a layer by one
MOST_BESIDE = 1024  # layers of the faster side in a run of both beside each other
MARGIN = 1.5  # of the time the slower side takes, for which the faster one is given work
QUOTA = 2  # blocks of transport `sm`, Strata's choice for loads
TRANSPORTS = ("ce", "batch", "sm")
MOST_STEPS = (1 << 24) - 8  # floats count exactly up to 2^24
STEP_FLOPS = 8 * 2  # of a thread
POISON = 0xA5


class GpuOverlap:
    """The overlap of :class:`overlap.HostOverlap` with layers in pinned host memory and computation on the GPU.

    ``pool`` is layer_first on both sides, ``order`` int64 [pages] the page that goes to each slot, ``transport`` one of
    ``TRANSPORTS``. A layer's computation reads its keys and values (kernel ``read``) and runs FMA chains (kernel
    ``arithmetic``). Times are those of the device's events. Raises UsageError for another transport or order,
    Unavailable without memory or the batched copy, and what buffers and kernels raise.
    """

    def __init__(
        self, service: Service, kernels: Kernels, enter: Enter, stream: Stream, pool: Pool, order: Words,
        transport: str, seed: int = 1,
    ) -> None:  # fmt: skip
        if transport not in TRANSPORTS:
            raise UsageError("no such transport", where="overlap", got=transport, expected=", ".join(TRANSPORTS))
        if order.shape != (pool.pages,) or not np.array_equal(np.sort(order), np.arange(pool.pages)):
            raise UsageError("the order is no permutation", where="overlap", got=order.shape, expected=str(pool.pages))
        self.pool, self.layers = pool, pool.geometry.layers
        self.layer_bytes, self.link_bytes = pool.nbytes // self.layers, pool.nbytes
        self._service, self._kernels, self._enter, self._stream = service, kernels, enter, stream
        self._far = enter(pinned(service, pool.nbytes, seed=seed))
        self._near = enter(hbm(service, pool.nbytes, seed=seed + 1))
        self._order = order
        self._strides = pool.strides()
        self._grid = 4 * service.device.facts.sms
        self._sums = enter(hbm(service, 16 * self.layers * self._grid, seed=seed + 2))
        copies = self._copies(transport)
        self._threads = self._grid * 512
        self._counts = enter(hbm(service, 8 * self._threads, seed=seed + 3))
        self.steps = 0
        self._reads = [self._read_launches(layer) for layer in range(self.layers)]
        self._chain = self._arithmetic_launch()
        computes = [self._computation(layer) for layer in range(self.layers)]
        self._queue = Layers(service.device, copies, computes, enter, AHEAD.get(transport))
        self._alone: tuple[float | None, float | None] = (None, None)
        self._scratch: dict[tuple[int, int], EventSet] = {}
        self._wanted = self._layer_sums()
        self.kernel = f"{copies[0].kernel} | read + arithmetic {self._grid} x 512"
        self.flags = self._far.flags

    def _copies(self, transport: str) -> list[Mover]:
        service, pool = self._service, self.pool
        slots = np.arange(pool.pages, dtype=np.int64)
        far, near = self._far.copy_address, self._near.copy_address
        sets = [moves(pool, pool, self._order, slots, layers=range(k, k + 1)) for k in range(self.layers)]
        if transport == "sm":
            tables = [device_table(service, table, "i64", self._enter).copy_address for table in (slots, self._order)]
            source = self._far.device_address or 0
            return [
                PageThreads(
                    service.device, self._kernels, box(part, pool, pool), near, source, (tables[0], tables[1]),
                    quota=QUOTA,
                )
                for part in sets
            ]  # fmt: skip
        if transport == "batch":
            gpu_batch.probe(service)
        mover = CopyEngine if transport == "ce" else BatchCopy
        return [mover(service.device, Fragments(near, far, part)) for part in sets]

    def _planes(self, layer: int) -> list[int]:
        """Return the offsets of the layer's planes; each holds ``strides()['layer']`` bytes."""
        return [
            plane * self._strides["plane"] + layer * self._strides["layer"]
            for plane in range(self.pool.geometry.planes)
        ]

    def _read_launches(self, layer: int) -> list[Launch]:
        return [
            self._kernels.launch(
                "read", self._grid, self._sums.copy_address + 8 * self._grid * (2 * layer + k),
                self._near.copy_address + offset, self._strides["layer"],
            )
            for k, offset in enumerate(self._planes(layer))
        ]  # fmt: skip

    def _arithmetic_launch(self) -> Launch:
        return self._kernels.launch("arithmetic", self._grid, self._counts.copy_address, self.steps, 1.0, block=512)

    def _computation(self, layer: int) -> Submit:
        def submit(stream: Stream) -> None:
            for read in self._reads[layer]:
                stream.launch(read)
            if self.steps:
                stream.launch(self._chain)

        return submit

    def _layer_sums(self) -> list[int]:
        words = self._far.array().view(np.uint64)
        size = self._strides["layer"] // 8
        return [
            sum(int(words[offset // 8 : offset // 8 + size].sum(dtype=np.uint64)) for offset in self._planes(layer))
            % 2**64
            for layer in range(self.layers)
        ]

    def arithmetic(self, flops: float) -> float:
        """Let the computation on a layer take ``flops`` operations, in whole steps of all threads; return what they
        are. Raises UsageError for a number that is negative or cannot be counted."""
        steps = round(flops / (STEP_FLOPS * self._threads))
        if not 0 <= steps <= MOST_STEPS:
            raise UsageError("operations of a layer", where="overlap", got=flops, expected="a count below 2^24 steps")
        self.steps = steps
        self._chain = self._arithmetic_launch()
        return float(steps * STEP_FLOPS * self._threads)

    # -- passes --------------------------------------------------------------------------------------------------

    def run(self, schedule: Schedule | None = None, recorder: Recorder | None = None) -> Pass:
        """Load and compute every layer by ``schedule`` (default: layer-wise), the target poisoned before.

        Raises VerifyError when a layer was read before it had arrived, or the arithmetic was not done.
        """
        self.poison()
        if recorder is not None:
            recorder.mark("spoilt")
        events = self._queue.submit(self._stream, schedule, recorder)
        self._wait()
        if recorder is not None:
            recorder.mark("computed")
        self.check()
        return stamps(events, self.layers, self.layers)

    def load_alone(self) -> Pass:
        """Load every layer while nothing is computed. Raises VerifyError when a layer did not arrive."""
        self.poison()
        found = self._free(list(range(self.layers)), [])
        self.compare()
        self._alone = (found.per_load, self._alone[1])
        return found

    def compute_alone(self, computes: int | None = None) -> Pass:
        """Compute on the first ``computes`` layers (default all), which must be there, while nothing is loaded."""
        count = self.layers if computes is None else computes
        found = self._free([], [place % self.layers for place in range(count)])
        self._check_work(range(min(count, self.layers)))
        self._alone = (self._alone[0], found.per_compute)
        return found

    def beside(self, loads: int, computes: int) -> Pass:
        """Do at least that many of both at once, unordered: loads of the second half of the layers, computation on the
        first. By the times they took alone the faster side is given more, so that both are busy together.

        The target must be loaded. Raises UsageError below two layers or one of each.
        """
        half = self.layers // 2
        if half < 1 or loads < 1 or computes < 1:
            raise UsageError("nothing to do beside each other", where="overlap", got=(self.layers, loads, computes))
        load = self._alone[0] or self.load_alone().per_load
        compute = self._alone[1] or self.compute_alone().per_compute
        span = MARGIN * max(loads * load, computes * compute)
        loads = max(loads, min(MOST_BESIDE, round(span / load)))
        computes = max(computes, min(MOST_BESIDE, round(span / compute)))
        found = self._free(
            [half + place % (self.layers - half) for place in range(loads)], [place % half for place in range(computes)]
        )
        self._check_work(range(min(computes, half)))
        return found

    def _free(self, loads: list[int], computes: list[int]) -> Pass:
        events = self._events(len(loads), len(computes))
        self._clear()
        self._queue.free(self._stream, loads, computes, events)
        self._wait()
        return stamps(events, len(loads), len(computes))

    def _events(self, loads: int, computes: int) -> EventSet:
        """Return an event set of at least that size; sizes are powers of two, so that few are ever made."""
        size = (1 << (loads - 1).bit_length() if loads else 0, 1 << (computes - 1).bit_length() if computes else 0)
        if size not in self._scratch:
            self._scratch[size] = EventSet(self._service.device, *size, self._enter)
        return self._scratch[size]

    def _wait(self) -> None:
        self._stream.synchronize()
        self._queue.side.synchronize()

    # -- proof ---------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._stream.set_bytes(self._sums.copy_address, POISON, self._sums.nbytes)
        self._stream.set_bytes(self._counts.copy_address, POISON, self._counts.nbytes)
        self._stream.synchronize()

    def poison(self) -> None:
        """Make the whole target and every result wrong, and wait for it."""
        self._stream.set_bytes(self._near.copy_address, POISON, self._near.nbytes)
        self._clear()

    def check(self) -> None:
        """Raise VerifyError unless the last pass computed on every layer after its bytes had arrived."""
        self._check_work(range(self.layers))

    def _check_work(self, layers: range) -> None:
        planes = self.pool.geometry.planes
        raw = self._service.read(self._sums.copy_address, self._sums.nbytes).view(np.uint64)
        sums = raw.reshape(self.layers, 2, self._grid)[:, :planes].sum(axis=(1, 2), dtype=np.uint64)
        for layer in layers:
            if int(sums[layer]) != self._wanted[layer]:
                raise VerifyError(
                    "a layer was read before it had arrived", where=f"overlap layer {layer}",
                    got=f"sum {int(sums[layer]):#x}", expected=f"{self._wanted[layer]:#x}",
                )  # fmt: skip
        if self.steps:
            counts = self._service.read(self._counts.copy_address, self._counts.nbytes).view(np.uint64)
            wanted = 8 * self.steps + 28
            if not bool((counts == wanted).all()):
                raise VerifyError(
                    "the arithmetic was not done", where="overlap", got=int(counts.min()), expected=f"{wanted} a thread"
                )

    def compare(self) -> None:
        """Raise VerifyError unless the target holds every page in its slot, to the last byte."""
        shape = (self.pool.geometry.planes * self.layers, self.pool.pages, -1)
        wanted = self._far.array().reshape(shape)[:, self._order]
        size = wanted[0].size
        for row in range(shape[0]):
            found = self._service.read(self._near.copy_address + row * size, size).reshape(wanted[row].shape)
            if not np.array_equal(found, wanted[row]):
                raise VerifyError("a fragment was not loaded", where=self.kernel, got=f"layer {row % self.layers}")

    def verify(self) -> None:
        """Poison the target, run once and compare all of it. Raises VerifyError."""
        self.run()
        self.compare()
