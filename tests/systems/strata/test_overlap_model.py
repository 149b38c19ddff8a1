"""The forecast of a layer-wise pass: closed forms, and a simulation in small steps of time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.strata.overlap_model import LayerTimes, Rates, pipeline, shared, varied

times = st.floats(0.1, 100.0)


@given(times, times, st.integers(1, 40))
def test_equal_layers_stall_for_the_first_load_and_for_what_later_ones_take_longer(t: float, c: float, n: int) -> None:
    found = pipeline([t] * n, [c] * n)
    assert found.stall == pytest.approx(t + (n - 1) * max(0.0, t - c))
    assert found.total == pytest.approx(found.stall + n * c)
    assert found.first == t
    assert 0.0 < found.share < 1.0


@given(st.lists(st.tuples(times, times), min_size=1, max_size=12))
def test_unequal_layers_take_the_longest_path_through_loads_and_computations(pairs: list[tuple[float, float]]) -> None:
    loads, computes = [list(side) for side in zip(*pairs, strict=True)]
    longest = max(sum(loads[: k + 1]) + sum(computes[k:]) for k in range(len(pairs)))
    assert pipeline(loads, computes).total == pytest.approx(longest)


@given(times, times, st.integers(1, 40))
def test_without_contention_the_shared_bus_is_the_plain_recurrence(t: float, c: float, n: int) -> None:
    plain = pipeline([t] * n, [c] * n)
    found = shared(Rates(t, c, t, c), n)
    assert (found.total, found.stall, found.first) == pytest.approx((plain.total, plain.stall, plain.first))


def stepped(rates: Rates, layers: int, step: float) -> tuple[float, float]:
    """Return total and stall by moving time on in small steps."""
    now = stall = loaded = computed = 0.0
    while computed < layers - 1e-9:
        loading, computing = loaded < layers, computed < int(loaded + 1e-9)
        if loading:
            loaded += step / (rates.load_beside if computing else rates.load)
        if computing:
            computed += step / (rates.compute_beside if loading else rates.compute)
        else:
            stall += step
        now += step
    return now, stall


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 3.0), st.floats(0.5, 3.0), st.floats(1.0, 2.0), st.floats(1.0, 2.0), st.integers(1, 6))
def test_a_shared_bus_is_what_small_steps_of_time_give(t: float, c: float, kt: float, kc: float, n: int) -> None:
    rates = Rates(t, c, t * kt, c * kc)
    total, stall = stepped(rates, n, 1e-3)
    found = shared(rates, n)
    assert found.total == pytest.approx(total, abs=5e-3 * (2 * n + 1))
    assert found.stall == pytest.approx(stall, abs=5e-3 * (2 * n + 1))


@given(times, times, times, times, st.integers(1, 12))
def test_layers_that_take_equally_long_are_the_plain_shared_bus(
    t: float, c: float, tb: float, cb: float, n: int
) -> None:
    plain, found = shared(Rates(t, c, tb, cb), n), varied(LayerTimes((t,), (c,) * 3, (tb, tb), (cb,)), n)
    assert (found.total, found.stall, found.first) == pytest.approx((plain.total, plain.stall, plain.first))


def test_unequal_layers_stall_where_equal_ones_of_the_same_mean_would_not() -> None:
    alone = LayerTimes((1.0, 3.0), (2.0,), (1.0, 3.0), (2.0,))
    assert alone.rates == Rates(2.0, 2.0, 2.0, 2.0)
    assert varied(alone, 4, starts=1).stall == pytest.approx(pipeline([1, 3, 1, 3], [2] * 4).stall)
    both = (pipeline([1, 3, 1, 3], [2] * 4).stall + pipeline([3, 1, 3, 1], [2] * 4).stall) / 2
    assert varied(alone, 4, starts=2).stall == pytest.approx(both)
    uneven = LayerTimes((1.0, 1.0, 4.0), (2.0,), (1.0, 1.0, 4.0), (2.0,))
    assert varied(uneven, 32).stall > shared(uneven.rates, 32).stall


def test_contention_can_only_add() -> None:
    rates = Rates(2.0, 3.0, 3.0, 4.0)
    assert (rates.load_slowdown, rates.compute_slowdown) == pytest.approx((1.5, 4 / 3))
    assert shared(rates, 8).total > shared(rates.undisturbed(), 8).total


@pytest.mark.parametrize(
    "call",
    [
        lambda: pipeline([], []), lambda: pipeline([1.0], [1.0, 2.0]), lambda: pipeline([1.0], [-1.0]),
        lambda: Rates(0.0, 1.0, 1.0, 1.0), lambda: Rates(1.0, 1.0, 1.0, float("nan")),
        lambda: shared(Rates(1.0, 1.0, 1.0, 1.0), 0), lambda: varied(LayerTimes((1.0,), (1.0,), (1.0,), (1.0,)), 0),
        lambda: varied(LayerTimes((1.0,), (), (1.0,), (1.0,)), 3),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(call: object) -> None:
    with pytest.raises(UsageError):
        call()  # type: ignore[operator]
