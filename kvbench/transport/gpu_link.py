"""The lanes of a link between GPU memory and another tier, made of what a case asks: buffers, transport, direction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.memory import libc
from kvbench.memory.cuda.buffers import GpuBuffer, How, hbm, managed, pageable, pinned
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.memory.file import ScratchFile, scratch_dir
from kvbench.memory.region import Pages
from kvbench.transport import gpu_batch
from kvbench.transport.gpu_ce import CopyEngine
from kvbench.transport.gpu_direct import ReadInPlace, WriteInPlace
from kvbench.transport.gpu_lane import Lane, Way, copied, from_file, read_in_place, to_file, written_in_place
from kvbench.transport.gpu_paths import Far, makes_sense
from kvbench.transport.gpu_pieces import Mover, Pieces, scattered
from kvbench.transport.gpu_sm import ThreadCopy
from kvbench.transport.gpu_staged import StagedRead, StagedWrite

Enter = Callable[[AbstractContextManager[Any]], Any]
PEAK_BYTES = 256 << 20  # 0.7 ms at 375 GB/s: what a submission takes is 1 % of it even there
STAGES, STAGE_BYTES = 4, 4 << 20  # four reads of 4 MiB in flight


@dataclass(frozen=True, slots=True)
class Link:
    """What is asked: ``nbytes`` a direction between hbm and ``far`` by ``transport``, in ``pieces`` fragments.

    ``direction`` is fetch, evict or both. ``how``, ``pages`` and ``node`` say how page-locked memory is made; ``node``
    None is the GPU's. ``threads`` touch host pages first. ``scratch``: where the file lies.
    """

    far: Far
    transport: str
    direction: str
    nbytes: int
    pieces: int = 1
    how: How = "register"
    pages: Pages = "4k"
    node: int | None = None
    threads: int = 1
    seed: int = 1
    scratch: Path | None = None

    @property
    def ways(self) -> tuple[Way, ...]:
        if self.direction == "both":
            return ("fetch", "evict")
        return ("fetch",) if self.direction == "fetch" else ("evict",)


def peak_of(link: Link) -> Link | None:
    """Return the link that is taken beside ``link`` as its measured ceiling; None where ``link`` is that one itself.

    One copy of PEAK_BYTES in one piece by the copy engine, page-locked memory on the far side: the largest fragment of
    the same directions. For a file there is none of the same kind; what bounds that is the file alone.
    """
    contiguous = link.far == "pinned" and link.transport == "ce" and link.pieces == 1
    if link.far == "file" or (contiguous and link.nbytes >= PEAK_BYTES):
        return None
    return replace(link, far="pinned", transport="ce", nbytes=PEAK_BYTES, pieces=1, seed=link.seed + 1000)


def open_lanes(service: Service, kernels: Kernels, enter: Enter, link: Link) -> list[Lane]:
    """Return the lanes of ``link``, one a direction, their targets spoilt.

    Raises UsageError for a link that makes no sense, Unavailable where memory, file or the batched call cannot be had,
    VerifyError when a buffer is not what it should be, CudaError when the driver refuses.
    """
    if not makes_sense(link.far, link.transport, link.direction, link.nbytes, link.pieces):
        raise UsageError(
            "no such link", where="link", got=f"{link.far} {link.transport} {link.direction} pieces={link.pieces}"
        )
    if link.transport == "batch":
        gpu_batch.probe(service)
    opener = _Opener(service, kernels, enter, link)
    return [opener.lane(way, link.seed + 17 * i) for i, way in enumerate(link.ways)]


@dataclass(frozen=True, slots=True)
class _Opener:
    service: Service
    kernels: Kernels
    enter: Enter
    link: Link

    def lane(self, way: Way, seed: int) -> Lane:
        link, service = self.link, self.service
        if link.transport == "staged":
            return self._staged(way, seed)
        if link.transport == "direct":
            grid = self._grid()
            far = self._far(seed)
            if way == "evict":
                mover: Mover = WriteInPlace(self.kernels, _device(far), link.nbytes, grid)
                return self._checked(written_in_place(mover, far), far)
            sums = self.enter(hbm(service, 8 * grid, seed=seed))
            mover = ReadInPlace(self.kernels, _device(sums), _device(far), link.nbytes, grid)
            return self._checked(read_in_place(service, mover, far, sums), far)
        near, far = self.enter(hbm(service, link.nbytes, seed=seed)), self._far(seed + 1)
        source, target = (far, near) if way == "fetch" else (near, far)
        order = scattered(link.pieces, seed)
        if link.transport == "sm":
            mover = ThreadCopy(self.kernels, _device(target), _device(source), link.nbytes, self._grid())
        else:
            pieces = Pieces(target.copy_address, source.copy_address, link.nbytes // link.pieces, order)
            mover = (CopyEngine if link.transport == "ce" else gpu_batch.BatchCopy)(service.device, pieces)
        return self._checked(copied(way, service, mover, source, target, order), far)

    def _grid(self) -> int:
        # One block a multiprocessor; half of them each when two run at a time, else the second waits for the first.
        return max(1, self.service.device.facts.sms // len(self.link.ways))

    def _far(self, seed: int) -> GpuBuffer:
        link, service = self.link, self.service
        placed: dict[str, Any] = {"node": link.node, "threads": link.threads, "seed": seed}
        if link.far == "pinned":
            return self.enter(pinned(service, link.nbytes, how=link.how, pages=link.pages, **placed))  # type: ignore[no-any-return]
        if link.far == "pageable":
            return self.enter(pageable(service, link.nbytes, pages=link.pages, **placed))  # type: ignore[no-any-return]
        return self.enter(managed(service, link.nbytes, seed=seed))  # type: ignore[no-any-return]

    def _staged(self, way: Way, seed: int) -> Lane:
        link, service = self.link, self.service
        evict = way == "evict"
        file = self.enter(ScratchFile(link.nbytes, scratch_dir(link.scratch), seed + 1 if evict else seed))
        near = self.enter(hbm(service, link.nbytes, seed=seed))
        stages = [
            self.enter(pinned(service, STAGE_BYTES, pages=link.pages, node=link.node, seed=seed + 2 + i))
            for i in range(min(STAGES, -(-link.nbytes // STAGE_BYTES)))
        ]
        if evict:
            write = self.enter(StagedWrite(service.device, file, near.copy_address, stages))
            return replace(to_file(write, near, file), flags=write.flags)
        read = self.enter(StagedRead(service.device, file, near.copy_address, stages))
        flags = read.flags if read.direct else ("page_cache_dropped", *read.flags)
        return replace(from_file(service, read, near, seed), prepare=read.prepare, flags=flags)

    def _checked(self, lane: Lane, far: GpuBuffer) -> Lane:
        """Raise VerifyError unless the tiers the driver named are those of the direction (trap T38)."""
        ends = ("hbm", self.link.far) if lane.way == "evict" else (self.link.far, "hbm")
        for found, wanted in zip((lane.source_tier, lane.target_tier), ends, strict=True):
            if found is not None and found != wanted:
                raise VerifyError("the direction is another one", where=f"link {lane.way}", got=found, expected=wanted)
        prepare = _to_host(far) if far.tier == "managed" else None
        return replace(lane, prepare=prepare, flags=far.flags, placement=far.placement)


def _device(buffer: GpuBuffer) -> int:
    address = buffer.device_address
    if address is None:
        raise UsageError("the device has no address for this memory", where="link", got=buffer.tier)
    return address


def _to_host(buffer: GpuBuffer) -> Callable[[], None]:
    """Return what brings the pages of managed memory back to the host: a read and a write of one byte a page."""
    view = buffer.array()[:: libc.base_page_bytes()]

    def touch() -> None:
        np.bitwise_xor(view, np.uint8(0), out=view)

    return touch
