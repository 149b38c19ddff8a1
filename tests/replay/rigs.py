"""Small policies and traces for tests of the engine."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvbench.replay.contention import Contention
from kvbench.replay.ledger import Ledger, TierSize
from kvbench.replay.protocol import Chunk, Holding, Live, Phase, Plan, State
from kvbench.replay.request import Request, blocks_of


@dataclass(frozen=True, slots=True)
class Factors:
    """Costs that know of contention alone."""

    contention: Contention = field(default_factory=Contention)


class OneByOne:
    """Serves one request at a time: a prefill of ``prefill`` seconds, then decodes of ``decode`` seconds each.

    ``phases`` replaces the prefill's phase; ``capacity`` in tokens; ``steps``: decodes that may be run as one event.
    """

    name = "one_by_one"

    def __init__(
        self, prefill: float = 2.0, decode: float = 0.5, *, phases: tuple[Phase, ...] = (), capacity: int = 1000,
        steps: int = 1,
    ) -> None:  # fmt: skip
        self.phases = phases or (Phase(compute=prefill),)
        self.decode, self.steps = decode, steps
        self.ledger = Ledger([TierSize("near", capacity, 1)])
        self.queue: deque[Live] = deque()
        self.own: dict[int, int] = {}

    def arrive(self, live: Live, state: State) -> str | None:
        if live.most > self.ledger.capacity("near"):
            return "larger than memory"
        self.queue.append(live)
        return None

    def plan(self, state: State) -> Plan | None:
        if not self.queue:
            return None
        live = self.queue[0]
        if live.decoding:
            return Plan((Phase(hbm=self.decode),), decode=(live,), steps=self.steps)
        self.ledger.take("near", live.request.id, live.most)
        self.own[live.request.id] = live.most
        return Plan(self.phases, prefill=(Chunk(live, live.remaining, live.kv),))

    def wake(self, state: State) -> float | None:
        return None

    def finish(self, plan: Plan, state: State) -> None:
        for live in state.ended:
            self.queue.remove(live)
            del self.own[live.request.id]
            self.ledger.give("near", live.request.id)

    def holdings(self) -> tuple[Holding, ...]:
        return (Holding("near", dict(self.own)),)

    def counters(self) -> Mapping[str, float]:
        return {}


def requests(count: int, rate: float, seed: int, *, tokens: tuple[int, int], out: tuple[int, int]) -> list[Request]:
    """Return Poisson arrivals with lengths uniform in ``tokens`` and ``out``."""
    source, now, made = random.Random(seed), 0.0, []
    for i in range(count):
        now += source.expovariate(rate)
        made.append(Request(i, round(now, 6), source.randint(*tokens), source.randint(*out)))
    return made


def documents(count: int, rate: float, seed: int, *, docs: int, length: int, block: int = 16) -> Iterator[Request]:
    """Yield questions of up to 40 tokens about ``docs`` documents of up to ``length`` tokens, in blocks."""
    source, now = random.Random(seed), 0.0
    lengths = [source.randint(length // 4, length) for _ in range(docs)]
    for i in range(count):
        now += source.expovariate(rate)
        doc = source.randrange(docs)
        tokens = lengths[doc] + source.randint(1, 40)
        shared, every = lengths[doc] // block, blocks_of(tokens, block)
        ids = tuple(doc * 10_000 + k for k in range(shared))
        ids += tuple(1_000_000 + i * 1000 + k for k in range(every - shared))
        yield Request(i, round(now, 6), tokens, source.randint(1, 12), block_tokens=block, hash_ids=ids)
