"""The fake device with ``copy_pages`` on it: what Triton would compile is told to the fake instead."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.memory.cuda import portable
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.portable import Image
from kvbench.memory.cuda.service import Service
from kvbench.model.geometry import KVGeometry
from kvbench.model.layout import Moves, Pool, moves
from kvbench.transport.gpu_lane import Lane
from kvbench.transport.paged import open_paged
from tests.suites.gpu_rig import IMAGE, LadderFake, device

WIDTHS = {"*i64": 8, "*i16": 2, "*i8": 1}


def tell(lib: LadderFake, kernel: GpuKernel) -> Image:
    """Let the fake run ``kernel`` as it is compiled, and return an image that names it."""
    constants = dict(kernel.constants)
    width = WIDTHS.get(kernel.types[0], 4 * int(constants["PER"]))
    index = 8 if kernel.types[4] == "*i64" else 4
    lib._c.ladder_pages(*(ctypes.c_uint64(n) for n in (width, index, int(constants["BOTH"]))))
    return Image(b"FAKE copy_pages", 2, 0)


@dataclass(frozen=True, slots=True)
class Paged:
    """An opened fake device; ``stack`` closes what :meth:`open` opens."""

    fake: LadderFake
    service: Service
    kernels: Kernels
    stack: ExitStack

    def open(self, transport: str, direction: str, shape: Shape, **how: object) -> Lane:
        """Return the lane of ``shape`` by ``transport``."""
        return open_paged(
            transport, self.service, self.kernels, shape.moves(direction), direction, shape.near, shape.far,
            self.stack.enter_context, 5, **how,  # type: ignore[arg-type]
        )  # fmt: skip

    def make(self, lane: Lane) -> None:
        """One pass of ``lane``, waited for."""
        lane.mover.submit(self.service.stream)
        self.service.stream.synchronize()


@dataclass(frozen=True, slots=True)
class Shape:
    """Which pages lie where: ``near`` in the GPU, ``far`` in host memory, entry i pairs near[i] with far[i]."""

    near: Pool
    far: Pool
    near_pages: tuple[int, ...]
    far_pages: tuple[int, ...]

    def moves(self, direction: str) -> Moves:
        """Return the fragments of ``direction``."""
        near, far = (self.near, self.near_pages), (self.far, self.far_pages)
        (a, frm), (b, to) = (far, near) if direction == "fetch" else (near, far)
        return moves(a, b, frm, to)


def shape(layout: str = "page_first", *, elements: int = 2, head: int = 16, planes: int = 2, tokens: int = 3) -> Shape:
    """A small cache of three layers and two heads; five of seven pages move, in no order."""
    geometry = KVGeometry("test", 3, 2, head // elements, planes, elements, "")
    near, far = Pool(geometry, "layer_first", tokens, 7), Pool(geometry, layout, tokens, 8)
    return Shape(near, far, (6, 0, 3, -1, 1, 5), (2, 7, 0, 4, 1, 6))


@contextmanager
def paged(patch: pytest.MonkeyPatch, **settings: int) -> Iterator[Paged]:
    """A fresh fake device; a test that ends well must have left nothing on it."""
    with device(**settings) as (lib, service), ExitStack() as stack:
        patch.setattr(portable, "image_of", lambda kernel, arch: tell(lib, kernel))
        yield Paged(lib, service, Kernels(service.device, lambda source, arch: IMAGE, stack), stack)


def image_of_target(lane: Lane) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return what the target of ``lane`` holds, guards included."""
    check = lane.check
    return check._part(0, check._target.nbytes)  # type: ignore[attr-defined,no-any-return]
