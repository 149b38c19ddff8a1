"""The bytes of attention against a walk over every pair of tiles, and against the derived table of the facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.directkv import attention_traffic as at
from kvbench.systems.directkv.attention_traffic import Attention

LLAMA = Attention(1, 4096, 4096, 32, 8, 128, 128, 64)


@st.composite
def shapes(draw: st.DrawFn) -> Attention:
    keys, queries, causal = draw(st.integers(1, 60)), draw(st.integers(1, 40)), draw(st.booleans())
    assume(not causal or queries <= keys)
    kv_heads = draw(st.integers(1, 3))
    return Attention(
        draw(st.integers(1, 3)), queries, keys, kv_heads * draw(st.integers(1, 4)), kv_heads, draw(st.integers(1, 4)),
        draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([2, 4])), causal,
    )  # fmt: skip


def pairs(shape: Attention) -> list[tuple[int, int, bool]]:
    """Return (rows, tokens, first) of every pair of tiles of one head that has to be computed."""
    found = []
    for q0 in range(0, shape.queries, shape.block_q):
        q1 = min(q0 + shape.block_q, shape.queries)
        last = shape.keys - shape.queries + q1 - 1  # position of the last query of the tile
        for k0 in range(0, shape.keys, shape.block_kv):
            if not shape.causal or k0 <= last:
                found.append((q1 - q0, min(shape.block_kv, shape.keys - k0), k0 == 0))
    return found


@settings(max_examples=120, deadline=None)
@given(shapes(), st.booleans())
def test_q_outer_is_the_walk(shape: Attention, packed: bool) -> None:
    tokens = sum(tokens for _, tokens, _ in pairs(shape))
    heads = shape.batch * (shape.kv_heads if packed else shape.q_heads)
    found = at.q_outer(shape, packed=packed)
    assert found.demand == found.link == heads * tokens * 2 * shape.head_dim * shape.item
    assert found.unique == shape.batch * shape.kv_heads * shape.keys * 2 * shape.head_dim * shape.item
    assert found.near == shape.q_bytes + shape.o_bytes
    through = at.q_outer(shape, packed=packed, buffered=True)
    assert through.near == found.near + 2 * found.demand


@settings(max_examples=120, deadline=None)
@given(shapes(), st.booleans(), st.sampled_from([8, 16]))
def test_kv_outer_is_the_walk(shape: Attention, initialised: bool, stat_bytes: int) -> None:
    heads = shape.batch * shape.q_heads
    written = sum(rows for rows, _, _ in pairs(shape)) * heads
    read = sum(rows for rows, _, first in pairs(shape) if initialised or not first) * heads
    found = at.kv_outer(shape, stat_bytes=stat_bytes, initialised=initialised)
    assert found.link == found.demand == found.unique
    assert found.q_read == written * shape.head_dim * shape.item
    assert found.o_write == written * shape.head_dim * shape.o_item
    assert found.o_read == read * shape.head_dim * shape.o_item
    assert found.stats == (written + read) * (stat_bytes // 2)
    assert found.kv_write == found.kv_read == 0


@given(st.integers(0, 30), st.integers(1, 20), st.integers(0, 40), st.integers(0, 50))
def test_the_closed_sum(count: int, divisor: int, slope: int, start: int) -> None:
    assert at.floor_sum(count, divisor, slope, start) == sum((slope * i + start) // divisor for i in range(count))


def test_the_table_of_prefill() -> None:
    """Llama-3.1-8B, d 128, tiles of 128 queries and 64 tokens (directkv facts, 2.b.2)."""
    assert LLAMA.kv_bytes == 16_777_216
    assert at.q_outer(LLAMA).link == 2_147_483_648
    assert at.q_outer(LLAMA).amplification == 128.0
    assert round(at.kv_outer(LLAMA).near / 1e9, 1) == 10.8
    long = replace(LLAMA, queries=32768, keys=32768)
    assert round(long.kv_bytes / 1e6) == 134
    assert round(at.q_outer(long).link / 1e9) == 137
    assert at.q_outer(long).amplification == 1024.0
    assert round(at.kv_outer(long).near / 1e9) == 691


def test_a_small_chunk_pays_for_its_heads_only() -> None:
    chunk = replace(LLAMA, queries=64)
    assert at.q_outer(chunk).amplification == 4.0
    assert at.q_outer(chunk, packed=True).amplification == 1.0


def test_decode_moves_what_a_swap_moves() -> None:
    """16 sequences of 4k, 32 layers: 8.6 GB a step; the gain is the near buffer, its write and its read."""
    step = replace(LLAMA, batch=16, queries=1)
    in_place, swapped = at.decode(step), at.staged(step, packed=True)
    assert round(32 * in_place.link / 1e9, 1) == 8.6
    assert in_place.link == swapped.link == in_place.unique
    assert swapped.near - in_place.near == 2 * in_place.unique
    assert at.decode(step, packed=False).amplification == 4.0
    assert at.resident(step, packed=True).link == 0
    assert at.resident(step, packed=True).near == swapped.near - swapped.kv_write


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"queries": 0}, "queries"), ({"keys": 0}, "keys"), ({"batch": 0}, "batch"), ({"block_kv": 0}, "block_kv"),
        ({"q_heads": 30}, "do not divide"), ({"causal": True, "keys": 100}, "more causal queries"),
    ],
)  # fmt: skip
def test_bad_shapes_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(LLAMA, **change)


def test_decode_has_one_query() -> None:
    with pytest.raises(UsageError, match="one query"):
        at.decode(LLAMA)
