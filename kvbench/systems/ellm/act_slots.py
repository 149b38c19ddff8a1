"""Activation slots: variable ranges of one address range, best-fit with coalescing (eLLM, section 2.1.2).

A freed slot keeps its mappings: its pages are mapped-available and a later slot on the same addresses needs no call.
Bookkeeping only; a page is one chunk's worth of addresses.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.errors import KvbenchError, UsageError
from kvbench.systems.ellm.best_fit import SizeIndex
from kvbench.systems.ellm.chunks import PoolExhausted

UNMAPPED, MAPPED, STALE = 0, 1, 2
_RANGES = [re.compile(bytes((state,)) + b"+") for state in (UNMAPPED, MAPPED, STALE)]
Range = tuple[int, int]  # (first page, pages)
_pools = itertools.count(1)  # of the process: a slot of another pool is never taken for one of this


@dataclass(frozen=True, slots=True)
class ActSlot:
    """A live activation tensor: ``pages`` pages from page ``first``; ``serial`` is never used again. ``pool``: the
    number of the range it is one of."""

    serial: int
    first: int
    pages: int
    pool: int


class ActSlots:
    """The pages of the activation range. ``chunk[page]`` is mapped there where the page is MAPPED.

    STALE pages still carry an old mapping of a chunk that has gone elsewhere; it has to be unmapped before the page is
    used again. Raises UsageError for a range without a page.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise UsageError("no addresses for activations", where="ActSlots", got=pages, expected="1 page or more")
        self.pages, self._pool = pages, next(_pools)
        self.state = bytearray(pages)
        self.chunk = [-1] * pages
        self.live: dict[int, ActSlot] = {}  # by first page
        self._serial = 0
        # Free runs are maximal: no two touch. Each is kept by its first page (length, mapped pages) and by its end.
        self._runs: dict[int, Range] = {}
        self._starts: dict[int, int] = {}
        self._mapped_runs: dict[int, None] = {}  # first pages of runs with mapped pages, longest untouched first
        self._index: SizeIndex[int] = SizeIndex()
        self._insert(0, pages, 0)

    def take(self, pages: int) -> tuple[ActSlot, int]:
        """Return a slot of ``pages`` from the smallest free run that holds it, and how many of its pages are mapped.

        Raises UsageError below one page, PoolExhausted without such a run; then nothing has changed.
        """
        if pages < 1:
            raise UsageError("an activation slot has a size", where="ActSlots", got=pages, expected="1 page or more")
        found = self._index.best(pages)
        if found is None:
            largest = self._index.largest()
            raise PoolExhausted(
                "no run of free activation addresses is long enough", where="ActSlots",
                got=f"{largest[0] if largest else 0} pages", expected=f"{pages}", mend="reserve more addresses",
            )  # fmt: skip
        length, first = found
        _, mapped = self._remove(first)
        inside = self.state.count(MAPPED, first, first + pages)
        if length > pages:
            self._insert(first + pages, length - pages, mapped - inside)
        self._serial += 1
        slot = ActSlot(self._serial, first, pages, self._pool)
        self.live[first] = slot
        return slot, inside

    def check_live(self, slot: ActSlot, *, closing: bool = False) -> None:
        """Raise UsageError unless ``slot`` is a live one of this pool; ``closing``: it is about to be given back."""
        if not isinstance(slot, ActSlot):
            raise UsageError(
                "the wrong kind of slot", where="elastic pool", got=type(slot).__name__, expected="a slot of open_act"
            )
        if slot.pool != self._pool:
            raise UsageError(
                "a slot of another pool", where=f"activation slot {slot.serial}", expected="one that this pool opened"
            )
        if self.live.get(slot.first) is not slot:
            raise UsageError(
                "double free" if closing else "used after it was closed", where=f"activation slot {slot.serial}",
                got="a slot already given back", expected="a live one of this pool",
            )  # fmt: skip

    def give(self, slot: ActSlot) -> int:
        """Take ``slot`` back, joined with its free neighbours; return how many of its pages are mapped.

        Raises UsageError for a double free.
        """
        self.check_live(slot, closing=True)
        del self.live[slot.first]
        first, end = slot.first, slot.first + slot.pages
        inside = mapped = self.state.count(MAPPED, first, end)
        before = self._starts.get(first)
        if before is not None:
            mapped += self._remove(before)[1]
            first = before
        if end in self._runs:
            length, more = self._remove(end)
            mapped += more
            end += length
        self._insert(first, end - first, mapped)
        return inside

    def ranges(self, first: int, pages: int, state: int) -> list[Range]:
        """Return the maximal ranges of pages in ``state`` within ``pages`` pages from ``first``, in order."""
        return [(m.start(), m.end() - m.start()) for m in _RANGES[state].finditer(self.state, first, first + pages)]

    def idle_ranges(self, count: int) -> list[tuple[int, int, int]]:
        """Return (run, first page, pages) of mapped pages in free runs, ``count`` in all (fewer where there are fewer).

        Runs left alone longest come first, of each its last pages first: the next slot goes to the start of a run.
        """
        found: list[tuple[int, int, int]] = []
        for run in self._mapped_runs:
            for first, pages in reversed(self.ranges(run, self._runs[run][0], MAPPED)):
                if count <= 0:
                    return found
                part = min(pages, count)
                found.append((run, first + pages - part, part))
                count -= part
        return found

    def attached(self, first: int, chunks: list[int]) -> None:
        """Note that ``chunks`` are mapped at the pages of a live slot from ``first`` on."""
        self.state[first : first + len(chunks)] = bytes((MAPPED,)) * len(chunks)
        self.chunk[first : first + len(chunks)] = chunks

    def detached(self, run: int, first: int, pages: int, state: int) -> list[int]:
        """Note that mapped pages of the free ``run`` are mapped no more (UNMAPPED or STALE); return their chunks."""
        chunks = self.chunk[first : first + pages]
        self.state[first : first + pages] = bytes((state,)) * pages
        self.chunk[first : first + pages] = [-1] * pages
        length, mapped = self._runs[run]
        self._runs[run] = (length, mapped - pages)
        if mapped == pages:
            del self._mapped_runs[run]
        return chunks

    def mark(self, first: int, pages: int, state: int) -> None:
        """Set the state of pages that are not mapped (UNMAPPED or STALE)."""
        self.state[first : first + pages] = bytes((state,)) * pages

    def _insert(self, first: int, length: int, mapped: int) -> None:
        self._runs[first] = (length, mapped)
        self._starts[first + length] = first
        self._index.add(length, first)
        if mapped:
            self._mapped_runs[first] = None

    def _remove(self, first: int) -> Range:
        length, mapped = self._runs.pop(first)
        del self._starts[first + length]
        self._index.remove(length, first)
        self._mapped_runs.pop(first, None)
        return length, mapped

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first page, pages, mapped pages) of every free run."""
        for first, (length, mapped) in self._runs.items():
            yield first, length, mapped

    def check(self) -> None:
        """Raise KvbenchError where runs and slots do not tile the range or counts are wrong."""
        parts = sorted([(first, n) for first, n, _ in self.runs()] + [(s.first, s.pages) for s in self.live.values()])
        at = 0
        for first, pages in parts:
            if first != at:
                raise KvbenchError("activation addresses do not add up", where=f"page {first}", got=at)
            at = first + pages
        wrong = [f for f, n, mapped in self.runs() if self.state.count(MAPPED, f, f + n) != mapped]
        if at != self.pages or wrong or len(self._index) != len(self._runs):
            raise KvbenchError("free runs miscount their pages", where="ActSlots", got=f"{wrong[:4]}, end {at}")
        free = sorted(self._runs)
        touching = [a for a in free if a + self._runs[a][0] in self._runs]
        if touching:
            raise KvbenchError("free neighbours were not joined", where=f"page {touching[0]}")
