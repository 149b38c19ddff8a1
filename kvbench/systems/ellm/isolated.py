"""Two static pools against one elastic pool under the same requests (eLLM, arXiv 2506.15155, sections 1 and 4).

What vLLM did when the paper was written: activations of the longest prompt are set aside for good, the rest holds KV
cache. The elastic pool starts from the same split and lends. Requests, iterations and activation sizes are played here;
every chunk they need is really mapped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.errors import UsageError
from kvbench.memory.vmm.protocol import Vmm
from kvbench.memory.vmm.touch import Touch
from kvbench.systems.ellm.backing import Policy, Sizes
from kvbench.systems.ellm.chunks import Owner, PoolExhausted
from kvbench.systems.ellm.identity import moved_bytes, stamp_all
from kvbench.systems.ellm.kv_slots import KvSlot
from kvbench.systems.ellm.pool import ElasticPool

WATERMARK = 0.01  # of all chunks: kept reclaimable when a request is admitted, as vLLM does for its blocks
PROMPT, OUTPUT = (450.0, 0.9), (220.0, 0.7)  # median tokens and sigma of the logarithm, in the manner of ShareGPT
# ShareGPT prompts have 2K tokens at most in 99 of 100 cases (section 1). The same requests fit every maximum context,
# so that only what is set aside differs.
LONGEST_PROMPT, LONGEST_OUTPUT = 1536, 512
BATCHED = 2048  # tokens of one prefill: the activations of any maximum context have room for them


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Memory:
    """``chunks`` of ``chunk_bytes`` hold KV cache and activations; weights are not in it.

    One chunk holds the KV cache of ``tokens_per_chunk`` tokens, and a token of a prefill or a decode needs
    ``act_per_kv`` times the bytes of its KV cache for activations. The defaults have the proportions of Llama-3-8B on
    80 GB (128 KiB of KV cache and about 105 kB of activations a token, 64 GiB beside the weights).
    """

    chunk_bytes: int
    chunks: int = 4096
    tokens_per_chunk: int = 128
    act_per_kv: float = 0.8

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of the KV cache of ``tokens``."""
        return -(-tokens * self.chunk_bytes // self.tokens_per_chunk)

    def act_bytes(self, tokens: int) -> int:
        """Return the bytes of activations that an iteration over ``tokens`` needs."""
        return max(1, round(tokens * self.act_per_kv * self.chunk_bytes / self.tokens_per_chunk))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pool made of a stream: requests ``admitted`` and ``finished``, the ``largest_batch``, prefill iterations
    put off for want of memory (``stalls``), requests sent back to the queue (``preempted``), prefill iterations; driver
    calls that map, a chunk each, per 1000 allocations; chunks that changed their owner and the bytes copied for it."""

    admitted: int
    finished: int
    largest_batch: int
    stalls: int
    preempted: int
    prefills: int
    maps_per_1000: float
    borrowed: int
    moved_bytes: int


def requests(count: int, seed: int) -> list[Request]:
    """Return ``count`` requests with log-normal lengths, of at most 2048 tokens together."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(PROMPT[0]), PROMPT[1], count), 4, LONGEST_PROMPT).astype(int)
    outputs = np.clip(rng.lognormal(np.log(OUTPUT[0]), OUTPUT[1], count), 4, LONGEST_OUTPUT).astype(int)
    return [Request(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def split(memory: Memory, context: int) -> Sizes:
    """Return the split that sets the activations of a prompt of ``context`` tokens aside.

    Raises UsageError when nothing is left for KV cache.
    """
    act = -(-memory.act_bytes(context) // memory.chunk_bytes)
    if act >= memory.chunks:
        raise UsageError(
            "activations of the longest prompt take all memory", where="isolated pools", got=f"{act} chunks",
            expected=f"fewer than {memory.chunks}", mend="choose a shorter context or more chunks",
        )  # fmt: skip
    reserved = -(-context // memory.tokens_per_chunk) * memory.chunk_bytes
    return Sizes(
        memory.chunk_bytes, memory.chunks - act, act, memory.chunks, reserved, 2 * memory.chunks * memory.chunk_bytes
    )


@dataclass(slots=True)
class _Running:
    slot: KvSlot
    request: Request
    tokens: int  # in the KV cache

    @property
    def over(self) -> bool:
        return self.tokens >= self.request.prompt + self.request.output


def play(
    vmm: Vmm, memory: Memory, context: int, stream: Sequence[Request], steps: int, *, elastic: bool, touch: Touch
) -> Outcome:
    """Serve ``stream``, all of it waiting from the start, for ``steps`` decode steps and return what came of it.

    Before each step waiting requests are prefilled, ``BATCHED`` tokens an iteration, as long as there is room for all
    they need; then each running one gets a token. A decode that finds no chunk sends the request admitted last back to
    the queue. What an iteration would take is not played: a step is a step. Raises UsageError as :func:`split` does.
    """
    with ElasticPool(vmm, split(memory, context), Policy(elastic=elastic)) as pool:
        stamp_all(pool, touch)
        player = _Player(pool, memory, stream)
        for _ in range(steps):
            while player.prefill():
                pass
            player.decode()
        moved = sum(moved_bytes(pool, run.slot, touch) for run in player.running)
        tally = pool.tally
        outcome = Outcome(
            player.admitted, player.finished, player.largest, player.stalls, player.preempted, player.prefills,
            1000.0 * (tally.mapped - memory.chunks) / max(1, tally.allocations - player.before), pool.borrowed, moved,
        )  # fmt: skip
        for run in player.running:
            pool.close_kv(run.slot)
        return outcome


class _Player:
    def __init__(self, pool: ElasticPool, memory: Memory, stream: Sequence[Request]) -> None:
        self.pool, self.memory = pool, memory
        self.waiting = deque(stream)
        self.running: list[_Running] = []
        self.admitted = self.finished = self.largest = self.stalls = self.preempted = self.prefills = 0
        self.before = pool.tally.allocations
        self._again: set[int] = set()  # requests admitted before and sent back

    def prefill(self) -> bool:
        """Admit waiting requests, one iteration's worth, if all they need is there; return whether any was."""
        batch: list[Request] = []
        for request in self.waiting:
            if batch and sum(r.prompt for r in batch) + request.prompt > BATCHED:
                break
            batch.append(request)
        while batch:
            slots = self._grant(batch)
            if slots is not None:
                break
            batch.pop()
            if not batch:
                self.stalls += 1
                return False
        else:
            return False
        for request, slot in zip(batch, slots, strict=True):
            self.waiting.popleft()
            self.running.append(_Running(slot, request, request.prompt))
            self.admitted += id(request) not in self._again
        self.prefills += 1
        self.largest = max(self.largest, len(self.running))
        return True

    def _grant(self, batch: Sequence[Request]) -> tuple[KvSlot, ...] | None:
        memory = self.memory
        opens = [memory.kv_bytes(request.prompt) for request in batch]
        lenders = Owner if self.pool.policy.elastic else (Owner.KV,)
        spare = sum(count.free + count.idle for count in map(self.pool.counts, lenders))
        need = sum(-(-nbytes // memory.chunk_bytes) for nbytes in opens)
        if self.running and spare - need < WATERMARK * memory.chunks:
            return None
        try:
            granted = self.pool.grant(opens=opens, act=memory.act_bytes(sum(request.prompt for request in batch)))
        except PoolExhausted:
            return None
        if granted.act is not None:
            self.pool.close_act(granted.act)
        return granted.kv

    def decode(self) -> None:
        """Give each running request one token."""
        memory, size = self.memory, self.memory.chunk_bytes
        while self.running:
            grows = [
                (run.slot, memory.kv_bytes(run.tokens + 1))
                for run in self.running
                if memory.kv_bytes(run.tokens + 1) > run.slot.need * size
            ]
            try:
                granted = self.pool.grant(grows=grows, act=memory.act_bytes(len(self.running)))
            except PoolExhausted:
                self._preempt()
                continue
            if granted.act is not None:
                self.pool.close_act(granted.act)
            for run in self.running:
                run.tokens += 1
                if run.over:
                    self.pool.close_kv(run.slot)
                    self.finished += 1
            self.running = [run for run in self.running if not run.over]
            return

    def _preempt(self) -> None:
        last = self.running.pop()
        self.pool.close_kv(last.slot)
        self.waiting.appendleft(last.request)
        self._again.add(id(last.request))
        self.preempted += 1
