"""What serving from far KV moves: worked out by hand, and the relations between the two routes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.directkv.serving import Heads, Moved, decode, prefill, swap_tokens, total

LLAMA = Heads(32, 8, 128)
TOKEN = 4096  # bytes of a token in one layer


def test_a_decode_reads_the_context_once_and_writes_its_token() -> None:
    assert decode(LLAMA, 2, 1002, "in_place") == Moved(1000 * TOKEN, 2 * TOKEN, 0)
    assert decode(LLAMA, 2, 1002, "layer_swap") == Moved(1000 * TOKEN, 2 * TOKEN, 2 * 1000 * TOKEN + 2 * TOKEN)
    assert decode(LLAMA, 0, 0, "in_place") == Moved()


def test_a_first_prefill_reads_nothing_over_the_link() -> None:
    for route in ("in_place", "layer_swap"):
        found = prefill(LLAMA, 256, 0, route)
        assert (found.link_in, found.link_out) == (0, 256 * TOKEN)


def test_the_unchanged_order_reads_the_context_for_each_tile_and_head() -> None:
    # one tile of 64 queries: each of the 4 query heads of a KV head reads the context
    once, usual = (prefill(LLAMA, 64, 4096, "in_place", order) for order in ("kv_outer", "q_outer"))
    assert once.link_in == 4096 * TOKEN
    assert usual.link_in == 4 * 4096 * TOKEN
    assert usual.near < once.near
    # 256 queries are two tiles
    assert prefill(LLAMA, 256, 8192, "in_place", "q_outer").link_in == pytest.approx(8 * 8192 * TOKEN, rel=0.02)


@given(st.integers(1, 2000), st.integers(0, 20_000))
def test_both_routes_cross_the_link_with_the_same_bytes(new: int, context: int) -> None:
    place, swap = (prefill(LLAMA, new, context, route) for route in ("in_place", "layer_swap"))
    assert (place.link_in, place.link_out) == (swap.link_in, swap.link_out) == (context * TOKEN, new * TOKEN)
    assert prefill(LLAMA, new, context, "in_place", "q_outer").link_in >= place.link_in


def test_sums_and_the_double_buffer() -> None:
    assert total([Moved(1, 2, 3), Moved(10, 20, 30)]) == Moved(11, 22, 33)
    assert total([]) == Moved()
    assert swap_tokens(10 * TOKEN, LLAMA) == 5
    assert swap_tokens(-1, LLAMA) == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="prefill of nothing"):
        prefill(LLAMA, 0, 5, "in_place")
    with pytest.raises(UsageError, match="decodes"):
        decode(LLAMA, 3, 2, "in_place")
    with pytest.raises(UsageError, match="in_place or layer_swap"):
        decode(LLAMA, 1, 2, "detour")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="kv_outer or q_outer"):
        prefill(LLAMA, 1, 2, "in_place", "detour")  # type: ignore[arg-type]
