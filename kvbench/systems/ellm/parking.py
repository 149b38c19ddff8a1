"""Which requests' KV goes to the CPU elastic buffer and when it returns: decisions, no bytes (eLLM, DAC 2026, 2.2.2).

A prompt the GPU has no room for is prefilled all the same when the buffer has room for its KV: layer by layer it leaves
behind the computation, so only a few layers of it are on the GPU at any time. The request then waits until the GPU has
room, and its KV comes back before its first decode step. The logical size follows the objectives
(:mod:`kvbench.systems.ellm.slo`); a smaller one refuses new requests and throws nothing out.

The paper says that "part of the requests" are offloaded and leaves open which, and in which order they return: both are
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvbench.errors import UsageError

Victims = Literal["newest", "longest"]
Order = Literal["oldest", "shortest"]
WHERE = "CPU elastic buffer"


@dataclass(frozen=True, slots=True)
class BufferRules:
    """``physical`` tokens fit in the buffer. ``victims``: of the prompts of one prefill that do not all fit on the GPU,
    the ``newest`` leave, or the ``longest``. ``order``: parked ones return ``oldest`` first, or ``shortest`` first.
    ``layers_in_flight``: layers whose KV is on the GPU at once while a prompt leaves (one computed, one copied).

    Raises UsageError for other words and for sizes below 1.
    """

    physical: int
    victims: Victims = "newest"
    order: Order = "oldest"
    layers_in_flight: int = 2

    def __post_init__(self) -> None:
        if self.physical < 1 or self.layers_in_flight < 1:
            raise UsageError(
                "no buffer", where=WHERE, got=(self.physical, self.layers_in_flight),
                expected="physical tokens and layers in flight of 1 or more",
            )  # fmt: skip
        for word, legal in ((self.victims, get_args(Victims)), (self.order, get_args(Order))):
            if word not in legal:
                raise UsageError("unknown word", where=WHERE, got=word, expected=" ".join(legal))


class Parking:
    """The requests in the buffer, by id, with their tokens."""

    def __init__(self, rules: BufferRules, logical: int | None = None) -> None:
        self.rules = rules
        self.logical = rules.physical if logical is None else logical
        self.stored = 0
        self._parked: dict[int, int] = {}  # in the order they came
        self.total = 0  # requests that ever were in it

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, key: object) -> bool:
        return key in self._parked

    def items(self) -> dict[int, int]:
        """Return the tokens of each parked request, in the order they came."""
        return dict(self._parked)

    def room(self, tokens: int) -> bool:
        """Return whether ``tokens`` more fit under the logical size."""
        return self.stored + tokens <= self.logical

    def resize(self, logical: int) -> None:
        """Set the logical size. Raises UsageError outside 0..physical."""
        if not 0 <= logical <= self.rules.physical:
            raise UsageError(
                "not a size of this buffer", where=WHERE, got=logical, expected=f"0..{self.rules.physical} tokens"
            )
        self.logical = logical

    def park(self, key: int, tokens: int) -> None:
        """Store the request ``key``. Raises UsageError when it does not fit or is there already."""
        if key in self._parked or not self.room(tokens):
            raise UsageError(
                "the request cannot be parked", where=WHERE, got=f"request {key} of {tokens} tokens",
                expected=f"one that is not parked, of at most {self.logical - self.stored} tokens",
            )  # fmt: skip
        self._parked[key] = tokens
        self.stored += tokens
        self.total += 1

    def take(self, key: int) -> int:
        """Take the request ``key`` out and return its tokens. Raises UsageError for one that is not there."""
        if key not in self._parked:
            raise UsageError("not parked", where=WHERE, got=key)
        tokens = self._parked.pop(key)
        self.stored -= tokens
        return tokens

    def returning(self, fits: Callable[[int], bool]) -> list[int]:
        """Return the requests to bring back now, in order, as long as ``fits(tokens)`` says yes to one after another.

        The first that does not fit ends it: nobody overtakes one that waits for room.
        """
        order = list(self._parked.items())
        if self.rules.order == "shortest":
            order.sort(key=lambda item: item[1])  # stable: of equal ones the oldest
        found = []
        for key, tokens in order:
            if not fits(tokens):
                break
            found.append(key)
        return found

    def check(self) -> None:
        """Raise UsageError where the tokens do not add up."""
        if sum(self._parked.values()) != self.stored or self.stored > self.rules.physical:
            raise UsageError(
                "tokens do not add up", where=WHERE, got=self.stored, expected=str(list(self._parked.items()))
            )


def leaving(prompts: Sequence[int], room: int, victims: Victims) -> frozenset[int]:
    """Return which of one prefill's ``prompts`` (indices) leave, so that the KV of the others fits into ``room``.

    All in one unit. Newest: from the last on; longest: from the longest on, of equal ones the newest.
    """
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i] if victims == "longest" else 0, i))
    left, total = set[int](), sum(prompts)
    while total > room and order:
        index = order.pop()
        left.add(index)
        total -= prompts[index]
    return frozenset(left)
