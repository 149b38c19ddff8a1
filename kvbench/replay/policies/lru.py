"""Baseline: a prefix cache near and far. Least recently used blocks are offloaded, and loaded again on a hit.

What a common engine with a hierarchical cache does without Strata's scheduling: requests are served in order, a hit in
the far tier is loaded layer by layer beside the prefill that needs it, and what is evicted from near is written far.
Output tokens are not cached: traces have no hash ids for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.replay.costs import TRANSPORTS, Costs, Transport
from kvbench.replay.ledger import Ledger, TierSize
from kvbench.replay.policies.blocks import Block, Blocks, with_cache
from kvbench.replay.policies.capacity import capacity
from kvbench.replay.policies.continuous import FAR, NEAR, BatchParams, Continuous
from kvbench.replay.protocol import Chunk, Holding, Live, Phase, Plan, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(BatchParams):
    """``transport`` of loads and offloads, ``page_tokens`` of a layer's keys or values being a fragment; ``overlap``:
    loads run beside the prefill, layer by layer, instead of before it; ``far``: whether there is a far tier.

    Raises UsageError for an unknown transport.
    """

    transport: Transport = "ce"
    overlap: bool = True
    far: bool = True

    def __post_init__(self) -> None:
        BatchParams.__post_init__(self)
        if self.transport not in TRANSPORTS:
            raise UsageError("unknown transport", where="transport", got=self.transport, expected=", ".join(TRANSPORTS))


@dataclass(slots=True, eq=False)
class Hold:
    """What a request holds: locked ``blocks`` of ``shared`` tokens, from its beginning on; ``private`` near tokens."""

    blocks: list[Block]
    shared: int
    private: int


class Lru(Continuous):
    """Continuous batching with a prefix cache in tokens (a page of one token); see the module."""

    name = "lru"

    def __init__(self, costs: Costs, params: Params) -> None:
        super().__init__(costs, params, far=params.far)
        self.params = params
        sizes = [TierSize(NEAR, capacity(costs, NEAR, params.near_tokens or None, self.name), costs.token_bytes)]
        if params.far:
            sizes.append(TierSize(FAR, capacity(costs, FAR, params.far_tokens or None, self.name), costs.token_bytes))
        self.ledger = Ledger(sizes)
        self.cache = Blocks(self.ledger, NEAR, FAR if params.far else None)
        self.holds: dict[int, Hold] = {}
        self.fragment = params.page_tokens * costs.layer_token_bytes // 2
        self._loaded = self._offloaded = 0  # tokens of this iteration
        self.totals = {"preemptions": 0.0, "loaded_tokens": 0.0, "offloaded_tokens": 0.0, "near_hit_tokens": 0.0}

    def arrive(self, live: Live, state: State) -> str | None:
        """Queue ``live``; one whose KV exceeds the near tier is rejected."""
        if live.most > self.ledger.capacity(NEAR):
            return f"needs {live.most} tokens of KV, the near tier holds {self.ledger.capacity(NEAR)}"
        self.waiting.append(live)
        return None

    def holdings(self) -> tuple[Holding, ...]:
        """Return each request's private tokens and the cache's."""
        cached = self.cache.holdings()
        own = {number: hold.private for number, hold in self.holds.items() if hold.private}
        return tuple(with_cache(tier, own if tier == NEAR else {}, tokens) for tier, tokens in cached.items())

    def plan(self, state: State) -> Plan | None:
        """Let decodes grow, let requests in with what the cache has of them, and fill the budget."""
        self._loaded = self._offloaded = 0
        return super().plan(state)

    def finish(self, plan: Plan, state: State) -> None:
        """Cache what was prefilled, hold what was decoded, and give up what ended."""
        for chunk in plan.prefill:
            if chunk.live.decoding or chunk.live.stage == "finished":
                self._share(chunk.live)
        super().finish(plan, state)

    # -- what continuous batching asks -----------------------------------------------------------------------------

    def _context(self, live: Live) -> int:
        return live.kv or self.holds[live.request.id].shared

    def _hold(self, live: Live, tokens: int) -> None:
        hold = self.holds[live.request.id]
        more = tokens - hold.shared - hold.private
        if more > 0:
            self.ledger.take(NEAR, live.request.id, more)
            hold.private += more

    def _end(self, live: Live) -> None:
        self._release(live)

    def _displace(self, live: Live) -> None:
        self._release(live)
        self.waiting.appendleft(live)
        self.totals["preemptions"] += 1

    def _make_room(self) -> list[Live]:
        """Let requests give way, last first, until every decode finds a token; what is cached and idle goes first."""
        out: list[Live] = []
        while True:
            need = sum(self._lacks(live) for live in self.running if live.decoding)
            moved = self.cache.make_room(need)
            if moved is not None:
                self._offloaded += moved
                break
            live = self.running.pop()
            self._displace(live)
            out.append(live)
        for live in self.running:
            if live.decoding:  # here already, so that whoever comes in now cannot take the token
                self._hold(live, live.kv + 1)
        return out

    def _admit(self, live: Live) -> bool:
        """Lock what the cache has of ``live``, make room for the rest and load what lies far."""
        request, tokens = live.request, live.kv + live.remaining
        blocks: list[Block] = []
        if request.hash_ids is not None and request.block_tokens is not None:
            blocks = self.cache.match(request.hash_ids, request.input_tokens - 1, request.block_tokens)
        self.cache.lock(blocks)
        far = [block for block in blocks if not block.near]
        shared = sum(block.tokens for block in blocks)
        private = tokens - shared
        load = sum(block.tokens for block in far)
        moved = self.cache.make_room(private + load)
        if moved is None:
            self.cache.unlock(blocks)
            return False
        self._offloaded += moved
        for block in far:
            self.cache.load(block)
        self._loaded += load
        self.totals["loaded_tokens"] += load
        self.totals["near_hit_tokens"] += tokens - private - load
        self.ledger.take(NEAR, request.id, private)
        self.holds[request.id] = Hold(blocks, shared, private)
        return True

    def _steps(self, decode: tuple[Live, ...]) -> int:
        """Return how many decodes in a row find a token that is free; their first one is theirs already."""
        steps = min(live.request.output_tokens - live.produced for live in decode)
        return max(1, min(steps, 1 + self.ledger.free(NEAR) // len(decode)))

    def _plan(self, prefill: tuple[Chunk, ...], decode: tuple[Live, ...], out: tuple[Live, ...]) -> Plan:
        drop = tuple(live for live in out if live.kv)
        loaded, offloaded = self._loaded, self._offloaded
        self.totals["offloaded_tokens"] += offloaded
        if decode and not prefill and not drop and not loaded and not offloaded:
            return self._decodes(decode)
        costs = self.costs
        link_in = costs.load(loaded, self.fragment, self.params.transport)
        link_out = costs.evict(offloaded, self.fragment, self.params.transport)
        kv = sum(live.kv for live in decode) + len(decode)
        chunks = [(c.new, c.context) for c in prefill]
        phases: tuple[Phase, ...]
        if self.params.overlap:
            phases = costs.iteration(chunks, len(decode), kv, link_in=link_in, link_out=link_out)
        else:
            move = costs.phase(repeat=costs.layers, link_in=link_in, link_out=link_out)
            phases = (move, *costs.iteration(chunks, len(decode), kv))
        return Plan(
            phases, prefill, decode, drop,
            link_in_bytes=loaded * costs.token_bytes, link_out_bytes=offloaded * costs.token_bytes,
        )  # fmt: skip

    # -- parts -----------------------------------------------------------------------------------------------------

    def _lacks(self, live: Live) -> int:
        """Return the near tokens ``live`` lacks for its next decode: one, or none where it has it already."""
        hold = self.holds[live.request.id]
        return max(0, live.kv + 1 - hold.shared - hold.private)

    def _share(self, live: Live) -> None:
        """Make the full blocks of a prompt the cache's, locked by ``live``; a copy that is near already is given up."""
        request, hold = live.request, self.holds[live.request.id]
        if request.hash_ids is None or request.block_tokens is None:
            return
        size, number = request.block_tokens, request.id
        for key in request.hash_ids[len(hold.blocks) : request.input_tokens // size]:
            block = self.cache.insert(key, size, number)
            if block is None:
                block = self.cache.find(key)
                if block.tokens != size:
                    return
                self.ledger.give(NEAR, number, size)
            hold.private -= size
            hold.shared += size
            self.cache.lock([block])
            hold.blocks.append(block)

    def _release(self, live: Live) -> None:
        hold = self.holds.pop(live.request.id)
        self.cache.unlock(hold.blocks)
        self.ledger.give(NEAR, live.request.id)


def make(costs: Costs, params: Params) -> Lru:
    """Return the policy."""
    return Lru(costs, params)
