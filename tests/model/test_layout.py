"""Address maps and fragments against a byte-by-byte copy through numpy's own axes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import Unavailable, UsageError
from kvbench.model.geometry import LAYOUTS, KVGeometry, geometry
from kvbench.model.layout import MOST_FRAGMENTS, Moves, Pool, moves, page_fragments

TINY = KVGeometry("tiny", 3, 2, 4, 2, 1, "made up")
LATENT = KVGeometry("latent", 3, 1, 6, 1, 2, "made up")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# How numpy sees each layout: shape after the plane, and where (page, layer, head, token) stand in it.
AXES = {"layer_first": "lpth", "page_first": "ptlh", "page_first_direct": "plth", "page_head": "phtl"}


def view(data: Bytes, pool: Pool) -> Bytes:
    """Return ``data`` as [plane, page, layer, head, token, byte], whatever the layout."""
    shape = pool.geometry
    extent = {"p": pool.pages, "l": shape.layers, "h": shape.kv_heads, "t": pool.page_tokens}
    axes = AXES[pool.layout]
    grid = data.reshape(shape.planes, *(extent[a] for a in axes), shape.head_bytes)
    return grid.transpose(0, *(1 + axes.index(a) for a in "plht"), 5)


def moved(source: Bytes, target: Bytes, work: Moves) -> None:
    for a, b, n in zip(work.src_offset.tolist(), work.dst_offset.tolist(), work.bytes.tolist(), strict=True):
        target[b : b + n] = source[a : a + n]


@pytest.mark.parametrize("shape", [TINY, LATENT], ids=lambda s: s.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_offset_of_every_row_is_numpys(shape: KVGeometry, layout: str) -> None:
    pool = Pool(shape, layout, 3, 4)
    places = view(np.arange(pool.nbytes).astype(np.int64), pool)
    for plane, page, layer, head, token in np.ndindex(*places.shape[:-1]):
        assert pool.offset(page, layer, plane, head, token) == places[plane, page, layer, head, token, 0]


@given(data=st.data(), shape=st.sampled_from([TINY, LATENT]), page=st.integers(1, 4), wide=st.booleans())
def test_every_layout_pair_moves_the_pages_and_nothing_else(
    data: st.DataObject, shape: KVGeometry, page: int, wide: bool
) -> None:
    a = Pool(shape, data.draw(st.sampled_from(LAYOUTS)), page, data.draw(st.integers(1, 5)))
    b = Pool(shape, data.draw(st.sampled_from(LAYOUTS)), page, data.draw(st.integers(1, 5)))
    to = data.draw(st.lists(st.integers(-1, b.pages - 1), max_size=6, unique_by=lambda v: v if v >= 0 else object()))
    of = data.draw(st.lists(st.integers(-1, a.pages - 1), min_size=len(to), max_size=len(to)))
    dtype = np.int64 if wide else np.int32
    work = moves(a, b, np.array(of, dtype), np.array(to, dtype))
    rng = np.random.default_rng(len(to))
    source, target = (rng.integers(0, 256, pool.nbytes, np.uint8) for pool in (a, b))
    wanted = target.copy()
    kept = [(s, d) for s, d in zip(of, to, strict=True) if s >= 0 and d >= 0]
    for s, d in kept:
        view(wanted, b)[:, d] = view(source, a)[:, s]
    moved(source, target, work)
    assert np.array_equal(target, wanted)
    assert (work.pages, work.skipped) == (len(kept), len(to) - len(kept))
    assert work.total == len(kept) * shape.page_bytes(page)
    if len(work) > 1:  # merged as far as both sides allow
        ends = work.src_offset + work.bytes, work.dst_offset + work.bytes
        assert not ((ends[0][:-1] == work.src_offset[1:]) & (ends[1][:-1] == work.dst_offset[1:])).any()


def test_neighbouring_pages_merge_where_both_layouts_keep_them_together() -> None:
    a, b = Pool(TINY, "layer_first", 2, 6), Pool(TINY, "layer_first", 2, 8)
    together, apart = moves(a, b, [1, 2, 3], [4, 5, 6]), moves(a, b, [1, 2, 3], [4, 6, 5])
    page_run = 2 * TINY.item_bytes()
    assert together.fragment == 3 * page_run
    assert len(together) == TINY.planes * TINY.layers
    assert len(apart) == 3 * len(together)
    whole = Pool(TINY, "page_head", 2, 6)
    assert len(moves(whole, whole, range(6), range(6))) == 1


def test_layers_can_be_moved_one_at_a_time() -> None:
    a, b = Pool(TINY, "page_head", 2, 5), Pool(TINY, "layer_first", 2, 5)
    source = np.random.default_rng(1).integers(0, 256, a.nbytes, np.uint8)
    whole, parts = np.zeros(b.nbytes, np.uint8), np.zeros(b.nbytes, np.uint8)
    moved(source, whole, moves(a, b, [4, 0], [1, 2]))
    for layer in range(TINY.layers):
        moved(source, parts, moves(a, b, [4, 0], [1, 2], layers=range(layer, layer + 1)))
        done = view(parts, b)[:, :, : layer + 1]
        assert np.array_equal(done, view(whole, b)[:, :, : layer + 1])
        assert not view(parts, b)[:, :, layer + 1 :].any()


def test_the_way_back_brings_everything_home() -> None:
    a, b = Pool(TINY, "layer_first", 2, 5), Pool(TINY, "page_first", 2, 5)
    work = moves(a, b, [3, 1], [0, 4])
    source, target = np.random.default_rng(2).integers(1, 256, a.nbytes, np.uint8), np.zeros(b.nbytes, np.uint8)
    moved(source, target, work)
    home = np.zeros_like(source)
    moved(target, home, work.reversed())
    assert np.array_equal(view(home, a)[:, [3, 1]], view(source, a)[:, [3, 1]])
    assert not view(home, a)[:, [0, 2, 4]].any()
    with pytest.raises(UsageError, match="named twice"):
        moves(a, b, [3, 3], [0, 4]).reversed()


def test_offsets_hold_pools_beyond_32_bits() -> None:
    shape = geometry("Llama-2-7B")
    far, near = Pool(shape, "page_first", 16, 1024), Pool(shape, "layer_first", 16, 1024)
    assert far.nbytes == 8 << 30
    work = moves(far, near, [1023], [1023])
    assert int(work.src_offset.max()) == far.offset(1023, 31, 1, 0, 15)
    assert int(work.dst_offset.max()) == near.offset(1023, 31, 1, 0, 15) > 2**32


def test_nothing_to_move_is_no_fragment() -> None:
    pool = Pool(TINY, "page_first", 2, 5)
    for index in ([], [-1, -5]):
        work = moves(pool, pool, index, index)
        assert (len(work), work.total, work.fragment, work.skipped) == (0, 0, None, len(index))


@pytest.mark.parametrize(
    ("of", "to", "words"),
    [
        ([0, 5], [1, 2], r"src_pages\[1\]: page index out of range, got 5, expected 0 to 4"),
        ([0, 1], [7, 2], r"dst_pages\[0\]: page index out of range, got 7"),
        ([0, 1, 2], [3, 1, 3], r"dst_pages\[0\] and dst_pages\[2\]: duplicated destination page, got 3"),
        ([0, 1], [1], "differ in number"),
        ([0.5], [1], "not page indices"),
        ([[0]], [[1]], "not page indices"),
        ([True], [1], "not page indices"),
    ],
)
def test_bad_indices_are_named(of: object, to: object, words: str) -> None:
    pool = Pool(TINY, "page_first", 2, 5)
    with pytest.raises(UsageError, match=words):
        moves(pool, pool, of, to)  # type: ignore[arg-type]


def test_pools_that_do_not_fit_each_other_are_refused() -> None:
    pool = Pool(TINY, "page_first", 2, 5)
    with pytest.raises(UsageError, match="different page size"):
        moves(pool, Pool(TINY, "page_first", 4, 5), [0], [0])
    with pytest.raises(UsageError, match="different geometry"):
        moves(pool, Pool(LATENT, "page_first", 2, 5), [0], [0])
    with pytest.raises(UsageError, match="no such layers"):
        moves(pool, pool, [0], [0], layers=range(2, 4))


def test_a_pool_is_whole_pages() -> None:
    assert Pool.of_tokens(TINY, "page_head", 16, 64).pages == 4
    for tokens in (65, 8, 0):
        with pytest.raises(UsageError, match="does not divide the pool"):
            Pool.of_tokens(TINY, "page_head", 16, tokens)
    with pytest.raises(UsageError, match="use 80 tokens"):
        Pool.of_tokens(TINY, "page_head", 16, 65)


def test_buffers_and_pools_out_of_bounds_are_refused() -> None:
    pool = Pool(TINY, "page_first", 2, 5)
    pool.require(pool.nbytes, "near")
    with pytest.raises(UsageError, match="near: the buffer is smaller than the geometry"):
        pool.require(pool.nbytes - 1, "near")
    with pytest.raises(UsageError, match="head index outside the pool, got 2"):
        pool.offset(0, 0, 0, 2, 0)
    with pytest.raises(UsageError, match="at least one page"):
        Pool(TINY, "page_first", 2, 0)
    with pytest.raises(UsageError, match="too large"):
        Pool(TINY, "page_first", 1 << 30, 1 << 40)


@pytest.mark.parametrize("shape", [TINY, LATENT, geometry("Llama-3.1-8B")], ids=lambda s: s.name)
@pytest.mark.parametrize("page", [1, 4])
def test_the_fragments_of_a_page_follow_from_the_geometry(shape: KVGeometry, page: int) -> None:
    for one in LAYOUTS:
        for other in LAYOUTS:
            a, b = Pool(shape, one, page, 3), Pool(shape, other, page, 3)
            assert page_fragments(a, b) == len(moves(a, b, [1], [1])), (one, other)
            part = range(1, 3)
            assert page_fragments(a, b, part) == len(moves(a, b, [1], [1], layers=part)), (one, other)


def test_too_many_fragments_are_refused_before_any_is_made() -> None:
    shape = geometry("Llama-3.1-8B")
    a, b = Pool(shape, "layer_first", 1 << 16, 3), Pool(shape, "page_head", 1 << 16, 3)
    c, d = (Pool(shape, layout, 1, MOST_FRAGMENTS) for layout in ("layer_first", "page_first"))
    many = np.broadcast_to(np.int64(-1), MOST_FRAGMENTS // page_fragments(c, d) + 1)
    tracemalloc.start()
    try:
        with pytest.raises(Unavailable, match=f"got '33554432 fragments', expected at most {MOST_FRAGMENTS}"):
            moves(a, b, [1], [1])
        with pytest.raises(Unavailable, match="too many fragments"):
            moves(c, d, many, many)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
