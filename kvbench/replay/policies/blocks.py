"""A flat prefix cache over hash ids in two tiers, least recently used first out: what the ``lru`` baseline keeps.

A hash id names the whole prefix up to and including its block, so a dictionary of ids is a prefix cache; only full
blocks are kept. A block is near, far or both. Blocks in use are locked and stay where they are. Of a path the end is
the older, so that ends are thrown out before what they stand on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.replay.ledger import Ledger
from kvbench.replay.protocol import Holding

CACHE = "cache"


@dataclass(slots=True, eq=False)
class Block:
    """One block of ``tokens`` tokens; ``users``: requests that lock it."""

    key: int
    tokens: int
    near: bool = False
    far: bool = False
    users: int = 0


class Blocks:
    """Blocks of the tiers ``near`` and ``far`` (None: no far tier) of ``ledger``, whose units are tokens."""

    def __init__(self, ledger: Ledger, near: str, far: str | None) -> None:
        self.ledger, self.near, self.far = ledger, near, far
        self._known: dict[int, Block] = {}
        self._idle_near: OrderedDict[int, Block] = OrderedDict()  # near, unlocked, oldest first
        self._idle_far: OrderedDict[int, Block] = OrderedDict()  # far, unlocked, oldest first
        self.idle_tokens = 0  # near tokens that make_room could free
        self.offloaded = self.discarded = 0  # tokens written to the far tier, and lost from the last tier

    def match(self, ids: Sequence[int], most: int, block_tokens: int) -> list[Block]:
        """Return the cached blocks at the beginning of ``ids``, at most ``most`` tokens of them."""
        found: list[Block] = []
        room = most // block_tokens
        known = self._known
        for key in ids[:room]:
            block = known.get(key)
            if block is None or block.tokens != block_tokens:
                break
            found.append(block)
        return found

    def lock(self, blocks: Sequence[Block]) -> None:
        """Keep ``blocks`` where they are."""
        for block in blocks:
            if not block.users:
                if self._idle_near.pop(block.key, None) is not None:
                    self.idle_tokens -= block.tokens
                self._idle_far.pop(block.key, None)
            block.users += 1

    def unlock(self, blocks: Sequence[Block]) -> None:
        """Give ``blocks`` up, the end of the path first; the youngest is then its beginning."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                if block.near:
                    self._idle_near[block.key] = block
                    self.idle_tokens += block.tokens
                if block.far:
                    self._idle_far[block.key] = block

    def make_room(self, tokens: int) -> int | None:
        """Free near tokens until ``tokens`` are free; return the tokens offloaded for it.

        None, and nothing is done, where even every idle block would not make the room.
        """
        if self.ledger.free(self.near) + self.idle_tokens < tokens:
            return None
        moved = 0
        while self.ledger.free(self.near) < tokens:
            _, block = self._idle_near.popitem(last=False)
            self.idle_tokens -= block.tokens
            moved += self._offload(block)
        return moved

    def load(self, block: Block) -> None:
        """Bring a far block near too; the room has been made."""
        self.ledger.take(self.near, CACHE, block.tokens)
        block.near = True

    def insert(self, key: int, tokens: int, owner: int) -> Block | None:
        """Make ``tokens`` near tokens of request ``owner`` the block ``key``.

        None, and nothing is done, where it is near already or known as a block of another size.
        """
        block = self._known.get(key)
        if block is not None and (block.near or block.tokens != tokens):
            return None
        if block is None:
            block = self._known[key] = Block(key, tokens)
        self.ledger.hand(self.near, owner, CACHE, tokens)
        block.near = True
        if not block.users:
            self._idle_near[key] = block
            self.idle_tokens += tokens
        return block

    def find(self, key: int) -> Block:
        """Return the block called ``key``; KeyError if there is none."""
        return self._known[key]

    def holdings(self) -> dict[str, int]:
        """Return the tokens by tier, counted one by one."""
        near = sum(block.tokens for block in self._known.values() if block.near)
        far = sum(block.tokens for block in self._known.values() if block.far)
        return {self.near: near} if self.far is None else {self.near: near, self.far: far}

    def _offload(self, block: Block) -> int:
        """Take an idle block from near; return the tokens written to far (none if they are there already)."""
        self.ledger.give(self.near, CACHE, block.tokens)
        block.near = False
        if block.far:
            return 0
        if self.far is not None and self._far_room(block.tokens):
            self.ledger.take(self.far, CACHE, block.tokens)
            block.far = True
            self._idle_far[block.key] = block
            self.offloaded += block.tokens
            return block.tokens
        self._forget(block)
        return 0

    def _far_room(self, tokens: int) -> bool:
        assert self.far is not None
        while self.ledger.free(self.far) < tokens:
            if not self._idle_far:
                return False
            _, block = self._idle_far.popitem(last=False)
            self.ledger.give(self.far, CACHE, block.tokens)
            block.far = False
            if not block.near:
                self._forget(block)
        return True

    def _forget(self, block: Block) -> None:
        self.discarded += block.tokens
        del self._known[block.key]


def with_cache(tier: str, own: dict[int, int], cached: int) -> Holding:
    """Return the holding of ``tier``: requests' own units and the cache's."""
    by_owner: dict[int | str, int] = {CACHE: cached} if cached else {}
    by_owner.update(own.items())
    return Holding(tier, by_owner)
