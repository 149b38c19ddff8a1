"""The walk through a cache: nothing held, everything held, and what the paper's counters showed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.directkv.cache import ORDERS, Lru, Order, cpu_aware_through, naive_through, raster
from kvbench.systems.directkv.predict import after_cache
from kvbench.systems.directkv.shapes import Gemm
from kvbench.systems.directkv.traffic import naive
from tests.systems.directkv.test_traffic import GEMMS

CASE = Gemm.square(10240, 128)


@settings(max_examples=40, deadline=None)
@given(GEMMS, st.sampled_from(ORDERS), st.integers(1, 9))
def test_no_cache_and_one_that_holds_all(gemm: Gemm, order: Order, workers: int) -> None:
    bare, held = (naive_through(gemm, size, order=order, workers=workers) for size in (0, 1 << 40))
    assert bare.demand == bare.link == naive(gemm).link
    assert bare.a_demand == bare.a_near == naive(gemm).a_read
    assert held.demand == bare.demand
    assert held.link == gemm.stored
    assert held.a_near == gemm.a_bytes
    assert cpu_aware_through(gemm, 0).link == cpu_aware_through(gemm, 1 << 40).link == gemm.stored


@settings(max_examples=40, deadline=None)
@given(GEMMS, st.integers(0, 5000), st.integers(1, 9))
def test_more_cache_lets_no_more_through(gemm: Gemm, capacity: int, workers: int) -> None:
    small, large = (naive_through(gemm, size, workers=workers) for size in (capacity, 16 * capacity + 8192))
    assert gemm.stored <= large.link <= small.link
    assert 0.0 <= small.hits <= large.hits < 1.0


def test_the_least_recent_goes_first() -> None:
    cache = Lru(10)
    assert [cache.touch(("b", 0, at), 4) for at in (0, 1, 0, 2, 1, 2, 0)] == [
        False, False, True, False, False, True, False
    ]  # fmt: skip
    assert not cache.touch(("b", 9, 9), 11)
    assert not cache.touch(("b", 9, 9), 11)
    assert cache.touch(("b", 0, 0), 4)


def test_every_order_visits_every_tile_once() -> None:
    gemm = Gemm(100, 70, 10, 10, 10, 10)
    places = {order: list(raster(gemm, order)) for order in ORDERS}
    assert len({frozenset(found) for found in places.values()}) == 1
    assert all(len(found) == gemm.rows * gemm.columns for found in places.values())
    assert len({tuple(found) for found in places.values()}) == len(ORDERS)


def test_the_counters_of_the_paper() -> None:
    """33.55 GB at 32.3 % hits are 22.7 GB on the link; 21.1 of 67.1 GB of a resident product leave a 50 MiB cache."""
    assert round(after_cache(naive(CASE).demand, 0.323) / 1e9, 1) == 22.7
    walked = naive_through(CASE, 50 << 20, workers=132)
    assert round((walked.link + walked.a_near) / 1e9, 1) == 21.1
    assert round(walked.all_hits, 3) == 0.685
    # blocks that run along a row of C share little of B, blocks that run down a column nearly all of it
    smaller = Gemm.square(2560, 128)
    along, down = (
        naive_through(smaller, 3 << 20, order=order, workers=33).hits for order in ("n_fastest", "m_fastest")
    )
    assert walked.hits < 0.5 < down
    assert along < down


@pytest.mark.parametrize("hits", [-0.1, 1.1])
def test_hits_are_a_share(hits: float) -> None:
    with pytest.raises(UsageError, match="share of hits"):
        after_cache(1, hits)


def test_bad_walks_are_refused() -> None:
    with pytest.raises(UsageError, match="without workers"):
        naive_through(CASE, 0, workers=0)
    with pytest.raises(UsageError, match="n_fastest"):
        list(raster(CASE, "diagonal"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a cache"):
        Lru(-1)
