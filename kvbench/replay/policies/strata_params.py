"""The parameters of the policy ``strata``, and what it keeps of a request and of a prefill pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbench.errors import UsageError
from kvbench.replay.costs import TRANSPORTS
from kvbench.replay.protocol import Chunk, Live
from kvbench.systems.strata.bubble import Bubble
from kvbench.systems.strata.deferral import Deferral
from kvbench.systems.strata.radix_node import Key, Node
from kvbench.systems.strata.tiers import TieredCache
from kvbench.systems.strata.writes import Writes


@dataclass(frozen=True, slots=True)
class Params:
    """What can be set. Tokens: ``page_tokens`` a page; ``batch_tokens`` a prefill pass computes; ``defer_tokens`` of
    transient prefix above which a request waits; ``load_back``: shorter far hits are computed again; ``near_tokens``,
    ``far_tokens``: capacities (None: what the machine holds).

    ``defer``, ``balance``, ``bubble``: the paper's three parts, each on or off. ``ratio``: loaded to computed tokens of
    a loading-bound batch (100 in the paper). ``transport`` and the far pool's ``layout`` decide what a load costs.
    ``write`` and ``write_uses``: see :class:`kvbench.systems.strata.writes.Writes`. ``chunked``: prompts are cut at
    ``batch_tokens``. ``requests``: most that run at once. ``window``: how much of the queue a round looks at.
    Raises UsageError for values out of range.
    """

    page_tokens: int = 1
    batch_tokens: int = 8192
    chunked: bool = True
    requests: int = 128
    window: int = 64
    ahead: bool = True
    defer: bool = True
    defer_tokens: int = 100
    balance: bool = True
    bubble: bool = True
    ratio: float = 100.0
    transport: str = "sm"
    layout: str = "page_first"
    write: str = "write_through_selective"
    write_uses: int = 2
    load_back: int = 10
    near_tokens: int | None = None
    far_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_tokens", "batch_tokens", "requests", "window"):
            if getattr(self, name) < 1:
                raise UsageError("parameter", where=f"strata {name}", got=getattr(self, name), expected="1 or more")
        for name in ("near_tokens", "far_tokens", "load_back"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError("parameter", where=f"strata {name}", got=value, expected="0 tokens or more")
        if self.transport not in TRANSPORTS:
            expected = f"one of {', '.join(TRANSPORTS)}"
            raise UsageError("parameter", where="strata transport", got=self.transport, expected=expected)
        self.writes(), self.deferral(), self.filler()

    def writes(self) -> Writes:
        return Writes(self.write, self.write_uses)  # type: ignore[arg-type]

    def deferral(self) -> Deferral:
        return Deferral(self.defer_tokens, self.defer)

    def filler(self) -> Bubble:
        return Bubble(self.ratio, self.bubble)


class Entry:
    """A request inside: its place in the tree, and tokens of near memory of its ``own``.

    ``planned``: prompt tokens found or given to a pass so far; ``stage``: queue, flight, decode.
    """

    __slots__ = ("cache", "deferred", "entered", "key", "leaf", "live", "own", "planned", "stage")

    def __init__(self, live: Live, key: Key, cache: TieredCache) -> None:
        self.live, self.key, self.cache = live, key, cache
        self.leaf: Node | None = None
        self.entered = self.deferred = False
        self.own = self.planned = 0
        self.stage: Literal["queue", "flight", "decode"] = "queue"

    @property
    def left(self) -> int:
        """Prompt tokens no pass has been given yet."""
        return self.live.request.input_tokens - self.planned

    @property
    def node(self) -> Node:
        assert self.leaf is not None, "asked before it entered"
        return self.leaf

    def transient_tokens(self) -> int:
        return self.cache.tree.match(self.key).transient * self.cache.unit

    def enter(self) -> None:
        self.leaf = self.cache.tree.enqueue(self.key)
        self.entered = True


@dataclass(slots=True)
class Batch:
    """A prefill pass: chunks, tokens it loads first, tokens an eviction for it has to write before."""

    chunks: list[Chunk] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    new: int = 0
    load: int = 0
    flush: int = 0
    loaded_at: float = 0.0
