"""The index set as rows, granules and boxes: the same bytes whichever way it is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.model.geometry import LAYOUTS, KVGeometry
from kvbench.model.layout import Moves, Pool, moves
from kvbench.transport.paged_set import Box, Fragments, box, check_moves, granule, granules, part, width_of
from kvbench.transport.paged_sm import numbers
from kvbench.transport.paged_staged import far_runs, stage_offsets

shapes = st.builds(
    KVGeometry, st.just("any"), st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(1, 2),
    st.sampled_from([1, 2, 4]), st.just(""),
)  # fmt: skip
layouts = st.sampled_from(LAYOUTS)


def arrived(made: Box, src: np.ndarray, nbytes: int) -> np.ndarray:
    """What the kernel's arithmetic makes of a box."""
    out = np.zeros(nbytes, np.uint8)
    for frm, to in zip(made.src_pages, made.dst_pages, strict=True):
        for plane, *at in itertools.product(range(made.planes), *map(range, made.shape)):
            here = made.src_first + plane * made.src_plane + int(np.dot((frm, *at), made.src_steps))
            there = made.dst_first + plane * made.dst_plane + int(np.dot((to, *at), made.dst_steps))
            assert not out[there : there + made.row].any()  # nothing is written twice
            out[there : there + made.row] = src[here : here + made.row]
    return out


@settings(max_examples=120, deadline=None)
@given(shapes, layouts, layouts, st.integers(1, 4), st.integers(1, 6), st.data())
def test_boxes_and_granules_are_the_moves_they_came_from(
    shape: KVGeometry, a: str, b: str, tokens: int, pages: int, data: st.DataObject
) -> None:
    source, target = Pool(shape, a, tokens, pages), Pool(shape, b, tokens, pages + 2)
    frm = data.draw(st.permutations(range(source.pages)))
    to = data.draw(st.permutations(range(target.pages)))[:pages]
    first = data.draw(st.integers(0, shape.layers - 1))
    chosen = range(first, data.draw(st.integers(first + 1, shape.layers)))
    asked = moves(source, target, frm, to, layers=chosen)
    src = np.random.default_rng(1).integers(1, 256, source.nbytes, np.uint8)
    want = np.zeros(target.nbytes, np.uint8)
    for start, end, size in zip(asked.src_offset, asked.dst_offset, asked.bytes, strict=True):
        want[end : end + size] = src[start : start + size]
    made = box(asked, source, target)
    assert np.array_equal(arrived(made, src, target.nbytes), want)
    assert made.nbytes == asked.total
    width = made.width()
    assert all(n >= 0 for n in numbers(made, width))
    piece = granule(asked)
    sources, targets = granules(asked, piece)
    got = np.zeros_like(want)
    got[: len(got) // piece * piece].reshape(-1, piece)[targets] = src[: len(src) // piece * piece].reshape(-1, piece)[
        sources
    ]
    assert np.array_equal(got, want)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_stage_holds_the_far_runs_in_order(sizes: list[int], shuffle: object) -> None:
    gaps = np.random.default_rng(len(sizes)).integers(0, 2, len(sizes)) * 3
    size = np.array(sizes, np.int64)
    far = np.cumsum(size + gaps) - size
    order = np.random.default_rng(sum(sizes)).permutation(len(size))
    far, size = far[order], size[order]
    runs, places, lengths = far_runs(far, size)
    stage = stage_offsets(far, size)
    pool = np.arange(int(far.max() + size.max()) + 9)
    staged = np.zeros(int(size.sum()), np.int64)
    for start, place, length in zip(runs, places, lengths, strict=True):
        staged[place : place + length] = pool[start : start + length]
    for start, place, length in zip(far, stage, size, strict=True):
        assert np.array_equal(staged[place : place + length], pool[start : start + length])
    assert int(lengths.sum()) == int(size.sum())
    assert not np.any(runs[1:] == runs[:-1] + lengths[:-1])  # no run follows another


def test_fragments_are_addresses_beyond_32_bits() -> None:
    far = Moves(np.array([0, 5 << 30]), np.array([7 << 30, 0]), np.array([3 << 30, 64]), 2, 0)
    fragments = Fragments(1 << 40, 1 << 41, far)
    assert fragments.targets().tolist() == [(1 << 40) + (7 << 30), 1 << 40]
    assert fragments.sources().tolist() == [1 << 41, (1 << 41) + (5 << 30)]
    assert (fragments.count, fragments.nbytes, fragments.fragment.tolist()) == (2, (3 << 30) + 64, [3 << 30, 64])
    assert part(far, 1, 9).bytes.tolist() == [64]
    check_moves(far, 6 << 30, 10 << 30, "here")
    with pytest.raises(UsageError, match=r"here dst_offset\[0\]: fragment outside the pool"):
        check_moves(far, 6 << 30, (10 << 30) - 1, "here")


def test_moves_between_places_of_another_kind_are_no_pages() -> None:
    shape = KVGeometry("two heads", 2, 2, 8, 2, 2, "")
    pool = Pool(shape, "page_head", 2, 2)
    asked = moves(pool, pool, [0], [1])
    swapped = Moves(asked.src_offset, asked.dst_offset[::-1].copy(), asked.bytes, 1, 0)
    assert len(asked) == 2  # K and V: swapped they have the right sum and count
    with pytest.raises(UsageError, match="not whole pages"):
        box(swapped, pool, pool)


def test_widths() -> None:
    assert [width_of(n, 32) for n in (16, 24, 20, 6, 5, 0)] == [16, 8, 4, 2, 1, 16]
