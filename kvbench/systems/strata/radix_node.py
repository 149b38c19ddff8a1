"""The nodes of the radix tree, and how far two runs of ids agree."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import KvbenchError

Key = tuple[int, ...]
Spans = list[tuple[int, int]]


class Node:
    """A run of pages. ``end``: pages from the root to its last one; ``waiting``: requests in the queue whose prompt
    runs through it; ``locks``: those dispatched.
    """

    __slots__ = ("children", "end", "far", "hits", "key", "locks", "near", "parent", "serial", "waiting")

    def __init__(self, key: Key, parent: Node | None, serial: int) -> None:
        self.key, self.parent, self.serial = key, parent, serial
        self.end: int = len(key) + (parent.end if parent is not None else 0)
        self.children: dict[int, Node] = {}
        self.near = self.far = False
        self.waiting = self.locks = self.hits = 0

    @property
    def cached(self) -> bool:
        """Whether its KV exists in a tier."""
        return self.near or self.far

    @property
    def state(self) -> str:
        """``near``, ``far``, ``both``; without KV ``in_flight`` once one of its requests runs, else ``in_queue``."""
        if self.cached:
            return "both" if self.near and self.far else "near" if self.near else "far"
        return "in_flight" if self.locks else "in_queue"

    def __repr__(self) -> str:
        return f"Node({len(self.key)} pages, {self.state}, locks {self.locks}, waiting {self.waiting})"


@dataclass(frozen=True, slots=True)
class Match:
    """Pages of a key from its start: in the near tier, then only in the far one, then on transient nodes."""

    near: int
    far: int
    transient: int

    @property
    def cached(self) -> int:
        return self.near + self.far


def common(edge: Key, key: Key, at: int) -> int:
    """Return how many ids of ``edge`` equal those of ``key`` from ``at`` on: by slices, halving where they differ."""
    span = min(len(edge), len(key) - at)
    if edge[:span] == key[at : at + span]:
        return span
    low, high = 1, span  # the first id is equal, all of span are not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == key[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def common_named(edge: Key, key: Key, at: int) -> int:
    """Return the same where equal ids mean equal prefixes."""
    low, high = 1, min(len(edge), len(key) - at)
    if edge[high - 1] == key[at + high - 1]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if edge[middle - 1] == key[at + middle - 1]:
            low = middle
        else:
            high = middle
    return low


def misuse(what: str, node: Node) -> KvbenchError:
    return KvbenchError(what, where="radix tree", got=node, mend="this is a bug of the caller or of the tree")
