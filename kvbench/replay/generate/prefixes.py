"""Names of prefix blocks: ids that are shared exactly where token prefixes are."""

from __future__ import annotations

from collections import OrderedDict

from kvbench.replay.request import blocks_of

KEPT_IDS = 2_000_000  # ids kept for documents that come back; 60 MB


class Ids:
    """Hands out ids no block has yet."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, number: int) -> range:
        """Return ``number`` fresh ids, which follow one another."""
        first = self._next
        self._next += number
        return range(first, self._next)


class Documents:
    """Prefixes many requests begin with. Only whole blocks are shared: the one in which they differ is their own.

    ``lengths``: tokens of each document. The ids of a document are made once and kept while it is in use.
    """

    def __init__(self, lengths: list[int], block_tokens: int, ids: Ids) -> None:
        self._spans = [ids.take(length // block_tokens) for length in lengths]
        self._block = block_tokens
        self._ids = ids
        self._kept: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._held = 0

    def request(self, document: int, tokens: int) -> tuple[int, ...]:
        """Return the ids of a request of ``tokens`` tokens that begins with ``document``."""
        shared = self._shared(document)
        return shared + tuple(self._ids.take(blocks_of(tokens, self._block) - len(shared)))

    def _shared(self, document: int) -> tuple[int, ...]:
        found = self._kept.get(document)
        if found is None:
            found = self._kept[document] = tuple(self._spans[document])
            self._held += len(found)
            while self._held > KEPT_IDS and len(self._kept) > 1:
                self._held -= len(self._kept.popitem(last=False)[1])
        else:
            self._kept.move_to_end(document)
        return found


class Chain:
    """The prefix of one conversation: each turn's input is the one before, its output, and something new."""

    def __init__(self, shared: tuple[int, ...], shared_tokens: int, block_tokens: int, ids: Ids) -> None:
        """Begin with ``shared_tokens`` tokens many conversations share; ``shared`` are the ids of their whole blocks"""
        self._ids, self._block = ids, block_tokens
        self._names = shared
        self.tokens = shared_tokens

    def turn(self, new_tokens: int, output_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Return (input tokens, ids) of a turn that adds ``new_tokens``, and take its output into the history."""
        inputs = self.tokens + new_tokens
        started = blocks_of(inputs, self._block)
        whole = inputs // self._block
        self._names = self._names + tuple(self._ids.take(whole - len(self._names)))
        # a block that is not full yet will be another one when the next turn has filled it
        names = self._names + tuple(self._ids.take(started - whole))
        self.tokens = inputs + output_tokens
        return inputs, names


def shared_prefix(tokens: int, block_tokens: int, ids: Ids) -> tuple[int, ...]:
    """Return ids for the whole blocks of a prefix of ``tokens`` tokens."""
    return tuple(ids.take(tokens // block_tokens))
