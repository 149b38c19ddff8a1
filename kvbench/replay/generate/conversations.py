"""Conversations: each turn brings the whole history back. ShareGPT's chats, and agents working on code."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.errors import UsageError
from kvbench.replay.generate.laws import Arrivals, Lengths, geometric, stream
from kvbench.replay.generate.prefixes import Chain, Ids, shared_prefix
from kvbench.replay.request import Request, seconds

MOST_TALKS = 500_000  # conversations that are going on when a trace begins
CANDIDATES = 32


class Turn(NamedTuple):
    """What a turn brings: tokens, seconds to the next one, and whether the history is dropped before it."""

    new: int
    output: int
    delay: float
    reset: bool


@dataclass(frozen=True, slots=True)
class ConversationLaw:
    """What conversations look like. Laws of tokens: ``new`` a turn, ``output``; of milliseconds between the arrivals of
    two turns: ``delay``, and ``other_delay`` where a person answers (a share ``1 - quick`` of the turns).

    ``turns``: mean number of a geometric law. ``shared``: tokens all conversations begin with. With the chance
    ``reset``, or when the next turn would pass ``most_context``, the history is dropped and a new chain begins.
    """

    turns: float
    new: Lengths
    output: Lengths
    delay: Lengths
    other_delay: Lengths | None = None
    quick: float = 1.0
    shared: int = 0
    reset: float = 0.0
    most_context: int = 1 << 24

    @property
    def mean_delay(self) -> float:
        """Mean seconds from one turn to the next."""
        other = self.other_delay or self.delay
        return (self.quick * self.delay.mean + (1.0 - self.quick) * other.mean) / 1e3


class _Talk:
    """One conversation as it goes on. ``left`` turns are to come."""

    def __init__(self, law: ConversationLaw, session: int, left: int, make: Callable[[], Chain]) -> None:
        self.law, self.session, self.left, self.make = law, session, left, make
        self.chain = make()
        self.parent: int | None = None
        self.begun = False

    def turn(self, draw: Turn) -> tuple[int, tuple[int, ...]]:
        """Return (input tokens, ids) of the next turn, dropping the history first where the law wants it."""
        if self.begun and (draw.reset or self.chain.tokens + draw.new + draw.output > self.law.most_context):
            self.chain, self.parent = self.make(), None
        self.begun = True
        return self.chain.turn(draw.new, draw.output)


def conversations(
    law: ConversationLaw, count: int, arrivals: Arrivals, seed: int, block_tokens: int
) -> Iterator[Request]:  # fmt: skip
    """Yield ``count`` requests of a steady stream of conversations, a window of it as a recorded trace is.

    At its beginning conversations are going on, as many as there are at ``arrivals.rate`` requests a second: their
    history is in their input and nowhere else, and their turns before the window are nobody's parent. Others start at
    the rate over the mean number of turns. Open loop: a turn arrives its delay after the one before arrived, however
    long that took to answer. Raises UsageError where more than MOST_TALKS would be going on.
    """
    going = arrivals.rate * (law.turns - 1.0) / law.turns * law.mean_delay
    if going > MOST_TALKS:
        raise UsageError(
            "too many conversations at once", where="rate", got=arrivals.rate,
            expected=f"at most {MOST_TALKS * law.turns / ((law.turns - 1.0) * law.mean_delay):.3g} requests a second",
        )  # fmt: skip
    return itertools.islice(_stream(law, going, arrivals, seed, block_tokens), count)


def _stream(
    law: ConversationLaw, going: float, arrivals: Arrivals, seed: int, block_tokens: int
) -> Iterator[Request]:  # fmt: skip
    ids, sessions, numbers = Ids(), itertools.count(), itertools.count()
    begins = shared_prefix(law.shared, block_tokens, ids)
    starts = Arrivals(arrivals.rate / law.turns, arrivals.cv).times(stream(seed, "arrivals"))
    turns, draws = geometric(law.turns, stream(seed, "turns")), _draws(law, seed)

    def talk() -> _Talk:
        return _Talk(law, next(sessions), next(turns), lambda: Chain(begins, law.shared, block_tokens, ids))

    waiting: list[tuple[float, int, _Talk]] = []
    for residual in _residuals(law, going, seed):
        old = talk()
        # turns come without memory: those before now follow the law of those after it
        for _ in range(next(turns)):
            old.turn(next(draws))
        waiting.append((residual, old.session, old))
    heapq.heapify(waiting)
    start = next(starts)
    while True:
        if not waiting or start <= waiting[0][0]:
            fresh = talk()
            heapq.heappush(waiting, (start, fresh.session, fresh))
            start = next(starts)
            continue
        at, order, now = heapq.heappop(waiting)
        draw, number = next(draws), next(numbers)
        inputs, names = now.turn(draw)
        yield Request(number, at, inputs, draw.output, now.session, now.parent, block_tokens, names)
        now.parent = number
        now.left -= 1
        if now.left:
            heapq.heappush(waiting, (seconds(at + draw.delay), order, now))


def _residuals(law: ConversationLaw, going: float, seed: int) -> Iterator[float]:
    """Yield seconds to the next turn of each conversation that is going on at the beginning.

    A delay is met in proportion to its length, at any of its points: the longer ones among CANDIDATES drawn.
    """
    rng, draws = stream(seed, "going"), _draws(law, seed + (1 << 32))
    for _ in range(int(rng.poisson(going))):
        delays = [next(draws).delay for _ in range(CANDIDATES)]
        met = rng.random() * sum(delays)
        for delay in delays:
            met -= delay
            if met < 0.0:
                break
        yield seconds(rng.random() * delay)


def _draws(law: ConversationLaw, seed: int) -> Iterator[Turn]:
    new, output = law.new.draws(stream(seed, "new")), law.output.draws(stream(seed, "outputs"))
    quick = law.delay.draws(stream(seed, "delay"))
    slow = (law.other_delay or law.delay).draws(stream(seed, "other delay"))
    which = stream(seed, "which")
    while True:
        for chance, again in which.random((1024, 2)).tolist():
            delay = next(quick) if chance < law.quick else next(slow)
            yield Turn(next(new), next(output), delay / 1e3, again < law.reset)
