"""The event engine: runs a trace through a policy, iteration by iteration, on a clock of its own.

Deterministic: nothing but the trace, the policy and the costs decides what happens; there is no random number and no
wall time. After every iteration tokens, time, bytes and each tier's units are checked to add up (O(1)); at the end, and
with ``audit="every"`` after each iteration, every request and every owner as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from kvbench.errors import KvbenchError, UsageError
from kvbench.replay.contention import Contention, bound
from kvbench.replay.events import EventLog
from kvbench.replay.ledger import ConservationError
from kvbench.replay.metrics import Slo, Summary, Tally
from kvbench.replay.protocol import Chunk, Live, Phase, Plan, Policy, State
from kvbench.replay.request import Request

BARREN = 1000  # iterations in a row without a token, at most
THRASH = 1000  # times a request's KV may be dropped whole
SLACK = 1e-9  # relative error that sums of times may gather


class ReplayError(KvbenchError):
    """A policy that plans what cannot be, or that lets requests wait for ever."""


class Priced(Protocol):
    """What the engine needs of costs: how resources disturb each other (:class:`kvbench.replay.costs.Costs`)."""

    @property
    def contention(self) -> Contention:
        """Factors between resources of a phase."""


@dataclass(frozen=True, slots=True)
class Executed:
    """An iteration that ran: ``steps`` repetitions of ``plan`` between two simulated times, seconds."""

    plan: Plan
    begin: float
    end: float
    steps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """``tally`` gives summaries for any objectives. ``digest``: sha256 of the ``events`` lines of the log; ``log`` the
    text where it was kept. ``counters``: the policy's own totals."""

    policy: str
    tally: Tally
    digest: str
    events: int
    counters: Mapping[str, float]
    log: tuple[str, ...] | None = None

    def summary(self, slo: Slo | None = None) -> Summary:
        """Return the metrics under ``slo``."""
        return self.tally.summary(slo)


def replay(
    trace: Iterable[Request], policy: Policy, costs: Priced, *, in_flight: int | None = None,
    audit: Literal["end", "every"] = "end", keep_log: bool = False, watch: Callable[[Executed], None] | None = None,
    progress: Callable[[int, float], None] | None = None, single_steps: bool = False,
) -> Outcome:  # fmt: skip
    """Run ``trace`` through ``policy`` until every request has finished or was rejected.

    ``in_flight``: at most so many requests are inside; further ones wait at the door (their TTFT counts from arrival).
    ``watch`` is told every iteration, ``progress`` (finished requests, simulated seconds) now and then.
    ``single_steps`` ignores ``Plan.steps``; the log is the same, only slower to come by.
    Raises UsageError for a trace out of order or ``in_flight`` below 1, ReplayError for a policy that plans what cannot
    be or waits for ever, ConservationError when something does not add up.
    """
    if in_flight is not None and in_flight < 1:
        raise UsageError("nobody may enter", where="in_flight", got=in_flight, expected="1 or more")
    return _Replay(iter(trace), policy, costs.contention, in_flight, audit == "every", single_steps, keep_log).run(
        watch, progress
    )


class _Replay:
    """One run of the engine."""

    def __init__(
        self, trace: Iterator[Request], policy: Policy, contention: Contention, in_flight: int | None, deep: bool,
        single: bool, keep: bool,
    ) -> None:  # fmt: skip
        self.trace, self.policy, self.contention = trace, policy, contention
        self.plain = contention.none
        self.in_flight = math.inf if in_flight is None else in_flight
        self.deep, self.single = deep, single
        self.tally, self.log, self.state = Tally(), EventLog(keep=keep), State()
        self.inside: dict[int, Live] = {}
        self.upcoming: Request | None = next(trace, None)
        self.now = 0.0
        self.made = self.gone = 0  # KV tokens that came to be, and those that ended with their request or were dropped
        self.held = 0  # KV tokens of the requests inside, kept by increments
        self.barren = 0
        if self.upcoming is not None:
            self.now = self.tally.first_arrival = self.upcoming.arrival

    def run(self, watch: Callable[[Executed], None] | None, progress: Callable[[int, float], None] | None) -> Outcome:
        """Run to the end; see :func:`replay`."""
        policy, state, tally = self.policy, self.state, self.tally
        told = 0
        while True:
            self._let_in()
            if not self.inside and self.upcoming is None:
                break
            self._refresh()
            plan = policy.plan(state)
            if plan is None:
                self._wait()
                continue
            begin = self.now
            steps = self._iterate(plan)
            self._advance(plan, steps)
            policy.finish(plan, state)
            if watch is not None:
                watch(Executed(plan, begin, self.now, steps))
            self._check(begin, plan)
            if progress is not None and tally.finished - told >= 1000:
                told = tally.finished
                progress(told, self.now)
        tally.end = self.now
        self._deep_check()
        kept = self.log.kept
        digest = self.log.digest()
        log = None if kept is None else tuple(kept)
        return Outcome(policy.name, tally, digest, self.log.count, dict(policy.counters()), log)

    # -- arrivals and idling ---------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        """Hand every request that has arrived to the policy, as far as the door allows."""
        while self.upcoming is not None and self.upcoming.arrival <= self.now and len(self.inside) < self.in_flight:
            request = self.upcoming
            if request.id in self.inside:
                raise UsageError("two requests of one id", where="trace", got=request.id, expected="ids of their own")
            live = Live(request)
            self.tally.arrived += 1
            self._refresh()
            reason = self.policy.arrive(live, self.state)
            if reason is None:
                self.inside[request.id] = live
                self.log.add(f"a {request.id} {request.arrival!r}")
            else:
                live.stage = "rejected"
                self.tally.reject(request.id, reason)
                self.log.add(f"r {request.id} {request.arrival!r} {reason}")
            self.upcoming = next(self.trace, None)
            if self.upcoming is not None and self.upcoming.arrival < request.arrival:
                raise UsageError(
                    "arrivals out of order", where=f"request {self.upcoming.id}", got=self.upcoming.arrival,
                    expected=f"{request.arrival!r} s or later", mend="sort the trace by arrival",
                )  # fmt: skip

    def _refresh(self) -> None:
        state = self.state
        state.now, state.unfinished, state.iteration = self.now, len(self.inside), self.tally.iterations
        state.next_arrival = self._next_arrival()
        state.steps, state.ended = 1, ()

    def _next_arrival(self) -> float | None:
        """Return when the next request comes in; with a full house none does before another one ends."""
        if self.upcoming is None or len(self.inside) >= self.in_flight:
            return None
        return self.upcoming.arrival

    def _wait(self) -> None:
        """Go on to the next arrival or wake-up."""
        times = [t for t in (self._next_arrival(), self.policy.wake(self.state)) if t is not None]
        target = min(times, default=None)
        if target is None or target <= self.now:
            raise self._stuck("waits for nothing" if target is None else "is awake and plans nothing")
        self.barren += 1
        if self.barren > BARREN:
            raise self._stuck("waits again and again")
        self.tally.idle += target - self.now
        self.now = target

    def _stuck(self, what: str) -> ReplayError:
        lives = self.inside.values()
        waiting = sum(1 for live in lives if live.stage == "waiting")
        ledger = self.policy.ledger
        tiers = ", ".join(f"{name} {ledger.used(name)}/{size.capacity}" for name, size in ledger.sizes.items())
        first = next(iter(lives), None)
        oldest = "" if first is None else f", oldest {first.request.id} ({first.request.input_tokens} tokens in)"
        return ReplayError(
            f"policy {self.policy.name} {what}", where=f"replay at {self.now:.6f} s",
            got=f"{len(self.inside)} unfinished requests, {waiting} not begun{oldest}; {tiers}",
            expected="a plan, a wake-up or an arrival",
        )  # fmt: skip

    # -- an iteration ----------------------------------------------------------------------------------------------

    def _iterate(self, plan: Plan) -> int:
        """Check ``plan``, let its time pass and return how many of its steps were run."""
        most = self._admit(plan)
        upcoming = self._next_arrival()
        wake = self.policy.wake(self.state) if most > 1 else None
        head = " ".join([f"{c.live.request.id}:{c.new}:{c.context}" for c in plan.prefill])
        batch, tail = f"{len(plan.decode)} {plan.link_out_bytes}", f"{plan.note} {head}"
        add, phases, step, calls, called = self.log.add, plan.phases, 0, plan.map_calls, 0
        link_in = plan.link_in_bytes
        while True:
            begin = self.now
            self._pass(phases)
            add(f"i {begin!r} {self.now!r} {link_in} {batch} {calls} {tail}")
            called += calls
            self.tally.link_in += link_in
            link_in += plan.link_in_step
            step += 1
            if step >= most or (upcoming is not None and upcoming <= self.now):
                break
            if wake is not None and wake <= self.now:
                break
            if plan.later is not None:
                phases = plan.later(step)
            if plan.calls_later is not None:
                calls = plan.calls_later(step)
        tally = self.tally
        tally.iterations += step
        tally.batched += step * (len(plan.prefill) + len(plan.decode))
        tally.link_out += step * plan.link_out_bytes
        tally.map_calls += called
        return step

    def _admit(self, plan: Plan) -> int:
        """Check ``plan`` against the requests and drop what it drops; return the most steps that can be run."""
        number = self.tally.iterations
        if plan.steps < 1 or (plan.steps > 1 and (plan.prefill or plan.drop or not plan.decode)):
            raise self._refuse("steps", plan.steps, "1, or more for decodes alone")
        counts = (plan.link_in_bytes, plan.link_in_step, plan.link_out_bytes, plan.map_calls)
        if min(counts) < 0:
            raise self._refuse("bytes and calls", counts, "0 or more")
        for live in plan.drop:
            self._drop(live)
        most = plan.steps
        for chunk in plan.prefill:
            self._mark(chunk.live, number)
            live = chunk.live
            if chunk.new < 1 or chunk.context < live.kv or chunk.context + chunk.new > live.kv + live.remaining:
                got = f"{chunk.new} new behind {chunk.context}"
                limits = f"1 or more behind {live.kv} or more, {live.kv + live.remaining} in all"
                raise self._refuse(f"a chunk of request {live.request.id}", got, limits)
        for live in plan.decode:
            self._mark(live, number)
            if not live.decoding:
                raise self._refuse(
                    f"decode of request {live.request.id}", f"{live.remaining} tokens to do", "a prefilled request"
                )
            left = live.request.output_tokens - live.produced
            if left < most:
                most = left
        return 1 if self.single else most

    def _mark(self, live: Live, number: int) -> None:
        """Note that ``live`` is in iteration ``number``, once; it has begun."""
        if live.planned == number or live.stage == "finished" or live.stage == "rejected":
            raise self._refuse(f"request {live.request.id}", f"{live.stage}, planned twice", "each live request once")
        live.planned = number
        if live.started_at is None:
            live.started_at = self.now
            live.stage = "running"
            self.tally.started_prompt += live.request.input_tokens

    def _drop(self, live: Live) -> None:
        if live.stage != "running":
            raise self._refuse(f"drop of request {live.request.id}", live.stage, "a running request")
        self.log.add(f"d {live.request.id} {live.kv}")
        self.tally.dropped += live.kv
        live.dropped += live.kv
        self.gone += live.kv
        self.held -= live.kv
        live.kv = 0
        if live.dropped > THRASH * live.most:
            raise self._stuck(f"has dropped the KV of request {live.request.id} over {THRASH} times")

    def _refuse(self, what: str, got: object, expected: str) -> ReplayError:
        return ReplayError(
            f"policy {self.policy.name} plans {what}", where=f"replay at {self.now:.6f} s", got=got, expected=expected
        )

    def _pass(self, phases: tuple[Phase, ...]) -> None:
        """Let the time of one iteration pass and say what was waited for."""
        tally, now = self.tally, self.now
        begin, stalls = now, tally.stalls
        for phase in phases:
            times = (
                (phase.compute, phase.hbm, phase.link_in, phase.link_out, phase.cpu)
                if self.plain
                else self.contention.disturbed(phase)
            )
            near, longest, cause = bound(times)
            repeat = phase.repeat
            if repeat < 1 or phase.serial < 0.0 or min(times) < 0.0:
                raise self._refuse("a phase", phase, "no negative seconds, a repeat of 1 or more")
            tally.near += repeat * near
            if longest > near:
                stalls[cause] += repeat * (longest - near)
            if phase.serial:
                stalls["serial"] += repeat * phase.serial
            now += repeat * (longest + phase.serial)
            if phase.until > now:
                stalls["until"] += phase.until - now
                now = phase.until
        if not begin <= now < math.inf:
            raise self._refuse("a phase", f"{now - begin} s", "seconds of 0 and more")
        tally.busy += now - begin
        self.now = now

    def _advance(self, plan: Plan, steps: int) -> None:
        """Move the requests of ``plan`` on by ``steps`` iterations that end now."""
        now, ended, produced = self.now, [], 0
        for chunk in plan.prefill:
            produced += self._prefilled(chunk)
            if chunk.live.produced >= chunk.live.request.output_tokens:
                ended.append(chunk.live)
        for live in plan.decode:
            live.kv += steps
            live.produced += steps
            if live.produced >= live.request.output_tokens:
                ended.append(live)
        tokens = steps * len(plan.decode)
        self.tally.computed += tokens
        self.made += tokens
        self.held += tokens
        self.barren = 0 if plan.prefill or plan.decode else self.barren + 1
        for live in ended:
            live.finished_at, live.stage = now, "finished"
            del self.inside[live.request.id]
            self.gone += live.kv
            self.held -= live.kv
            self.tally.done(live)
            self.log.add(f"f {live.request.id} {live.first_token_at!r} {now!r}")
        self._refresh()
        self.state.steps, self.state.ended = steps, tuple(ended)

    def _prefilled(self, chunk: Chunk) -> int:
        """Move a prefilled request on; return the tokens that came out (one with the last chunk of a prompt)."""
        live = chunk.live
        found = chunk.context - live.kv
        if found:
            if live.dropped:
                live.restored += found
                self.tally.restored += found
            else:
                live.reused += found
                self.tally.reused += found
        grown = found + chunk.new
        live.kv += grown
        self.tally.computed += chunk.new
        self.made += grown
        self.held += grown
        if live.remaining:
            return 0
        live.produced += 1
        if live.first_token_at is None:
            live.first_token_at = self.now
        return 1

    # -- audits ----------------------------------------------------------------------------------------------------

    def _check(self, begin: float, plan: Plan) -> None:
        """Check in O(1) that tokens, time and units add up after an iteration."""
        tally = self.tally
        if self.held != self.made - self.gone or self.held < 0:
            raise ConservationError(
                "tokens do not add up", where=f"replay at {self.now:.6f} s", got=f"{self.held} held",
                expected=f"{self.made} made - {self.gone} gone",
            )  # fmt: skip
        start = tally.first_arrival or 0.0
        spent = start + tally.busy + tally.idle
        stalled = tally.near + sum(tally.stalls.values())
        if abs(spent - self.now) > SLACK * self.now or abs(stalled - tally.busy) > SLACK * max(self.now, tally.busy):
            raise ConservationError(
                "time does not add up", where=f"replay at {self.now:.6f} s",
                got=f"{tally.busy} busy ({tally.near} near and stalls of {stalled - tally.near}), {tally.idle} idle",
                expected=f"{self.now - start} s in all",
            )  # fmt: skip
        ledger = self.policy.ledger
        ledger.check()
        into, out = ledger.least_moved_bytes("far", "near"), ledger.least_moved_bytes("near", "far")
        if into > tally.link_in or out > tally.link_out:
            raise ConservationError(
                "KV moved between the tiers without crossing the link", where=f"replay at {self.now:.6f} s",
                got=f"{tally.link_in} B in, {tally.link_out} B out", expected=f"at least {into} B in, {out} B out",
            )  # fmt: skip
        if self.barren > BARREN:
            raise self._stuck("plans iterations without a token, again and again")
        if self.deep:
            self._deep_check()

    def _deep_check(self) -> None:
        """Check every request and every owner."""
        held = sum(live.kv for live in self.inside.values())
        if held != self.held:
            raise ConservationError("tokens of requests", where="audit", got=held, expected=f"{self.held}")
        tally = self.tally
        if self.made != tally.computed + tally.reused + tally.restored:
            raise ConservationError(
                "tokens made", where="audit", got=self.made,
                expected=f"{tally.computed} computed + {tally.reused} reused + {tally.restored} restored",
            )  # fmt: skip
        if tally.arrived != tally.finished + tally.rejected + len(self.inside):
            raise ConservationError(
                "requests", where="audit", got=tally.arrived,
                expected=f"{tally.finished} finished + {tally.rejected} rejected + {len(self.inside)} inside",
            )  # fmt: skip
        self.policy.ledger.audit(self.policy.holdings())
