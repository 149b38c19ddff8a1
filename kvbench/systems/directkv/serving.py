"""What serving from far KV moves a layer: KV read in place, or swapped in layer by layer through a double buffer.

DirectKV, OSDI 2026, sections 4 and 5: all KV lies in host memory. In place, an attention kernel streams it over the
link, each byte once, and only attention can hide the link. With the swap the KV of the next layer arrives while a layer
is computed: the whole layer hides it, at the price of two buffers of a layer's KV and of a further write and read of
near memory. New KV is written back to the far side either way; the fused kernels keep it on chip until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from kvbench.errors import UsageError
from kvbench.systems.directkv.attention_traffic import Attention, kv_outer, q_outer

Route = Literal["in_place", "layer_swap"]
ROUTES: tuple[Route, ...] = get_args(Route)
Order = Literal["kv_outer", "q_outer"]
ORDERS: tuple[Order, ...] = get_args(Order)
BUFFERS = 2  # of one layer's KV each: one is computed from while the other one fills


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one layer: query and KV heads of ``head_dim`` elements; ``block_q`` x ``block_kv`` tiles.

    128 x 64 are the tiles of the artifact's kernel.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    block_q: int = 128
    block_kv: int = 64
    item: int = 2

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.item


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one layer: over the link into the near side and out of it, and in near memory beyond weights."""

    link_in: int = 0
    link_out: int = 0
    near: int = 0

    def plus(self, other: Moved) -> Moved:
        """Return the sum."""
        return Moved(self.link_in + other.link_in, self.link_out + other.link_out, self.near + other.near)


def prefill(of: Heads, new: int, context: int, route: Route, order: Order = "kv_outer") -> Moved:
    """Return what ``new`` tokens behind ``context`` far ones move.

    In place, ``kv_outer`` reads the context once and pays near memory for running outputs; ``q_outer`` (the unchanged
    kernel) reads it for each tile of queries and each query head. Swapped, the context crosses once and is written to
    and read from near memory. Raises UsageError for new tokens below 1, or a negative context.
    """
    if new < 1 or context < 0:
        raise UsageError("a prefill of nothing", where="serving", got=(new, context), expected="1 new, context from 0")
    _known(route, ROUTES)
    out = new * of.token_bytes
    if route == "layer_swap":
        once = context * of.token_bytes
        return Moved(once, out, 2 * once + 2 * out)
    attention = Attention(
        1, new, context + new, of.q_heads, of.kv_heads, of.head_dim, of.block_q, of.block_kv, of.item, causal=True
    )
    if _known(order, ORDERS) == "kv_outer":
        return Moved(context * of.token_bytes, out, kv_outer(attention).near)
    usual = q_outer(attention)
    # of the KV it asks for, the new tokens' share is the share of the tokens: they come from near memory
    asked = usual.demand * context // (context + new)
    return Moved(asked, out, usual.near + usual.demand - asked)


def decode(of: Heads, requests: int, kv_tokens: int, route: Route) -> Moved:
    """Return what one step of ``requests`` decodes over ``kv_tokens`` tokens in all moves, the new tokens included."""
    if not 0 <= requests <= kv_tokens:
        raise UsageError("decodes", where="serving", got=(requests, kv_tokens), expected="a token of KV a request")
    out = requests * of.token_bytes
    once = kv_tokens * of.token_bytes - out
    if _known(route, ROUTES) == "in_place":
        return Moved(once, out, 0)
    return Moved(once, out, 2 * once + out)


def total(parts: Iterable[Moved]) -> Moved:
    """Return the sum of ``parts``."""
    whole = Moved()
    for part in parts:
        whole = whole.plus(part)
    return whole


def swap_tokens(near_bytes: int, of: Heads) -> int:
    """Return how many tokens of KV one iteration may touch with the swap: two buffers of one layer hold them."""
    return max(0, near_bytes) // (BUFFERS * of.token_bytes)


def _known(word: str, words: tuple[str, ...]) -> str:
    if word not in words:
        raise UsageError("unknown word", where="serving", got=word, expected=" or ".join(words))
    return word
