"""What every host transport is given and owes: two pools, the fragments between them, and the proof they arrived.

Pools lie between guards; the target is filled with canaries first. After the timed region the moved fragments are
compared byte by byte with the payload of the source, and everything else (guards at both ends, pages between) with the
canaries, after one more pass into a freshly filled target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.memory import payload
from kvbench.model.layout import Moves
from kvbench.transport.paged_set import granule, granules

if TYPE_CHECKING:
    from kvbench.kernels.team import Team

Enter = Callable[[AbstractContextManager[Any]], Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rows = np.ndarray[Any, np.dtype[np.int64]]
Scalar = str | int | float | bool | None

GUARD = 4096  # bytes before and after a pool; a multiple of every alignment in use
CHUNK = 8 << 20
KEPT = 256  # latest passes whose time to submission is kept
SPOILT = 64  # fragments whose edges are made wrong before each pass
CANARY = 0xCA4A  # added to a payload's seed for what a target holds where nothing is moved


class End(Protocol):
    """A pool of ``nbytes`` between guards, first byte at ``base`` of its memory or file."""

    nbytes: int

    def image(self) -> Bytes:
        """Return the pool with its guards as it is, uint8 (GUARD + nbytes + GUARD,)."""
        ...

    def content(self, check: bool) -> Bytes:
        """Return what a source holds, shaped like :meth:`image`; ``check``: VerifyError if that is not its payload."""
        ...

    def refill(self, seed: int) -> None:
        """Fill pool and guards with the payload of ``seed``."""
        ...


class MemoryEnd:
    """A pool of ``nbytes`` in host memory; its guards start at ``start``, which is 2 x GUARD + nbytes long."""

    def __init__(self, start: int, nbytes: int, seed: int) -> None:
        self.start, self.nbytes, self.seed = start, nbytes, seed
        self.address = start + GUARD

    @staticmethod
    def needs(nbytes: int) -> int:
        """Return the bytes of the buffer of a pool of ``nbytes``."""
        return nbytes + 2 * GUARD

    def image(self) -> Bytes:
        """Return the live memory."""
        from kvbench.kernels.raw import bytes_at

        return bytes_at(self.start, self.needs(self.nbytes))

    def content(self, check: bool) -> Bytes:
        """Return the live memory; with ``check`` raise VerifyError unless it is the payload of ``seed``."""
        whole = self.image()
        for start in range(0, whole.size if check else 0, CHUNK):
            piece = whole[start : start + CHUNK]
            if not np.array_equal(piece, payload.expected(piece.size, self.seed, "bits", start)):
                raise VerifyError("the source does not hold its payload any more", where=f"bytes from {start} on")
        return whole

    def refill(self, seed: int) -> None:
        """Fill pool and guards with the payload of ``seed``."""
        payload.fill(self.image(), seed)
        self.seed = seed


@dataclass(frozen=True, slots=True)
class HostTransport:
    """One way to do a job. ``submit(reps)`` makes ``reps`` passes and returns their seconds, first call to completion.

    ``calls`` a pass; ``link`` bytes a pass that crossed to the far tier, or a function that counted them (None:
    unknown, ``link_reason`` says why). ``submitted``: seconds of the latest passes until their last call had returned,
    none where that is completion. ``flags`` and ``detail`` belong on the row.
    """

    name: str
    kernel: str
    submit: Callable[[int], float]
    calls: int
    link: int | Callable[[], int | None]
    link_reason: Callable[[], str] = str
    submitted: Callable[[], tuple[float, ...]] = tuple
    flags: tuple[str, ...] = ()
    detail: Mapping[str, Scalar] = field(default_factory=dict)


class HostJob:
    """``moves`` from ``source`` to ``target`` by ``team``; offsets are those inside the pools.

    ``enter`` keeps what a transport opens (staging buffers, mappings) until its caller is done with the job.

    Raises UsageError for no fragments and for a pool smaller than the fragments reach.
    """

    def __init__(self, moves: Moves, source: End, target: End, team: Team, enter: Enter, seed: int) -> None:
        if not len(moves):
            raise UsageError("nothing to move", where="host transport", got=f"{moves.skipped} skipped entries")
        for name, offsets, end in (("source", moves.src_offset, source), ("target", moves.dst_offset, target)):
            last = int((offsets + moves.bytes).max())
            if int(offsets.min()) < 0 or last > end.nbytes:
                raise UsageError(
                    "the buffer is smaller than the geometry", where=f"host transport, {name}",
                    got=f"{end.nbytes} bytes", expected=f"{last}, the end of the last fragment",
                )  # fmt: skip
        self.moves, self.source, self.target, self.team, self.enter = moves, source, target, team, enter
        self.total = moves.total
        self._canary = seed + CANARY
        target.refill(self._canary)
        self._wrong = self._edges()

    def memory_rows(self, source: int, target: int) -> Rows:
        """Return (source address, target address, bytes) of every fragment, given the pools' addresses."""
        moves = self.moves
        columns = (moves.src_offset + source, moves.dst_offset + target, moves.bytes)
        return np.ascontiguousarray(np.stack(columns, axis=1))

    def _edges(self) -> tuple[Rows, Bytes]:
        """Return places of the target image and the bytes that are wrong there: ends and middle of some fragments."""
        moves = self.moves
        if not isinstance(self.target, MemoryEnd):
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        some = np.unique(np.linspace(0, len(moves) - 1, min(SPOILT, len(moves))).astype(np.int64))
        inside = np.stack([np.zeros(len(some), np.int64), moves.bytes[some] // 2, moves.bytes[some] - 1])
        right = self.source.content(False)[(moves.src_offset[some] + inside).ravel() + GUARD]
        return (moves.dst_offset[some] + inside).ravel() + GUARD, ~right

    def spoil(self) -> None:
        """Make the target wrong at places of every part of it, so that a pass that moves nothing is found out.

        Memory only: rewriting parts of a file would put them into the page cache.
        """
        if isinstance(self.target, MemoryEnd):
            places, wrong = self._wrong
            self.target.image()[places] = wrong

    def verify(self, submit: Callable[[int], float]) -> None:
        """Raise VerifyError unless the last pass, and one more into a fresh target, left exactly what they should."""
        source = self.source.content(True)
        self._moved("a timed pass", source)
        self.target.refill(self._canary)
        self.spoil()
        submit(1)
        self._untouched(*self._moved("a pass into a fresh target", source))

    def arrived(self, submit: Callable[[int], float]) -> None:
        """Make one pass and raise VerifyError unless every fragment arrived: :meth:`verify` without the rest."""
        self.spoil()
        submit(1)
        self._moved("a pass", self.source.content(False))

    def _granules(self) -> tuple[int, Rows, Rows]:
        """Return the largest unit all fragments consist of, and its places in source and target image, in order."""
        unit = granule(self.moves, GUARD)
        origins, places = granules(self.moves, unit)
        return unit, origins + GUARD // unit, places + GUARD // unit

    def _moved(self, what: str, source: Bytes) -> tuple[Bytes, int, Rows]:
        unit, origins, places = self._granules()
        target = self.target.image()
        wanted = source[: len(source) // unit * unit].reshape(-1, unit)
        found = target[: len(target) // unit * unit].reshape(-1, unit)
        step = max(1, CHUNK // unit)
        for start in range(0, len(places), step):
            bad = wanted[origins[start : start + step]] != found[places[start : start + step]]
            if bad.any():
                first = start + int(np.flatnonzero(bad.any(axis=1))[0])
                at = int(places[first]) * unit - GUARD
                raise VerifyError(
                    "a fragment did not arrive", where=what,
                    got=f"other bytes at offset {at} of the target pool",
                    expected=f"those at {int(origins[first]) * unit - GUARD} of the source pool",
                )  # fmt: skip
        return target, unit, places

    def _untouched(self, target: Bytes, unit: int, places: Rows) -> None:
        keep = np.ones(len(target) // unit, bool)
        keep[places] = False
        step = max(1, CHUNK // unit // 8) * 8  # payload offsets are multiples of 8 bytes
        for start in range(0, len(keep), step):
            mask = keep[start : start + step]
            if not mask.any():
                continue
            piece = target[start * unit : (start + len(mask)) * unit]
            wanted = payload.expected(piece.size, self._canary, "bits", start * unit)
            bad = (piece.reshape(-1, unit) != wanted.reshape(-1, unit)).any(axis=1) & mask
            if bad.any():
                at = (start + int(np.flatnonzero(bad)[0])) * unit - GUARD
                where = (
                    "the guard before the pool" if at < 0 else f"offset {at} of a pool of {self.target.nbytes} bytes"
                )
                raise VerifyError("bytes beside the moved fragments were changed", where=where, got="other bytes")
