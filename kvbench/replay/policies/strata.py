"""Strata's scheduler in the engine: a two-tier radix cache, loads layer by layer beside the prefill, deferral, balanced
batches, bubble filling (OSDI 2026, sections 4.2 and 4.3).

Prefill goes before decode, as in SGLang. With ``ahead`` the next batch is formed when the current one starts, before
its cache exists (SGLang's overlapped scheduling): that is where delay hits come from. A request reserves near memory
for its whole prompt and output when it is dispatched, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Literal

from kvbench.errors import UsageError
from kvbench.model.geometry import KVGeometry
from kvbench.replay.costs import Costs
from kvbench.replay.ledger import Ledger, TierSize
from kvbench.replay.models import ELEMENT
from kvbench.replay.policies.capacity import capacity
from kvbench.replay.policies.strata_params import Batch, Entry, Params
from kvbench.replay.protocol import Chunk, Holding, Live, Phase, Plan, State
from kvbench.systems.strata.batching import Candidate, Limits, balanced, fifo
from kvbench.systems.strata.bubble import not_before
from kvbench.systems.strata.deferral import restore, scan
from kvbench.systems.strata.radix_node import Key, Node
from kvbench.systems.strata.tiers import TieredCache, unit_key, unit_of

__all__ = ["Params", "StrataPolicy", "make"]

NEAR: Literal["near"] = "near"
FAR: Literal["far"] = "far"
CACHE = "cache"
TAILS = 1 << 16  # ended requests whose next turn is awaited, at most
ENDLESS = 1 << 30  # decode steps: the engine cuts them at the next arrival or end of a request


class StrataPolicy:
    """The policy; see the module. ``ledger`` counts tokens of tiers ``near`` and ``far``."""

    name = "strata"

    def __init__(self, costs: Costs, params: Params) -> None:
        self.costs, self.params = costs, params
        near = capacity(costs, NEAR, params.near_tokens, self.name)
        far = capacity(costs, FAR, params.far_tokens, self.name)
        self.ledger = Ledger([TierSize(NEAR, near, costs.token_bytes), TierSize(FAR, far, costs.token_bytes)])
        self._near, self._far = near, far
        self._cache: TieredCache | None = None
        self._block: int | None = None
        self._queue: deque[Entry] = deque()
        self._active: dict[int, Entry] = {}  # dispatched, by request
        self._decoding: dict[int, Live] = {}
        self._tails: OrderedDict[int, Node] = OrderedDict()  # output of ended requests another turn may repeat
        self._partial: Entry | None = None
        self._next: Batch | None = None
        self._loading: Batch | None = None
        self._unwritten = 0  # tokens of background writes no pass has carried yet
        self._drained = 0  # tokens of them that went out while the link was idle; the next pass counts their bytes
        self._free_since = 0.0  # when the link was last busy with what a pass waits for
        self._written_seen = 0
        self._rule, self._bubble = params.deferral(), params.filler()
        shape = costs.shape
        kv = KVGeometry(shape.name, shape.layers, shape.kv_heads, shape.head_dim, 2, ELEMENT, shape.source)
        self._fragment = kv.fragment_bytes(params.layout, params.page_tokens)
        self._count = dict.fromkeys(
            ("deferred", "deferrals", "bundled", "passed", "bubbles", "duplicate_tokens", "padding_tokens"), 0
        )

    # -- the engine's side -----------------------------------------------------------------------------------------

    def arrive(self, live: Live, state: State) -> str | None:
        request = live.request
        cache = self._cache_for(request.block_tokens)
        if self._pages(live.most) > self._near:
            return f"needs {live.most} tokens of KV, the near tier holds {self._near}"
        key: Key = ()
        if request.block_tokens is not None:
            key = unit_key(request.hash_ids, request.block_tokens, request.input_tokens, cache.unit)
        tail = None if request.parent is None else self._tails.pop(request.parent, None)
        if tail is not None:
            cache.tree.name(tail, key)
        live.own = entry = Entry(live, key, cache)
        self._queue.append(entry)
        return None

    def plan(self, state: State) -> Plan | None:
        self._drain(state.now)
        if self._loading is not None:
            batch, self._loading = self._loading, None
            plan = self._prefill(batch, until=batch.loaded_at)
        else:
            formed, self._next = self._next or self._form(), None
            if formed is None:
                return self._decode()
            if self._bubble.fills(formed.load, formed.new, len(self._decoding)):
                self._loading = formed
                self._count["bubbles"] += 1
                return self._fill(formed, state.now)
            plan = self._prefill(formed)
        if self.params.ahead:
            self._next = self._form()
        return plan

    def wake(self, state: State) -> float | None:
        return None

    def finish(self, plan: Plan, state: State) -> None:
        for chunk in plan.prefill:
            live = chunk.live
            if live.produced:
                self._computed(live.own)
                self._decoding[live.request.id] = live
        for live in state.ended:
            self._ended(live.own)
        if plan.link_in_bytes or plan.link_out_bytes or plan.prefill:
            self._free_since = state.now
        if plan.prefill or state.ended:
            self._sync()

    def holdings(self) -> tuple[Holding, ...]:
        near: dict[int | str, int] = {entry.live.request.id: entry.own for entry in self._active.values()}
        far: dict[int | str, int] = {}
        if self._cache is not None:
            self._cache.tree.check()
            near[CACHE] = self._cache.tree.near_pages * self._cache.unit
            far[CACHE] = self._cache.tree.far_pages * self._cache.unit
        return Holding(NEAR, near), Holding(FAR, far)

    def counters(self) -> Mapping[str, float]:
        """Return totals: requests ``deferred`` and rounds they waited (``deferrals``), ``bundled``, ``passed`` over,
        ``bubbles`` filled; tokens: ``duplicate`` (computed though somebody else was computing them: delay hits),
        ``padding`` (near memory pages have beyond their tokens), and what the cache moved."""
        found: dict[str, float] = dict(self._count)
        if self._cache is not None:
            moved = self._cache.moved
            found.update({f"{name}_tokens": getattr(moved, name) for name in moved.__slots__})
        return found

    # -- forming a batch -------------------------------------------------------------------------------------------

    def _form(self) -> Batch | None:
        """Return the next prefill pass, its requests dispatched; None where none can be."""
        batch, budget = Batch(), self.params.batch_tokens
        if self._partial is not None:
            budget -= self._chunk(batch, self._partial, budget)
        slots = self.params.requests - len(self._active)
        if self._queue and slots > 0 and (budget > 0 or not self.params.chunked):
            self._admit(batch, max(budget, 1), slots)
        return batch if batch.chunks else None

    def _admit(self, batch: Batch, budget: int, slots: int) -> None:
        """Choose requests of the queue for ``batch``, dispatch them and load what they find in the far tier."""
        params, cache = self.params, self._settled
        candidates: list[Candidate] = []
        seen = [0, 0]

        def enough(ready: list[Entry]) -> bool:
            one = self._candidate(ready[-1], cache)
            candidates.append(one)
            seen[0] += one.new
            seen[1] += len(one.loads)
            # without a load to balance, a batch is the head of the queue
            return seen[0] >= budget and (not params.balance or not seen[1])

        ready, deferred = scan(self._queue, self._rule, params.window, enough)
        self._count["deferrals"] += len(deferred)
        for entry in deferred:
            self._count["deferred"] += not entry.deferred
            entry.deferred = True
        limits = Limits(budget, cache.attainable, slots, params.chunked)
        if params.balance:
            found = balanced(candidates, limits, params.ratio, computing=batch.new)
        else:
            found = fifo(candidates, limits)
        self._count["bundled"] += found.bundled
        self._count["passed"] += found.passed
        taken = set(found.chosen)
        restore(self._queue, deferred, [entry for at, entry in enumerate(ready) if at not in taken])
        if not taken:
            return
        chosen = [ready[at] for at in found.chosen]
        for entry in chosen:  # all are locked before the first of them evicts anything
            cache.tree.dispatch(entry.node)
            entry.stage = "flight"
        flushed = cache.moved.flushed
        for entry in chosen:
            self._start(batch, entry, cache)
        batch.flush += cache.moved.flushed - flushed
        self._sync()
        for entry in chosen:
            request = entry.live.request
            self.ledger.take(NEAR, request.id, entry.own)
            self._active[request.id] = entry
            budget -= self._chunk(batch, entry, budget)

    def _candidate(self, entry: Entry, cache: TieredCache) -> Candidate:
        found = cache.find(entry.node)
        live, hit = entry.live, found.hit
        return Candidate(live.request.input_tokens - hit, self._pages(live.most - hit), found.loads, found.pins)

    def _start(self, batch: Batch, entry: Entry, cache: TieredCache) -> None:
        hit = cache.find(entry.node).hit
        need = entry.live.most - hit
        entry.own = self._pages(need)
        entry.planned = hit
        self._count["padding_tokens"] += entry.own - need
        batch.load += cache.start(entry.node, entry.own)

    def _chunk(self, batch: Batch, entry: Entry, budget: int) -> int:
        """Give ``entry`` its next tokens in ``batch``; return how many."""
        new = min(entry.left, budget) if self.params.chunked else entry.left
        batch.chunks.append(Chunk(entry.live, new, entry.planned))
        batch.entries.append(entry)
        batch.new += new
        entry.planned += new
        self._partial = entry if entry.left else None
        return new

    # -- passes ----------------------------------------------------------------------------------------------------

    def _prefill(self, batch: Batch, until: float | None = None) -> Plan:
        """Return the pass of ``batch``; with ``until`` its load is under way and ends then."""
        costs, layers = self.costs, self.costs.layers
        work = costs.layer([(chunk.new, chunk.context) for chunk in batch.chunks])
        load = 0.0 if until is not None else self._load_seconds(batch.load)
        out, carried = self._background(work.seconds)
        phases = [] if until is not None else self._flush(batch)
        if until is not None:
            last = not_before(until, layers * work.seconds, layers)
            phases.append(costs.phase(work, repeat=layers, link_out=out, until=last))
        elif load > 0.0 and layers > 1:
            phases.append(costs.phase(link_in=load))
            phases.append(costs.phase(work, repeat=layers - 1, link_in=load, link_out=out))
            phases.append(costs.phase(work, link_out=out))
        else:
            phases.append(costs.phase(work, repeat=layers, link_in=load, link_out=out))
        phases.append(costs.phase(costs.head(len(batch.chunks))))
        into = batch.load if until is None else 0
        flushed = batch.flush if until is None else 0
        return Plan(
            tuple(phases), tuple(batch.chunks), link_in_bytes=into * costs.token_bytes,
            link_out_bytes=(carried + flushed) * costs.token_bytes, note="prefill",
        )  # fmt: skip

    def _fill(self, batch: Batch, now: float) -> Plan:
        """Return one decode that runs while ``batch`` loads."""
        costs, layers = self.costs, self.costs.layers
        lives = tuple(self._decoding.values())
        load = self._load_seconds(batch.load)
        kv = sum([live.kv for live in lives]) + len(lives)
        work = costs.layer((), len(lives), kv)
        flush = self._flush(batch)
        begin = now + sum(phase.repeat * phase.link_out for phase in flush)
        batch.loaded_at = begin + layers * load
        phases = (
            *flush, costs.phase(work, repeat=layers, link_in=min(load, work.seconds)),
            costs.phase(costs.head(len(lives))),
        )  # fmt: skip
        return Plan(
            phases, decode=lives, link_in_bytes=batch.load * costs.token_bytes,
            link_out_bytes=batch.flush * costs.token_bytes, note="bubble",
        )  # fmt: skip

    def _decode(self) -> Plan | None:
        """Return decodes alone: as many steps as nothing changes."""
        lives = tuple(self._decoding.values())
        if not lives:
            return None
        costs, n = self.costs, len(lives)
        kv = sum([live.kv for live in lives]) + n

        def later(step: int) -> tuple[Phase, ...]:
            return costs.iteration((), n, kv + step * n)

        return Plan(later(0), decode=lives, steps=ENDLESS, later=later, note="decode")

    def _load_seconds(self, tokens: int) -> float:
        """Return link seconds of one layer's KV of ``tokens`` tokens."""
        return self.costs.load(tokens, self._fragment, self.params.transport)  # type: ignore[arg-type]

    def _out_seconds(self, tokens: int) -> float:
        return self.costs.evict(tokens, self._fragment, self.params.transport)  # type: ignore[arg-type]

    def _flush(self, batch: Batch) -> list[Phase]:
        """Return the writes an eviction waits for; nothing else runs meanwhile."""
        if not batch.flush:
            return []
        return [self.costs.phase(repeat=self.costs.layers, link_out=self._out_seconds(batch.flush))]

    def _drain(self, now: float) -> None:
        """Let background writes go out in the time since the last pass: decodes and idling leave the link to them."""
        carried = self._fitting((now - self._free_since) / self.costs.layers)
        self._drained += carried
        self._free_since = now

    def _background(self, seconds: float) -> tuple[float, int]:
        """Return (link seconds a layer, tokens) of background writes that fit beside ``seconds`` of a layer.

        The tokens include those that went out before.
        """
        carried = self._fitting(seconds)
        before, self._drained = self._drained, 0
        return self._out_seconds(carried), carried + before

    def _fitting(self, seconds: float) -> int:
        """Take as many tokens off the background writes as ``seconds`` a layer can carry."""
        if not self._unwritten or seconds <= 0.0:
            return 0
        whole = self._out_seconds(self._unwritten)
        carried = self._unwritten if whole <= seconds else int(self._unwritten * seconds / whole)
        self._unwritten -= carried
        return carried

    # -- memory ----------------------------------------------------------------------------------------------------

    def _computed(self, entry: Entry) -> None:
        """The prompt of ``entry`` is done: the tree takes its whole pages over, copies of what was there are freed."""
        cache, request = self._settled, entry.live.request
        taken = cache.computed(entry.node)
        self.ledger.hand(NEAR, request.id, CACHE, taken)
        entry.own -= taken
        entry.stage = "decode"
        spare = entry.own - self._pages(entry.live.most - len(entry.key) * cache.unit)
        if spare > 0:
            self._count["duplicate_tokens"] += spare
            cache.give(spare)
            entry.own -= spare
            self.ledger.give(NEAR, request.id, spare)

    def _ended(self, entry: Entry) -> None:
        """The request is done: its output stays in the cache, nameless until the next turn repeats it."""
        cache, request = self._settled, entry.live.request
        del self._decoding[request.id], self._active[request.id]
        start = len(entry.key)
        tail = None
        if request.session is not None and request.hash_ids is not None:
            tail = cache.leave(entry.node, entry.live.most - start * cache.unit)
        if tail is not None:
            tokens = len(tail.key) * cache.unit
            entry.own -= tokens
            self.ledger.hand(NEAR, request.id, CACHE, tokens)
            self._tails[request.id] = tail
            if len(self._tails) > TAILS:
                self._tails.popitem(last=False)
        cache.tree.release(entry.node)
        cache.give(entry.own)
        self.ledger.give(NEAR, request.id)

    def _sync(self) -> None:
        """Let the ledger follow what the cache holds after evictions, loads and writes."""
        cache, ledger = self._settled, self.ledger
        for tier, pages in ((NEAR, cache.tree.near_pages), (FAR, cache.tree.far_pages)):
            more = pages * cache.unit - ledger.held(tier, CACHE)
            if more > 0:
                ledger.take(tier, CACHE, more)
            elif more < 0:
                ledger.give(tier, CACHE, -more)
        self._unwritten += cache.moved.written - self._written_seen
        self._written_seen = cache.moved.written

    def _pages(self, tokens: int) -> int:
        """Return ``tokens`` rounded up to whole pages."""
        page = self.params.page_tokens
        return -(-tokens // page) * page

    @property
    def _settled(self) -> TieredCache:
        assert self._cache is not None
        return self._cache

    def _cache_for(self, block: int | None) -> TieredCache:
        """Return the cache; the first request with hash ids settles in which unit its tree counts."""
        params = self.params
        if self._cache is None:
            self._cache = TieredCache(
                self._near, self._far, params.page_tokens, params.writes(), load_back=params.load_back, named=True
            )
        if block is not None and block != self._block:
            if self._block is not None:
                raise UsageError(
                    "block sizes are mixed", where="strata", got=block, expected=f"{self._block} as before"
                )
            self._cache.unit, self._block = unit_of(params.page_tokens, block), block
        return self._cache


def make(costs: Costs, params: Params) -> StrataPolicy:
    """Return a fresh policy."""
    return StrataPolicy(costs, params)
