"""One direction between two GPU tiers: its buffers, its mover, and the proof that every byte arrived."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvbench.errors import VerifyError
from kvbench.memory import payload
from kvbench.memory.cuda.buffers import GpuBuffer
from kvbench.memory.cuda.kernels import payload_sum, ramp
from kvbench.memory.cuda.service import WINDOW, Service, windows
from kvbench.memory.file import ScratchFile
from kvbench.memory.host import Placement
from kvbench.transport.gpu_direct import FIRST, STEP
from kvbench.transport.gpu_pieces import Mover, Words

Way = Literal["fetch", "evict"]
CHUNK = 8 << 20  # a multiple of 8: bytes of host memory looked at in one go
OTHER = 0x5EED  # added to a payload's seed for what a target holds before the work


@dataclass(frozen=True, slots=True)
class Lane:
    """``mover`` brings bytes one ``way``. ``check`` raises VerifyError unless all arrived; ``spoil`` makes it fail.

    ``source_tier`` and ``target_tier`` are what the driver says of the addresses used, None where there is no buffer.
    ``prepare``: to be done before each pass, outside its window, or the pass has nothing to move; None: nothing.
    ``flags`` and ``placement`` are those of the host buffer, None where no host memory of this process takes part.
    """

    way: Way
    mover: Mover
    check: Callable[[], None]
    spoil: Callable[[], None]
    source_tier: str | None
    target_tier: str | None
    prepare: Callable[[], None] | None = None
    flags: tuple[str, ...] = ()
    placement: Placement | None = None


def copied(way: Way, service: Service, mover: Mover, source: GpuBuffer, target: GpuBuffer, order: Words) -> Lane:
    """Return the lane of a copy of ``source`` into ``target``, slot ``order[i]`` to slot i; the target is spoilt."""

    def check() -> None:
        if len(order) == 1:
            same_content(source, target, way)
            return
        source.verify()
        size = target.nbytes // len(order)
        for slot, origin in enumerate(order.tolist()):
            found = service.checksum(target.copy_address + slot * size, size)
            if found != payload.checksum(payload.expected(size, source.seed, source.kind, origin * size)):
                raise VerifyError("a fragment did not arrive", where=f"link {way}", got=f"other bytes in slot {slot}")

    def spoil() -> None:
        target.refill(source.seed + OTHER)

    spoil()
    return Lane(way, mover, check, spoil, source.tier, target.tier)


def same_content(source: GpuBuffer, target: GpuBuffer, where: str) -> None:
    """Raise VerifyError unless both hold the source's payload: all of it by the checksum of the device, which reads
    page-locked memory by its alias, and the places :func:`windows` names by the host where it can read them."""
    source.verify()
    wanted, found = source.checksum(), target.checksum()
    if wanted != found:
        raise VerifyError(
            "the payload did not arrive", where=f"link {where}", got=f"checksum {found:016x}", expected=f"{wanted:016x}"
        )
    if target.host_address is None:
        return
    view = target.array()
    for offset in windows(target.nbytes):
        part = view[offset : offset + WINDOW]
        if not np.array_equal(part, payload.expected(part.size, source.seed, source.kind, offset)):
            raise VerifyError("the host reads something else", where=f"link {where}", got=f"at byte {offset}")


def from_file(service: Service, mover: Mover, target: GpuBuffer, seed: int) -> Lane:
    """Return the lane of a file with the payload of ``seed`` into GPU memory, compared whole."""

    def check() -> None:
        for start in range(0, target.nbytes, CHUNK):
            size = min(CHUNK, target.nbytes - start)
            found = service.checksum(target.copy_address + start, size)
            if found != payload.checksum(payload.expected(size, seed, "bits", start)):
                raise VerifyError("the file did not arrive", where="link fetch", got=f"other bytes from {start} on")

    def spoil() -> None:
        target.refill(seed + OTHER)

    spoil()
    return Lane("fetch", mover, check, spoil, "file", target.tier)


def to_file(mover: Mover, source: GpuBuffer, file: ScratchFile) -> Lane:
    """Return the lane of GPU memory into ``file``, which is read back whole, from storage where its cache can go."""

    def check() -> None:
        source.verify()
        file.drop_cache()
        for start in range(0, file.nbytes, CHUNK):
            size = min(CHUNK, file.nbytes - start)
            found = np.frombuffer(os.pread(file.fd, size, start), np.uint8)
            if not np.array_equal(found, payload.expected(size, source.seed, source.kind, start)):
                raise VerifyError(
                    "the file holds something else", where="link evict", got=f"other bytes from {start} on"
                )

    def spoil() -> None:
        part = np.empty(min(CHUNK, file.nbytes), np.uint8)
        for start in range(0, file.nbytes, CHUNK):
            piece = part[: min(CHUNK, file.nbytes - start)]
            payload.fill(piece, source.seed + OTHER, source.kind, start)
            if os.pwrite(file.fd, piece.data, start) != piece.size:
                raise VerifyError("a write ended early", where="link evict", got=f"at byte {start}")
        os.fsync(file.fd)

    spoil()
    return Lane("evict", mover, check, spoil, source.tier, "file")


def read_in_place(service: Service, mover: Mover, source: GpuBuffer, sums: GpuBuffer) -> Lane:
    """Return the lane of a read whose only trace are the sums of its blocks, held against the payload's own sum."""
    wanted = payload_sum(source.nbytes, source.seed, source.kind)

    def check() -> None:
        source.verify()
        parts = service.read(sums.copy_address, sums.nbytes).view(np.uint64)
        found = int(parts.sum(dtype=np.uint64))
        if found != wanted:
            raise VerifyError(
                "not every byte was read", where="link fetch", got=f"sum {found:016x}", expected=f"{wanted:016x}"
            )

    def spoil() -> None:
        sums.refill(sums.seed + OTHER)

    spoil()
    return Lane("fetch", mover, check, spoil, source.tier, None)


def written_in_place(mover: Mover, target: GpuBuffer) -> Lane:
    """Return the lane of a write by the GPU, read whole by the host."""

    def check() -> None:
        view = target.array()
        for start in range(0, target.nbytes, CHUNK):
            part = view[start : start + CHUNK]
            if not np.array_equal(part, ramp(start, part.size, FIRST, STEP)):
                raise VerifyError("not every byte was written", where="link evict", got=f"others from byte {start} on")

    def spoil() -> None:
        target.refill(target.seed + OTHER)

    spoil()
    return Lane("evict", mover, check, spoil, None, target.tier)
