"""Delay-hit deferral: a request whose prefix is being made elsewhere waits for it instead of making it again.

After Strata (OSDI 2026, section 4.3.1). While the queue is scanned in order, a request that matches more than 100
tokens of transient nodes (KV another request in the queue or in flight will produce) is not schedulable this round and
goes to the front of the queue for the next one; any other marks its own uncached tokens as transient. That serves two
cases: requests of one batch that share a prefix, and a batch formed before the cache of the one before it exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvbench.errors import UsageError

THRESHOLD = 100  # tokens, strict


class Waiting(Protocol):
    """A request of the queue: ``entered`` once its tokens are marked as transient."""

    entered: bool

    def transient_tokens(self) -> int:
        """Return how many tokens it matches that others will produce."""

    def enter(self) -> None:
        """Mark its uncached tokens as transient, in queue; sets ``entered``."""


Entry = TypeVar("Entry", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Deferral:
    """``threshold``: matched transient tokens above which a request waits; ``enabled``: False schedules all (ablation).

    Raises UsageError for a threshold below 0.
    """

    threshold: int = THRESHOLD
    enabled: bool = True

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise UsageError("deferral threshold", where="strata", got=self.threshold, expected="0 tokens or more")

    def defers(self, transient_tokens: int) -> bool:
        return self.enabled and transient_tokens > self.threshold


def scan(
    queue: deque[Entry], rule: Deferral, window: int, enough: Callable[[list[Entry]], bool] | None = None
) -> tuple[list[Entry], list[Entry]]:
    """Take up to ``window`` requests off the queue; return (schedulable, deferred), each in the order of the queue.

    More than ``window`` are taken while none of them is schedulable: the one that all others wait for may stand behind
    them. ``enough`` may end the scan once the schedulable ones are plenty. A request that has entered stays
    schedulable: the transient nodes it matches are its own. Give back with :func:`restore` whatever was not scheduled.
    """
    ready: list[Entry] = []
    deferred: list[Entry] = []
    while queue and (len(ready) + len(deferred) < window or not ready):
        entry = queue.popleft()
        if not entry.entered:
            if rule.enabled and rule.defers(entry.transient_tokens()):
                deferred.append(entry)
                continue
            entry.enter()
        ready.append(entry)
        if enough is not None and enough(ready):
            break
    return ready, deferred


def restore(queue: deque[Entry], deferred: list[Entry], postponed: list[Entry]) -> None:
    """Put requests back: the deferred ones at the front, then the schedulable ones that were not taken, in order."""
    queue.extendleft(reversed(postponed))
    queue.extendleft(reversed(deferred))
