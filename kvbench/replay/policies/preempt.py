"""Baseline: whole requests are swapped to the far tier and back, before the iteration, as vLLM's swapping did.

A request that gives way moves out with all its KV; it comes back before anything new is let in, once its pages and one
more for each running decode are free. Nothing comes back in an iteration in which something moves out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.replay.costs import TRANSPORTS, Costs, Transport
from kvbench.replay.policies.continuous import FAR, NEAR, BatchParams, Continuous
from kvbench.replay.protocol import Chunk, Live, Phase, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(BatchParams):
    """``transport`` of the swaps, a page of a layer (keys or values) being a fragment; ``overlap``: swaps run beside
    the computation instead of before it. Raises UsageError for an unknown transport."""

    transport: Transport = "ce"
    overlap: bool = False

    def __post_init__(self) -> None:
        BatchParams.__post_init__(self)
        if self.transport not in TRANSPORTS:
            raise UsageError("unknown transport", where="transport", got=self.transport, expected=", ".join(TRANSPORTS))


class Preempt(Continuous):
    """Swaps; a request for which the far tier has no room loses its KV instead."""

    name = "preempt"

    def __init__(self, costs: Costs, params: Params) -> None:
        super().__init__(costs, params, far=True)
        self.params = params
        self.out: deque[Live] = deque()
        self.fragment = params.page_tokens * costs.layer_token_bytes // 2
        self._moved_in = self._moved_out = 0  # pages of this iteration
        self._dropped: list[Live] = []
        self.totals = {"swapped_out": 0.0, "swapped_in": 0.0, "preemptions": 0.0}

    def _displace(self, live: Live) -> None:
        self.totals["preemptions"] += 1
        held = self.pages.own[NEAR].get(live.request.id, 0)
        if live.kv and held <= self.ledger.free(FAR):
            self._moved_out += self.pages.move(live, NEAR, FAR)
            self.totals["swapped_out"] += 1
            self.out.appendleft(live)
            return
        self.pages.free(live)
        self.waiting.appendleft(live)
        if live.kv:
            self._dropped.append(live)

    def _let_in(self, *, blocked: bool) -> None:
        while self.out and not blocked and len(self.running) < self.batch.max_batch:
            live = self.out[0]
            soon = sum(self.pages.lacks(NEAR, other, other.kv + 1) for other in self.running if other.decoding)
            need = self.pages.of(live.kv + live.remaining)
            if need + soon > self.ledger.free(NEAR):
                return
            self.out.popleft()
            self._moved_in += self.pages.move(live, FAR, NEAR)
            self.pages.grow(NEAR, live, live.kv + live.remaining)
            self.totals["swapped_in"] += 1
            self.running.append(live)
        if not self.out:
            super()._let_in(blocked=blocked)

    def _plan(self, prefill: tuple[Chunk, ...], decode: tuple[Live, ...], out: tuple[Live, ...]) -> Plan:
        into, gone, dropped = self._moved_in, self._moved_out, tuple(self._dropped)
        self._moved_in = self._moved_out = 0
        self._dropped = []
        if decode and not into and not gone and not dropped:
            return super()._plan(prefill, decode, ())
        kv = sum(live.kv for live in decode) + len(decode)
        tokens = self.pages.tokens
        link_in = self.costs.load(into * tokens, self.fragment, self.params.transport)
        link_out = self.costs.evict(gone * tokens, self.fragment, self.params.transport)
        return Plan(
            self._swapping(prefill, len(decode), kv, link_in, link_out), prefill, decode, dropped,
            link_in_bytes=into * self.pages.page_bytes, link_out_bytes=gone * self.pages.page_bytes,
        )  # fmt: skip

    def _swapping(
        self, prefill: tuple[Chunk, ...], requests: int, kv: int, link_in: float, link_out: float
    ) -> tuple[Phase, ...]:
        chunks = [(c.new, c.context) for c in prefill]
        if self.params.overlap:
            return self.costs.iteration(chunks, requests, kv, link_in=link_in, link_out=link_out)
        swap = self.costs.phase(repeat=self.costs.layers, link_in=link_in, link_out=link_out)
        return (swap, *self.costs.iteration(chunks, requests, kv))


def make(costs: Costs, params: Params) -> Preempt:
    """Return the policy."""
    return Preempt(costs, params)
