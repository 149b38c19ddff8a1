"""``strata-radix``: what an operation on Strata's radix tree takes with 10,000, 100,000 and 1,000,000 cached blocks.

The trees hold documents of 40 blocks with a few questions each. Rounds go over the sizes in turns; in each, the same
number of requests with a new question about a random document runs through a tree, and what was used least recently is
evicted until the tree has the size it had. An operation's time is the median over rounds. Growth is judged for a
request, all operations together: the largest tree's time over what the law a + b log(blocks) through the two smaller
ones says of it. A square root would give about 1.4, a linear operation 2.5 and more.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.locks import acquire, machine_resources
from kvbench.systems.strata.radix import RadixTree
from kvbench.systems.strata.radix_node import Key, Node
from kvbench.units import format_value

from .processes import Neighbours
from .record import Figure, judge

GROUP = "strata-radix"
SIZES = (10_000, 100_000, 1_000_000)
DOCUMENT, QUESTIONS = 40, 3  # blocks of a document; questions a document, of a block each
OPERATIONS = ("match", "insert", "survey", "dispatch", "arrive", "release", "evict")
MOST_S, MOST_GROWTH = 20e-6, 1.2
SEED = 5


@dataclass(slots=True)
class Bed:
    """A tree of about ``blocks`` cached blocks, and the times of each operation, seconds."""

    blocks: int
    rng: random.Random
    tree: RadixTree = field(default_factory=lambda: RadixTree(named=True))
    documents: list[Key] = field(default_factory=list)
    fresh: int = 0
    taken: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})

    def fill(self) -> None:
        """Cache documents and their questions."""
        while self.tree.near_pages < self.blocks:
            self.documents.append(self.ids(DOCUMENT))
            for _ in range(QUESTIONS):
                leaf = self.tree.enqueue(self.documents[-1] + self.ids(1))
                self.tree.dispatch(leaf)
                self.tree.arrive_near(leaf)
                self.tree.release(leaf)

    def ids(self, count: int) -> Key:
        """Return fresh block ids."""
        self.fresh += count
        return tuple(range(self.fresh - count, self.fresh))

    def round(self, requests: int) -> None:
        """Run ``requests`` requests, operation by operation."""
        tree = self.tree
        keys = [self.rng.choice(self.documents) + self.ids(1) for _ in range(requests)]
        before = tree.near_pages
        leaves: list[Node] = []
        self.timed("match", tree.match, keys)
        self.timed("insert", lambda key: leaves.append(tree.enqueue(key)), keys)
        self.timed("survey", tree.survey, leaves)
        self.timed("dispatch", tree.dispatch, leaves)
        self.timed("arrive", tree.arrive_near, leaves)
        self.timed("release", tree.release, leaves)
        if tree.near_pages < before + requests:
            raise KvbenchError("the tree took too little in", where=GROUP, got=tree.near_pages - before)
        evicted, begin = 0, time.perf_counter()
        while tree.near_pages > self.blocks:
            node = tree.oldest_near()
            assert node is not None
            tree.demote(node)
            evicted += 1
        if evicted:  # none where the round before took a whole document too many
            self.taken["evict"].append((time.perf_counter() - begin) / evicted)

    def timed(self, name: str, call: Callable[[Any], object], arguments: Sequence[Any]) -> None:
        begin = time.perf_counter()
        for argument in arguments:
            call(argument)
        self.taken[name].append((time.perf_counter() - begin) / len(arguments))


def figures(rounds: int = 41, requests: int = 200, sizes: Sequence[int] = SIZES) -> Iterator[Figure]:
    """Yield the time of each operation at the largest size, and its growth from the smallest."""
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        yield from timed_trees(rounds, requests, sizes)


def timed_trees(rounds: int, requests: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """Yield the figures of three ``sizes``, without the machine's lock."""
    others = Neighbours()
    beds = [Bed(blocks, random.Random(SEED)) for blocks in sizes]
    for bed in beds:
        bed.fill()
        bed.round(requests)  # the first one warms
        bed.taken = {name: [] for name in OPERATIONS}
    collecting = gc.isenabled()
    gc.disable()  # a collection walks all trees at once, whoever caused it
    try:
        for _ in range(rounds):
            for bed in beds:
                bed.round(requests)
    finally:
        if collecting:
            gc.enable()
    for bed in beds:
        bed.tree.check()
    disturbed = others.disturbing()
    large = beds[-1]
    for name in OPERATIONS:
        times = [median(bed.taken[name]) for bed in beds]
        note = ", ".join(
            f"{bed.blocks} blocks {format_value(seconds, 's')}" for bed, seconds in zip(beds, times, strict=True)
        )
        detail = {f"seconds_{bed.blocks}": seconds for bed, seconds in zip(beds, times, strict=True)}
        yield Figure(
            GROUP, f"{name}, {large.blocks} blocks", "s", times[-1], None, MOST_S,
            judge(times[-1], None, MOST_S, disturbed=disturbed), f"{note}, {rounds} rounds of {requests}",
            detail=detail,
        )  # fmt: skip
    whole = [sum(median(times) for times in bed.taken.values()) for bed in beds]
    logs = [math.log(bed.blocks) for bed in beds]
    told = whole[0] + (whole[1] - whole[0]) * (logs[-1] - logs[0]) / (logs[1] - logs[0])
    growth = whole[-1] / max(told, whole[0])  # a law that falls says nothing
    yield Figure(
        GROUP, "a request, over the law of log", "ratio", growth, None, MOST_GROWTH,
        judge(growth, None, MOST_GROWTH, disturbed=disturbed),
        ", ".join(f"{bed.blocks} blocks {format_value(t, 's')}" for bed, t in zip(beds, whole, strict=True)),
        detail={f"seconds_{bed.blocks}": seconds for bed, seconds in zip(beds, whole, strict=True)},
    )  # fmt: skip
