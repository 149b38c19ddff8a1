"""What a replay amounts to: throughput, latencies, goodput, hit rate, stalls, bytes; kept in 40 bytes a request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.replay.protocol import CAUSES, Live


@dataclass(frozen=True, slots=True)
class Spread:
    """``n`` values: mean and quantiles (the smallest value that at least the share of all does not exceed).

    All None where there is no value.
    """

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds: ``ttft`` from arrival to the first token, ``tpot`` a further token. None: no objective.

    Raises UsageError for one that is not above 0.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise UsageError("not an objective", where=f"slo {name}", got=value, expected="seconds above 0")


@dataclass(frozen=True, slots=True)
class Summary:
    """A replay's metrics; seconds are simulated. Rates are None where no time passed.

    ``requests`` = ``finished`` + ``rejected``; ``rejection``: which was the first and why, empty for none. ``span``:
    from the first arrival to the last event. ``request_rate`` and ``token_rate`` (output tokens) count finished
    requests over ``span``. ``tpot``: (last - first token) / (output - 1), for requests of two output tokens and more.
    ``latency``: arrival to last token; ``per_token``: latency / output tokens. ``within``: finished requests that meet
    the objectives (a request of one token has no TPOT and meets that one); ``goodput`` is their rate, ``attainment``
    their share of all requests, rejected ones included.

    ``hit_rate``: prompt tokens taken from a cache / prompt tokens of the requests that started. ``computed``: tokens
    that passed through the model; ``dropped``: whose KV was thrown away and needed again, ``restored``: of these, found
    in a cache. ``busy``: seconds of iterations; ``near``: of them, the near side worked; ``stalls``: seconds the near
    side waited, by cause; ``stall_share``: their sum over ``busy``. ``idle``: no iteration ran.
    """

    requests: int
    finished: int
    rejected: int
    rejection: str
    span: float
    request_rate: float | None
    token_rate: float | None
    ttft: Spread
    tpot: Spread
    latency: Spread
    per_token: Spread
    within: int
    goodput: float | None
    attainment: float | None
    hit_rate: float | None
    prompt_tokens: int
    reused: int
    computed: int
    dropped: int
    restored: int
    output_tokens: int
    iterations: int
    mean_batch: float | None
    busy: float
    near: float
    idle: float
    stalls: Mapping[str, float]
    stall_share: float | None
    link_in_bytes: int
    link_out_bytes: int
    map_calls: int


def spread(values: Sequence[float]) -> Spread:
    """Return mean and quantiles of ``values``; sums are exact (fsum), so their order does not matter."""
    n = len(values)
    if not n:
        return Spread(0, None, None, None, None)
    ordered = sorted(values)
    p50, p90, p99 = (ordered[max(0, math.ceil(share * n / 100) - 1)] for share in (50, 90, 99))
    return Spread(n, math.fsum(ordered) / n, p50, p90, p99)


class Tally:
    """Counts one replay. The engine adds; :meth:`summary` may be asked at any time and for any objectives."""

    def __init__(self) -> None:
        self.arrived = self.finished = self.rejected = 0
        self.rejection = ""
        self.started_prompt = self.reused = self.computed = self.dropped = self.restored = self.output = 0
        self.iterations = self.batched = 0
        self.busy = self.near = self.idle = 0.0
        self.stalls: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self.link_in = self.link_out = self.map_calls = 0
        self.first_arrival: float | None = None
        self.end = 0.0
        # requests of a single output token have no TPOT: theirs stand apart, so that the first two stay side by side
        self._ttft, self._tpot, self._ttft_single = array("d"), array("d"), array("d")
        self._latency, self._per_token = array("d"), array("d")

    def reject(self, number: int, reason: str) -> None:
        """Count a request that was rejected; the first one is kept with its reason."""
        if not self.rejected:
            self.rejection = f"request {number}: {reason}"
        self.rejected += 1

    def done(self, live: Live) -> None:
        """Count a finished request."""
        request, first, last = live.request, live.first_token_at, live.finished_at
        assert first is not None
        assert last is not None
        self.finished += 1
        self.output += request.output_tokens
        if request.output_tokens > 1:
            self._ttft.append(first - request.arrival)
            self._tpot.append((last - first) / (request.output_tokens - 1))
        else:
            self._ttft_single.append(first - request.arrival)
        self._latency.append(last - request.arrival)
        self._per_token.append((last - request.arrival) / request.output_tokens)

    def summary(self, slo: Slo | None = None) -> Summary:
        """Return the metrics so far; without objectives ``within`` counts every finished request."""
        slo = slo or Slo()
        most_ttft = math.inf if slo.ttft is None else slo.ttft
        most_tpot = math.inf if slo.tpot is None else slo.tpot
        pairs = zip(self._ttft, self._tpot, strict=True)
        within = sum(1 for ttft, tpot in pairs if ttft <= most_ttft and tpot <= most_tpot)
        within += sum(1 for ttft in self._ttft_single if ttft <= most_ttft)
        span = self.end - self.first_arrival if self.first_arrival is not None else 0.0
        counted = self.finished + self.rejected
        stalled = math.fsum(self.stalls.values())
        return Summary(
            requests=counted, finished=self.finished, rejected=self.rejected, rejection=self.rejection, span=span,
            request_rate=_over(self.finished, span), token_rate=_over(self.output, span),
            ttft=spread(self._ttft + self._ttft_single), tpot=spread(self._tpot),
            latency=spread(self._latency), per_token=spread(self._per_token),
            within=within, goodput=_over(within, span), attainment=_over(within, counted),
            hit_rate=_over(self.reused, self.started_prompt), prompt_tokens=self.started_prompt, reused=self.reused,
            computed=self.computed, dropped=self.dropped, restored=self.restored, output_tokens=self.output,
            iterations=self.iterations, mean_batch=_over(self.batched, self.iterations),
            busy=self.busy, near=self.near, idle=self.idle, stalls=dict(self.stalls),
            stall_share=_over(stalled, self.busy),
            link_in_bytes=self.link_in, link_out_bytes=self.link_out, map_calls=self.map_calls,
        )  # fmt: skip


def _over(amount: float, by: float) -> float | None:
    return amount / by if by > 0 else None
