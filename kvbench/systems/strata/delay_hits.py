"""How many pages are computed again because a prefix was still being made when it was asked for (delay hits).

After Strata (OSDI 2026, section 5.3.4 and Fig. 12): a simulation with an unlimited cache. KV of a page that is not
there appears ``resolve`` seconds after it was first asked for; who asks in between misses it too, and that miss is due
to the delay alone. As ``resolve`` grows they approach all repeats: every page asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbench.errors import UsageError


@dataclass(frozen=True, slots=True)
class DelayHits:
    """Pages ``asked`` for, ``first`` time asked, ``delayed``: missed though asked for before, ``requests`` with one.

    ``total``: requests. Repeats are ``asked - first``; with an instant cache all of them are hits.
    """

    total: int
    requests: int
    asked: int
    first: int
    delayed: int

    @property
    def repeats(self) -> int:
        return self.asked - self.first

    @property
    def share_of_repeats(self) -> float | None:
        """``delayed`` over repeats; None where nothing was asked for twice."""
        return self.delayed / self.repeats if self.repeats else None

    @property
    def hit_rate(self) -> float | None:
        """Hits over pages; None without pages."""
        return (self.repeats - self.delayed) / self.asked if self.asked else None


def delay_hits(trace: Iterable[tuple[float, tuple[int, ...]]], resolve: float, *, speed: float = 1.0) -> DelayHits:
    """Replay ``trace``: (arrival in seconds, ids of its pages, each naming its whole prefix), in order of arrival.

    ``resolve`` seconds until an uncached page can be used, counted from the request that asked first; ``speed`` divides
    the times of arrival (the paper scales the trace's timestamps). Raises UsageError for a negative ``resolve``, a
    ``speed`` that is not above 0, or a trace that is out of order.
    """
    if not resolve >= 0.0 or not speed > 0.0:
        got = f"resolve {resolve}, speed {speed}"
        raise UsageError("delay hits", where="strata", got=got, expected="resolve of 0 or more, speed above 0")
    ready: dict[int, float] = {}
    total = requests = asked = delayed = 0
    last = 0.0
    for arrival, pages in trace:
        if arrival < last:
            raise UsageError("a trace out of order", where="delay hits", got=arrival, expected=f"{last} s or later")
        last, now = arrival, arrival / speed
        known = _boundary(pages, ready, None)
        # a page is never asked for before the ones ahead of it, so those ready are a prefix as well
        usable = _boundary(pages[:known], ready, now)
        for page in pages[known:]:
            ready[page] = now + resolve
        total += 1
        asked += len(pages)
        delayed += known - usable
        requests += known > usable
    return DelayHits(total, requests, asked, len(ready), delayed)


def _boundary(pages: tuple[int, ...], ready: dict[int, float], now: float | None) -> int:
    """Return how many pages from the start are known and, with ``now``, ready by then."""
    low, high = 0, len(pages)
    while low < high:
        middle = (low + high) // 2
        at = ready.get(pages[middle])
        if at is not None and (now is None or at <= now):
            low = middle + 1
        else:
            high = middle
    return low
