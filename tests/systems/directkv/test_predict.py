"""Bounds, break-evens and winners: the table of the facts (n = 10240, link 50 or 375 GB/s, HBM 4.8 TB/s)."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.directkv import predict
from kvbench.systems.directkv.predict import Rates, seconds
from kvbench.systems.directkv.shapes import Gemm
from kvbench.systems.directkv.traffic import cpu_aware, naive, swap

FP32, BF16 = Gemm.square(10240, 128), Gemm.square(10240, 128, item=2)
PCIE, C2C, HBM = 50e9, 375e9, 4.8e12


@pytest.mark.parametrize(
    ("gemm", "flops", "compute", "naive_pcie", "naive_c2c", "link", "near"),
    [
        (FP32, 41e12, 52.4, 671, 89, 8.4, 20.9),
        (FP32, 300e12, 7.2, 671, 89, 8.4, 20.9),
        (BF16, 700e12, 3.1, 336, 45, 4.2, 17.4),
        # C is read and written half as often at 256, and A read half as often
        (Gemm.square(10240, 256, item=2), 700e12, 3.1, 168, 22, 4.2, 8.7),
    ],
)
def test_the_table_of_times(
    gemm: Gemm, flops: float, compute: float, naive_pcie: float, naive_c2c: float, link: float, near: float
) -> None:
    found = seconds(gemm.flops, cpu_aware(gemm), Rates(flops, PCIE, HBM))
    assert round(found.compute * 1e3, 1) == compute
    assert round(found.link * 1e3, 1) == link
    assert round(found.near * 1e3, 1) in (near, round(near - 0.1, 1))
    assert round(seconds(gemm.flops, naive(gemm), Rates(flops, PCIE, HBM)).link * 1e3) == naive_pcie
    assert round(seconds(gemm.flops, naive(gemm), Rates(flops, C2C, HBM)).link * 1e3) == naive_c2c


def test_simt_hides_everything_and_tensor_cores_do_not() -> None:
    simt, tensor = Rates(41e12, PCIE, HBM), Rates(300e12, PCIE, HBM)
    moved = {"swap": swap(FP32), "naive": naive(FP32), "cpu_aware": cpu_aware(FP32)}
    slow = predict.order_of(FP32, simt, moved)  # type: ignore[arg-type]
    assert slow["cpu_aware"] == slow["swap"] == FP32.flops / 41e12  # as fast as B near
    fast = predict.order_of(FP32, tensor, moved)  # type: ignore[arg-type]
    assert fast["swap"] < fast["cpu_aware"] < fast["naive"]
    assert predict.winner({str(method): value for method, value in fast.items()}) == "swap"
    assert seconds(FP32.flops, cpu_aware(FP32), tensor).bound == "near"
    assert seconds(FP32.flops, naive(FP32), tensor).bound == "link"


def test_the_crossover_with_swap_is_where_near_traffic_shows() -> None:
    edge = predict.pays_against_swap(FP32, HBM)
    assert 41e12 < edge < 300e12
    for flops, bound in ((0.99 * edge, "compute"), (1.01 * edge, "near")):
        assert seconds(FP32.flops, cpu_aware(FP32), Rates(flops, 1e15, HBM)).bound == bound


def test_b_stationary_pays_from_about_two() -> None:
    """For square tiles B_hbm / B_link > ~2, always true on PCIe and C2C."""
    found = predict.pays_over_naive(FP32)
    assert found is not None
    assert round(found, 2) == 2.0
    assert predict.pays_over_naive(Gemm(128, 4096, 4096, 128, 128, 128)) is None
    assert predict.pays_over_naive(Gemm(4096, 4096, 128, 128, 128, 128)) == 0.0


def test_the_n_from_which_a_swap_hides() -> None:
    assert [round(predict.hidden_from(f, PCIE, b), -2) for f, b in ((41e12, 4), (300e12, 4), (700e12, 2))] == [
        1600, 12000, 14000
    ]  # fmt: skip


def stepped(loads: list[int], products: list[int], depth: int) -> int:
    """Return the ticks of the same pipeline, one tick at a time."""
    tick, free, waiting, ready = 0, depth, deque(loads), 0
    left, todo, busy = 0, deque(products), 0
    loading = multiplying = False
    while todo or multiplying:
        if not loading and waiting and free:
            free, loading, left = free - 1, True, waiting.popleft()
        if not multiplying and todo and ready:
            ready, multiplying, busy = ready - 1, True, todo.popleft()
        tick += 1
        left, busy = left - loading, busy - multiplying
        if loading and not left:
            loading, ready = False, ready + 1
        if multiplying and not busy:
            multiplying, free = False, free + 1
    return tick


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 5))
def test_the_recurrence_is_the_machine(work: list[tuple[int, int]], depth: int) -> None:
    loads, products = [load for load, _ in work], [product for _, product in work]
    found = predict.pipeline([float(x) for x in loads], [float(x) for x in products], depth)
    assert found == stepped(loads, products, depth)
    assert predict.pipeline([float(x) for x in loads], [float(x) for x in products], 1) == sum(loads) + sum(products)
    assert predict.pipeline([], [float(x) for x in products], depth) == sum(products)
    late = predict.pipeline([float(x) for x in loads], [float(x) for x in products], depth, 7.0)
    if depth == 1 or min(products) >= 7:
        assert late == found
    assert max(found, 7.0 * (len(loads) - 1) * (depth > 1)) <= late <= found + 7.0 * len(loads)
    assert predict.pipeline([], [float(x) for x in products], depth, 7.0) == sum(products)


def test_tiny_loads_take_as_long_as_handing_them_over() -> None:
    tiny, large = [1.0] * 100, [10.0] * 100
    assert predict.pipeline(tiny, tiny, 2, 4.0) == 100 * 4.0
    assert predict.pipeline(tiny, large, 2, 4.0) == predict.pipeline(tiny, large, 2)


def test_winner_and_regret() -> None:
    measured = {"swap": 2.0, "naive": 3.0, "cpu_aware": 1.0}
    assert predict.winner(measured) == "cpu_aware"
    assert predict.regret("swap", measured) == 2.0
    assert predict.regret("cpu_aware", measured) == 1.0
    with pytest.raises(UsageError, match="no method"):
        predict.winner({})


@pytest.mark.parametrize("rates", [(0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, float("inf")), (float("nan"), 1, 1)])
def test_rates_are_above_nothing(rates: tuple[float, float, float]) -> None:
    with pytest.raises(UsageError, match="not a rate"):
        Rates(*rates)


def test_a_pipeline_needs_a_product_for_each_load() -> None:
    for loads, products, depth in (([1.0], [1.0, 2.0], 1), ([1.0], [1.0], 0)):
        with pytest.raises(UsageError, match="not a pipeline"):
            predict.pipeline(loads, products, depth)
    with pytest.raises(UsageError, match="not a pipeline"):
        predict.pipeline([1.0], [1.0], 2, -1.0)
