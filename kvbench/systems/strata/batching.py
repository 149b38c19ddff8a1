"""Which requests of the queue form the next prefill batch: in order, or so that loading hides behind computing.

After Strata (OSDI 2026, Algorithm 1). A batch is loading bound when it loads more than ``ratio`` tokens from the far
tier for each token it computes. The balanced batch starts with the head of the queue, takes in every request that
shares a context it loads (a bundle hit: loaded once), passes over requests that would make it loading bound, and is
filled up with those, in the order of their arrival, when nothing better is left. So the head of the queue is in every
batch and nobody waits at the head for more than one.

The ratio is 100 in the paper: an onset its authors measured on their code, not a constant of hardware. From rates it is
13 to 63 for the models they used; ``strata/overlap_onset`` measures it on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.errors import UsageError

RATIO = 100.0
Contexts = Sequence[tuple[int, int]]


class Candidate(NamedTuple):
    """A schedulable request: ``new`` tokens to compute, ``own`` tokens of near memory for itself alone.

    ``loads``: (context, tokens) it finds only in the far tier; ``pins``: (context, tokens) near already that it would
    keep from being evicted. Contexts are shared: each counts once in a batch.
    """

    new: int
    own: int = 0
    loads: Contexts = ()
    pins: Contexts = ()

    @property
    def load(self) -> int:
        """Tokens it would load alone."""
        return sum(tokens for _, tokens in self.loads)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a batch is full: ``tokens`` to compute, ``memory`` tokens of the near tier, ``requests``.

    ``cut``: the request that crosses ``tokens`` is taken and computes only what fits now (chunked prefill). Without it
    the first request is taken whatever it computes, and a later one that crosses is not. The memory is never crossed.
    """

    tokens: int
    memory: int
    requests: int
    cut: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.requests < 1:
            got = f"{self.tokens} tokens, {self.requests} requests"
            raise UsageError("limits of a batch", where="strata", got=got, expected="1 or more of each")


@dataclass(frozen=True, slots=True)
class Batch:
    """``chosen``: places in the queue, in the order they were taken; ``new`` and ``load`` tokens, shared ones once.

    ``passed``: how many schedulable requests were passed over because they would have made it loading bound and did
    not get in after all; ``bundled``: how many came in as bundle hits.
    """

    chosen: tuple[int, ...] = ()
    new: int = 0
    load: int = 0
    passed: int = 0
    bundled: int = 0

    def loading_bound(self, ratio: float) -> bool:
        return loading_bound(self.load, self.new, ratio)


def loading_bound(load: int, new: int, ratio: float) -> bool:
    """Return whether ``load`` tokens from the far tier are too many to hide behind ``new`` computed ones."""
    return load > ratio * new


class _Growing:
    def __init__(self, queue: Sequence[Candidate], limits: Limits, computing: int = 0) -> None:
        self.queue, self.limits, self.computing = queue, limits, computing
        self.chosen: list[int] = []
        self.taken = bytearray(len(queue))
        self.loaded: set[int] = set()
        self.pinned: set[int] = set()
        self.new = self.load = self.memory = 0

    def further(self, candidate: Candidate) -> int:
        """Tokens it would load in this batch."""
        return sum(tokens for context, tokens in candidate.loads if context not in self.loaded)

    def part(self, candidate: Candidate) -> int:
        """Tokens it would compute in this batch."""
        return min(candidate.new, self.limits.tokens - self.new) if self.limits.cut else candidate.new

    def fits(self, candidate: Candidate) -> bool:
        limits = self.limits
        if self.chosen:
            most = limits.tokens - 1 if limits.cut else limits.tokens - candidate.new
            if len(self.chosen) >= limits.requests or self.new > most:
                return False
        held = sum(tokens for context, tokens in candidate.pins if context not in self.pinned)
        return self.memory + candidate.own + self.further(candidate) + held <= limits.memory

    def bound_with(self, candidate: Candidate, ratio: float) -> bool:
        """Whether the batch is loading bound with it; what is computed beside the batch hides loads as well."""
        new = self.computing + self.new + self.part(candidate)
        return loading_bound(self.load + self.further(candidate), new, ratio)

    def add(self, at: int) -> list[int]:
        """Take the request in; return the contexts it is the first to load."""
        candidate = self.queue[at]
        fresh = [context for context, _ in candidate.loads if context not in self.loaded]
        further = self.further(candidate)
        self.memory += candidate.own + further
        self.memory += sum(tokens for context, tokens in candidate.pins if context not in self.pinned)
        self.load += further
        self.new += self.part(candidate)
        self.loaded.update(fresh)
        self.pinned.update(context for context, _ in candidate.pins)
        self.chosen.append(at)
        self.taken[at] = 1
        return fresh

    def batch(self, passed: int = 0, bundled: int = 0) -> Batch:
        return Batch(tuple(self.chosen), self.new, self.load, passed, bundled)


def fifo(queue: Sequence[Candidate], limits: Limits) -> Batch:
    """Return the requests at the head of ``queue`` that fit, in order; empty where the head's memory is not there."""
    growing = _Growing(queue, limits)
    for at, candidate in enumerate(queue):
        if not growing.fits(candidate):
            break
        growing.add(at)
    return growing.batch()


def balanced(queue: Sequence[Candidate], limits: Limits, ratio: float = RATIO, *, computing: int = 0) -> Batch:
    """Return the batch of Algorithm 1 for the schedulable requests of ``queue``, in order of arrival.

    ``computing``: tokens computed in the same pass anyway (the rest of a prompt that was cut). Empty where there is no
    queue or the head's memory is not there. Raises UsageError for a ratio that is not above 0.
    """
    if not ratio > 0.0:
        raise UsageError("load to compute ratio", where="strata", got=ratio, expected="above 0")
    growing = _Growing(queue, limits, computing)
    if not queue or not growing.fits(queue[0]):
        return Batch()
    sharers: dict[int, list[int]] = {}
    for at, candidate in enumerate(queue):
        for context, _ in candidate.loads:
            sharers.setdefault(context, []).append(at)
    bundled = _bundle(growing, sharers, growing.add(0))
    passed: list[int] = []
    full = False
    for at in range(1, len(queue)):
        if growing.taken[at]:
            continue
        candidate = queue[at]
        if growing.bound_with(candidate, ratio):
            passed.append(at)
        elif growing.fits(candidate):
            bundled += _bundle(growing, sharers, growing.add(at))
        else:
            full = True
            break
    for at in passed:
        if full or not (growing.taken[at] or growing.fits(queue[at])):
            break
        if not growing.taken[at]:
            growing.add(at)
    return growing.batch(sum(not growing.taken[at] for at in passed), bundled)


def _bundle(growing: _Growing, sharers: dict[int, list[int]], fresh: list[int]) -> int:
    """Take in all that share a context the batch loads, and what those share in turn; return how many."""
    count = 0
    while fresh:
        for at in sharers[fresh.pop()]:
            if not growing.taken[at] and growing.fits(growing.queue[at]):
                fresh += growing.add(at)
                count += 1
    return count
