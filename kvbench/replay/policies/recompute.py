"""Baseline: KV that does not fit is dropped and computed again. No prefix cache, no far tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.replay.costs import Costs
from kvbench.replay.policies.continuous import BatchParams, Continuous
from kvbench.replay.protocol import Chunk, Live, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(BatchParams):
    """Those of continuous batching."""


class Recompute(Continuous):
    """A request that gives way loses its KV and goes to the head of the queue."""

    name = "recompute"

    def __init__(self, costs: Costs, params: Params) -> None:
        super().__init__(costs, params)
        self.totals = {"preemptions": 0.0}

    def _displace(self, live: Live) -> None:
        self.pages.free(live)
        self.waiting.appendleft(live)
        self.totals["preemptions"] += 1

    def _plan(self, prefill: tuple[Chunk, ...], decode: tuple[Live, ...], out: tuple[Live, ...]) -> Plan:
        # what gave way before its first chunk has nothing to lose
        drop = tuple(live for live in out if live.kv)
        return self._decodes(decode) if decode and not prefill and not drop else self._mixed(prefill, decode, drop)


def make(costs: Costs, params: Params) -> Recompute:
    """Return the policy."""
    return Recompute(costs, params)
