"""What a product on a GPU is held against: host memory read in place, the vendor's product, bytes the board counts."""

from __future__ import annotations

from dataclasses import replace

from kvbench.errors import Unavailable, VerifyError
from kvbench.kernels.gpu.cublas import Cublas
from kvbench.kernels.gpu.gemm_kernels import error_bound
from kvbench.machine import link_profiler
from kvbench.machine.link_bytes import LinkBytes, LinkCounters, link_bytes
from kvbench.memory.cuda.buffers import hbm, pinned
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.gpu_gemm import GpuGemm
from kvbench.systems.directkv.gpu_once import words
from kvbench.systems.directkv.gpu_operands import POISON, Enter
from kvbench.transport.gpu_lane import Lane
from kvbench.transport.gpu_link import Link, open_lanes

PROBE_BYTES = 64 << 20  # of the known copy a counter has to tell
LEAST_BYTES = 1 << 20  # read for a rate


def reader(
    service: Service, kernels: Kernels, enter: Enter, nbytes: int, transport: str, threads: int, seed: int
) -> Lane:
    """Return the lane of ``nbytes`` (at least 1 MiB) of page-locked memory brought near by ``transport``: ``direct``,
    a full grid that reads it in place, or ``ce``, one copy. Raises what :func:`gpu_link.open_lanes` raises."""
    size = max(LEAST_BYTES, -(-nbytes // 16) * 16)
    (lane,) = open_lanes(service, kernels, enter, Link("pinned", transport, "fetch", size, threads=threads, seed=seed))
    return lane


def with_b_near(service: Service, enter: Enter, work: GpuGemm, seed: int) -> GpuGemm:
    """Return the launch of ``work`` with B near; for swap, whose launches multiply slabs, the one of all of B."""
    if work.asked.method != "swap":
        return GpuGemm(service, enter, work.asked, seed, near=True)
    return GpuGemm(service, enter, replace(work.asked, method="resident", staging=100, double=False), seed)


def link_of(service: Service, enter: Enter, stream: Stream, board: int | None, work: GpuGemm, seed: int) -> LinkBytes:
    """Return the link bytes of one pass of ``work``: by counters of NVML's ``board``, a profiler in a child, or bounds.

    ``board`` None: nobody knows which of NVML's boards this GPU is, and board 0 could be another one.
    """
    source = enter(pinned(service, PROBE_BYTES, seed=51))
    target = enter(hbm(service, PROBE_BYTES, seed=52))

    def copy() -> None:
        stream.copy(target.copy_address, source.copy_address, PROBE_BYTES)
        stream.synchronize()

    def one() -> None:
        work.submit(stream)
        stream.synchronize()

    def profiled() -> tuple[float | None, str]:
        if work.asked.method == "swap":
            return None, "what a copy engine moves belongs to no kernel"
        return link_profiler.profile(words(work.asked, service.device.ordinal, seed), work.form.entry)

    moved = work.traffic
    with LinkCounters(board) as counters:
        return link_bytes(
            counters, one, (moved.unique, max(moved.demand, moved.link)), copy, PROBE_BYTES, profiled=profiled
        )


class VendorProduct:
    """The same float32 product by cuBLAS, B near, no TF32: ``submit`` queues it. For ``simt`` and ``resident`` alone.

    ``spoil`` and ``check`` prove it as the work's own. Raises Unavailable where no cuBLAS loads, or for another
    arithmetic or method.
    """

    def __init__(self, enter: Enter, work: GpuGemm, service: Service) -> None:
        o = work.operands
        if o.compute != "simt" or o.place != "near":
            raise Unavailable("cuBLAS stands beside a resident float32 product alone", where="gemm", got=o.compute)
        self._cublas: Cublas = enter(Cublas())
        self._c = enter(hbm(service, o.c.nbytes, seed=61))
        self._o, self._service = o, service
        self.operations = 1

    def submit(self, stream: Stream) -> None:
        """Queue it; row-major C = A B is column-major C' = B' A'."""
        o = self._o
        if stream.handle is None:
            raise ValueError("the stream is closed")
        self._cublas.gemm32(
            stream.handle, (o.n, o.m, o.k), (o.b_address, o.slabs[0].ld), (o.a.copy_address, o.lda),
            (self._c.copy_address, o.ldc),
        )  # fmt: skip
        stream.count(1)

    def spoil(self) -> None:
        """Make the result not a number, and wait for it."""
        self._service.stream.set_bytes(self._c.copy_address, POISON, self._c.nbytes)
        self._service.stream.synchronize()

    def check(self) -> None:
        """Raise VerifyError unless the vendor's product is right to what float32 sums are: with TF32 it is not."""
        o = self._o
        found, bound = o.error(self._c), error_bound("simt", o.k)
        if not found <= bound:
            raise VerifyError("the vendor's product is not float32", where=f"cuBLAS {o.m} x {o.n} x {o.k}",
                              got=f"an error of {found:.2e}", expected=f"at most {bound:.2e}")  # fmt: skip
