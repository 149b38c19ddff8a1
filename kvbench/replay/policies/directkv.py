"""DirectKV: KV stays far and is read in place, so that far memory bounds the batch; or swapped in layer by layer.

:mod:`kvbench.systems.directkv.serving` says what moves; here it becomes seconds and admission. In place an attention
kernel waits for the link alone (linear operations come before and after it); with the swap a layer's link time runs
beside the whole layer, and the batch is bounded by the double buffer as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.replay.costs import TRANSPORTS, Costs, Transport, Work
from kvbench.replay.policies.continuous import FAR, BatchParams, Continuous
from kvbench.replay.protocol import Chunk, Live, Phase, Plan, State
from kvbench.systems.directkv import serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(BatchParams):
    """``route``: in_place or layer_swap; ``order`` of the loops in a prefill in place: kv_outer (the paper's) or
    q_outer (an unchanged kernel); ``transport`` of the swap, a page of a layer (keys or values) being a fragment.
    Raises UsageError for other words.
    """

    route: serving.Route = "in_place"
    order: serving.Order = "kv_outer"
    transport: Transport = "sm"

    def __post_init__(self) -> None:
        BatchParams.__post_init__(self)
        for name, words in (
            ("route", serving.ROUTES), ("order", serving.ORDERS), ("transport", TRANSPORTS)
        ):  # fmt: skip
            if getattr(self, name) not in words:
                raise UsageError("unknown word", where=name, got=getattr(self, name), expected=", ".join(words))


class DirectKV(Continuous):
    """Requests that find no far page any more lose their KV, as in the baseline that recomputes."""

    name = "directkv"

    def __init__(self, costs: Costs, params: Params) -> None:
        super().__init__(costs, params, far=True, home=FAR)
        self.params = params
        shape = costs.shape
        self.heads = serving.Heads(shape.heads, shape.kv_heads, shape.head_dim)
        self.fragment = params.page_tokens * costs.layer_token_bytes // 2
        self.swap = params.route == "layer_swap"
        self.most = serving.swap_tokens(costs.near_bytes, self.heads) if self.swap else 0
        self.totals = {"preemptions": 0.0}

    def arrive(self, live: Live, state: State) -> str | None:
        """Queue ``live``; with the swap a request also has to fit the double buffer."""
        if self.swap and live.most > self.most:
            return f"needs {live.most} tokens of KV, the double buffer of a layer holds {self.most}"
        return super().arrive(live, state)

    def _displace(self, live: Live) -> None:
        self.pages.free(live)
        self.waiting.appendleft(live)
        self.totals["preemptions"] += 1

    def _make_room(self) -> list[Live]:
        out = super()._make_room()
        while self.swap and sum(live.kv for live in self.running) + len(self.running) > self.most:
            live = self.running.pop()
            self._displace(live)
            out.append(live)
        return out

    def _admit(self, live: Live) -> bool:
        if self.swap:
            inside = sum(max(other.kv + 1, other.kv + other.remaining) for other in self.running)
            if inside + live.kv + live.remaining + 1 > self.most and self.running:
                return False
        return super()._admit(live)

    def _plan(self, prefill: tuple[Chunk, ...], decode: tuple[Live, ...], out: tuple[Live, ...]) -> Plan:
        drop = tuple(live for live in out if live.kv)
        n = len(decode)
        kv = sum(live.kv for live in decode) + n
        moved, layers = self._moved(prefill, n, kv), self.costs.layers
        alone = bool(decode) and not prefill and not drop
        return Plan(
            self._phases(prefill, n, kv), prefill, decode, drop, steps=self._steps(decode) if alone else 1,
            later=(lambda k: self._phases((), n, kv + k * n)) if alone else None,
            link_in_bytes=layers * moved.link_in, link_out_bytes=layers * moved.link_out,
            link_in_step=layers * n * self.heads.token_bytes if alone else 0,
        )  # fmt: skip

    def _steps(self, decode: tuple[Live, ...]) -> int:
        steps = super()._steps(decode)
        if not self.swap:
            return steps
        return max(1, min(steps, (self.most - sum(live.kv for live in self.running)) // max(1, len(self.running))))

    def _moved(self, prefill: tuple[Chunk, ...], requests: int, kv_tokens: int) -> serving.Moved:
        parts = [serving.prefill(self.heads, c.new, c.context, self.params.route, self.params.order) for c in prefill]
        return serving.total([*parts, serving.decode(self.heads, requests, kv_tokens, self.params.route)])

    def _phases(self, prefill: tuple[Chunk, ...], requests: int, kv_tokens: int) -> tuple[Phase, ...]:
        costs, layers = self.costs, self.costs.layers
        moved = self._moved(prefill, requests, kv_tokens)
        tokens = sum(c.new for c in prefill) + requests
        pairs = sum(c.new * c.context + c.new * (c.new + 1) / 2 for c in prefill) + kv_tokens
        arithmetic, near = costs.attention_compute(pairs), costs.near_seconds(moved.near)
        linear, head = costs.linear(tokens), costs.phase(costs.head(len(prefill) + requests))
        link_out = costs.evict(moved.link_out // self.heads.token_bytes)
        if not self.swap:
            link_in = costs.read_in_place(moved.link_in // self.heads.token_bytes)
            attention = Phase(arithmetic, near, link_in, link_out, repeat=layers)
            return (costs.phase(linear, repeat=layers), attention, head)
        link_in = costs.load(moved.link_in // self.heads.token_bytes, self.fragment, self.params.transport)
        attend = Work(arithmetic, 0.0) if arithmetic >= near else Work(0.0, near)
        return (costs.phase(linear.then(attend), repeat=layers, link_in=link_in, link_out=link_out), head)


def make(costs: Costs, params: Params) -> DirectKV:
    """Return the policy."""
    return DirectKV(costs, params)
