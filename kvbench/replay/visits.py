"""A trace through a prefix cache, one request after the other: what is found, moved and wasted, without a schedule."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvbench.replay.request import Request
from kvbench.systems.strata.radix_node import Node
from kvbench.systems.strata.tiers import TieredCache, unit_key

TAILS = 1 << 16  # requests whose next turn is awaited, at most


@dataclass(frozen=True, slots=True)
class Visits:
    """Tokens: of all prompts (``prompt``), of them found ``near`` or in the far tier (``far``); near memory ``asked``
    for behind the keys, of it ``padding`` that fills up last pages. ``with_hit``: ``requests`` that found something.
    """

    requests: int
    with_hit: int
    prompt: int
    near: int
    far: int
    asked: int
    padding: int

    @property
    def hit_rate(self) -> float | None:
        """Prompt tokens found in either tier over all; None without any."""
        return (self.near + self.far) / self.prompt if self.prompt else None


def visit_all(trace: Iterable[Request], cache: TieredCache, page_tokens: int) -> Visits:
    """Let each request of ``trace`` run alone through ``cache``, in pages of ``page_tokens`` tokens.

    Prompts are matched in whole units of the cache; output is kept, and found by the next turn of the same session.
    """
    requests = with_hit = prompt = near = far = asked = padding = 0
    tails: OrderedDict[int, Node] = OrderedDict()
    unit = cache.unit
    for request in trace:
        block = request.block_tokens or unit
        key = unit_key(request.hash_ids, block, request.input_tokens, unit)
        tail = None if request.parent is None else tails.pop(request.parent, None)
        if tail is not None:
            cache.tree.name(tail, key)
        behind = request.total_tokens - 1 - len(key) * unit
        own = -(-behind // page_tokens) * page_tokens
        found, left = cache.visit(key, own, behind if request.session is not None else 0)
        if left is not None:
            tails[request.id] = left
            if len(tails) > TAILS:
                tails.popitem(last=False)
        requests += 1
        with_hit += found.hit > 0
        prompt += request.input_tokens
        near += found.near
        far += found.load
        asked += own
        padding += own - behind
    return Visits(requests, with_hit, prompt, near, far, asked, padding)
