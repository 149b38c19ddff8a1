"""The queue of Strata's Fig. 7, driven through tree, deferral, batching and bubble filling: two requests a batch.

A and B are new documents with two questions each; C, D, F and G have their context in the far tier, two questions share
D's; C and D compute little, F and G much. One request decodes. As the figure does, each batch is done before the next
is formed, and a batch whose computation is postponed stands before the decode that fills its bubble.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvbench.systems.strata.batching import Candidate, Limits, balanced, fifo
from kvbench.systems.strata.bubble import Bubble
from kvbench.systems.strata.deferral import Deferral, restore, scan
from kvbench.systems.strata.radix_node import Key, Node
from kvbench.systems.strata.tiers import TieredCache

FIFO = [("A0", "A1"), ("B0", "B1"), ("C", "D0"), ("D1", "F"), ("G",), ("decode",)]
STRATA = [("A0", "B0"), ("A1", "B1"), ("C", "F"), ("D0", "D1"), ("decode",), ("G",)]
DOCUMENT = 2000  # pages of a token each
QUESTIONS = {"A0": 10, "A1": 10, "B0": 10, "B1": 10, "C": 10, "D0": 9, "D1": 9, "F": 200, "G": 200}
FAR = "CDFG"


@dataclass(frozen=True)
class Toggles:
    defer: bool
    balance: bool
    bubble: bool


class Entry:
    def __init__(self, name: str, key: Key, cache: TieredCache) -> None:
        self.name, self.key, self.cache = name, key, cache
        self.entered = False
        self.leaf: Node | None = None

    @property
    def node(self) -> Node:
        assert self.leaf is not None
        return self.leaf

    def transient_tokens(self) -> int:
        return self.cache.tree.match(self.key).transient

    def enter(self) -> None:
        self.leaf = self.cache.tree.enqueue(self.key)
        self.entered = True


def document(name: str) -> Key:
    start = ord(name) * 100_000
    return tuple(range(start, start + DOCUMENT))


def run(toggles: Toggles) -> list[tuple[str, ...]]:
    """Return the batches in the order they are formed."""
    cache = TieredCache(near=100_000, far=100_000, unit=1)
    for name in FAR:  # computed once, written, and evicted
        leaf = cache.tree.enqueue(document(name))
        cache.tree.dispatch(leaf)
        cache.start(leaf, DOCUMENT)
        cache.give(DOCUMENT - cache.computed(leaf))
        cache.tree.release(leaf)
        cache.tree.back_up(leaf)
        cache.tree.demote(leaf)
    queue: deque[Entry] = deque()
    for at, (name, new) in enumerate(QUESTIONS.items()):
        asked = tuple(range(-1000 * (at + 1), -1000 * (at + 1) + new))
        queue.append(Entry(name, document(name[0]) + asked, cache))
    rule, bubble = Deferral(enabled=toggles.defer), Bubble(enabled=toggles.bubble)
    decoding, batches = 1, []
    while queue:
        ready, deferred = scan(queue, rule, window=100)
        found = [cache.find(entry.node) for entry in ready]
        candidates = [Candidate(len(e.key) - f.hit, 0, f.loads) for e, f in zip(ready, found, strict=True)]
        limits = Limits(1 << 20, 1 << 40, 2)
        batch = balanced(candidates, limits) if toggles.balance else fifo(candidates, limits)
        chosen = [ready[at] for at in batch.chosen]
        batches.append(tuple(entry.name for entry in chosen))
        if bubble.fills(batch.load, batch.new, decoding):
            batches.append(("decode",))
            decoding = 0
        for entry in chosen:
            cache.tree.dispatch(entry.node)
        for entry in chosen:
            cache.start(entry.node, len(entry.key))
        for entry in chosen:
            cache.give(len(entry.key) - cache.computed(entry.node))
            cache.tree.release(entry.node)
        restore(queue, deferred, [entry for entry in ready if entry not in chosen])
        cache.tree.check()
    return [*batches, *[("decode",)] * decoding]
