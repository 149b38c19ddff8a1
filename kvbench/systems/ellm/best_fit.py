"""The smallest item that is large enough, in O(log n)."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar

T = TypeVar("T")


class SizeIndex(Generic[T]):
    """Items by size; of one size, the one added last comes first.

    Only distinct sizes are kept in order. Items that divide n chunks have at most sqrt(2 n) distinct sizes (1 + 2 + ...
    + k <= n), so the ordered list stays short: 447 entries at 100,000 chunks.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._items: dict[int, dict[T, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def add(self, size: int, item: T) -> None:
        """Add ``item``, which must not be in here."""
        found = self._items.get(size)
        if found is None:
            self._items[size] = {item: None}
            insort(self._sizes, size)
        else:
            found[item] = None

    def remove(self, size: int, item: T) -> None:
        """Take ``item`` out. Raises KeyError when it is not in here with that size."""
        found = self._items[size]
        del found[item]
        if not found:
            del self._items[size]
            del self._sizes[bisect_left(self._sizes, size)]

    def best(self, size: int) -> tuple[int, T] | None:
        """Return (its size, the smallest item of at least ``size``), or None."""
        at = bisect_left(self._sizes, size)
        return self._last(self._sizes[at]) if at < len(self._sizes) else None

    def largest(self) -> tuple[int, T] | None:
        """Return (its size, the largest item), or None."""
        return self._last(self._sizes[-1]) if self._sizes else None

    def _last(self, size: int) -> tuple[int, T]:
        return size, next(reversed(self._items[size]))
