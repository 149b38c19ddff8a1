"""CUDA C++ kernels with macros compiled in, and Gluon kernels with tensor maps, on one device.

Both are compiled in a child process: a text of its own for each form, and a compiler that dies takes nothing with it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.kernels.gpu import build
from kvbench.kernels.gpu.arch import ARCHS, Arch
from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.memory.cuda.device import Device, Launch, Module
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.memory.cuda.kernels import C_TYPES
from kvbench.memory.cuda.portable import Image, opt_in, scratch_arguments

Enter = Callable[[AbstractContextManager[Any]], Any]
MAP_BYTES, MAP_ALIGN = 128, 128
_TYPES = {"fp32": ("CU_TENSOR_MAP_DATA_TYPE_FLOAT32", 4), "bf16": ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2)}


def arch_of(device: Device) -> Arch:
    """Return the architecture ``device`` is gated as. Raises Unavailable for one no kernel is compiled for."""
    major, minor = device.facts.arch
    for arch in ARCHS.values():
        if arch.backend == "cuda" and arch.number == 10 * major + minor:
            return arch
    raise Unavailable("no kernels for this architecture", where="GPU", got=f"sm_{major}{minor}",
                      expected=", ".join(a.name for a in ARCHS.values() if a.backend == "cuda"))  # fmt: skip


@lru_cache(maxsize=32)
def image_of(kernel: GpuKernel, arch: Arch) -> Image:
    """Return the machine code of a CUDA C++ or Gluon kernel for ``arch``.

    Raises Unavailable without its compiler or where that refuses, KvbenchError for a Gluon kernel compiled to other
    arguments or threads than the catalogue says.
    """
    cuda = kernel.form == "cuda"
    why = build.missing_nvrtc() if cuda else build.missing_triton()
    if why:
        raise Unavailable(why, where=kernel.name, mend="pip install 'kvbench[compile]'")
    (built,) = build.cuda([(kernel.text(), arch)]) if cuda else build.triton([(kernel, arch)])
    if built.binary is None or built.assembly is None:
        raise Unavailable("the kernel does not compile", where=f"{kernel.name} for {arch.name}", got=built.reason)
    scratch = 0 if cuda else map_scratch(kernel, built.assembly)
    threads = re.search(r"\.reqntid (\d+)", built.assembly)
    if threads and int(threads[1]) != kernel.block:
        raise KvbenchError("compiled for another number of threads", where=kernel.name, got=int(threads[1]),
                           expected=str(kernel.block))  # fmt: skip
    return Image(built.binary, scratch, kernel.shared if cuda else built.dynamic_shared)


def launch(device: Device, enter: Enter, kernel: GpuKernel, grid: int, *values: int | float) -> Launch:
    """Return a launch of a CUDA C++ kernel with its own macros by ``grid`` blocks of ``kernel.block`` threads.

    ``enter`` keeps the module loaded. Raises UsageError for a kernel of another form or arguments it cannot take, what
    :func:`image_of` raises, Unavailable where a block has not that much shared memory, CudaError where the driver
    refuses.
    """
    if kernel.form != "cuda":
        raise UsageError("not a CUDA C++ kernel", where=kernel.name, got=kernel.form)
    if grid < 1:
        raise UsageError("not a launch it can take", where=kernel.name, got=f"{grid} blocks", expected="at least 1")
    kernel.check(*values)
    arguments = [C_TYPES[a.kind](value) for a, value in zip(kernel.arguments, values, strict=True)]
    return _launch(device, enter, kernel, grid, arguments)


def _launch(device: Device, enter: Enter, kernel: GpuKernel, grid: int, arguments: Sequence[Any]) -> Launch:
    image = image_of(kernel, arch_of(device))
    module: Module = enter(Module(device, image.code))
    function = module.function(kernel.entry)
    opt_in(device, function, image.shared, kernel.name)
    extra = [ctypes.c_uint64(0) for _ in range(image.scratch)]
    return Launch(function, grid, kernel.block, [*arguments, *extra], image.shared)


# -- tensor maps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matrix:
    """A row-major matrix for a tensor map: ``rows`` x ``columns`` of ``dtype`` (fp32, bf16) at a device ``address``,
    rows ``pitch`` bytes apart, seen through boxes of ``box`` rows and columns."""

    address: int
    rows: int
    columns: int
    pitch: int
    dtype: str
    box: tuple[int, int]


def tensor_map(device: Device, matrix: Matrix) -> Any:
    """Return the 128 bytes that describe ``matrix`` to the copy engine of a multiprocessor (swizzle of 128 bytes).

    A box is as wide as the swizzle: 128 bytes, wider tiles are copied box by box. Raises UsageError for an address or
    pitch that is no multiple of 16, Unavailable where the driver is older than CUDA 12, CudaError where it refuses.
    """
    name, item = _TYPES[matrix.dtype]
    if matrix.address % 16 or matrix.pitch % 16:
        raise UsageError("a tensor map needs whole 16 bytes", where="tensor map",
                         got=f"address {matrix.address:#x}, pitch {matrix.pitch}")  # fmt: skip
    device.driver.address("cuTensorMapEncodeTiled")
    raw = (ctypes.c_ubyte * (MAP_BYTES + MAP_ALIGN))()
    start = -ctypes.addressof(raw) % MAP_ALIGN
    made = (ctypes.c_ubyte * MAP_BYTES).from_buffer(raw, start)
    dims = (ctypes.c_uint64 * 2)(matrix.columns, matrix.rows)
    pitches = (ctypes.c_uint64 * 1)(matrix.pitch)
    box = (ctypes.c_uint32 * 2)(min(matrix.box[1], 128 // item), matrix.box[0])
    steps = (ctypes.c_uint32 * 2)(1, 1)
    device.call(
        "cuTensorMapEncodeTiled", made, CONSTANTS[name], 2, matrix.address, dims, pitches, box, steps, 0,
        CONSTANTS["CU_TENSOR_MAP_SWIZZLE_128B"], CONSTANTS["CU_TENSOR_MAP_L2_PROMOTION_L2_128B"], 0,
    )  # fmt: skip
    return made


def map_scratch(kernel: GpuKernel, ptx: str) -> int:
    """Return how many unused pointers the Gluon entry in ``ptx`` takes behind its own arguments.

    A tensor map is 128 bytes, two 32-bit sizes and two 64-bit strides. Raises KvbenchError for other arguments, or
    scratch memory that is used.
    """
    wanted = [kind for a in kernel.arguments
              for kind in (("b8", "u32", "u32", "u64", "u64") if a.kind == "map" else ("u32",))]  # fmt: skip
    return scratch_arguments(kernel, ptx, wanted)


def launch_maps(
    device: Device, enter: Enter, kernel: GpuKernel, grid: int, matrices: Sequence[Matrix], numbers: Sequence[int]
) -> Launch:
    """Return a launch of a Gluon kernel whose first arguments are tensor maps of ``matrices``, then ``numbers``.

    Raises UsageError for a kernel of another form or another number of arguments, and what :func:`launch` raises.
    """
    if kernel.form != "gluon" or len(matrices) + len(numbers) != len(kernel.arguments) or grid < 1:
        raise UsageError("not a launch it can take", where=kernel.name,
                         got=f"{kernel.form}, {len(matrices)} maps, {len(numbers)} numbers, {grid} blocks")  # fmt: skip
    arguments: list[Any] = []
    for matrix in matrices:
        item = _TYPES[matrix.dtype][1]
        arguments += [
            tensor_map(device, matrix), ctypes.c_int32(matrix.rows), ctypes.c_int32(matrix.columns),
            ctypes.c_int64(matrix.pitch // item), ctypes.c_int64(1),
        ]  # fmt: skip
    return _launch(device, enter, kernel, grid, [*arguments, *(ctypes.c_int32(n) for n in numbers)])
