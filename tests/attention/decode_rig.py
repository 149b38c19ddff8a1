"""The fake device with the decode kernels on it: their references in numpy, run where a launch is queued."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from kvbench.attention.shapes import Shape
from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.memory.cuda import portable
from kvbench.memory.cuda.device import Device, Launch, Module, Stream
from tests.fake_cuda import Fake


class Told(Launch):
    """A launch of a kernel that the fake does not have: nothing on the device, its reference on the host."""

    def __init__(self, function: Any, kernel: GpuKernel, grid: int, values: tuple[Any, ...]) -> None:
        super().__init__(function, 1, 1, [])
        self.kernel, self.programs, self.values = kernel, grid, values


class Decoder:
    """Runs told launches on ``fake``. ``lost``: tokens of each sequence that are forgotten, for tests that notice."""

    def __init__(self, fake: Fake) -> None:
        self.fake, self.lost, self.ran = fake, 0, list[str]()

    def run(self, launch: Told) -> None:
        constants = dict(launch.kernel.constants)
        self.ran.append(launch.kernel.entry)
        (self._split if launch.kernel.entry == "decode_split" else self._merge)(launch, constants)

    def _split(self, launch: Told, constants: dict[str, Any]) -> None:
        (part, logs, q, k, v, table, lengths, scale, kv_heads, splits, chunk, row, block16) = launch.values
        group, dim, page = (int(constants[n]) for n in ("GROUP", "DIM", "PAGE"))
        batch = launch.programs // (kv_heads * splits)
        assert launch.programs == batch * kv_heads * splits
        dtype = launch.kernel.types[2].removeprefix("*")
        shape = Shape(dtype, group * kv_heads, kv_heads, dim, page)  # type: ignore[arg-type]
        size = shape.array_dtype.itemsize
        assert block16 * 16 == shape.page_bytes
        tables = self._read(table, (batch, row), np.int32)
        counts = self._read(lengths, (batch,), np.int32) - np.int32(self.lost)
        blocks = int(tables.max()) + 1

        def numbers(at: int, *of: int) -> Any:
            return shape.floats(self._read(at, of, shape.array_dtype))

        assert chunk * size * dim % 16 == 0
        caches = [numbers(at, blocks, kv_heads, page, dim) for at in (k, v)]
        queries = numbers(q, batch, kv_heads, group, dim)
        reference: Any = launch.kernel.reference
        parts, lses = reference(queries, *caches, tables, counts, scale, splits, chunk)
        self._write(part, parts)
        self._write(logs, lses)

    def _merge(self, launch: Told, constants: dict[str, Any]) -> None:
        out, lse, part, logs, splits = launch.values
        group, dim = int(constants["GROUP"]), int(constants["DIM"])
        heads = (1, launch.programs // group, splits, group)
        reference: Any = launch.kernel.reference
        merged, log = reference(self._read(part, (*heads, dim), np.float32), self._read(logs, heads, np.float32))
        self._write(out, merged)
        self._write(lse, log)

    def _read(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.fake.peek(address, nbytes).view(dtype).reshape(shape)

    def _write(self, address: int, values: Any) -> None:
        self.fake.poke(address, np.ascontiguousarray(values, np.float32).tobytes())


def decoder(patch: pytest.MonkeyPatch, fake: Fake) -> Decoder:
    """Let launches of Triton kernels run their references on ``fake``."""
    made, queue = Decoder(fake), Stream.launch

    def told(
        device: Device, enter: Callable[[AbstractContextManager[Any]], Any], kernel: GpuKernel, grid: int, *values: Any
    ) -> Told:
        kernel.check(*values)
        module = enter(Module(device, b"FAKE kvbench_empty"))
        return Told(module.function("kvbench_empty"), kernel, grid, values)

    def launch(self: Stream, launch: Launch) -> None:
        if isinstance(launch, Told):
            made.run(launch)
        queue(self, launch)

    patch.setattr(portable, "launch", told)
    patch.setattr(Stream, "launch", launch)
    return made
