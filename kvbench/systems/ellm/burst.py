"""A small queue model in which the buffer controller is replayed against bursts: seeded, event by event, no clock.

One engine prefers prefills to decode steps (eLLM, DAC 2026, section 2.3.2). A waiting request is prefilled when the GPU
has room for its prompt and output, or else when the CPU buffer has room for its prompt; then it is parked there until
the GPU has room, and its KV comes back over the link. So a large logical buffer brings first tokens early and lets
parked requests and starved decode steps wait: the trade the controller steers. Everything is in tokens and seconds; the
numbers of an engine are parameters, and what comes out is a simulation, never a measurement.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvbench.errors import UsageError
from kvbench.systems.ellm.slo import Observation, Params, State, controller, reversals


@dataclass(frozen=True, slots=True)
class Engine:
    """``gpu_tokens`` of KV fit on the GPU. Seconds: a prompt token, a decode step, a running request in it, a token of
    KV brought back. The defaults are those of an 8B model on an 80 GB board of 1.6 TB/s and 156 TFLOP/s behind 25 GB/s:
    16 GFLOP a prompt token, 16 GB of weights a step, 128 KiB of KV a token, 2,048 tokens a request."""

    gpu_tokens: int = 275_000
    prefill_token: float = 16e9 / 156e12
    step: float = 16e9 / 1.6e12
    step_request: float = 2048 * 131072 / 1.6e12
    fetch_token: float = 131072 / 25e9

    def no_load(self, prompt: int) -> tuple[float, float]:
        """Return TTFT and TPOT of a request that is alone."""
        return self.prefill_token * prompt, self.step + self.step_request


@dataclass(frozen=True, slots=True)
class Load:
    """``requests`` arrivals, exponential gaps: ``calm`` a second, and ``burst`` in the first ``length`` seconds of each
    ``period``; prompts and outputs uniform within a quarter of their mean."""

    requests: int
    calm: float = 0.4
    burst: float = 4.0
    length: float = 20.0
    period: float = 60.0
    prompt: int = 2048
    output: int = 2048


@dataclass(frozen=True, slots=True)
class Request:
    """Seconds of arrival, tokens of prompt and output."""

    arrival: float
    prompt: int
    output: int


def arrivals(load: Load, seed: int) -> list[Request]:
    """Return the requests of ``load``; the same for the same seed. Raises UsageError for a load that is none."""
    rates = (load.calm, load.burst, load.period, load.length)
    if load.requests < 1 or min(rates) <= 0.0 or min(load.prompt, load.output) < 4:
        raise UsageError("a load needs requests, rates and lengths", where="burst model", got=load)
    rng = np.random.default_rng(seed)
    made, now = [], 0.0
    for _ in range(load.requests):
        # the rate changes inside a gap: take the gap as work of rate 1 and spend it piece by piece
        left = float(rng.exponential())
        while True:
            inside = now % load.period
            rate, edge = (load.burst, load.length) if inside < load.length else (load.calm, load.period)
            span = max(edge - inside, 1e-9)
            if left <= rate * span:
                now += left / rate
                break
            left -= rate * span
            now += span
        prompt, output = (int(rng.integers(m - m // 4, m + m // 4 + 1)) for m in (load.prompt, load.output))
        made.append(Request(now, prompt, output))
    return made


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of requests within the objectives, 0..1, and how the logical size moved.

    ``reaction``: iterations from the first TTFT violation to the first growth, None where nothing grew. ``p99_ttft`` in
    seconds; ``mean_size`` in tokens over iterations; ``parked``: requests that went through the buffer.
    """

    attained: float
    ttft_attained: float
    tpot_attained: float
    p99_ttft: float
    iterations: int
    changes: int
    reversals: int
    mean_size: float
    reaction: int | None
    parked: int
    seconds: float


class _Replay:
    def __init__(self, requests: list[Request], engine: Engine, params: Params, size: int, scaled: bool) -> None:
        self.requests, self.engine, self.params, self.scaled = requests, engine, params, scaled
        self.now, self.free, self.stored, self.steps, self.next = 0.0, engine.gpu_tokens, 0, 0, 0
        self.waiting: deque[int] = deque()
        self.parked: deque[int] = deque()
        self.running: list[tuple[int, int]] = []  # heap of (step after which it ends, request)
        self.fresh: list[int] = []  # first token out, no step yet
        self.first, self.end = [0.0] * len(requests), [0.0] * len(requests)
        self.last_step = 0.0
        self.state = State(size)
        self.sizes = [size]
        self.through = 0
        self.violated: int | None = None
        self.reaction: int | None = None

    def run(self) -> None:
        left = len(self.requests)
        while left:
            while self.next < len(self.requests) and self.requests[self.next].arrival <= self.now:
                self.waiting.append(self.next)
                self.next += 1
            if not (self.waiting or self.parked or self.running):
                self.now = self.requests[self.next].arrival
                continue
            ttft, tpot = self.prefill(), None
            if ttft is None:
                tpot, ended = self.decode()
                left -= ended
            oldest = self.now - self.requests[self.waiting[0]].arrival if self.waiting else None
            seen = [late for late in (ttft, oldest) if late is not None]
            self.observe(Observation(max(seen, default=None), tpot))

    def prefill(self) -> float | None:
        """Prefill the first waiting request if it fits; return its TTFT."""
        if not self.waiting:
            return None
        index = self.waiting[0]
        request = self.requests[index]
        need = request.prompt + request.output
        if not self.parked and need <= self.free:
            self.free -= need
            self.start(index)
        elif request.prompt <= self.state.logical - self.stored:
            self.stored += request.prompt
            self.parked.append(index)
            self.through += 1
        else:
            return None
        self.waiting.popleft()
        self.now += self.engine.prefill_token * request.prompt
        self.first[index] = self.now
        return self.now - request.arrival

    def start(self, index: int) -> None:
        heapq.heappush(self.running, (self.steps + self.requests[index].output - 1, index))
        self.fresh.append(index)

    def decode(self) -> tuple[float | None, int]:
        """Bring back what fits, decode a step; return the longest gap between tokens and how many requests ended."""
        before = self.last_step
        while self.parked:
            index = self.parked[0]
            request = self.requests[index]
            if request.prompt + request.output > self.free:
                break
            self.parked.popleft()
            self.free -= request.prompt + request.output
            self.stored -= request.prompt
            self.now += self.engine.fetch_token * request.prompt
            self.start(index)
        if not self.running:
            raise UsageError(
                "a request that fits nowhere", where="burst model", got=self.requests[self.waiting[0]],
                expected=f"prompt and output within {self.engine.gpu_tokens} tokens",
            )  # fmt: skip
        self.now += self.engine.step + self.engine.step_request * len(self.running)
        self.steps += 1
        gaps = [self.now - self.first[index] for index in self.fresh]
        if len(self.fresh) < len(self.running):
            gaps.append(self.now - before)
        self.fresh.clear()
        self.last_step = self.now
        ended = 0
        while self.running and self.running[0][0] <= self.steps:
            _, index = heapq.heappop(self.running)
            self.free += self.requests[index].prompt + self.requests[index].output
            self.end[index] = self.now
            ended += 1
        return max(gaps), ended

    def observe(self, seen: Observation) -> None:
        if self.violated is None and seen.ttft is not None and seen.ttft > self.params.ttft:
            self.violated = len(self.sizes)
        if self.scaled:
            self.state = controller(self.state, seen, self.params)
        if self.reaction is None and self.violated is not None and self.state.logical > self.sizes[-1]:
            self.reaction = len(self.sizes) - self.violated
        self.sizes.append(self.state.logical)


def replay(requests: list[Request], engine: Engine, params: Params, size: int, *, scaled: bool = True) -> Outcome:
    """Return what becomes of ``requests`` with a buffer of ``size`` tokens at first; ``scaled``: steered by ``params``.

    ``params`` are in tokens where they say bytes. The TTFT an iteration shows is that of the request prefilled in it,
    or, when it is larger, the age of the oldest one waiting: an engine that admits nothing must not look punctual.
    Raises UsageError without requests, and for one that never fits.
    """
    if not requests:
        raise UsageError("nothing to replay", where="burst model")
    done = _Replay(requests, engine, params, min(size, params.physical), scaled)
    done.run()
    first = np.array([done.first[i] - r.arrival for i, r in enumerate(requests)])
    per_token = np.array([(done.end[i] - done.first[i]) / (r.output - 1) for i, r in enumerate(requests)])
    early, quick = first <= params.ttft, per_token <= params.tpot
    return Outcome(
        float((early & quick).mean()), float(early.mean()), float(quick.mean()), float(np.quantile(first, 0.99)),
        len(done.sizes) - 1, sum(a != b for a, b in pairwise(done.sizes)),
        reversals(done.sizes), float(np.mean(done.sizes)), done.reaction, done.through, done.now,
    )  # fmt: skip
