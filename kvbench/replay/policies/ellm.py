"""eLLM's scheduler in the replay engine: isolated or elastic pools, CPU buffer, logical controller (DAC 2026).

Decisions are those of :mod:`kvbench.systems.ellm.scheduler`; here they get times and a ledger. A prompt that leaves for
the CPU buffer does so layer by layer beside the computation (link_out); one that returns comes layer by layer beside
the decode step that needs it (link_in), which hides little of it. Mapping what an iteration needs at once comes before
it; mapping for sequences that grow runs beside the step before, when ``premap`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs
from kvbench.replay.ledger import Ledger, TierSize
from kvbench.replay.policies.ellm_params import BUFFER_GB, WHERE, ElasticParams, EngineParams, IsolatedParams
from kvbench.replay.protocol import Chunk, Holding, Live, Phase, Plan, State
from kvbench.systems.ellm import ledger as activations
from kvbench.systems.ellm.parking import BufferRules, Order, Parking, Victims
from kvbench.systems.ellm.pools import Pools
from kvbench.systems.ellm.scheduler import Rules, Scheduler, Step
from kvbench.systems.ellm.slo import Law, Observation, Params, controller
from kvbench.systems.ellm.slo import State as Size

ACT = "activations"
PAGE = 16  # tokens of vLLM's KV page
FLOOR = 2  # prompts the logical buffer always has room for


@dataclass(frozen=True, slots=True)
class Memory:
    """``units`` of ``unit_bytes`` on the GPU, each ``tokens`` of KV cache and ``calls`` driver chunks; ``reserve`` of
    them for the activations of the longest prefill."""

    units: int
    unit_bytes: int
    tokens: int
    calls: int
    reserve: int


class Activations:
    """Units of activations of an iteration, by :func:`kvbench.systems.ellm.ledger.peak`; each pair is asked once."""

    def __init__(self, costs: Costs, unit_bytes: int, *, past: bool) -> None:
        self._shape, self._unit, self._past = costs.shape, unit_bytes, past
        self._known: dict[tuple[int, int], int] = {}

    def __call__(self, tokens: int, rows: int) -> int:
        """Return the units for ``tokens`` tokens with logits for ``rows`` of them."""
        rows = max(1, rows)  # a part of a prompt gives no logits; one row of them is what the ledger starts from
        found = self._known.get((tokens, rows))
        if found is None:
            # a later chunk holds more than a first one; a prefill of no past is then a bound
            past = self._past and tokens > rows
            found = -(-activations.peak(self._shape, tokens, past=past, rows=rows).nbytes // self._unit)
            self._known[tokens, rows] = found
        return found


def unloaded(costs: Costs, prompt: int) -> tuple[float, float]:
    """Return TTFT and TPOT in seconds of a request with ``prompt`` tokens that is alone."""
    return _seconds(costs.iteration([(prompt, 0)])), _seconds(costs.iteration((), 1, prompt + 1))


def _seconds(phases: tuple[Phase, ...]) -> float:
    return sum(phase.repeat * max(phase.compute, phase.hbm) for phase in phases)


def make_isolated(costs: Costs, params: IsolatedParams) -> EllmPolicy:
    """Return two static pools. Raises UsageError when the reserve of activations leaves nothing for KV cache."""
    return EllmPolicy("ellm_isolated", costs, params, lend=False)


def make_elastic(costs: Costs, params: ElasticParams) -> EllmPolicy:
    """Return one pool that lends both ways."""
    return EllmPolicy("ellm_elastic", costs, params, lend=True)


class EllmPolicy:
    """A policy of the engine (:class:`kvbench.replay.protocol.Policy`) around one scheduler."""

    def __init__(self, name: str, costs: Costs, params: EngineParams, *, lend: bool) -> None:
        self.name, self.costs, self.params, self.lend = name, costs, params, lend
        self.premap = isinstance(params, ElasticParams) and params.premap
        self.alias = isinstance(params, ElasticParams) and params.alias
        batched = params.batched or max(params.context, 2048)
        self.memory, act = _memory(costs, params, batched, lend=lend)
        rules = Rules(
            params.context, self.memory.tokens, costs.layers, params.chunk, batched, params.sequences, params.watermark
        )
        self.buffer_tokens = _buffer_bytes(costs, params) // costs.token_bytes
        self.parking, self.slo = self._buffer()
        kv = max(1, self.memory.units - self.memory.reserve)
        pools = Pools(kv, self.memory.units - kv, lend=lend)
        self.scheduler = Scheduler(rules, pools, act, self.parking)
        far = self.buffer_tokens if self.parking is not None else 0
        self.ledger = Ledger(
            [TierSize("near", self.memory.units, self.memory.unit_bytes), TierSize("far", far, costs.token_bytes)]
        )
        if not lend:
            self.ledger.take("near", ACT, self.memory.reserve)
        self._lives: dict[int, Live] = {}
        self._fresh: dict[int, float] = {}  # request -> when its last token came out, until it decodes
        self._last_decode = 0.0
        self._most_running = self._changes = self._reversals = self._observed = 0
        self._up: bool | None = None
        self._sizes = self._map_seconds = self._map_exposed = 0.0

    def _buffer(self) -> tuple[Parking | None, Params | None]:
        params = self.params
        if not params.cpu_buffer:
            return None, None
        physical = self.buffer_tokens
        if physical < params.slo_prompt:
            raise UsageError(
                "the CPU buffer is smaller than a prompt", where=WHERE, got=f"{physical} tokens",
                expected=f"{params.slo_prompt} or more", mend="give it more with buffer_gb",
            )  # fmt: skip
        size = max(1, round(physical * params.size))
        rules = BufferRules(physical, cast(Victims, params.victims), cast(Order, params.order))
        parking = Parking(rules, size)
        if not params.controller:
            return parking, None
        ttft, tpot = (params.slo * alone for alone in unloaded(self.costs, params.slo_prompt))
        self._size = Size(size)
        return parking, Params(
            physical, ttft, tpot, params.window, params.threshold, params.alpha, cast(Law, params.law),
            min(physical, FLOOR * params.slo_prompt), max(1, physical // 16),
        )  # fmt: skip

    # -- what the engine calls ---------------------------------------------------------------------------------------

    def arrive(self, live: Live, state: State) -> str | None:
        """Queue ``live``, or say why it can never run."""
        reason = self.scheduler.refuses(live.most)
        if reason is not None and live.most >= self.params.context:
            reason += f"; context={live.most + 1} would admit it"
        if reason is None:
            self._lives[live.request.id] = live
            self.scheduler.arrive(live.request.id, live.request.input_tokens)
        return reason

    def plan(self, state: State) -> Plan | None:
        """Return the next iteration with the times of its parts."""
        step = self.scheduler.plan()
        if step is None:
            return None
        self._book(step)
        self._most_running = max(self._most_running, len(step.decode))
        rows, first = len(step.decode), self.scheduler.kv_tokens + len(step.decode)
        moves, calls = step.moves, self.memory.calls
        urgent = moves.mapped - (moves.grown if self.premap else 0)
        unmapped = 0 if self.alias else self._urgent_unmaps(step)
        serial = self._mapping(urgent) + self._unmapping(unmapped)
        self._map_exposed += serial
        self._map_seconds += self._mapping(moves.mapped) + self._unmapping(moves.unmapped)
        out = sum(part.new for part in step.parts if part.leaves)
        back = sum(tokens for _, tokens in step.fetch)
        phases = self.costs.iteration(
            [(part.new, part.context) for part in step.parts], rows, first if rows else 0,
            link_in=self.costs.load(back, None, "ce"), link_out=self.costs.evict(out, None, "ce"),
        )  # fmt: skip
        phases = self._with_mapping(phases, self._beside(step, 0), serial)

        def later(k: int) -> tuple[Phase, ...]:
            phases = self.costs.iteration((), rows, first + k * rows)
            return self._with_mapping(phases, self._beside(step, k), 0.0)

        steps = step.most
        if steps > 1 and not (self._alike() and self._calm(step, state, _seconds(phases), _seconds(later(steps - 1)))):
            steps = 1
        kind = "mixed" if step.parts and step.decode else "prefill" if step.parts else "decode"
        return Plan(
            phases, note=kind, own=step, steps=steps, later=later if steps > 1 else None,
            prefill=tuple(Chunk(self._lives[part.key], part.new, part.context) for part in step.parts),
            decode=tuple(self._lives[key] for key in step.decode),
            drop=tuple(self._lives[key] for key in step.dropped),
            link_in_bytes=back * self.costs.token_bytes, link_out_bytes=out * self.costs.token_bytes,
            map_calls=calls * moves.mapped,
            calls_later=(lambda k: calls * self.scheduler.growth_at(k)) if steps > 1 and self.lend else None,
        )  # fmt: skip

    def wake(self, state: State) -> float | None:
        """Return None: transfers end with the iteration they belong to."""
        return None

    def finish(self, plan: Plan, state: State) -> None:
        """Settle memory, and let the controller see the iteration."""
        step: Step = plan.own
        scheduler, ledger = self.scheduler, self.ledger
        ended = [live.request.id for live in state.ended]
        if state.steps > 1:
            grown = scheduler.growth(state.steps) - scheduler.growth(1)
            self._map_seconds += self._mapping(grown if self.lend else 0)
            self._map_seconds += self._unmapping(scheduler.pools.unmaps(grown))
        scheduler.finish(step, state.steps, ended)
        if self.lend:
            ledger.give("near", ACT, step.act)
        for part in step.parts:
            if part.leaves:
                ledger.give("near", part.key)
            if part.last:
                self._fresh[part.key] = state.now
        self._observe(step, state)
        for key in ended:
            ledger.give("near", key)
            ledger.give("far", key)
            self._fresh.pop(key, None)
            del self._lives[key]
        for key in step.decode:
            if key in self._lives:
                ledger.take("near", key, scheduler.chunks_of(key) - ledger.held("near", key))

    def holdings(self) -> tuple[Holding, ...]:
        """Return what scheduler and buffer hold."""
        scheduler = self.scheduler
        near: dict[int | str, int] = {key: scheduler.chunks_of(key) for key in scheduler.running}
        near.update({key: scheduler.chunks_of(key) for key in scheduler.prefilling})
        if not self.lend:
            near[ACT] = self.memory.reserve
        far: dict[int | str, int] = {}
        for key, tokens in () if self.parking is None else self.parking.items().items():
            far[key] = tokens
        return Holding("near", near), Holding("far", far)

    def counters(self) -> Mapping[str, float]:
        """Return the totals of the scheduler, the pools, the buffer and the controller."""
        pools = self.scheduler.pools
        found: dict[str, float] = {
            "preemptions": self.scheduler.preempted, "stalls": self.scheduler.stalled,
            "largest_batch": self._most_running, "reserved_bytes": self.memory.reserve * self.memory.unit_bytes,
            "borrowed": pools.borrowed, "mapped": pools.mapped, "unmapped": pools.unmapped,
            "map_seconds": self._map_seconds, "map_exposed": self._map_exposed,
            "parked": 0 if self.parking is None else self.parking.total,
        }  # fmt: skip
        if self.slo is not None:
            found["changes"], found["reversals"] = self._changes, self._reversals
            found["mean_size"] = self._sizes / self._observed if self._observed else 0.0
        return found

    # -- memory ------------------------------------------------------------------------------------------------------

    def _book(self, step: Step) -> None:
        ledger, scheduler = self.ledger, self.scheduler
        for key in step.dropped:
            ledger.give("near", key)
        for part in step.parts:
            if part.leaves:
                ledger.take("near", part.key, scheduler.in_flight(part.new))
                ledger.take("far", part.key, part.new)
            elif not part.context:
                tokens = scheduler.prefilling[part.key].tokens if part.key in scheduler.prefilling else part.new
                ledger.take("near", part.key, scheduler.rules.chunks(tokens))
        for key, tokens in step.fetch:
            ledger.give("far", key)
            ledger.take("near", key, scheduler.rules.chunks(tokens + 1))
        if self.lend:
            ledger.take("near", ACT, step.act)

    def _mapping(self, units: int) -> float:
        return self.costs.remap(units * self.memory.calls, unmap=False)

    def _unmapping(self, units: int) -> float:
        return units * self.memory.calls * self.costs.machine["unmap_chunk"]

    def _urgent_unmaps(self, step: Step) -> int:
        """Return the units to be unmapped before the iteration: all, but for those that growing sequences take."""
        return max(0, step.moves.unmapped - (step.moves.grown if self.premap else 0))

    def _beside(self, step: Step, k: int) -> float:
        """Return the seconds of mapping that run beside decode step ``k`` of ``step``."""
        if not self.premap or not self.lend:
            return 0.0
        grown = self.scheduler.growth_at(k) if k else step.moves.grown
        if self.alias:
            return self._mapping(grown)
        if not k:
            return self._mapping(grown) + self._unmapping(step.moves.unmapped - self._urgent_unmaps(step))
        before = self.scheduler.growth(k) - self.scheduler.growth(1)
        pools = self.scheduler.pools
        return self._mapping(grown) + self._unmapping(pools.unmaps(before + grown) - pools.unmaps(before))

    def _alike(self) -> bool:
        """Return whether mapping of later steps is known beforehand: none is made, or it runs beside the step."""
        return not self.lend or self.premap

    def _calm(self, step: Step, state: State, first: float, last: float) -> bool:
        """Return whether the controller will see no violation in any of the iterations of ``step``, the first and the
        last of which take ``first`` and ``last`` seconds; those between take no more than the last."""
        if self.slo is None:
            return True
        late = state.now + first - self._last_decode > self.slo.tpot or max(first, last) > self.slo.tpot
        return not (late or self.scheduler.waiting or any(key in self._fresh for key in step.decode))

    @staticmethod
    def _with_mapping(phases: tuple[Phase, ...], beside: float, serial: float) -> tuple[Phase, ...]:
        layers = phases[0]
        if beside:
            layers = Phase(
                layers.compute, layers.hbm, layers.link_in, layers.link_out, beside / layers.repeat, layers.serial,
                layers.until, layers.repeat,
            )  # fmt: skip
        return ((Phase(serial=serial),) if serial else ()) + (layers, *phases[1:])

    # -- the controller ----------------------------------------------------------------------------------------------

    def _observe(self, step: Step, state: State) -> None:
        """Show the controller the worst TTFT and the longest gap between tokens of this iteration."""
        now, lives = state.now, self._lives
        gaps = []
        if step.decode:
            fresh = [self._fresh.pop(key) for key in step.decode if key in self._fresh]
            gaps = [now - at for at in fresh]
            if len(fresh) < len(step.decode):
                gaps.append(now - self._last_decode)
            self._last_decode = now
        if self.slo is None or self.parking is None:
            return
        begun = [lives[part.key] for part in step.parts if part.last]
        waits = [now - live.request.arrival for live in begun if live.first_token_at == now]
        if self.scheduler.waiting and not (head := lives[self.scheduler.waiting[0].key]).produced:
            waits.append(now - head.request.arrival)
        seen = Observation(max(waits, default=None), max(gaps, default=None))
        if state.steps > 1:
            seen = Observation()  # _calm has seen that there is no violation in any of them
        for _ in range(state.steps):
            before = self._size
            self._size = controller(before, seen, self.slo)
            self._moved(before.logical)
            if self._size == before:
                break  # further iterations like this one change nothing
        self._sizes += self._size.logical * state.steps
        self._observed += state.steps
        self.parking.resize(self._size.logical)

    def _moved(self, before: int) -> None:
        """Count a change of the logical size, and one that goes back."""
        if self._size.logical != before:
            up = self._size.logical > before
            self._changes += 1
            self._reversals += self._up is not None and up != self._up
            self._up = up


def _buffer_bytes(costs: Costs, params: EngineParams) -> int:
    """Return the bytes of the CPU buffer: the default at most what the host has, more than that is refused."""
    asked, held = params.buffer_gb * 1e9, costs.far_bytes
    if asked > held and params.buffer_gb != BUFFER_GB:
        raise UsageError(
            "a buffer larger than the host's memory", where=f"{WHERE}, buffer_gb", got=params.buffer_gb,
            expected=f"at most {held / 1e9:g}, what {costs.machine.name} has",
            mend="give less, or take a machine with more host_memory",
        )  # fmt: skip
    return int(min(asked, held))


def _memory(costs: Costs, params: EngineParams, batched: int, *, lend: bool) -> tuple[Memory, Activations]:
    chunk = int(costs.machine["chunk_bytes"])
    tokens = params.tokens_per_chunk or (costs.chunk_tokens if lend else PAGE)
    calls = -(-tokens * costs.token_bytes // chunk) if lend else 0
    unit = calls * chunk if lend else tokens * costs.token_bytes
    units = costs.near_bytes // unit
    act = Activations(costs, unit, past=params.chunk > 0)
    longest = max(params.chunk, params.sequences) if params.chunk else max(batched, params.context)
    rows = params.sequences
    reserve = max(act(longest, min(rows, longest)), act(rows, rows))
    if not lend and reserve >= units:
        raise UsageError(
            "activations of the longest prefill take all memory", where=WHERE,
            got=f"{reserve * unit / 1e9:.1f} GB for {longest} tokens",
            expected=f"less than the {costs.near_bytes / 1e9:.1f} GB beside the weights",
            mend="give a shorter context, or chunk=512",
        )  # fmt: skip
    if units < 2:
        raise UsageError(
            "no memory for two chunks", where=WHERE, got=f"{units} of {unit} bytes", expected="2 or more",
            mend="give fewer tokens_per_chunk",
        )  # fmt: skip
    return Memory(units, unit, tokens, calls, min(reserve, units - 1)), act
