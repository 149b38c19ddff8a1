"""Which pages a transfer moves, and how many fit a sample."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.model.geometry import LAYOUTS, geometry
from kvbench.systems.strata.transfer import (
    CAPS,
    USUAL_BYTES,
    change,
    far_name,
    pages_for,
    pass_bytes,
    plan,
    setup_seconds,
)

SHAPE = geometry("Llama-3.1-8B")


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_two_pages_merge_so_a_fragment_is_what_the_page_size_says(layout: str, order: str) -> None:
    chosen = plan(SHAPE, layout, 4, 6, order, 1)
    for direction in ("fetch", "evict"):
        moves = chosen.moves(direction)
        assert moves.fragment == SHAPE.fragment_bytes(layout, 4)
        assert (moves.pages, moves.total) == (6, 6 * SHAPE.page_bytes(4))
    assert bool((np.diff(chosen.far_pages) > 1).all()) == (order == "sorted")
    assert sorted(chosen.far_pages.tolist()) == [0, 2, 4, 6, 8, 10]


def test_both_directions_move_the_same_fragments_in_the_order_of_the_far_side() -> None:
    chosen = plan(SHAPE, "page_head", 2, 3, "shuffled", 2)
    fetch, evict = chosen.moves("fetch"), chosen.moves("evict")
    assert np.array_equal(fetch.src_offset, evict.dst_offset)
    assert np.array_equal(fetch.dst_offset, evict.src_offset)
    inside = fetch.src_offset.reshape(3, 2, -1)  # page, plane
    assert bool((np.diff(inside, axis=2) > 0).all())


def test_a_seed_gives_the_same_order_again() -> None:
    first, again, other = (plan(SHAPE, "page_first", 1, 50, "shuffled", seed).far_pages for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_sample_holds_the_bytes_asked_or_as_many_fragments_as_it_may() -> None:
    mib = 1 << 20
    assert pages_for(SHAPE, "layer_first", 32, 64 * mib, "dram") == 16
    assert pages_for(SHAPE, "layer_first", 512, 16 * mib, "dram") == 1  # one page of 64 MiB, four times as asked
    few = pages_for(SHAPE, "layer_first", 1, 64 * mib, "file")
    assert few * SHAPE.fragments_per_page("layer_first", 1) == CAPS["file"][0]
    assert pages_for(SHAPE, "page_first", 32, 64 * mib, "file") == 1
    with pytest.raises(Unavailable, match="got '16384 fragments', expected at most 8192 a page to file"):
        pages_for(SHAPE, "page_head", 32, 64 * mib, "file")


def test_a_page_far_larger_than_the_bytes_asked_is_refused() -> None:
    mib = 1 << 20
    with pytest.raises(Unavailable, match="got 'a page of 64 MiB', expected at most 4 x the 15 MiB asked"):
        pages_for(SHAPE, "layer_first", 512, 15 * mib, "dram")
    with pytest.raises(Unavailable, match="one page is larger than a pass"):
        pages_for(geometry("DeepSeek-V3"), "layer_first", 1 << 16, 64 << 10, "file")


def test_what_a_pass_moves_is_known_before_it_is_planned() -> None:
    mib = 1 << 20
    assert pass_bytes(SHAPE.name, "layer_first", [1, 32, 512], 16 * mib, "file") == 64 * mib
    assert pass_bytes(SHAPE.name, "layer_first", [1], 64 * mib, "file") == mib  # 512 fragments of 2 KiB
    for layout, pages, nbytes in (("page_head", [32], 64 * mib), ("layer_first", [1, 512], mib)):
        assert pass_bytes(SHAPE.name, layout, pages, nbytes, "file") == 0


def test_large_pools_are_part_of_the_estimate() -> None:
    assert setup_seconds(USUAL_BYTES) == 0.0
    assert 1.0 < setup_seconds(1 << 30) < setup_seconds(1 << 32)


def test_a_change_moves_every_page_once_between_both_layouts() -> None:
    source, target, moves = change(SHAPE, ("page_first", "page_first_direct"), 4, 3, 1)
    assert (source.pages, target.pages, moves.pages) == (6, 3, 3)
    assert moves.fragment == SHAPE.item_bytes()
    assert moves.total == target.nbytes


@pytest.mark.parametrize(("pair", "far"), [("dram:file", "file"), ("dram@0:dram@1", "dram"), ("hbm:pinned", "pinned")])
def test_the_far_tier_of_a_pair(pair: str, far: str) -> None:
    assert far_name(pair) == far


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown order, got 'random'"):
        plan(SHAPE, "layer_first", 1, 2, "random", 1)
    with pytest.raises(UsageError, match="no cap for this tier, got 'tape'"):
        pages_for(SHAPE, "layer_first", 1, 1 << 20, "tape")
