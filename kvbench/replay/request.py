"""A request of a trace: what every reader and generator yields and the engine replays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.errors import UsageError

MOST_TOKENS = 1 << 32  # no context is longer: a larger number is another unit or another column
MOST_SECONDS = 1e10  # three hundred years: a larger time is another unit


@dataclass(frozen=True, slots=True)
class Request:
    """One request. A trace is an iterator of these in the order of ``arrival``.

    ``id``: unique in its trace; ``arrival``: seconds since its beginning; ``input_tokens`` and ``output_tokens``: 1 or
    more. ``session`` groups the turns of one conversation, ``parent`` is the id of the turn before. ``hash_ids``: one
    for each started block of ``block_tokens`` input tokens; an id names the whole prefix up to and including its block,
    so two requests share exactly the blocks whose ids are equal. Without prefix information both are None.
    Raises UsageError where a field contradicts this.
    """

    id: int
    arrival: float
    input_tokens: int
    output_tokens: int
    session: int | None = None
    parent: int | None = None
    block_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.arrival <= MOST_SECONDS:
            raise UsageError("arrival", where=f"request {self.id}", got=self.arrival, expected="seconds from 0")
        if not (1 <= self.input_tokens <= MOST_TOKENS and 1 <= self.output_tokens <= MOST_TOKENS):
            got = f"{self.input_tokens} in, {self.output_tokens} out"
            raise UsageError("tokens", where=f"request {self.id}", got=got, expected="at least one of each")
        if (self.block_tokens is None) is not (self.hash_ids is None):
            raise UsageError("hash ids", where=f"request {self.id}", expected="ids together with their block size")
        if self.block_tokens is not None and self.hash_ids is not None:
            if self.block_tokens < 1:
                raise UsageError(
                    "block size", where=f"request {self.id}", got=self.block_tokens, expected="1 token or more"
                )
            expected = blocks_of(self.input_tokens, self.block_tokens)
            if len(self.hash_ids) != expected:
                raise UsageError(
                    "number of hash ids", where=f"request {self.id}", got=len(self.hash_ids),
                    expected=f"{expected}, one for each started block of {self.block_tokens} tokens",
                )  # fmt: skip

    @property
    def total_tokens(self) -> int:
        """Tokens of KV the request holds when its last token is made."""
        return self.input_tokens + self.output_tokens


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return how many blocks of ``block_tokens`` tokens are started by ``tokens`` tokens."""
    return -(-tokens // block_tokens)


def seconds(value: float) -> float:
    """Return a time on the grid of 1 us all traces lie on, so that the last bit of a logarithm changes no schedule."""
    return math.floor(value * 1e6 + 0.5) / 1e6
