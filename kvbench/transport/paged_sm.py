"""Transport ``sm`` of an index set: a few blocks of GPU threads move whole pages, from any layout to any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from kvbench.errors import UsageError
from kvbench.kernels.gpu.catalogue import GpuKernel, pages_kernel
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, pointer_facts
from kvbench.memory.cuda.device import Device, Launch, Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.transport.gpu_pieces import Words
from kvbench.transport.paged_set import Box, width_of

Enter = Callable[[AbstractContextManager[Any]], Any]
Index = Literal["i32", "i64"]
NARROW = "narrow_access"  # flag: less than 16 bytes at a time, as sizes or strides are no multiple of 16
ROWS_LIMIT = 1 << 30  # row numbers of one launch are 32-bit, with room for the step beyond the last one


def device_table(service: Service, values: Words, index: Index, enter: Enter, seed: int = 1) -> GpuBuffer:
    """Return ``values`` as a table of type ``index`` in the memory of the device.

    Raises UsageError for a value the type cannot hold, Unavailable without memory.
    """
    array = np.ascontiguousarray(values, np.int64)
    limit = 1 << 31
    if index == "i32" and len(array) and not -limit <= int(array.min()) <= int(array.max()) < limit:
        raise UsageError("index does not fit 32 bits", where="page table", got=int(np.abs(array).max()),
                         expected=f"less than {limit}", mend="use 64-bit tables")  # fmt: skip
    table: GpuBuffer = enter(hbm(service, max(1, len(array)) * (4 if index == "i32" else 8), seed=seed))
    if len(array):
        service.write(table.copy_address, array.astype(np.int32) if index == "i32" else array)
    return table


def require_on_device(device: Device, address: int, where: str) -> None:
    """Raise UsageError unless ``address`` lies in the memory of ``device``.

    A table in host memory is read over the link, a word a thread and row; one on another GPU faults.
    """
    facts = pointer_facts(device, address)
    if facts.tier != "hbm" or facts.ordinal != device.ordinal:
        raise UsageError("the table is on the wrong device", where=where,
                         got=facts.tier if facts.tier != "hbm" else f"GPU {facts.ordinal}",
                         expected=f"memory of GPU {device.ordinal}", mend="copy it there first")  # fmt: skip


def numbers(box: Box, width: int) -> tuple[int, ...]:
    """Return the numbers ``copy_pages`` takes for ``box`` by accesses of ``width`` bytes: count to src_inner."""
    _, middle, inner = box.shape
    steps = (*box.dst_steps, *box.src_steps)
    return (
        len(box.src_pages), box.page_rows, box.row // width, middle * inner, inner, *(step // width for step in steps)
    )  # fmt: skip


class PageThreads:
    """A mover: one launch of ``copy_pages`` by ``quota`` blocks of ``threads`` between pools at device addresses.

    ``tables``: addresses of the (target, source) page tables of type ``index`` in device memory. ``width`` is the
    access width in bytes (16 unless the pools allow less), ``in_flight`` the payload bytes one block has under way.

    Raises UsageError for tables elsewhere, a quota below 1, threads there is no kernel for, or more than 2^30 rows;
    Unavailable without triton; CudaError where the driver refuses.
    """

    def __init__(
        self, device: Device, kernels: Kernels, box: Box, target: int, source: int, tables: tuple[int, int], *,
        quota: int, threads: int = 1024, index: Index = "i64",
    ) -> None:  # fmt: skip
        if quota < 1:
            raise UsageError("no blocks", where="sm quota", got=quota, expected="at least 1")
        for name, address in zip(("dst_pages", "src_pages"), tables, strict=True):
            require_on_device(device, address, f"sm {name}")
        both = box.planes == 2
        k_dst, k_src = target + box.dst_first, source + box.src_first
        self.width = width_of(box.width(), k_dst, k_src)
        kernel = pages_kernel(box.row, both, index, threads, self.width)
        rows, across = tile(kernel)
        units = -(-len(box.src_pages) * box.page_rows // rows) * -(-box.row // across)
        if max(len(box.src_pages) * box.page_rows, units) >= ROWS_LIMIT:
            raise UsageError("more rows than one launch numbers", where="sm", got=f"{len(box.src_pages)} pages of "
                             f"{box.page_rows} rows", expected=f"fewer than {ROWS_LIMIT} rows")  # fmt: skip
        # As many as asked for; blocks without a unit of work would only be started.
        self.grid = min(quota, units)
        self.operations, self.link_bytes = 1, box.nbytes
        self.in_flight = min(rows, len(box.src_pages) * box.page_rows) * min(across, box.row) * box.planes
        self.flags = () if self.width == 16 else (NARROW,)
        self._launch: Launch = kernels.portable(
            kernel, self.grid, k_dst, k_dst + box.dst_plane, k_src, k_src + box.src_plane, *tables,
            *numbers(box, self.width),
        )  # fmt: skip
        how = "" if self.width == 16 else ", as 16 does not divide sizes and strides"
        self.kernel = (
            f"copy_pages {self.grid} x {threads}, rows of {box.row} B, {self.width}-byte accesses{how}, {index} tables"
        )

    def submit(self, stream: Stream) -> None:
        """Queue the launch. Raises CudaError when the driver refuses it."""
        stream.launch(self._launch)


def tile(kernel: GpuKernel) -> tuple[int, int]:
    """Return the (rows, bytes of a row) one program of ``copy_pages`` takes at a time."""
    constants = dict(kernel.constants)
    element = {"*i64": 8, "*i32": 4, "*i16": 2, "*i8": 1}[kernel.types[0]]
    return int(constants["ROWS"]), int(constants["WORDS"]) * element
