"""Which requests an engine runs next over static or elastic pools, with or without a CPU buffer: decisions, no clock.

The rules of vLLM 0.5.5, on which eLLM was built, are the frame: first come, first served; prompts before decodes, or,
with chunked prefill, prompts in the tokens that decodes leave of a fixed number; a prompt is admitted when its KV fits
and a watermark stays free; when a running request finds no room for its next token, the one admitted last loses its KV
and is computed again. eLLM (DAC 2026, sections 2.2 and 2.3) changes what "fits" means: with ``Pools(lend=True)`` KV and
activations of one iteration are granted together from one pool, and with a ``Parking`` a prompt without room on the GPU
is prefilled into CPU memory. What the output lengths are is asked only to refuse what could never fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbench.errors import KvbenchError, UsageError
from kvbench.systems.ellm.parking import Parking, leaving
from kvbench.systems.ellm.pools import Moves, Pools

WHERE = "eLLM scheduler"


@dataclass(frozen=True, slots=True)
class Rules:
    """``context``: the longest context, tokens. ``tokens_per_chunk`` of KV cache. ``layers`` of the model.

    ``chunk``: tokens an iteration has with chunked prefill, 0: prompts are prefilled whole, up to ``batched`` tokens
    together. ``sequences`` run at most. ``watermark``: share of all chunks kept free when a prompt is admitted beside
    running requests (vLLM: 0.01). Raises UsageError for values out of range.
    """

    context: int
    tokens_per_chunk: int
    layers: int
    chunk: int = 0
    batched: int = 2048
    sequences: int = 256
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if min(self.context, self.tokens_per_chunk, self.layers, self.batched, self.sequences) < 1 or self.chunk < 0:
            raise UsageError("no scheduler", where=WHERE, got=self, expected="counts of 1 or more, chunk of 0 or more")
        if not 0.0 <= self.watermark < 1.0:
            raise UsageError("watermark", where=WHERE, got=self.watermark, expected="0 <= watermark < 1")

    def chunks(self, tokens: int) -> int:
        """Return the chunks that the KV cache of ``tokens`` takes."""
        return -(-tokens // self.tokens_per_chunk)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler: the ``tokens`` to prefill, how many of them are ``done``, and for a running one
    ``base``: its KV tokens minus the number of decode iterations when it began to run."""

    key: int
    tokens: int
    done: int = 0
    base: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """``new`` tokens of request ``key`` to prefill behind ``context``; it ``leaves`` to the buffer; it is its ``last``
    part, so that a token comes out."""

    key: int
    new: int
    context: int
    leaves: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration: ``parts`` to prefill, requests to ``decode`` (those brought back by ``fetch`` are among them),
    requests that lose their KV (``dropped``). ``act`` chunks of activations; ``moves`` is what memory took. ``most``:
    how many such iterations there is room for, when it only decodes."""

    parts: tuple[Part, ...]
    decode: tuple[int, ...]
    fetch: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]
    act: int
    moves: Moves
    most: int


class Scheduler:
    """Requests by key; ``act(tokens, rows)`` are the chunks of activations of an iteration over ``tokens`` with logits
    for ``rows`` of them. Raises UsageError for a buffer with chunked prefill, which the paper does not describe."""

    def __init__(
        self, rules: Rules, pools: Pools, act: Callable[[int, int], int], parking: Parking | None = None
    ) -> None:
        if parking is not None and rules.chunk:
            raise UsageError(
                "a CPU buffer needs prompts that are prefilled whole", where=WHERE, got=f"chunks of {rules.chunk}",
                expected="chunk = 0, or no buffer",
            )  # fmt: skip
        self.rules, self.pools, self.act, self.parking = rules, pools, act, parking
        self.waiting: deque[Sequence] = deque()
        self.prefilling: dict[int, Sequence] = {}  # chunked prefill: begun, not done
        self.running: dict[int, Sequence] = {}  # in the order they were admitted
        self.decodes = 0  # iterations that decoded
        self.preempted = self.stalled = 0  # requests that lost their KV; prompts put off for want of memory
        self._phase = [0] * rules.tokens_per_chunk  # running requests by base, modulo the tokens of a chunk
        self._bases = 0  # of the running requests, together
        self._near = 0 if parking is None else parking.rules.layers_in_flight
        self._watermark = int(rules.watermark * pools.chunks)
        # what chunked prefill may need once prompts are begun, however full memory is by then
        self._reserve = act(rules.chunk, min(rules.chunk, rules.sequences)) if rules.chunk else 0
        self._head: int | None = None

    # -- arrival -----------------------------------------------------------------------------------------------------

    def refuses(self, most: int) -> str | None:
        """Return why a request with ``most`` tokens of KV at its end can never run; None if it can."""
        rules = self.rules
        if most + 1 > rules.context:
            return f"{most + 1} tokens, the longest context is {rules.context}"
        # after a preemption up to all of its tokens are prefilled again
        act = self._reserve if rules.chunk else max(self.act(most, 1), self.act(1, 1))
        room = self.pools.most_kv(act)
        if rules.chunks(most) > room:
            return f"{rules.chunks(most)} chunks of KV cache, {max(0, room)} beside {act} of activations"
        return None

    def arrive(self, key: int, prompt: int) -> None:
        """Queue request ``key``."""
        self.waiting.append(Sequence(key, prompt))

    # -- one iteration -----------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """Return the next iteration, its memory granted; None when nothing is there to do."""
        if self.rules.chunk:
            return self._mixed()
        return self._prefill() or self._decode()

    def finish(self, step: Step, steps: int, ended: Iterable[int]) -> None:
        """Settle ``step`` after it was run ``steps`` times in a row; ``ended`` are the requests that are over."""
        if step.decode:
            more = self.growth(steps) - self.growth(1)
            if more and self.pools.grant(grows=more) is None:
                raise KvbenchError("more decode steps were run than there is room for", where=WHERE, got=steps)
            self.decodes += steps
        self.pools.rest(step.act)
        over = set(ended)
        for part in step.parts:
            if not part.last:
                self.prefilling[part.key].done += part.new
            elif part.leaves:
                self.pools.give(self.in_flight(part.new))
                if part.key in over and self.parking is not None:
                    self.parking.take(part.key)
                    over.discard(part.key)
            else:
                self.prefilling.pop(part.key, None)
                self._run(Sequence(part.key, part.context + part.new))
        for key in sorted(over):
            self.pools.give(self._stop(key))

    def chunks_of(self, key: int) -> int:
        """Return the chunks that request ``key`` holds on the GPU between iterations."""
        if key in self.running:
            return self.rules.chunks(self.running[key].base + self.decodes)
        return self.rules.chunks(self.prefilling[key].tokens) if key in self.prefilling else 0

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the running requests have."""
        return self._bases + len(self.running) * self.decodes

    def growth(self, steps: int) -> int:
        """Return the chunks that ``steps`` decode iterations of the running requests add."""
        whole, rest = divmod(steps, self.rules.tokens_per_chunk)
        return whole * len(self.running) + sum(self.growth_at(step) for step in range(rest))

    def growth_at(self, step: int) -> int:
        """Return the chunks that decode iteration ``step`` (0: the next one) adds."""
        return self._phase[-(self.decodes + step) % self.rules.tokens_per_chunk]

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _prefill(self) -> Step | None:
        """Take prompts from the head of the queue as long as all they need is there."""
        if not self.waiting:
            return None
        batch: list[Sequence] = []
        taken: tuple[frozenset[int], int] | None = None
        total = 0
        for sequence in self.waiting:
            if batch and total + sequence.tokens > self.rules.batched:
                break
            found = self._fit([*batch, sequence], total + sequence.tokens)
            if found is None:
                break
            batch.append(sequence)
            total += sequence.tokens
            taken = found
        if taken is None:
            self._put_off()
            return None
        left, opens = taken
        act = self.act(total, len(batch))
        moves = self.pools.grant(opens=opens, act=act)
        if moves is None:
            raise KvbenchError("the prompts that fit were not granted", where=WHERE, got=opens)
        parts = []
        for index, sequence in enumerate(batch):
            self.waiting.popleft()
            if index in left and self.parking is not None:
                self.parking.park(sequence.key, sequence.tokens)
            parts.append(Part(sequence.key, sequence.tokens, 0, index in left, last=True))
        return Step(tuple(parts), (), (), (), act, moves, 1)

    def _put_off(self) -> None:
        """Count the head of the queue as put off, once while it stays the head."""
        if self.waiting and self.waiting[0].key != self._head:
            self._head = self.waiting[0].key
            self.stalled += 1

    def _fit(self, batch: list[Sequence], total: int) -> tuple[frozenset[int], int] | None:
        """Return which of ``batch`` leave and the chunks it takes; None when there is no room for it."""
        rules, parking = self.rules, self.parking
        spare = self.pools.spare(self.act(total, len(batch)))
        if spare < 0:
            return None
        room = max(0, spare - self._watermark) if self.running else spare
        slots = max(0, rules.sequences - len(self.running))
        sizes = [rules.chunks(sequence.tokens) for sequence in batch]
        if parking is None:
            return (frozenset(), sum(sizes)) if sum(sizes) <= room and len(batch) <= slots else None
        if len(parking):
            room = slots = 0  # those in the buffer come first: no prompt takes room on the GPU before them
        left = set(leaving(sizes, room, parking.rules.victims))
        left.update([index for index in range(len(batch)) if index not in left][slots:])
        opens = sum(size for index, size in enumerate(sizes) if index not in left)
        opens += sum(self.in_flight(batch[index].tokens) for index in left)
        if opens > spare or (left and not parking.room(sum(batch[index].tokens for index in left))):
            return None
        return frozenset(left), opens

    def in_flight(self, tokens: int) -> int:
        """Return the chunks on the GPU while a prompt of ``tokens`` leaves it layer by layer."""
        rules = self.rules
        return -(-tokens * min(self._near, rules.layers) // (rules.tokens_per_chunk * rules.layers))

    # -- decodes -----------------------------------------------------------------------------------------------------

    def _decode(self) -> Step | None:
        dropped: list[int] = []
        while True:
            fetch, opens = ([], 0) if dropped else self._returning()
            rows = len(self.running) + len(fetch)
            if not rows:
                self._none(dropped)
                return None
            act = self.act(rows, rows)
            moves = self.pools.grant(opens=opens, grows=self.growth(1), act=act)
            if moves is not None:
                break
            dropped.append(self._preempt())
        for key, tokens in fetch:
            self._run(Sequence(key, tokens))
        most = 1 if fetch or dropped else self._most()
        return Step((), tuple(self.running), tuple(fetch), tuple(dropped), act, moves, most)

    def _none(self, dropped: list[int]) -> None:
        if dropped:
            raise KvbenchError("no request was left that could run", where=WHERE, got=f"{len(dropped)} dropped")

    def _returning(self) -> tuple[list[tuple[int, int]], int]:
        """Return the parked requests to bring back and the chunks they take, those of their next token included."""
        parking = self.parking
        if parking is None or not len(parking):
            return [], 0
        chosen: list[int] = []

        def fits(tokens: int) -> bool:
            chosen.append(self.rules.chunks(tokens + 1))
            rows = len(self.running) + len(chosen)
            reserve = self._watermark if rows > 1 else 0
            room = self.pools.spare(self.act(rows, rows)) - self.growth(1) - reserve
            if sum(chosen) <= room and rows <= self.rules.sequences:
                return True
            chosen.pop()
            return False

        back = [(key, parking.take(key)) for key in parking.returning(fits)]
        return back, sum(chosen)

    def _most(self) -> int:
        """Return how many decode iterations in a row there is room for, after the first was granted."""
        room, running = self.pools.spare() + self.growth(1), len(self.running)
        most = room // running * self.rules.tokens_per_chunk
        room %= running
        for step in range(self.rules.tokens_per_chunk):
            room -= self.growth_at(step)
            if room < 0:
                break
            most += 1
        return max(1, most)

    def _preempt(self) -> int:
        key = next(reversed(self.running))
        tokens = self.running[key].base + self.decodes
        self.pools.give(self._stop(key))
        # the token that came out last has no KV yet: it is computed again with the others
        self.waiting.appendleft(Sequence(key, tokens + 1))
        self.preempted += 1
        return key

    def _run(self, sequence: Sequence) -> None:
        """Let ``sequence`` decode from the next iteration that decodes on."""
        sequence.base = sequence.tokens - self.decodes
        self.running[sequence.key] = sequence
        self._phase[sequence.base % self.rules.tokens_per_chunk] += 1
        self._bases += sequence.base

    def _stop(self, key: int) -> int:
        """Take ``key`` out of the running ones and return the chunks it holds."""
        held = self.chunks_of(key)
        gone = self.running.pop(key)
        self._phase[gone.base % self.rules.tokens_per_chunk] -= 1
        self._bases -= gone.base
        return held

    # -- chunked prefill ---------------------------------------------------------------------------------------------

    def _mixed(self) -> Step | None:
        """Decode all running requests and fill up what they leave of ``chunk`` tokens with prompts."""
        dropped: list[int] = []
        while True:
            parts, admitted = self._parts(admit=not dropped)
            rows = len(self.running)
            if not rows and not parts:
                self._none(dropped)
                return None
            tokens = rows + sum(part.new for part in parts)
            act = self.act(tokens, rows + sum(part.last for part in parts))
            opens = sum(self.rules.chunks(sequence.tokens) for sequence in admitted)
            moves = self.pools.grant(opens=opens, grows=self.growth(1), act=act)
            if moves is not None:
                break
            if not rows:
                raise KvbenchError("prompts that were admitted have no room", where=WHERE, got=f"{act} chunks")
            dropped.append(self._preempt())
        for sequence in admitted:
            self.waiting.popleft()
            self.prefilling[sequence.key] = sequence
        most = 1 if parts or dropped else self._most()
        return Step(tuple(parts), tuple(self.running), (), tuple(dropped), act, moves, most)

    def _parts(self, *, admit: bool) -> tuple[list[Part], list[Sequence]]:
        """Return the parts of the next iteration and which requests of the queue are among them for the first time."""
        left = self.rules.chunk - len(self.running)
        parts: list[Part] = []
        admitted: list[Sequence] = []
        for sequence in self.prefilling.values():
            if left < 1:
                break
            left -= self._part(sequence, left, parts)
        if not admit:
            return parts, admitted
        begun = len(self.running) + len(self.prefilling)
        room = self.pools.spare(self._reserve) - self.growth(1)
        for sequence in self.waiting:
            size = self.rules.chunks(sequence.tokens)
            kept = self._watermark if begun + len(admitted) else 0
            if left < 1 or begun + len(admitted) >= self.rules.sequences or size > room - kept:
                self._put_off()
                break
            room -= size
            admitted.append(sequence)
            left -= self._part(sequence, left, parts)
        return parts, admitted

    def _part(self, sequence: Sequence, left: int, parts: list[Part]) -> int:
        new = min(left, sequence.tokens - sequence.done)
        last = sequence.done + new == sequence.tokens
        parts.append(Part(sequence.key, new, sequence.done, leaves=False, last=last))
        return new
