"""Continuous batching over paged KV: what the baselines share. Requests join and leave between iterations.

With chunked prefill every iteration decodes all running requests and fills its token budget with parts of prompts;
without, an iteration prefills whole prompts, oldest first, or decodes. First come, first served; the head of the queue
is never overtaken. A request is let in when the pages of what it has to prefill are free. When a decode finds no page,
the request that came last gives way (:meth:`Continuous._displace`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs
from kvbench.replay.ledger import Ledger, TierSize
from kvbench.replay.policies.capacity import capacity
from kvbench.replay.protocol import Chunk, Holding, Live, Phase, Plan, State

NEAR: Literal["near"] = "near"
FAR: Literal["far"] = "far"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParams:
    """``chunked``: whether prompts are cut to fill ``budget`` tokens an iteration; ``max_batch`` requests at most;
    ``page_tokens`` tokens a page. ``near_tokens``, ``far_tokens``: capacity for KV, 0 for what the machine leaves; a
    policy refuses more than that.

    Raises UsageError for numbers out of range.
    """

    chunked: bool = True
    budget: int = 2048
    max_batch: int = 256
    page_tokens: int = 16
    near_tokens: int = 0
    far_tokens: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "budget": (1, 1 << 24), "max_batch": (1, 1 << 16), "page_tokens": (1, 1 << 16),
            "near_tokens": (0, 1 << 40), "far_tokens": (0, 1 << 40),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise UsageError(
                    "parameter out of range", where=name, got=getattr(self, name), expected=f"{low}..{high}"
                )


class Pages:
    """Pages by tier, kept twice: in the ledger, and as what each request here holds (the deep audit compares)."""

    def __init__(self, costs: Costs, params: BatchParams, *, far: bool, policy: str) -> None:
        self.tokens = params.page_tokens
        page_bytes = params.page_tokens * costs.token_bytes
        sizes = [TierSize(NEAR, capacity(costs, NEAR, params.near_tokens or None, policy) // self.tokens, page_bytes)]
        tokens = capacity(costs, FAR, params.far_tokens or None, policy)
        if far:
            sizes.append(TierSize(FAR, tokens // self.tokens, page_bytes))
        self.ledger = Ledger(sizes)
        self.page_bytes = page_bytes
        self.own: dict[str, dict[int, int]] = {size.name: {} for size in sizes}

    def of(self, tokens: int) -> int:
        """Return the pages ``tokens`` tokens fill."""
        return -(-tokens // self.tokens)

    def grow(self, tier: str, live: Live, tokens: int) -> None:
        """Give ``live`` the pages it lacks in ``tier`` for ``tokens`` tokens."""
        own, number = self.own[tier], live.request.id
        more = self.of(tokens) - own.get(number, 0)
        if more > 0:
            self.ledger.take(tier, number, more)
            own[number] = own.get(number, 0) + more

    def lacks(self, tier: str, live: Live, tokens: int) -> int:
        """Return how many pages ``live`` lacks in ``tier`` for ``tokens`` tokens."""
        return max(0, self.of(tokens) - self.own[tier].get(live.request.id, 0))

    def free(self, live: Live) -> None:
        """Take every page back from ``live``."""
        for tier, own in self.own.items():
            if own.pop(live.request.id, 0):
                self.ledger.give(tier, live.request.id)

    def move(self, live: Live, source: str, target: str) -> int:
        """Move the pages of ``live``; return how many."""
        pages = self.own[source].pop(live.request.id, 0)
        self.ledger.move(live.request.id, source, target, pages)
        self.own[target][live.request.id] = pages
        return pages

    def holdings(self) -> tuple[Holding, ...]:
        """Return the pages by tier and request."""
        return tuple(Holding(tier, dict(own)) for tier, own in self.own.items())


class Continuous(ABC):
    """A policy without prefix cache; subclasses say what giving way means and what an iteration costs."""

    name = "continuous"

    def __init__(self, costs: Costs, params: BatchParams, *, far: bool = False, home: str = NEAR) -> None:
        self.costs, self.batch = costs, params
        self.pages = Pages(costs, params, far=far, policy=self.name)
        self.ledger = self.pages.ledger
        self.home = home
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []
        self.totals: dict[str, float] = {}

    def arrive(self, live: Live, state: State) -> str | None:
        """Queue ``live``; one whose KV exceeds the whole tier is rejected."""
        if self.pages.of(live.most) > self.ledger.capacity(self.home):
            held = self.ledger.capacity(self.home) * self.pages.tokens
            return f"needs {live.most} tokens of KV, the {self.home} tier holds {held}"
        self.waiting.append(live)
        return None

    def wake(self, state: State) -> float | None:
        """Nothing goes on between iterations."""
        return None

    def holdings(self) -> tuple[Holding, ...]:
        """Return the pages each request holds."""
        return self.pages.holdings()

    def counters(self) -> Mapping[str, float]:
        """Return the policy's totals."""
        return self.totals

    def plan(self, state: State) -> Plan | None:
        """Let decodes have their pages, let requests in, and fill the budget."""
        out = self._make_room()
        self._let_in(blocked=bool(out))
        batch = self.batch
        decode = [live for live in self.running if live.decoding]
        prefill: list[Chunk] = []
        left = batch.budget - (len(decode) if batch.chunked else 0)
        for live in self.running:
            if live.decoding:
                continue
            context = self._context(live)
            todo = live.kv + live.remaining - context
            if batch.chunked:
                todo = min(todo, left)
            elif todo > left and prefill:
                break
            if todo < 1 or (left < 1 and prefill):
                break
            prefill.append(Chunk(live, todo, context))
            left -= todo
        if prefill and not batch.chunked:
            decode = []
        if not prefill and not decode and not out:
            return None
        for live in decode:
            self._hold(live, live.kv + 1)
        return self._plan(tuple(prefill), tuple(decode), tuple(out))

    def finish(self, plan: Plan, state: State) -> None:
        """Hold the pages of what was decoded and free those of requests that ended."""
        if state.steps > 1:
            for live in plan.decode:
                self._hold(live, live.kv)
        for live in state.ended:
            self._end(live)
        if state.ended:
            self.running = [live for live in self.running if live.stage != "finished"]

    # -- what subclasses change ------------------------------------------------------------------------------------

    @abstractmethod
    def _displace(self, live: Live) -> None:
        """Free the pages of ``live``, which is not in ``running`` any more, and say where its KV goes."""

    def _hold(self, live: Live, tokens: int) -> None:
        """Give ``live`` what it lacks for ``tokens`` tokens."""
        self.pages.grow(self.home, live, tokens)

    def _context(self, live: Live) -> int:
        """Return the tokens in front of the next chunk of ``live``."""
        return live.kv

    def _phases(self, prefill: tuple[Chunk, ...], requests: int, kv_tokens: int) -> tuple[Phase, ...]:
        """Return what an iteration takes; ``kv_tokens`` of the decodes, the new ones included."""
        return self.costs.iteration([(c.new, c.context) for c in prefill], requests, kv_tokens)

    def _end(self, live: Live) -> None:
        self.pages.free(live)

    def _plan(self, prefill: tuple[Chunk, ...], decode: tuple[Live, ...], out: tuple[Live, ...]) -> Plan:
        """Return the plan; ``out`` are the requests that gave way."""
        return self._mixed(prefill, decode, out) if prefill or out else self._decodes(decode)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _mixed(self, prefill: tuple[Chunk, ...], decode: tuple[Live, ...], drop: tuple[Live, ...] = ()) -> Plan:
        kv = sum(live.kv for live in decode) + len(decode)
        return Plan(self._phases(prefill, len(decode), kv), prefill, decode, drop)

    def _decodes(self, decode: tuple[Live, ...]) -> Plan:
        """Return a plan of decodes alone, as many steps as pages last."""
        n = len(decode)
        kv = sum(live.kv for live in decode) + n
        return Plan(
            self._phases((), n, kv), decode=decode, steps=self._steps(decode),
            later=lambda k: self._phases((), n, kv + k * n),
        )  # fmt: skip

    def _steps(self, decode: tuple[Live, ...]) -> int:
        """Return how many decodes in a row find their pages; at most until the first request ends."""
        steps = min(live.request.output_tokens - live.produced for live in decode)
        free = self.ledger.free(self.home)
        while steps > 1 and sum(self.pages.lacks(self.home, live, live.kv + steps) for live in decode) > free:
            steps //= 2
        return max(1, steps)

    def _make_room(self) -> list[Live]:
        """Let requests give way, last first, until every decode that runs finds its page; return those."""
        out: list[Live] = []
        need = sum(self.pages.lacks(self.home, live, live.kv + 1) for live in self.running if live.decoding)
        while need > self.ledger.free(self.home):
            live = self.running.pop()
            if live.decoding:
                need -= self.pages.lacks(self.home, live, live.kv + 1)
            self._displace(live)
            out.append(live)
        return out

    def _let_in(self, *, blocked: bool) -> None:
        """Let the head of the queue in while its pages are free; ``blocked``: a request just gave way."""
        while self.waiting and not blocked and len(self.running) < self.batch.max_batch:
            live = self.waiting[0]
            if not self._admit(live):
                return
            self.waiting.popleft()
            self.running.append(live)

    def _admit(self, live: Live) -> bool:
        """Take the pages ``live`` needs for its prefill; return False where they are not free.

        Decodes of this iteration keep the page they are about to take.
        """
        tokens = live.kv + live.remaining
        soon = sum(self.pages.lacks(self.home, other, other.kv + 1) for other in self.running if other.decoding)
        if self.pages.lacks(self.home, live, tokens) + soon > self.ledger.free(self.home):
            return False
        self.pages.grow(self.home, live, tokens)
        return True
