"""A prefix cache in two tiers: a radix tree with capacities, eviction, writes to the far tier and loads back.

After Strata (OSDI 2026, section 4) and SGLang's HiCache controller: LRU in both tiers; far hits shorter than
``load_back`` tokens (10) are computed again instead of loaded; what is loaded is loaded whole. A request holds near
memory of its own for tokens that are not in the tree (its last partial page, its output, and its prompt until that is
computed). Amounts are tokens; the tree counts in units of ``unit`` tokens, the page or the trace's block, whichever is
larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.errors import KvbenchError, UsageError
from kvbench.systems.strata.radix import RadixTree
from kvbench.systems.strata.radix_node import Key, Node
from kvbench.systems.strata.writes import Writes

LOAD_BACK = 10  # tokens
Spans = Sequence[tuple[int, int]]


def unit_of(page_tokens: int, block_tokens: int) -> int:
    """Return the tokens of a unit of the tree for pages of ``page_tokens`` and a trace of ``block_tokens``.

    A trace says only for whole blocks what is shared, so smaller pages match in blocks. Raises UsageError where neither
    size divides the other.
    """
    small, large = sorted((page_tokens, block_tokens))
    if small < 1 or large % small:
        raise UsageError(
            "page size", where="strata", got=f"pages of {page_tokens}, blocks of {block_tokens} tokens",
            expected="one a multiple of the other",
        )  # fmt: skip
    return large


def unit_key(hash_ids: Key | None, block_tokens: int, tokens: int, unit: int) -> Key:
    """Return the ids of the whole units of a prompt of ``tokens`` tokens, its last token left out.

    That one has to be computed whatever is cached. An id of a block names the whole prefix, so the last block of a unit
    names the unit.
    """
    if hash_ids is None:
        return ()
    step = unit // block_tokens
    whole = (tokens - 1) // unit
    return hash_ids[:whole] if step == 1 else hash_ids[step - 1 : whole * step : step]


@dataclass(slots=True)
class Moved:
    """Tokens so far.

    ``loaded``: far to near; ``written``: near to far in the background, ``flushed``: while an eviction waited;
    ``evicted`` from near, ``lost`` of them without a far copy; ``dropped`` from far; ``unwritten``: a write that found
    no room; ``again``: computed though a far copy existed (too short to load).
    """

    loaded: int = 0
    written: int = 0
    flushed: int = 0
    evicted: int = 0
    lost: int = 0
    dropped: int = 0
    unwritten: int = 0
    again: int = 0


class Found(NamedTuple):
    """What a key finds, tokens: ``near``, and to ``load`` from the far tier.

    ``loads``: (context, tokens) of the latter, ``pins``: of near KV that running it would keep from being evicted.
    """

    near: int = 0
    load: int = 0
    loads: Spans = ()
    pins: Spans = ()

    @property
    def hit(self) -> int:
        return self.near + self.load


class TieredCache:
    """Near and far capacity in tokens around one :class:`RadixTree`; UsageError for sizes below 0 or a unit below 1."""

    def __init__(
        self, near: int, far: int, unit: int, writes: Writes | None = None, *, load_back: int = LOAD_BACK,
        named: bool = False,
    ) -> None:  # fmt: skip
        if near < 0 or far < 0 or unit < 1 or load_back < 0:
            got = f"near {near}, far {far}, unit {unit}, load_back {load_back}"
            raise UsageError("a cache", where="strata", got=got, expected="0 tokens or more, a unit of 1 or more")
        self.near, self.far, self.unit, self.load_back = near, far, unit, load_back
        self.writes = writes or Writes()
        self.tree = RadixTree(named=named)
        self.private = 0  # near tokens held by requests, outside the tree
        self.moved = Moved()

    @property
    def free(self) -> int:
        """Near tokens nobody holds."""
        return self.near - self.private - self.tree.near_pages * self.unit

    @property
    def attainable(self) -> int:
        """Near tokens that are free or that eviction can free."""
        return self.free + self.tree.spare_pages * self.unit

    @property
    def far_free(self) -> int:
        return self.far - self.tree.far_pages * self.unit

    def find(self, leaf: Node) -> Found:
        """Return what the key that ends at ``leaf`` would find now."""
        near, loads, pins = self.tree.survey(leaf)
        unit = self.unit
        if unit != 1:
            near *= unit
            loads = [(context, pages * unit) for context, pages in loads]
            pins = [(context, pages * unit) for context, pages in pins]
        load = 0
        for _, tokens in loads:
            load += tokens
        return Found(near, load, loads, pins) if load >= self.load_back else Found(near, 0, (), pins)

    def start(self, leaf: Node, own: int) -> int:
        """Load what the dispatched (locked) ``leaf`` finds in the far tier and take ``own`` tokens of near memory.

        Evicts what it must. Returns the tokens loaded. Raises KvbenchError when the near tier has no room: ask
        :attr:`attainable`, less what it pins, before. Lock all requests of a batch before the first of them starts.
        """
        load = self.find(leaf).load
        self.make_room(load + own)
        if load:
            load = self.tree.load(leaf) * self.unit
            self.moved.loaded += load
        self.private += own
        return load

    def computed(self, leaf: Node) -> int:
        """KV of the whole prompt of ``leaf`` is near now; returns the tokens of its own that the tree took over.

        The caller's own tokens of KV that was there already (somebody else was faster) are still its own. Counts a use
        of the path and writes to the far tier what the policy asks for.
        """
        made, again = self.tree.arrive_near(leaf)
        taken = (made + again) * self.unit
        self.private -= taken
        self.moved.again += again * self.unit
        for node in self.tree.hit(leaf):
            self._used(node)
        return taken

    def leave(self, leaf: Node, tokens: int) -> Node | None:
        """Turn the whole units of ``tokens`` own tokens of the running ``leaf``, behind its key, into cached output.

        Returns their node (:meth:`RadixTree.name` gives them ids), None where there is no whole unit.
        """
        pages = tokens // self.unit
        if pages < 1:
            return None
        node = self.tree.append(leaf, pages)
        self.private -= pages * self.unit
        self._used(node)
        return node

    def _used(self, node: Node) -> None:
        """Write ``node`` to the far tier in the background where its uses ask for it."""
        if self.writes.after_use(node.hits, node.far):
            tokens = len(node.key) * self.unit
            if self._far_room(tokens):
                self.tree.back_up(node)
                self.moved.written += tokens
            else:
                self.moved.unwritten += tokens

    def give(self, own: int) -> None:
        """Give ``own`` tokens of near memory back."""
        if not 0 <= own <= self.private:
            raise KvbenchError("more given back than held", where="strata cache", got=own, expected=f"{self.private}")
        self.private -= own

    def make_room(self, tokens: int) -> None:
        """Evict, least recently used first, until ``tokens`` near tokens are free. KvbenchError when all is locked."""
        while self.free < tokens:
            node = self.tree.oldest_near()
            if node is None:
                raise KvbenchError(
                    "no room in the near tier", where="strata cache", got=f"{tokens} tokens asked",
                    expected=f"at most {self.free}, the rest is in use",
                )  # fmt: skip
            self._evict(node)

    def _evict(self, node: Node) -> None:
        tokens = len(node.key) * self.unit
        if self.writes.at_eviction(node.far):
            if self._far_room(tokens):
                self.tree.back_up(node)
                self.moved.flushed += tokens
            else:
                self.moved.unwritten += tokens
        self.moved.evicted += tokens
        if not node.far:
            self.moved.lost += tokens
        self.tree.demote(node)

    def _far_room(self, tokens: int) -> bool:
        """Drop far KV, least recently used first, until ``tokens`` fit; False where they cannot."""
        if tokens > self.far:
            return False
        while self.far_free < tokens:
            node = self.tree.oldest_far()
            if node is None:
                return False
            before = self.tree.far_pages
            self.tree.forget_far(node)
            self.moved.dropped += (before - self.tree.far_pages) * self.unit
        return True

    def visit(self, key: Sequence[int], own: int = 0, output: int = 0) -> tuple[Found, Node | None]:
        """Let one request with ``key`` run from begin to end; return what it found and the node of its output.

        ``own``: tokens it holds behind its key, ``output``: of them, those whose KV is worth keeping. Where it does not
        fit at all it runs without the cache: nothing is found and nothing stays.
        """
        leaf = self.tree.enqueue(key)
        found = self.find(leaf)
        need = len(key) * self.unit - found.hit + own
        if need + found.load + sum(tokens for _, tokens in found.pins) > self.attainable:
            self.tree.withdraw(leaf)
            return Found(), None
        self.tree.dispatch(leaf)
        self.start(leaf, need)
        left = need - self.computed(leaf)
        tail = self.leave(leaf, output)
        self.tree.release(leaf)
        self.give(left - (0 if tail is None else len(tail.key) * self.unit))
        return found, tail
