"""Which method should win on a GPU: the algebra's bytes at rates of the same board, and the methods to hold it against.

DirectKV, OSDI 2026, section 4, as a roofline: :mod:`predict` has the parts, an order of stages makes one time of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.errors import UsageError
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.movers import MemoryWork
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.gpu_ceilings import reader, with_b_near
from kvbench.systems.directkv.gpu_gemm import Asked, GpuGemm, usual_depth
from kvbench.systems.directkv.gpu_operands import Enter
from kvbench.systems.directkv.predict import Rates, pipeline, seconds
from kvbench.systems.directkv.shapes import Gemm, Method, staged_columns


@dataclass(frozen=True, slots=True)
class BoardRates:
    """Bytes a second read in place over the link, by the copy engine, and touched in GPU memory; operations a second
    of the product with B near."""

    direct: float
    engine: float
    near: float
    flops: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds a product should take, and of its two sides: the ``link``, and what runs ``inside`` the board."""

    seconds: float
    link: float
    inside: float


@dataclass(frozen=True, slots=True)
class Part:
    """Something a round times: ``submit`` queues ``operations`` on its stream and ``also``; ``spoil`` and ``check``
    prove it."""

    submit: Callable[[Stream], None]
    operations: int
    also: Sequence[Stream]
    spoil: Callable[[], object]
    check: Callable[[], object]


class Board:
    """Every method of one point on one GPU, and what their rates come from; errors as of :class:`GpuGemm`.

    ``parts``: four probes (B read in place, B by the copy engine, a copy in GPU memory of four L2, the product with B
    near), then the methods of ``works``. ``threads`` touch host pages first.
    """

    def __init__(self, service: Service, kernels: Kernels, enter: Enter, asked: Asked, threads: int, seed: int) -> None:
        self.works = contenders(service, enter, asked, seed)
        first = self.works["naive"]
        self._flops, nbytes = first.gemm.flops, first.operands.b_bytes
        lanes = [reader(service, kernels, enter, nbytes, way, threads, seed + 31) for way in ("direct", "ce")]
        self._crossed = [lane.mover.link_bytes for lane in lanes]
        copy = MemoryWork("copy", 4 * service.device.facts.l2_bytes, service, kernels, enter, seed + 41)
        self._moved = copy.moved
        near = with_b_near(service, enter, first, seed)
        direct, engine = (Part(x.mover.submit, x.mover.operations, (), x.spoil, x.check) for x in lanes)
        self.parts: dict[str, Part] = {
            "direct": direct, "engine": engine, "near": Part(copy.submit, 1, (), copy.spoil, copy.check),
            "product": Part(near.submit, near.operations, (), near.spoil, near.check),
        }  # fmt: skip
        for name, work in self.works.items():
            self.parts[name] = Part(work.submit, work.operations, work.also, work.spoil, work.check)

    def rates(self, taken: Mapping[str, float]) -> BoardRates:
        """Return the rates of the seconds the probes took."""
        return BoardRates(
            self._crossed[0] / taken["direct"], self._crossed[1] / taken["engine"], self._moved / taken["near"],
            self._flops / taken["product"],
        )  # fmt: skip


def contenders(service: Service, enter: Enter, asked: Asked, seed: int) -> dict[str, GpuGemm]:
    """Return the methods that read B from the far tier, shapes and tile those of ``asked``; a double buffer only where
    each half holds a column of tiles. Raises what :class:`GpuGemm` raises."""
    methods: tuple[Method, ...] = ("swap", "naive", "cpu_aware", "cpu_aware_pipelined")
    asks = {m: replace(asked, method=m, depth=usual_depth(service.device, m), split=None) for m in methods}
    works: dict[str, GpuGemm] = {"swap": GpuGemm(service, enter, asks["swap"], seed)}
    if _halves_fit(works["swap"].gemm):
        works["swap_double"] = GpuGemm(service, enter, replace(asks["swap"], double=True), seed)
    return works | {m: GpuGemm(service, enter, asks[m], seed) for m in methods[1:]}


def forecast(work: GpuGemm, rates: BoardRates) -> Forecast:
    """Return what ``work`` should take.

    A swap: slabs and products by the exact recurrence over its buffers. In place: the longest of link, computation and
    near traffic, all overlapped; with one stage a block loads and multiplies in turns, so that its own share of the
    link (the others use it meanwhile) comes on top of its computation. No cache between: where the L2 keeps lines of
    host memory, `naive` is faster than this.
    """
    asked, gemm, moved = work.asked, work.gemm, work.traffic
    swap = asked.method == "swap"
    parts = seconds(gemm.flops, moved, Rates(rates.flops, rates.engine if swap else rates.direct, rates.near))
    inside = max(parts.compute, parts.near)
    if swap:
        slabs = work.operands.slabs
        loads = [slab.nbytes / rates.engine for slab in slabs]
        products = [inside * slab.width / asked.n for slab in slabs]
        return Forecast(pipeline(loads, products, 2 if asked.double else 1), sum(loads), inside)
    turns = parts.link / work.grid if asked.depth == 1 else 0.0
    return Forecast(max(parts.link, inside + turns), parts.link, inside)


def _halves_fit(gemm: Gemm) -> bool:
    try:
        staged_columns(gemm, 100, double=True)
    except UsageError:  # the half of a narrow B is less than one column of tiles
        return False
    return True
