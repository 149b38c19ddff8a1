"""What the engine and a policy say to each other: requests in progress, plans made of phases, states.

The engine (:mod:`kvbench.replay.engine`) owns the clock, arrivals, the progress of requests, metrics, the event log and
audits. A policy owns decisions and its cache structures. Each iteration the engine asks :meth:`Policy.plan`, lets the
plan's time pass, moves the requests of the plan on, and tells :meth:`Policy.finish`.

A request needs ``input + produced`` tokens to have passed through the model before its next token comes out:
``Live.remaining`` of them are still to do. So a prefill and a decode are the same thing, a decode being the last one
of ``remaining == 1``. A plan may take part of ``remaining`` as given (``Chunk.context`` beyond ``Live.kv``): tokens
whose KV a cache holds; that is a hit. At least one token always has to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from kvbench.replay.ledger import Ledger
    from kvbench.replay.request import Request

Cause = Literal["link_in", "link_out", "cpu", "until", "serial"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
Stage = Literal["waiting", "running", "finished", "rejected"]


@dataclass(slots=True, eq=False)
class Live:
    """One request in progress. The engine alone writes it, but for ``own``: whatever a policy keeps with a request.

    ``kv``: tokens of this request whose KV exists (computed, or taken from a cache). ``produced``: output tokens so
    far. ``reused``: prompt tokens taken from a cache; ``dropped``: tokens whose KV was discarded and had to be computed
    again; ``restored``: those of them that a cache still had. Times are seconds on the trace's clock, None before they
    happen. ``stage``: ``running`` from its first plan.
    """

    request: Request
    kv: int = 0
    produced: int = 0
    reused: int = 0
    dropped: int = 0
    restored: int = 0
    stage: Stage = "waiting"
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    own: Any = None
    planned: int = -1  # the engine's mark of the last iteration this request was in

    @property
    def remaining(self) -> int:
        """Tokens that have to pass through the model before the next token comes out; 1 is a decode."""
        return self.request.input_tokens + self.produced - self.kv

    @property
    def decoding(self) -> bool:
        """Whether the next step is a decode: the prompt (and what was dropped) is in the cache."""
        return self.produced > 0 and self.remaining == 1

    @property
    def most(self) -> int:
        """Tokens of KV this request holds at its end; the last output token leaves none."""
        return self.request.input_tokens + self.request.output_tokens - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill of ``new`` tokens of ``live`` behind ``context`` ones that are in the cache.

    ``context - live.kv`` tokens are taken from a prefix cache: hits. The engine refuses ``new < 1``,
    ``context < live.kv`` and more than the request has.
    """

    live: Live
    new: int
    context: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of each resource at its full rate; the resources of a phase overlap, phases follow each other.

    A phase takes ``repeat * (max(resources after contention) + serial)`` and does not end before ``until``, an absolute
    time (a transfer started earlier). ``repeat`` counts layers: seconds are those of one. Time beyond the larger of
    ``compute`` and ``hbm`` is a stall of the resource that bounds the phase, ``serial`` and ``until`` likewise.
    """

    compute: float = 0.0
    hbm: float = 0.0
    link_in: float = 0.0
    link_out: float = 0.0
    cpu: float = 0.0
    serial: float = 0.0
    until: float = 0.0
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration: ``prefill`` chunks and ``decode`` requests (one token each), and the ``phases`` it takes.

    ``drop``: requests whose KV is discarded before it begins; what they had is computed again (preemption).
    ``link_in_bytes``, ``link_out_bytes``: bytes this plan moves or reads over the link, in either direction, whether
    hidden or not; ``map_calls``: memory mapping calls. ``note``: a word for the event log and the executor.

    ``steps`` > 1 promises that up to that many iterations of this plan would follow each other if nothing arrives,
    finishes or wakes meanwhile; only for plans of decodes alone. ``later(k)`` then returns the phases of step k
    (``later(0) == phases``); without it every step takes ``phases``. The byte and call counts are those of one step;
    where steps make different numbers of mapping calls, ``calls_later(k)`` returns those of step k, and
    ``link_in_step`` more bytes come in with each further step (KV that is read in place grows).
    The engine cuts after the first step at whose end a request finishes, one has arrived, or :meth:`Policy.wake` is
    due. The result is the same as that of single steps.
    """

    phases: tuple[Phase, ...]
    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Live, ...] = ()
    drop: tuple[Live, ...] = ()
    steps: int = 1
    later: Callable[[int], tuple[Phase, ...]] | None = None
    calls_later: Callable[[int], int] | None = None
    link_in_bytes: int = 0
    link_out_bytes: int = 0
    link_in_step: int = 0
    map_calls: int = 0
    note: str = ""
    own: Any = None


@dataclass(slots=True)
class State:
    """What the engine tells a policy: the time, the number of the iteration, the next arrival if there is one.

    ``unfinished``: requests that have arrived and neither finished nor been rejected. In :meth:`Policy.finish`,
    ``now`` is the end of the iteration, ``steps`` how many were run as one and ``ended`` the requests that finished.
    """

    now: float = 0.0
    iteration: int = 0
    next_arrival: float | None = None
    unfinished: int = 0
    steps: int = 1
    ended: tuple[Live, ...] = ()


@dataclass(frozen=True, slots=True)
class Holding:
    """What a policy's own structures hold in a tier: units by owner (a request's id, or a word such as ``cache``)."""

    tier: str
    by_owner: Mapping[Any, int] = field(default_factory=dict)


class Policy(Protocol):
    """Decisions of a scheduler. All methods are called by the engine, one at a time.

    ``ledger`` is asked to check itself after every iteration, and compared with :meth:`holdings` in the deep audit.
    """

    name: str
    ledger: Ledger

    def arrive(self, live: Live, state: State) -> str | None:
        """Take ``live`` in; return a reason to reject it (larger than memory), None otherwise.

        A rejected request is counted and never seen again.
        """

    def plan(self, state: State) -> Plan | None:
        """Return the next iteration; None when there is nothing to do now.

        After None the engine goes on to the next arrival or :meth:`wake`, whichever comes first. It raises
        ReplayError when there is neither and requests are unfinished.
        """

    def wake(self, state: State) -> float | None:
        """Return the absolute time from which a plan may be possible (a transfer's end); None if none is awaited."""

    def finish(self, plan: Plan, state: State) -> None:
        """Settle ``plan`` after its time has passed; requests have been moved on, ``state.ended`` have finished."""

    def holdings(self) -> tuple[Holding, ...]:
        """Return what the policy's structures hold, one entry a tier of the ledger; for the deep audit."""

    def counters(self) -> Mapping[str, float]:
        """Return the policy's own totals by name (``preemptions``, ``deferred``); reported beside the metrics."""
