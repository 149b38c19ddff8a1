"""B in the far tier of a host: a scratch file read by O_DIRECT, or memory of this or another node read by memcpy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from kvbench.errors import Unavailable
from kvbench.memory.file import FILE_UNIT, ScratchFile, scratch_dir
from kvbench.memory.host import HostBuffer, host_buffer
from kvbench.memory.readers import probe_counter, read_bytes
from kvbench.memory.tiers import Tier, parse_pair, require_tier
from kvbench.systems.directkv.host_plan import Piece

Array = np.ndarray[Any, np.dtype[np.float32]]
WRITE_AT_ONCE = 8 << 20
LARGE = 2 << 20  # from here on a buffer is made of huge pages


class Keeper(Protocol):
    """Who keeps resources open: a bench's ``measure`` or an ExitStack (``enter_context``)."""

    def __call__(self, resource: AbstractContextManager[Any], /) -> Any: ...


def near_buffer(nbytes: int, node: int | None) -> HostBuffer:
    """Return ``nbytes`` (at least a page) of near memory, touched, in huge pages where it is large enough for them."""
    return host_buffer(max(nbytes, FILE_UNIT), "thp" if nbytes >= LARGE else "4k", node, kind=None)


def batches(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Yield the pieces, which lie behind each other, in parts of about 8 MiB: one call writes many tiny tiles."""
    begin = size = 0
    for at, piece in enumerate(pieces):
        if size and size + piece.stored > WRITE_AT_ONCE:
            yield pieces[begin:at]
            begin, size = at, 0
        size += piece.stored
    if begin < len(pieces):
        yield pieces[begin:]


class FarStore:
    """``pieces`` of B, one behind the other, in tier ``far``; reads are rows for :mod:`kernels.io_calls`.

    A file is read past the page cache; ``counter`` says whether the kernel counts what storage delivers. In memory the
    reads are memcpy and nothing counts them. Raises Unavailable where the tier, its space, or O_DIRECT is missing.
    """

    def __init__(
        self, far: Tier, pieces: Sequence[Piece], b: Array, enter: Keeper, scratch: Path | None, seed: int
    ) -> None:
        require_tier(far)
        self.tier = far
        self.flags: tuple[str, ...] = ()
        self.nbytes = sum(piece.stored for piece in pieces)
        self._file: ScratchFile | None = None
        self._memory: HostBuffer | None = None
        self._grown: list[int] = []
        self._before = 0
        if far.name == "file":
            size = -(-self.nbytes // FILE_UNIT) * FILE_UNIT
            file: ScratchFile = enter(ScratchFile(size, scratch_dir(scratch), seed))
            if file.direct_fd is None:
                raise Unavailable(
                    "no direct reads here", where=str(file.directory), got=file.direct.reason,
                    mend="give --scratch a directory on a disk",
                )  # fmt: skip
            self._file, self.transport = file, "batch"
            self.kernel = "pread+O_DIRECT"
            self.counter = probe_counter(file)
            if file.direct.works is None:
                self.flags = ("direct_unproven",)
        elif far.name == "dram":
            self._memory = enter(near_buffer(self.nbytes, far.node))
            self.transport, self.kernel = "staged", "memcpy"
            self.flags = tuple(self._memory.placement.flags)
        else:
            raise Unavailable("no host product reads from it", where=str(far), expected="file, dram or dram@NODE")
        for batch in batches(pieces):
            self._write(batch, b)
        if self._file is not None:
            os.fsync(self._file.fd)
            self._file.drop_cache()

    def _write(self, batch: Sequence[Piece], b: Array) -> None:
        first = batch[0].offset
        image = np.zeros(sum(piece.stored for piece in batch) // 4, np.float32)
        for piece in batch:
            whole = b[piece.k0 : piece.k1, piece.n0 : piece.n1]
            image[(piece.offset - first) // 4 :][: piece.elements] = whole.ravel(order="F")
        if self._memory is not None:
            self._memory.array(np.float32)[first // 4 :][: image.size] = image
            return
        assert self._file is not None
        view, done = image.view(np.uint8).data, 0
        while done < len(view):
            done += os.pwrite(self._file.fd, view[done:], first + done)

    @property
    def system(self) -> str | None:
        """The file system, None where there is no file."""
        return None if self._file is None else self._file.system.kind

    def row(self, piece: Piece, target: int) -> list[int]:
        """Return the row of the call that brings ``piece``, padding included, to address ``target``."""
        from kvbench.kernels.io_calls import call_row

        if self._memory is not None:
            return call_row("memcpy", target, self._memory.address + piece.offset, piece.stored, returns=target)
        assert self._file is not None
        assert self._file.direct_fd is not None
        return call_row("pread", self._file.direct_fd, target, piece.stored, piece.offset, returns=piece.stored)

    # -- what crossed the link -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the counter before a pass."""
        if self.counted:
            self._before = read_bytes().value or 0

    def end(self) -> None:
        """Keep what the counter grew by."""
        if self.counted:
            self._grown.append((read_bytes().value or 0) - self._before)

    def forget(self) -> None:
        """Count anew."""
        self._grown.clear()

    @property
    def counted(self) -> bool:
        """Whether the kernel's counter of this process tells what storage delivers."""
        return self._file is not None and self.counter.value is True

    @property
    def link(self) -> int | None:
        """Median bytes storage delivered to a pass; None where that is not measured: see ``link_reason``.

        The counter is the whole process's: a page of a library read meanwhile spoils one pass, not the median.
        """
        return round(median(self._grown)) if self._grown else None

    @property
    def link_reason(self) -> str:
        """Why ``link`` is None, else empty."""
        if self._file is None:
            return f"no counter of what crosses to {self.tier}"
        return self.counter.reason if not self.counted else ("" if self._grown else "no pass yet")


def tiers(pair: str) -> tuple[Tier, Tier]:
    """Return (near, far) of a host pair. Raises UsageError for what is no pair, Unavailable for a missing tier."""
    found = parse_pair(pair)
    for tier in (found.near, found.far):
        require_tier(tier)
    return found.near, found.far
