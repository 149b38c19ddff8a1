"""The catalogue's kernels on one device: loaded when asked for, arguments checked before a launch can go wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.errors import UsageError
from kvbench.kernels.gpu import catalogue
from kvbench.memory import payload
from kvbench.memory.cuda.device import Device, Launch, Module
from kvbench.memory.payload import BLOCK_BYTES, Kind

Images = Callable[[Path, tuple[int, int]], bytes]
C_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_uint64, "u64": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32,
    "f64": ctypes.c_double,
}  # fmt: skip


class Kernels:
    """Loads from ``images`` (source file, compute capability) -> cubin; ``stack`` unloads the modules."""

    def __init__(self, device: Device, images: Images, stack: ExitStack) -> None:
        self._device, self._images, self._stack = device, images, stack
        self._modules: dict[Path, Module] = {}

    def launch(self, name: str, grid: int, *values: int | float, block: int | None = None) -> Launch:
        """Return a launch of the CUDA C++ kernel ``name`` by ``grid`` blocks of ``block`` (default: its most) threads.

        Raises UsageError for an unknown kernel or arguments it cannot take, CudaError where the driver refuses.
        """
        kernel = catalogue.kernel(name)
        threads = kernel.block if block is None else block
        if kernel.form != "cuda":
            raise UsageError("not a CUDA C++ kernel", where=name, got=kernel.form)
        if not 1 <= threads <= kernel.block or grid < 1:
            raise UsageError(
                "not a launch it can take", where=name, got=f"{grid} x {threads}",
                expected=f"1 to {kernel.block} threads",
            )  # fmt: skip
        kernel.check(*values)
        if kernel.source not in self._modules:
            image = self._images(kernel.source, self._device.facts.arch)
            self._modules[kernel.source] = self._stack.enter_context(Module(self._device, image))
        function = self._modules[kernel.source].function(kernel.entry)
        arguments = [C_TYPES[a.kind](value) for a, value in zip(kernel.arguments, values, strict=True)]
        return Launch(function, grid, threads, arguments)

    def portable(self, kernel: catalogue.GpuKernel, grid: int, *values: int | float) -> Launch:
        """Return a launch of a Triton kernel by ``grid`` programs, each of exactly ``kernel.block`` threads.

        Raises what :func:`portable.launch` raises: UsageError, Unavailable without triton, CudaError.
        """
        from kvbench.memory.cuda import portable

        return portable.launch(self._device, self._stack.enter_context, kernel, grid, *values)


def payload_sum(nbytes: int, seed: int, kind: Kind = "bits") -> int:
    """Return what the kernel ``read`` finds in ``nbytes`` of payload: the sum of its words modulo 2^64.

    The last word is padded with zero bytes. Runs over blocks of 1 MiB, without an array of ``nbytes``.
    """
    block, total = np.empty(min(BLOCK_BYTES, -(-nbytes // 8) * 8), np.uint8), 0
    for start in range(0, nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, nbytes - start)
        part = block[: -(-size // 8) * 8]
        payload.fill(part[:size], seed, kind, start)
        part[size:] = 0
        total += int(part.view("<u8").sum(dtype=np.uint64))
    return total & payload.MASK64


def ramp_sum(nbytes: int, first: int, step: int) -> int:
    """Return the same sum of what the kernel ``write`` leaves: word k is first + k * step, the last one cut."""
    words, rest = divmod(nbytes, 8)
    total = words * first + step * (words * (words - 1) // 2)
    if rest:
        total += (first + words * step & payload.MASK64) & ((1 << 8 * rest) - 1)
    return int(total & payload.MASK64)


def ramp(offset: int, nbytes: int, first: int, step: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return ``nbytes`` bytes of what ``write`` leaves from byte ``offset``, a multiple of 8, on."""
    from kvbench.kernels.gpu import reference

    start = (first + offset // 8 * step) & payload.MASK64
    return reference.write(nbytes, start, step)
