"""Writing, reading and reaching what is mapped: how a bench knows that a mapping is one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvbench.errors import VerifyError
from kvbench.memory import libc
from kvbench.memory.cuda.service import Service
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.driver import Driver
from kvbench.memory.vmm.host import can_touch
from kvbench.memory.vmm.protocol import Chunk, Reservation
from kvbench.memory.vmm.ranges import Ints


class Touch(Protocol):
    """The near side of a driver: who reads and writes what it maps."""

    def write(self, address: int, data: bytes) -> None:
        """Write ``data``; return when it is there."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Return what is there."""

    def reachable(self, address: int) -> bool:
        """Return whether the address can be used; never fails where it cannot."""

    def first(self, addresses: Sequence[int] | Ints, nbytes: int) -> None:
        """Touch ``nbytes`` at each address for the first time; return when it is done."""


class HostTouch:
    """Threads of the host: a first touch writes one byte in every base page."""

    def __init__(self) -> None:
        self._value = 0

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def reachable(self, address: int) -> bool:
        return can_touch(address)

    def first(self, addresses: Sequence[int] | Ints, nbytes: int) -> None:
        from kvbench.kernels.call_loop import touch_many

        table = np.asarray(addresses, np.int64)
        self._value = (self._value + 1) % 256
        touch_many(table.ctypes.data, len(table), nbytes, libc.base_page_bytes(), self._value)


class CudaTouch:
    """The GPU, by copies and memsets: a first touch writes one byte of each mapping and waits for all of them."""

    def __init__(self, vmm: CudaVmm, service: Service) -> None:
        self._vmm, self._service = vmm, service

    def write(self, address: int, data: bytes) -> None:
        self._service.write(address, np.frombuffer(data, np.uint8))

    def read(self, address: int, nbytes: int) -> bytes:
        return self._service.read(address, nbytes).tobytes()

    def reachable(self, address: int) -> bool:
        return self._vmm.is_mapped(address) is not False

    def first(self, addresses: Sequence[int] | Ints, nbytes: int) -> None:
        for address in np.asarray(addresses, np.int64).tolist():
            self._service.stream.set_bytes(address, 1, 1)
        self._service.stream.synchronize()


def check_mapped(
    vmm: Driver, touch: Touch, place: Reservation, offsets: Sequence[int], chunks: Sequence[Chunk]
) -> None:
    """Raise VerifyError unless ``offsets[i]`` of ``place`` is ``chunks[i]`` and nothing else.

    Each is written through its address, at both ends, and read through an alias mapped for it elsewhere.
    """
    size = max(chunk.nbytes for chunk in chunks)
    alias = vmm.reserve(size)
    try:
        words = [
            f"{place.serial}:{offset}:{chunk.serial}".encode() for offset, chunk in zip(offsets, chunks, strict=True)
        ]
        for offset, chunk, word in zip(offsets, chunks, words, strict=True):
            touch.write(place.address + offset, word)
            touch.write(place.address + offset + chunk.nbytes - len(word), word)
        for offset, chunk, word in zip(offsets, chunks, words, strict=True):
            vmm.map(alias, 0, chunk)
            vmm.set_access(alias, 0, chunk.nbytes)
            ends = [touch.read(alias.address + at, len(word)) for at in (0, chunk.nbytes - len(word))]
            vmm.unmap(alias, 0, chunk.nbytes)
            if ends != [word, word]:
                raise VerifyError(
                    "an address is not the chunk that was mapped there", where=f"vmm {vmm.name}, offset {offset}",
                    got=repr(ends[0][:40]), expected=repr(word),
                )  # fmt: skip
    finally:
        spans = vmm.book.mapped_spans(alias)
        if spans:
            vmm.unmap_many(alias, spans)
        vmm.free(alias)


def check_unreachable(touch: Touch, addresses: Sequence[int], where: str) -> None:
    """Raise VerifyError when one of ``addresses`` can still be used."""
    for address in addresses:
        if touch.reachable(address):
            raise VerifyError("memory can be used after it was given up", where=where, got=hex(address))
