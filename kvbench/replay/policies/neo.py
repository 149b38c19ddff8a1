"""NEO in a replay: its scheduler's decisions as plans, layer by layer, each request's KV wholly near or wholly far.

NEO (MLSys 2025, arXiv 2411.01142), sections 3.1 and 3.2; the decisions are :mod:`kvbench.systems.neo.scheduler`'s. A
layer takes max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0). Beyond that formula a replay charges the link: q, k, v and o
of CPU decodes beside the half-stage of their attention; KV of prompts bound for host memory beside the layer that made
it; requests that are swapped, all layers, before the iteration begins. The output head runs once a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs, Transport, Work
from kvbench.replay.ledger import Ledger, TierSize
from kvbench.replay.policies.capacity import capacity
from kvbench.replay.protocol import Chunk, Holding, Live, Phase, Plan, State
from kvbench.systems.neo.halves import Cost, Job
from kvbench.systems.neo.scheduler import Decision, Scheduler
from kvbench.systems.neo.scheduler import Params as SchedulerParams

CACHED = 1 << 15  # answers of the costs that are kept: prompts and batches come in few sizes
Sized = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of NEO, by default those of its code. ``near_tokens``, ``far_tokens``: KV tokens of each tier, None:
    what the machine leaves. ``page``: tokens a block; ``requests``, ``tokens``: most of an iteration; ``floor``: least
    tokens of batch 0 when prompts are taken off; ``swap_in``: share of the near blocks up to which requests come back.

    ``offload``: ``part`` is NEO, ``none`` its GPU-only baseline, ``all`` FastDecode+ (every KV far). ``order``:
    ``pipelined``, or with ``all`` a strawman: ``simple``, ``symmetric``. ``transport``: how KV is moved, a page of keys
    or values a fragment. ``extra_layer``: one layer's blocks stage what goes far (NEO and FastDecode+). Raises
    UsageError for values out of range.
    """

    near_tokens: int | None = None
    far_tokens: int | None = None
    page: int = 16
    requests: int = 1024
    tokens: int = 20_480
    floor: int = 128
    swap_in: float = 0.95
    offload: str = "part"
    order: str = "pipelined"
    transport: str = "ce"
    extra_layer: bool = True

    def __post_init__(self) -> None:
        if self.transport not in ("ce", "batch", "sm", "ideal"):
            raise UsageError("parameter", where="neo.transport", got=self.transport, expected="ce, batch, sm or ideal")
        for name, least in (("near_tokens", 1), ("far_tokens", 0), ("page", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError("parameter", where=f"neo.{name}", got=value, expected=f"{least} or more")
        self.blocks(1 << 20, 1 << 20, 1)  # whatever the scheduler refuses is refused here already

    def blocks(self, near_tokens: int, far_tokens: int, layers: int) -> SchedulerParams:
        """Return the scheduler's parameters for tiers of so many tokens, or of :attr:`near_tokens`, where given."""
        near = (near_tokens if self.near_tokens is None else self.near_tokens) // self.page
        far = (far_tokens if self.far_tokens is None else self.far_tokens) // self.page
        if self.extra_layer and self.offload != "none":
            near = near * layers // (layers + 1)
        return SchedulerParams(
            near, far, self.page, self.requests, self.tokens, self.floor, self.swap_in,
            self.offload,  # type: ignore[arg-type]  # refused by the class itself
            self.order,  # type: ignore[arg-type]
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """What moves and who is attended to on the CPU in the phase of the same number, by request id and tokens, a layer.

    ``out``, ``into``: KV that crosses the link; ``decodes``: CPU decodes with the token being decoded. Of the near
    side: tokens of each pass over the ``linear`` operations, of each of the ``prompts`` attended to, rows of each pass
    over the output ``heads``, and how many decodes it attends to (``near``).
    """

    out: Sized = ()
    into: Sized = ()
    decodes: Sized = ()
    linear: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    near: int = 0


class Priced:
    """The scheduler's costs out of a replay's."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._linear: dict[int, float] = {}
        self._prefill: dict[int, float] = {}

    @property
    def launch(self) -> float:
        return self._costs.launch

    def linear(self, tokens: int) -> float:
        found = self._linear.get(tokens)
        if found is None:
            found = self._costs.linear(tokens).seconds
            if len(self._linear) < CACHED:
                self._linear[tokens] = found
        return found

    def prefill(self, tokens: int) -> float:
        found = self._prefill.get(tokens)
        if found is None:
            found = self._costs.prefill_attention(tokens, 0).seconds
            if len(self._prefill) < CACHED:
                self._prefill[tokens] = found
        return found

    def near(self, requests: int, tokens: int) -> float:
        return self._costs.decode_attention(requests, tokens).seconds

    def far(self, requests: int, tokens: int) -> float:
        return self._costs.cpu_attention(requests, tokens)


class Neo:
    """The policy. ``cost`` is what the scheduler believes, by default what the replay charges."""

    def __init__(self, costs: Costs, params: Params, cost: Cost | None = None) -> None:
        self.name = "neo"
        self.costs, self.params = costs, params
        near, far = (
            capacity(costs, "near", params.near_tokens, "neo"), capacity(costs, "far", params.far_tokens, "neo"),
        )  # fmt: skip
        self.blocks = params.blocks(near, far, costs.layers)
        self.scheduler = Scheduler(self.blocks, cost or Priced(costs))
        unit = self.blocks.page * costs.token_bytes
        self.ledger = Ledger(
            (TierSize("near", self.blocks.near_room, unit), TierSize("far", self.blocks.far_blocks, unit))
        )
        self._lives: dict[int, Live] = {}
        self._unserved: set[int] = set()  # prefilled far and in no CPU decode so far
        self._fragment = self.blocks.page * costs.layer_token_bytes // 2
        self._transport: Transport = params.transport  # type: ignore[assignment]  # checked by Params
        self._counts: dict[str, float] = dict.fromkeys(
            ("swapped_out", "swapped_in", "preemptions", "cpu_decodes", "near_decodes", "far_prefills", "far_undecoded",
             "pipelined", "near_only", "exposed"), 0,
        )  # fmt: skip

    # -- the engine's questions ------------------------------------------------------------------------------------

    def arrive(self, live: Live, state: State) -> str | None:
        """Queue ``live``; reject one that no tier could ever hold or no iteration could prefill."""
        request = live.request
        job = Job(request.id, request.input_tokens, live.most)
        if reason := self.scheduler.fits(job):
            return reason
        self.scheduler.arrive(job)
        self._lives[request.id] = live
        return None

    def plan(self, state: State) -> Plan | None:
        """Return the scheduler's next iteration."""
        made = self.scheduler.plan()
        if made is None:
            return None
        self._settle(made)
        self._count(made)
        phases, parts = self._phases(made)
        lives, into, out = self._lives, 0, 0
        token = self.costs.token_bytes
        for part in parts:
            out += token * sum(tokens for _, tokens in part.out)
            into += token * sum(tokens for _, tokens in part.into)
        shipped = self.costs.shipped_bytes(len(made.far[0]) + len(made.far[1]))
        later = None
        if made.repeats > 1:
            requests, kv = len(made.near), sum(job.cached + 1 for job in made.near)

            def later(step: int) -> tuple[Phase, ...]:
                return self.costs.iteration((), requests, kv + step * requests)

        swaps = f"out{len(made.swapped_out)} in{len(made.swapped_in)}"
        return Plan(
            phases=phases,
            prefill=tuple(Chunk(lives[job.key], job.prompt, 0) for job, _ in made.prefills),
            decode=tuple(lives[job.key] for job in (*made.near, *made.far[0], *made.far[1])),
            drop=tuple(lives[job.key] for job in made.dropped),
            steps=made.repeats, later=later, link_in_bytes=into + shipped[0], link_out_bytes=out + shipped[1],
            note=f"{made.mode} {len(made.far[0])}+{len(made.far[1])} {swaps}",
            own=parts,
        )  # fmt: skip

    def wake(self, state: State) -> float | None:
        """Return None: no transfer outlives its iteration."""
        return None

    def finish(self, plan: Plan, state: State) -> None:
        """Tell the scheduler, and give back what the requests that finished held."""
        ended = {live.request.id for live in state.ended}
        self.scheduler.done(ended, state.steps)
        for live in state.ended:
            key = live.request.id
            del self._lives[key]
            self._left(key)
            for tier in ("near", "far"):
                if self.ledger.held(tier, key):
                    self.ledger.give(tier, key)
        if state.steps > 1:
            self._counts["near_decodes"] += (state.steps - 1) * len(plan.decode)
            self._counts["near_only"] += state.steps - 1
            for job in self.scheduler.near:
                self._grow("near", job)

    def holdings(self) -> tuple[Holding, ...]:
        """Return the blocks of every request, by the scheduler's queues."""
        near: dict[int | str, int] = {job.key: job.blocks for job in self.scheduler.near}
        far: dict[int | str, int] = {job.key: job.blocks for job in self.scheduler.far}
        return Holding("near", near), Holding("far", far)

    def counters(self) -> Mapping[str, float]:
        """Return swaps and dropped requests, decodes by where their attention ran, iterations by mode.

        ``far_prefills``: prompts whose KV went far; ``far_undecoded``: those of them that came back, ended or were
        dropped before any CPU decode.
        """
        return self._counts

    # -- a decision in the ledger and in seconds -------------------------------------------------------------------

    def _settle(self, made: Decision) -> None:
        """Bring the ledger to where the scheduler is."""
        ledger = self.ledger
        for job in made.swapped_out:
            ledger.move(job.key, "near", "far", ledger.held("near", job.key))
        for job in made.dropped:
            for tier in ("near", "far"):
                if ledger.held(tier, job.key):
                    ledger.give(tier, job.key)
        for job in made.swapped_in:
            ledger.move(job.key, "far", "near", ledger.held("far", job.key))
        for job in made.near:
            self._grow("near", job)
        for job in (*made.far[0], *made.far[1]):
            self._grow("far", job)
        for job, far in made.prefills:
            self._grow("far" if far else "near", job)

    def _grow(self, tier: str, job: Job) -> None:
        more = job.blocks - self.ledger.held(tier, job.key)
        if more:
            self.ledger.take(tier, job.key, more)

    def _count(self, made: Decision) -> None:
        counts = self._counts
        counts["swapped_out"] += len(made.swapped_out)
        counts["swapped_in"] += len(made.swapped_in)
        counts["preemptions"] += len(made.dropped)
        counts["cpu_decodes"] += len(made.far[0]) + len(made.far[1])
        counts["near_decodes"] += len(made.near)
        counts["far_prefills"] += sum(far for _, far in made.prefills)
        for job in (*made.swapped_in, *made.dropped):
            self._left(job.key)
        self._unserved.update(job.key for job, far in made.prefills if far)
        self._unserved.difference_update(job.key for job in (*made.far[0], *made.far[1]))
        mode = "near_only" if made.mode == "near" else "pipelined" if made.mode == "pipelined" else "exposed"
        counts[mode] += 1

    def _left(self, key: int) -> None:
        """Count a request that leaves host memory without a CPU decode since it was prefilled there."""
        if key in self._unserved:
            self._unserved.remove(key)
            self._counts["far_undecoded"] += 1

    def _phases(self, made: Decision) -> tuple[tuple[Phase, ...], tuple[Part, ...]]:
        """Return the phases of an iteration and what each of them does."""
        costs = self.costs
        phases: list[Phase] = []
        parts: list[Part] = []

        def add(
            work: Work,
            part: Part,
            cpu: float = 0.0,
            link_in: float = 0.0,
            link_out: float = 0.0,
            repeat: int = costs.layers,
        ) -> None:
            phases.append(costs.phase(work, repeat=repeat, cpu=cpu, link_in=link_in, link_out=link_out))
            parts.append(part)

        nothing = Work(0.0, 0.0)
        out, into = _sized(made.swapped_out), _sized(made.swapped_in)
        if out or into:
            add(nothing, Part(out, into), link_in=self._load(into), link_out=self._evict(out))
        prompts = [(job.prompt, 0) for job, _ in made.prefills]
        gone = tuple((job.key, job.prompt) for job, far in made.prefills if far)
        leaving = self._evict(gone)
        kv = sum(job.cached + 1 for job in made.near)
        first, second = (tuple((job.key, job.cached + 1) for job in far) for far in made.far)
        ship = [costs.ship(len(far)) for far in made.far]
        cpu = [self._attention(far) for far in (first, second)]
        news, near = tuple(new for new, _ in prompts), len(made.near)
        tokens = sum(news) + near + len(first)
        if made.mode == "near":
            add(costs.layer(prompts, near, kv), Part(gone, (), (), (tokens,), news, (), near), link_out=leaving)
        elif made.mode == "simple":
            add(costs.layer(prompts, 0, 0, len(first)), Part(gone, (), (), (tokens,), news), link_out=leaving)
            add(nothing, Part(), link_out=ship[0][1])
            add(nothing, Part(decodes=first), cpu=cpu[0])
            add(nothing, Part(), link_in=ship[0][0])
        else:
            if made.mode == "symmetric":
                if prompts:
                    add(costs.layer(prompts), Part(gone, (), (), (sum(news),), news), link_out=leaving)
                prompts, news, gone, leaving, tokens = [], (), (), 0.0, near + len(first)
            linear = [costs.linear(tokens), costs.linear(len(second))]
            attention = costs.decode_attention(near, kv)
            for new, context in prompts:
                attention = attention.then(costs.prefill_attention(new, context))
            short = linear[1].then(attention)
            # what a layer's prompts leave is copied until the next layer writes to the same blocks
            beside = min(leaving, max(short.seconds, cpu[0]))
            long_part = Part((), (), second, _some(tokens))
            short_part = Part(gone, (), first, _some(len(second)), news, (), near)
            add(linear[0], long_part, cpu[1], ship[1][0], ship[1][1] + leaving - beside)
            add(short, short_part, cpu[0], ship[0][0], ship[0][1] + beside)
        heads = [len(made.prefills) + near + len(first), len(second)]
        head = costs.head(heads[0]).then(costs.head(heads[1]))
        add(head, Part(heads=_some(*heads)), repeat=1)
        return tuple(phases), tuple(parts)

    def _attention(self, decodes: Sized) -> float:
        if not decodes:
            return 0.0
        return self.costs.cpu_attention(len(decodes), sum(tokens for _, tokens in decodes)) + self.costs.launch

    def _evict(self, moved: Sized) -> float:
        return sum(self.costs.evict(tokens, self._fragment, self._transport) for _, tokens in moved)

    def _load(self, moved: Sized) -> float:
        return sum(self.costs.load(tokens, self._fragment, self._transport) for _, tokens in moved)


def _some(*counts: int) -> tuple[int, ...]:
    return tuple(count for count in counts if count)


def _sized(jobs: tuple[Job, ...]) -> Sized:
    return tuple((job.key, job.cached) for job in jobs)


def make(costs: Costs, params: Params) -> Neo:
    """Return the policy; UsageError where the machine leaves less than a block of near memory."""
    return Neo(costs, params)
