"""What both drivers share: check and claim, wait for fences, make the calls, settle; and fences of threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.vmm.book import Book, Claim
from kvbench.memory.vmm.protocol import Chunk, Counters, Fence, Reservation, Span, check_fence
from kvbench.memory.vmm.ranges import Ints

if TYPE_CHECKING:
    from kvbench.kernels.call_loop import Failure, Runner

PIECE = 256  # ranges unmapped at a time on the way out: their tables are too small to need a mapping themselves
WAIT_S = 60.0  # a fence that does not come within this is lost work, and waiting on would hang the program


class ThreadFence:
    """Open until ``readers`` threads have called :meth:`leave`."""

    def __init__(self, readers: int = 1) -> None:
        if readers < 1:
            raise UsageError("a fence needs a reader", where="vmm fence", got=readers)
        self._left = readers
        self._lock = threading.Lock()
        self._over = threading.Event()

    def leave(self) -> None:
        """One reader has read the last byte. Raises UsageError when more leave than came."""
        with self._lock:
            if self._left == 0:
                raise UsageError("more readers leave than came", where="vmm fence")
            self._left -= 1
            if self._left == 0:
                self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Return once all have left. Raises KvbenchError after a minute."""
        if not self._over.wait(WAIT_S):
            raise KvbenchError(
                "readers do not come to an end", where="vmm fence", got=f"{self._left} after {WAIT_S:g} s",
                mend="call leave() when a reader is done",
            )  # fmt: skip

    def close(self) -> None:
        """Nothing to give back."""


class Driver(ABC):
    """A :class:`kvbench.memory.vmm.protocol.Vmm`; the subclasses make the calls."""

    name = ""

    def __init__(self, granularity: int, runner: Runner | None) -> None:
        if runner is None:
            from kvbench.kernels.call_loop import alone

            runner = alone
        self.runner: Runner = runner
        self.book = Book(granularity)
        self._closed = False
        self._fences: dict[int, list[Fence]] = {}
        self._fence_lock = threading.Lock()

    # -- what a subclass does ------------------------------------------------------------------------------------

    @abstractmethod
    def _reserve(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of free addresses. Raises Exhausted."""

    @abstractmethod
    def _free(self, reservation: Reservation) -> None:
        """Give addresses back. Raises VmmError."""

    @abstractmethod
    def _create(self, nbytes: int, count: int) -> list[int]:
        """Return handles of ``count`` chunks, or raise with none made."""

    @abstractmethod
    def _release(self, chunks: Sequence[Chunk]) -> tuple[Failure, bool] | None:
        """Give chunks back in order; return the failure, if any, and whether the failed one is lost."""

    @abstractmethod
    def _map(self, claim: Claim) -> tuple[Failure, list[int]] | None:
        """Map; on a failure unmap what was mapped and return it with the places that could not be unmapped."""

    @abstractmethod
    def _access(self, claim: Claim) -> Failure | None:
        """Make accessible; on a failure take it from what had none before."""

    @abstractmethod
    def _unmap(self, claim: Claim) -> tuple[Failure, list[bool | None]] | None:
        """Unmap in order; on a failure return it and, per part, whether it is unmapped; None: that is not known."""

    @abstractmethod
    def _error(self, call: str, failure: Failure) -> KvbenchError:
        """Return the exception for a failure of ``call``."""

    @abstractmethod
    def _fds(self) -> int:
        """Return the descriptors held."""

    @abstractmethod
    def _end(self) -> None:
        """Give back what the driver itself holds."""

    # -- addresses -----------------------------------------------------------------------------------------------

    def granularity(self) -> int:
        """Return the bytes everything is a multiple of."""
        return self.book.granularity

    def reserve(self, nbytes: int) -> Reservation:
        """Take addresses. Raises UsageError off the granularity, Exhausted without room."""
        self._check_open()
        self.book.check_size(nbytes, "a reservation")
        address = self._reserve(nbytes)
        try:
            return self.book.add_space(address, nbytes)
        except MemoryError as error:
            self._free(Reservation(0, address, nbytes))
            raise UsageError(
                "a reservation beyond what can be kept track of", where="vmm reserve", got=nbytes
            ) from error

    def free(self, reservation: Reservation) -> None:
        """Give addresses back after their fences. Raises UsageError while something is mapped there."""
        self.book.check_space(reservation)
        self._quiesce(reservation)
        self.book.drop_space(reservation)
        try:
            self._free(reservation)
        except KvbenchError:
            self.book.lost += 1
            raise

    # -- chunks --------------------------------------------------------------------------------------------------

    def create(self, nbytes: int) -> Chunk:
        """Return a new chunk. Raises UsageError off the granularity, Exhausted without room."""
        return self.create_many(nbytes, 1)[0]

    def create_many(self, nbytes: int, count: int) -> list[Chunk]:
        """Return ``count`` new chunks, or none: then as :meth:`create`."""
        self._check_open()
        self.book.check_size(nbytes, "a chunk")
        self.book.check_count(count, "create")
        return self.book.add_chunks(nbytes, self._create(nbytes, count))

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back. Raises UsageError while it is mapped, or when it is gone already."""
        self.release_many([chunk])

    def release_many(self, chunks: Sequence[Chunk]) -> None:
        """Give chunks back in order; those after a failure stay. Raises as :meth:`release`, and VmmError."""
        self.book.check_count(len(chunks), "release")
        self.book.drop_chunks(chunks)
        found = self._release(chunks)
        if found is None:
            return
        failure, lost = found
        kept = [chunk for chunk, made in zip(chunks, failure.made.tolist(), strict=True) if not made]
        if lost:
            self.book.lost += 1
            kept = [chunk for chunk in kept if chunk is not chunks[failure.index]]
        self.book.restore_chunks(kept)
        raise self._error("release", failure)

    def mapped_count(self, chunk: Chunk) -> int:
        """Return at how many places a live chunk is mapped."""
        return self.book.mapped_count(chunk)

    # -- mappings ------------------------------------------------------------------------------------------------

    def map(self, reservation: Reservation, offset: int, chunk: Chunk) -> None:
        """Map one chunk; see :meth:`map_many`."""
        self.map_many(reservation, [offset], [chunk])

    def map_many(self, reservation: Reservation, offsets: Sequence[int] | Ints, chunks: Sequence[Chunk]) -> None:
        """Map ``chunks[i]`` at ``offsets[i]``; what is mapped has no access yet.

        Raises UsageError for a place taken, a chunk gone, or sizes off the granularity; VmmError naming call and index
        when a call fails, with every map of this call undone.
        """
        claim = self.book.claim_map(reservation, offsets, chunks)
        found = self._map(claim)
        if found is None:
            self.book.commit_map(claim)
            return
        failure, stuck = found
        for index in range(len(chunks)):
            if index not in stuck:
                self.book.abandon_map(claim.part(index, index + 1))
        self.book.lost += len(stuck)
        raise self._error("map", failure)

    def set_access(self, reservation: Reservation, offset: int, nbytes: int) -> None:
        """Make one range accessible; see :meth:`set_access_many`."""
        self.set_access_many(reservation, [(offset, nbytes)])

    def set_access_many(self, reservation: Reservation, spans: Sequence[Span]) -> None:
        """Make ranges of whole mappings readable and writable.

        Raises UsageError for a range that is none, VmmError when a call fails: then what had no access has none.
        """
        claim = self.book.claim_spans(reservation, spans, "set_access", unmap=False)
        failure = self._access(claim)
        if failure is not None:
            raise self._error("set_access", failure)
        self.book.commit_access(claim)

    def unmap(self, reservation: Reservation, offset: int, nbytes: int) -> None:
        """Unmap one range; see :meth:`unmap_many`."""
        self.unmap_many(reservation, [(offset, nbytes)])

    def unmap_many(self, reservation: Reservation, spans: Sequence[Span]) -> None:
        """Unmap ranges of whole mappings in order, after every fence of the reservation.

        Raises UsageError for a range that is none, VmmError when a call fails: what came before it stays unmapped.
        """
        claim = self.book.claim_spans(reservation, spans, "unmap", unmap=True)
        try:
            self._quiesce(reservation)
        except BaseException:
            self.book.restore_unmap(claim)
            raise
        found = self._unmap(claim)
        if found is None:
            self.book.commit_unmap(claim)
            return
        failure, gone = found
        for index, unmapped in enumerate(gone):
            part = claim.part(index, index + 1)
            if unmapped is None:
                self.book.lost += 1
            elif unmapped:
                self.book.commit_unmap(part)
            else:
                self.book.restore_unmap(part)
        raise self._error("unmap", failure)

    # -- fences --------------------------------------------------------------------------------------------------

    def guard(self, reservation: Reservation, fence: Fence) -> None:
        """Hand over ``fence``: unmap and free of ``reservation`` wait for it, and then close it.

        Raises UsageError for what is no fence.
        """
        check_fence(fence)
        self.book.check_space(reservation)
        with self._fence_lock:
            held = self._fences.setdefault(reservation.serial, [])
            over = [f for f in held if f.done()]
            self._fences[reservation.serial] = [*(f for f in held if f not in over), fence]
        for old in over:
            old.close()

    def _quiesce(self, reservation: Reservation) -> None:
        """Wait for the fences of a reservation. One that raises stays, so nothing is unmapped by trying again."""
        while True:
            with self._fence_lock:
                held = self._fences.get(reservation.serial)
                if not held:
                    self._fences.pop(reservation.serial, None)
                    return
                fence = held[0]
            _fenced(fence.wait)
            with self._fence_lock:
                mine = fence in held
                if mine:
                    held.remove(fence)
            if mine:
                _fenced(fence.close)

    # -- the end -------------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Return what is alive."""
        return self.book.counters(self._fds())

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the driver is closed", where=f"vmm {self.name}")

    def close(self) -> None:
        """Give back what the driver itself holds. Raises UsageError, naming it, while anything is alive."""
        if self._closed:
            return
        alive = self.counters()
        if alive.reservations or alive.chunks:
            raise UsageError(
                "closed with live objects", where=f"vmm {self.name}",
                got=f"{alive.reservations} reservations, {alive.chunks} chunks, {alive.mappings} mappings",
                mend="free and release them first",
            )  # fmt: skip
        self._closed = True
        self._end()

    def destroy(self) -> Counters:
        """Give everything back, whatever is alive, behind its fences; return what was alive.

        What the system refuses to take back is counted as lost; the first such refusal, or fence that fails, is raised
        at the end, when all else is given back.
        """
        alive = self.counters()
        if self._closed:
            return alive
        self._make_room()
        refused: list[KvbenchError] = []
        reservations, chunks = self.book.alive()
        # Without room for the bookkeeping of one, others come first: each that goes makes room. What then still cannot
        # be done raises MemoryError with the driver open, to be destroyed again.
        later = [reservation for reservation in reservations if not self._give_back(reservation, refused)]
        for reservation in later:
            if not self._give_back(reservation, refused):
                raise MemoryError(f"vmm {self.name}: no room to give back {reservation.nbytes} bytes of addresses")
        for chunk in chunks:
            try:
                self.release(chunk)
            except KvbenchError as error:
                refused.append(error)
        self._closed = True
        self._end()
        if refused:
            raise refused[0]
        return alive

    def _make_room(self) -> None:  # noqa: B027 - a driver that keeps nothing for that has nothing to do
        """Give up, before everything else, what is only held to be given up."""

    def _give_back(self, reservation: Reservation, refused: list[KvbenchError]) -> bool:
        """Unmap and free a reservation; add what is refused. Return False where there was no memory to do it."""
        try:
            self._quiesce(reservation)
            spans = self.book.mapped_spans(reservation)
            for first in range(0, len(spans), PIECE):
                self.unmap_many(reservation, spans[first : first + PIECE])
            self.free(reservation)
        except KvbenchError as error:
            refused.append(error)
        except MemoryError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give everything back, live or not: :meth:`close` is for a caller who says that nothing is."""
        try:
            self.destroy()
        except KvbenchError as later:
            if error is None:
                raise
            error.add_note(f"and giving memory back failed: {later}")


def _fenced(step: Callable[[], None]) -> None:
    """Take a step of a fence, which is the caller's code: whatever it raises is an error of that fence."""
    try:
        step()
    except KvbenchError:
        raise
    except Exception as error:
        raise KvbenchError("a fence failed", where="vmm fence", got=f"{type(error).__name__}: {error}") from error


def rows(count: int, *columns: Ints | int) -> Ints:
    """Return ``count`` rows of six arguments, those not given 0."""
    if count == 1:
        given = [int(column[0] if isinstance(column, np.ndarray) else column) for column in columns]
        return np.array([given + [0] * (6 - len(given))], np.int64)
    table = np.zeros((count, 6), np.int64)
    for place, column in enumerate(columns):
        table[:, place] = column
    return table
