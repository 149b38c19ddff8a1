"""Triton kernels of the catalogue on one device: compiled ahead of time in a child process, launched by the driver.

Triton's own launcher needs torch, a C compiler at run time and some microseconds of Python a call; the machine code it
compiles needs none of them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.kernels.gpu import build
from kvbench.kernels.gpu.arch import ARCHS
from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.memory.cuda.device import Device, Launch, Module
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.memory.cuda.kernels import C_TYPES

SHARED_LIMIT = 48 << 10  # bytes of dynamic shared memory a block can have without opting in
_PTX_TYPE = {"pointer": "u64", "u64": "u64", "i64": "u64", "i32": "u32", "f64": "f64"}


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code of one kernel: ``scratch`` pointers it takes behind its own arguments and never uses, ``shared``
    bytes of dynamic shared memory a block."""

    code: bytes
    scratch: int
    shared: int


@lru_cache(maxsize=32)
def image_of(kernel: GpuKernel, arch: tuple[int, int]) -> Image:
    """Return the code of a Triton kernel for compute capability ``arch``.

    Raises Unavailable without triton or where it refuses, KvbenchError when the code takes other arguments than the
    catalogue says: launched with those it would read or write anywhere.
    """
    why = build.missing_triton()
    if why:
        raise Unavailable(why, where=kernel.name, mend="pip install 'kvbench[compile]'")
    number = 10 * arch[0] + arch[1]
    known = [a for a in ARCHS.values() if a.backend == "cuda" and a.number == number]
    target = known[0] if known else replace(ARCHS["sm_75"], name=f"sm_{number}", number=number)
    built = build.triton([(kernel, target)])[0]
    if built.binary is None or built.assembly is None:
        raise Unavailable("the kernel does not compile", where=f"{kernel.name} for {target.name}", got=built.reason)
    return Image(built.binary, scratch_arguments(kernel, built.assembly), built.dynamic_shared)


def scratch_arguments(kernel: GpuKernel, ptx: str, wanted: Sequence[str] | None = None) -> int:
    """Return how many pointers the entry in ``ptx`` takes behind the kernel's own arguments (none, one or two by the
    version of Triton).

    ``wanted``: the types of the own ones in PTX, by default those of the catalogue. Raises KvbenchError unless they are
    those and no other is used.
    """
    found = re.search(rf"\.entry {re.escape(kernel.entry)}\(([^)]*)\)", ptx)
    types = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", found[1]) if found else []
    wanted = [_PTX_TYPE[a.kind] for a in kernel.arguments] if wanted is None else list(wanted)
    extra = types[len(wanted) :]
    used = [k for k in range(len(wanted), len(types)) if re.search(rf"\[{kernel.entry}_param_{k}[\]+]", ptx)]
    if types[: len(wanted)] != wanted or any(kind != "u64" for kind in extra) or used:
        raise KvbenchError("compiled to other arguments", where=kernel.name, got=f"({', '.join(types)})",
                           expected=f"({', '.join(wanted)}) and unused pointers")  # fmt: skip
    return len(extra)


def launch(
    device: Device, enter: Callable[[AbstractContextManager[Any]], Any], kernel: GpuKernel, grid: int,
    *values: int | float,
) -> Launch:  # fmt: skip
    """Return a launch of a Triton kernel by ``grid`` programs of exactly ``kernel.block`` threads.

    ``enter`` keeps the module loaded. Raises UsageError for a kernel of another form or arguments it cannot take, what
    :func:`image_of` raises, CudaError where the driver refuses.
    """
    if kernel.form != "triton":
        raise UsageError("not a Triton kernel", where=kernel.name, got=kernel.form)
    if grid < 1:
        raise UsageError("not a launch it can take", where=kernel.name, got=f"{grid} programs", expected="at least 1")
    kernel.check(*values)
    image = image_of(kernel, device.facts.arch)
    module: Module = enter(Module(device, image.code))
    function = module.function(kernel.entry)
    opt_in(device, function, image.shared, kernel.name)
    arguments = [C_TYPES[a.kind](value) for a, value in zip(kernel.arguments, values, strict=True)]
    arguments += [ctypes.c_uint64(0) for _ in range(image.scratch)]
    return Launch(function, grid, kernel.block, arguments, image.shared)


def opt_in(device: Device, function: ctypes.c_void_p, nbytes: int, where: str) -> None:
    """Let ``function`` have ``nbytes`` of dynamic shared memory a block: beyond 48 KiB a driver wants to be asked.

    Raises Unavailable, naming what the device has, where that is more than a block can have.
    """
    if nbytes <= SHARED_LIMIT:
        return
    most = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    if nbytes > most:
        raise Unavailable("more shared memory than a block has", where=where, got=f"{nbytes} bytes",
                          expected=f"at most {most}", mend="choose smaller tiles or fewer stages")  # fmt: skip
    device.call("cuFuncSetAttribute", function, CONSTANTS["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"], nbytes)
