"""The bytes of a tiled product against a walk over every tile, and against the numbers of the paper's case study."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.directkv.shapes import METHODS, Gemm, staged_columns
from kvbench.systems.directkv.traffic import (
    Traffic,
    column_loads,
    cpu_aware,
    naive,
    resident,
    stored_panels,
    swap,
    traffic,
    unit_bounds,
)

SIZES = st.integers(1, 40)
GEMMS = st.builds(
    Gemm, SIZES, SIZES, SIZES, st.integers(1, 16), st.integers(1, 16), st.integers(1, 16), st.sampled_from([2, 4]),
    st.sampled_from([2, 4]), st.sampled_from([1, 7, 64, 512]),
)  # fmt: skip
CASE = Gemm.square(10240, 128)


def spans(size: int, tile: int) -> list[int]:
    """Return the length of every tile along one dimension."""
    return [min(tile, size - at) for at in range(0, size, tile)]


def up(nbytes: int, block: int) -> int:
    return (nbytes + block - 1) // block * block


def walked(gemm: Gemm, method: str, bounds: tuple[int, ...] | None = None) -> dict[str, int]:
    """Return the bytes counted tile by tile, as a kernel of that order would touch them."""
    found = dict.fromkeys(("demand", "link", "a_read", "b_write", "b_read", "c_read", "c_write"), 0)
    rows, columns, steps = spans(gemm.m, gemm.tile_m), spans(gemm.n, gemm.tile_n), spans(gemm.k, gemm.tile_k)
    if method == "swap":
        for wide in columns:
            for deep in steps:
                found["demand"] += deep * wide * gemm.item
                found["link"] += up(deep * wide * gemm.item, gemm.block)
                found["b_write"] += up(deep * wide * gemm.item, gemm.block)
    if method in ("resident", "swap", "naive"):
        for high in rows:
            for wide in columns:
                for deep in steps:
                    found["a_read"] += high * deep * gemm.item
                    if method == "naive":
                        found["demand"] += deep * wide * gemm.item
                        found["link"] += up(deep * wide * gemm.item, gemm.block)
                    else:
                        found["b_read"] += deep * wide * gemm.item
                found["c_write"] += high * wide * gemm.c_item
        return found
    edges = bounds or (0, len(rows) * len(columns))
    for first, end in itertools.pairwise(edges):
        mine = [(unit // len(rows), unit % len(rows)) for unit in range(first, end)]
        for column in dict.fromkeys(column for column, _ in mine):
            wide = columns[column]
            for step, deep in enumerate(steps):
                found["demand"] += deep * wide * gemm.item
                found["link"] += up(deep * wide * gemm.item, gemm.block)
                for row in [row for other, row in mine if other == column]:
                    found["a_read"] += rows[row] * deep * gemm.item
                    found["c_read"] += rows[row] * wide * gemm.c_item if step else 0
                    found["c_write"] += rows[row] * wide * gemm.c_item
    return found


def fields(moved: Traffic) -> dict[str, int]:
    return {name: getattr(moved, name) for name in walked(Gemm.square(1, 1), "naive")}


@settings(max_examples=60, deadline=None)
@given(GEMMS, st.sampled_from(METHODS))
def test_the_closed_form_is_the_walk(gemm: Gemm, method: str) -> None:
    found = traffic(gemm, method)  # type: ignore[arg-type]
    assert fields(found) == walked(gemm, method)
    assert found.unique == gemm.k * gemm.n * gemm.item
    assert found.near == found.a_read + found.b_write + found.b_read + found.c_read + found.c_write


@settings(max_examples=60, deadline=None)
@given(GEMMS, st.integers(1, 30))
def test_workers_that_share_a_column_each_read_it(gemm: Gemm, workers: int) -> None:
    bounds = unit_bounds(gemm, workers)
    found = cpu_aware(gemm, bounds=bounds)
    assert fields(found) == walked(gemm, "cpu_aware", bounds)
    assert sum(column_loads(gemm, bounds)) <= gemm.columns + workers - 1
    assert cpu_aware(gemm, bounds=unit_bounds(gemm, 1)) == cpu_aware(gemm)


@settings(max_examples=60, deadline=None)
@given(GEMMS, st.integers(1, 20))
def test_panels_are_as_long_as_they_are_stored(gemm: Gemm, columns: int) -> None:
    wide = columns * gemm.tile_n
    counted = sum(
        up(gemm.k * min(wide, gemm.n - at) * gemm.item, gemm.block) for at in range(0, gemm.n, wide)
    )  # fmt: skip
    assert stored_panels(gemm, columns) == counted == swap(gemm, columns=columns).link
    assert stored_panels(replace(gemm, block=1), columns) == gemm.b_bytes


def test_a_buffered_tile_passes_through_near_memory() -> None:
    gemm = Gemm(300, 200, 260, 128, 128, 128, block=4096)
    for bare, through in (
        (naive(gemm), naive(gemm, buffered=True)),
        (cpu_aware(gemm), cpu_aware(gemm, buffered=True)),
    ):
        assert through.b_write == bare.link == through.link
        assert through.b_read == gemm.rows * gemm.b_bytes
        assert through.near == bare.near + through.b_write + through.b_read
        assert bare.b_write == bare.b_read == 0


def test_the_case_study_of_the_paper() -> None:
    """n = 10240 fp32, tiles of 128: 33.55 GB naive, 0.42 GB CPU-aware, 33.6 GB of C writes (section 2.3)."""
    assert naive(CASE).link == 33_554_432_000
    assert cpu_aware(CASE).link == 419_430_400 == swap(CASE).link
    assert cpu_aware(CASE).c_write == 33_554_432_000
    assert cpu_aware(CASE).near_read == 33_554_432_000 + 33_135_001_600  # A, and C in all steps but the first
    assert naive(CASE).amplification == 80.0
    assert resident(CASE).near_read == 67_108_864_000  # 67.1 demanded; 21.1 after the cache: 68.6 % hits
    assert resident(CASE).link == resident(CASE).demand == 0
    # half of a 64-wide FP16 tile gives the same demand, but of a matrix that is not the paper's 400 MiB
    half = Gemm(10240, 10240, 10240, 64, 128, 128, item=2)
    assert naive(half).link == naive(CASE).link
    assert half.b_bytes == 200 << 20


def test_the_bound_of_a_persistent_kernel() -> None:
    """132 workers over 80 columns: B is read 2.64 times at most (findings, GPU code)."""
    found = cpu_aware(CASE, bounds=unit_bounds(CASE, 132))
    assert 1.0 < found.amplification <= 2.64
    assert found.c_write == cpu_aware(CASE).c_write


def test_small_m_has_nothing_to_read_twice() -> None:
    gemm = Gemm(100, 4096, 4096, 128, 128, 128)
    assert naive(gemm).amplification == 1.0


def test_sizes_beyond_32_bits_are_exact() -> None:
    gemm = Gemm(2**40 + 1, 2**33 + 3, 2**35 + 7, 128, 128, 128, block=4096)
    found = naive(gemm)
    assert found.demand == (2**33 + 1) * (2**33 + 3) * (2**35 + 7) * 4
    assert found.link % 4096 == 0
    assert found.link >= found.demand


@pytest.mark.parametrize("name", ["m", "n", "k", "tile_m", "tile_n", "tile_k", "item", "c_item", "block"])
def test_nothing_has_no_bytes(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        replace(CASE, **{name: 0})


@pytest.mark.parametrize("bounds", [(0,), (0, 5), (1, 6400), (0, 7, 3, 6400)])
def test_ranges_must_cover_every_unit(bounds: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="ranges of units"):
        column_loads(CASE, bounds)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(UsageError, match="cpu_aware_pipelined"):
        traffic(CASE, "magic")  # type: ignore[arg-type]


def test_staging_below_a_column_says_what_would_do() -> None:
    gemm = Gemm.square(1024, 256)  # four columns
    assert staged_columns(gemm, 25, double=False) == 1
    assert staged_columns(gemm, 50, double=True) == 1
    assert staged_columns(gemm, 100, double=True) == 2
    with pytest.raises(UsageError, match=r"smaller than a tile column.*stage at least 50 %"):
        staged_columns(gemm, 25, double=True)
    with pytest.raises(UsageError, match="smaller tiles"):
        staged_columns(Gemm.square(1024, 1024), 50, double=True)
    for percent in (0, 101):
        with pytest.raises(UsageError, match="share of B"):
            staged_columns(gemm, percent, double=False)
