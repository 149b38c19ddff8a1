"""Which pages a transfer moves, and how many fit a sample."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.model.geometry import LAYOUTS, geometry
from kvbench.systems.strata.transfer import CAPS, change, far_name, pages_for, plan

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
    assert pages_for(SHAPE, "layer_first", 512, 1 * mib, "dram") == 1  # one page, larger than asked
    few = pages_for(SHAPE, "layer_first", 1, 64 * mib, "file")
    assert few * SHAPE.fragments_per_page("layer_first", 1) == CAPS["file"][0]
    assert pages_for(SHAPE, "page_first", 32, 64 * mib, "file") == 1
    with pytest.raises(Unavailable, match="got '16384 fragments', expected at most 8192 a page to file"):
        pages_for(SHAPE, "page_head", 32, 64 * mib, "file")


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
