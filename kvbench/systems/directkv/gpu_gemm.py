"""The product with B far on a GPU: resident, swap, read in place by rows of tiles (naive) or once (cpu_aware).

DirectKV, OSDI 2026, 2.3 and 4. A mechanism: it queues work on a stream it is given and knows no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels.gpu import build
from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.kernels.gpu.gemm_kernels import (
    COMPUTES,
    GROUPS_TRITON,
    ITEM,
    RASTERS,
    TENSOR_DEPTHS,
    Compute,
    Order,
    groups_kernel,
    require_arch,
    require_fit,
    shape_of,
    simt_kernel,
    tensor_kernel,
)
from kvbench.memory.cuda import compiled, portable
from kvbench.memory.cuda.buffers import GpuBuffer, hbm
from kvbench.memory.cuda.device import Device, Launch, Stream
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.gpu_operands import Enter, Operands, Place, Slab, padded
from kvbench.systems.directkv.gpu_swap import Load, SwapQueue
from kvbench.systems.directkv.shapes import METHODS, Gemm, Method, staged_columns
from kvbench.systems.directkv.traffic import Traffic, cpu_aware, naive, resident, swap

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What to multiply and how: C [m, n] = A [m, k] B [k, n].

    ``tile`` as of gemm_kernels.SHAPES; ``depth`` stages (cpu_aware_pipelined: 2 or more); ``split`` parts a column of
    tiles is cut into for cpu_aware, None: as many as it has tiles; ``raster`` order of tiles for the others;
    ``staging`` per cent of B in near buffers for swap, ``double``: two of them.
    """

    m: int
    n: int
    k: int
    method: Method
    compute: Compute = "simt"
    tile: int = 128
    depth: int = 1
    split: int | None = None
    raster: str = "n_fastest"
    staging: int = 100
    double: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("method", self.method, METHODS), ("compute", self.compute, COMPUTES),
                                   ("raster", self.raster, RASTERS)):  # fmt: skip
            if value not in known:
                raise UsageError("unknown value", where=f"gemm {name}", got=value, expected=", ".join(known))
        if self.method == "cpu_aware_pipelined" and self.depth < 2:
            raise UsageError("a pipeline of one stage is none", where="gemm depth", got=self.depth, expected="2 to 4")
        if self.method == "cpu_aware" and self.depth != 1:
            raise UsageError("more than one stage", where="gemm depth", got=self.depth, expected="1",
                             mend="the method is cpu_aware_pipelined")  # fmt: skip

    @property
    def order(self) -> Order:
        return "aware" if self.method.startswith("cpu_aware") else "naive"


def unit_bounds(gemm: Gemm, split: int, blocks: int) -> tuple[int, ...]:
    """Return where the contiguous ranges of ``blocks`` begin, and the end, in tiles of C counted down the columns.

    A column's tiles are handed out in ``split`` parts: with as many parts as tiles this is traffic.unit_bounds. The
    same arithmetic as in gemm.cu and gemm.py. Raises UsageError for a split that is not 1 to the rows of tiles.
    """
    if not 1 <= split <= gemm.rows:
        raise UsageError("parts of a column of tiles", where="gemm split", got=split, expected=f"1 to {gemm.rows}")
    units = gemm.columns * split
    firsts = [block * units // blocks for block in range(blocks + 1)]
    return tuple(unit // split * gemm.rows + unit % split * gemm.rows // split for unit in firsts)


class GpuGemm:
    """One product on a GPU, ready to be queued: ``submit(stream)`` queues ``operations`` there and on ``also``.

    ``traffic`` are the bytes of the algebra with this form's padding, ``near_bytes`` what it holds in GPU memory,
    ``kernel`` names what runs, any fallback included. ``near``: the same launch with B in GPU memory, which is what
    bounds it; not for swap. Raises UsageError for what makes no sense, Unavailable for tiles that do not fit on the
    chip (with what does), a kernel there is not for this GPU, or memory that is not there.
    """

    def __init__(self, service: Service, enter: Enter, asked: Asked, seed: int = 1, *, near: bool = False) -> None:
        if near and asked.method == "swap":
            raise UsageError("a swap from near memory", where="gemm", got="swap", mend="its bound is resident")
        self.near = near or asked.method == "resident"
        self.asked, self._service, self._enter = asked, service, enter
        self.form, self.fallback = chosen(service, asked)
        tile_m, tile_n, tile_k = _tiles(self.form)
        self.gemm = Gemm(asked.m, asked.n, asked.k, tile_m, tile_n, tile_k, ITEM[asked.compute], 4)
        sms = service.device.facts.sms
        self.split = self.gemm.rows if asked.split is None else asked.split
        aware = asked.order == "aware"
        # A persistent grid for runs of units; the unchanged kernel has a block a tile.
        self.grid = min(sms, self.gemm.columns * self.split) if aware else self.gemm.rows * self.gemm.columns
        self.bounds = unit_bounds(self.gemm, self.split, max(1, self.grid)) if aware else None
        columns = asked.n
        if asked.method == "swap":
            columns = staged_columns(self.gemm, asked.staging, double=asked.double) * tile_n
        place: Place = "near" if self.near else "far"
        self.operands = Operands(service, enter, asked.m, asked.n, asked.k, asked.compute, place, columns, seed)
        self.flags = self.operands.flags
        self._staging: list[GpuBuffer] = []
        self.also: tuple[Stream, ...] = ()
        if asked.method == "swap":
            self._swap = self._swapped(tile_n)
            self.also = (self._swap.side,)
            self.operations = self._swap.operations
        else:
            whole = self.operands.slabs[0]
            self._launch = self._made(self.operands.b_address, whole, self.grid)
            self.operations = 1
        self.operands.poison()

    @property
    def near_bytes(self) -> int:
        """Bytes of GPU memory it holds: A, C, and B or its staging buffers."""
        own = [self.operands.a, self.operands.c, *self._staging]
        return sum(b.nbytes for b in own) + (self.operands.b_bytes if self.near else 0)

    @property
    def staging_bytes(self) -> int:
        """Bytes of near memory that stand for B: all of it when resident, the buffers of swap, else none."""
        return self.operands.b_bytes if self.near else sum(b.nbytes for b in self._staging)

    @property
    def traffic(self) -> Traffic:
        """The algebra of this form: rows of B padded to 16 bytes, tiles shared among the blocks as they are."""
        asked = self.asked
        n = padded(asked.n, "simt") if asked.compute == "simt" else asked.n
        k = asked.k if asked.compute == "simt" else padded(asked.k, asked.compute)
        stored = Gemm(asked.m, n, k, self.gemm.tile_m, self.gemm.tile_n, self.gemm.tile_k, self.gemm.item, 4)
        if asked.method == "cpu_aware" or asked.method == "cpu_aware_pipelined":
            moved = cpu_aware(stored, bounds=self.bounds)
        else:
            moved = {"resident": resident, "swap": swap, "naive": naive}[asked.method](stored)
        if self.near and asked.method != "resident":
            return replace(moved, demand=0, link=0, b_read=moved.demand)
        return moved

    @property
    def kernel(self) -> str:
        """The kernel with its grid, what it replaces, and the copies of swap."""
        said = f"{self.form.name} {self.grid} x {self.form.block}{self.fallback}"
        if self.asked.method != "swap":
            return said
        return f"{len(self.operands.slabs)} slabs over {len(self._staging)} buffers | {said}"

    def notes(self) -> dict[str, Scalar]:
        """Return what a row says of the launch: blocks, waves, parts of a column, order of tiles, stages."""
        sms = self._service.device.facts.sms
        aware = self.asked.order == "aware"
        return {
            "ctas": self.grid, "waves": -(-self.grid // sms), "split": self.split if aware else None,
            "raster": None if aware else self.asked.raster, "stages": self.asked.depth,
            "shared_bytes": self.form.shared, "kernel_digest": self.form.digest(),
            "slabs": len(self.operands.slabs), "buffers": len(self._staging),
        }  # fmt: skip

    def submit(self, stream: Stream) -> None:
        """Queue one product. Raises CudaError when the driver refuses it."""
        if self.asked.method == "swap":
            self._swap.submit(stream)
        else:
            stream.launch(self._launch)

    def check(self) -> float:
        """Return the error of what the last product left; raises VerifyError beyond the arithmetic's bound."""
        return self.operands.check()

    def spoil(self) -> None:
        """Make C wrong, and the staging buffers too: only a product that did everything passes after it."""
        for buffer in self._staging:
            self._service.stream.set_bytes(buffer.copy_address, 0xFF, buffer.nbytes)
        self.operands.poison()

    # -- making --------------------------------------------------------------------------------------------------

    def _swapped(self, tile_n: int) -> SwapQueue:
        slabs = self.operands.slabs
        slots = min(2 if self.asked.double else 1, len(slabs))
        self._staging = [
            self._enter(hbm(self._service, max(s.nbytes for s in slabs), seed=40 + i)) for i in range(slots)
        ]
        loads, products = [], []
        for number, slab in enumerate(slabs):
            target = self._staging[number % slots].copy_address
            loads.append(Load(target, self.operands.b.copy_address + slab.offset, slab.nbytes))
            grid = self.gemm.rows * -(-slab.width // tile_n)
            products.append(self._made(target, slab, grid))
        return SwapQueue(self._service.device, self._enter, loads, products, slots)

    def _made(self, b: int, slab: Slab, grid: int) -> Launch:
        """Return the launch that multiplies A by ``slab`` at ``b`` into its columns of C."""
        o, device, form = self.operands, self._service.device, self.form
        c, a, item = o.c.copy_address + 4 * slab.first, o.a.copy_address, ITEM[o.compute]
        shape = (o.m, slab.width, o.k)
        raster = RASTERS[self.asked.raster]
        if form.form == "cuda":
            return compiled.launch(
                device, self._enter, form, grid, c, a, b, *shape, o.lda, slab.ld, o.ldc, self.split, raster
            )
        if form.form == "triton":
            pitches = (o.lda * item // 16, slab.ld * item // 16, o.ldc // 4)
            return portable.launch(device, self._enter, form, grid, c, a, b, *shape, *pitches, self.split, raster)
        box = (self.gemm.tile_m, self.gemm.tile_k)
        maps = (
            compiled.Matrix(c, o.m, slab.width, 4 * o.ldc, "fp32", (self.gemm.tile_m, self.gemm.tile_n)),
            compiled.Matrix(a, o.m, o.k, o.lda * item, "bf16", box),
            compiled.Matrix(b, slab.width, o.k, slab.ld * item, "bf16", box),
        )
        numbers = (self.gemm.rows, self.gemm.columns, self.gemm.steps, self.split)
        return compiled.launch_maps(device, self._enter, form, grid, maps, numbers)


def _tiles(form: GpuKernel) -> tuple[int, int, int]:
    """Return the rows and columns of a tile of C and the rows of a tile of B that ``form`` is compiled for."""
    constants = {name: int(value) for name, value in form.constants}
    if form.form == "gluon":
        return constants["TILE"], constants["TILE"], constants["STEP"]
    return constants["TILE_M"], constants["TILE_N"], constants["TILE_K" if form.form == "cuda" else "STEP"]


def usual_depth(device: Device, method: Method) -> int:
    """Return the stages a method has when nobody asks for others.

    Three for tiles of C (a kernel that loads and multiplies in turns would make any other look good), one for
    cpu_aware, two for its pipelined form; one before sm_80, which has no asynchronous copies.
    """
    if device.facts.arch[0] < 8 and method != "cpu_aware_pipelined":
        return 1
    return {"cpu_aware": 1, "cpu_aware_pipelined": 2}.get(method, 3)


def triton_version() -> tuple[int, int] | None:
    """Return the (major, minor) version of the installed Triton without importing it; None without."""
    from importlib import metadata

    try:
        words: Sequence[str] = metadata.version("triton").split(".")
    except metadata.PackageNotFoundError:
        return None
    return int(words[0]), int(words[1])


def chosen(service: Service, asked: Asked) -> tuple[GpuKernel, str]:
    """Return the kernel for ``asked`` on this GPU, and what to say where it is not the first choice.

    The pipelined bf16 order is the three groups on Hopper with Triton 3.8 or later; elsewhere the Triton form with as
    many stages. Raises Unavailable or UsageError where there is none.
    """
    arch = compiled.arch_of(service.device)
    if asked.compute == "simt":
        require_fit(asked.order, asked.tile, asked.depth, arch)
        return simt_kernel(asked.order, asked.tile, asked.depth), ""
    shape_of(asked.tile)
    said = ""
    if asked.method == "cpu_aware_pipelined" and asked.compute == "bf16":
        version = triton_version()
        if arch.name == "sm_90a" and version is not None and version >= GROUPS_TRITON and not build.missing_triton():
            return groups_kernel(asked.tile, asked.depth), ""
        why = arch.name if arch.name != "sm_90a" else f"Triton {'.'.join(map(str, version)) if version else 'absent'}"
        said = f" (no groups of warps: {why})"
    depths = TENSOR_DEPTHS.get((asked.order, asked.tile), ())
    if asked.depth not in depths:
        known = ", ".join(f"tile {t} depth {'/'.join(map(str, d))}" for (o, t), d in TENSOR_DEPTHS.items()
                          if o == asked.order)  # fmt: skip
        raise Unavailable(f"no {asked.compute} kernel of that form{said}", where=f"gemm {asked.method}",
                          got=f"tile {asked.tile} depth {asked.depth}", expected=known)  # fmt: skip
    form = tensor_kernel(asked.compute, asked.order, asked.tile, asked.depth)
    require_arch(form, arch)
    return form, said
