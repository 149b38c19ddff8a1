"""The fake device with the products on it: what compilers would make is named to the fake instead."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.memory.cuda import compiled, portable
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.portable import Image
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.gpu_gemm import Asked, GpuGemm
from tests.suites.gpu_rig import LadderFake, device


def image(lib: LadderFake, kernel: GpuKernel) -> Image:
    """Return an image that names ``kernel``; the fake is told how wide the elements are."""
    item = 2 if "*bf16" in kernel.types or kernel.form == "gluon" else 4
    lib._c.gemm_item(ctypes.c_uint64(item))
    lib._c.gemm_short(ctypes.c_uint64(0))
    return Image(b"FAKE " + kernel.entry.encode(), 0 if kernel.form == "cuda" else 2, kernel.shared)


def told(patch: pytest.MonkeyPatch, lib: LadderFake) -> None:
    """Let both ways to machine code end at the fake."""
    patch.setattr(compiled, "image_of", lambda kernel, arch: image(lib, kernel))
    patch.setattr(portable, "image_of", lambda kernel, arch: image(lib, kernel))


@dataclass(frozen=True, slots=True)
class Bed:
    """An opened fake device with a stream to queue on."""

    fake: LadderFake
    service: Service
    stream: Stream
    stack: ExitStack

    def make(self, asked: Asked) -> GpuGemm:
        return GpuGemm(self.service, self.stack.enter_context, asked, 5)

    def once(self, work: GpuGemm) -> float:
        """Queue one product, wait for its stream alone, return its error."""
        work.submit(self.stream)
        self.stream.synchronize()
        return work.check()


@contextmanager
def bed(patch: pytest.MonkeyPatch, **settings: int) -> Iterator[Bed]:
    """A fresh fake device; a test that ends well must have left nothing on it."""
    with device(**settings) as (lib, service), ExitStack() as stack:
        told(patch, lib)
        yield Bed(lib, service, stack.enter_context(Stream(service.device)), stack)
