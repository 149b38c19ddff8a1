"""Both hide inequalities, their slack, the capacity rule, and how decodes are cut into batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.neo import hide
from kvbench.systems.neo.schedule import Batch

TIMES = {"pr0": 1.0, "po0": 3.0, "pr1": 0.25, "po1": 0.75, "ga0": 1.0, "ca0": 1.5, "ca1": 5.0}


def test_slack_and_who_stalls() -> None:
    found = hide.hiding(TIMES)
    assert (found.long.near, found.long.cpu, found.long.slack) == (4.0, 5.0, -1.0)
    assert (found.short.near, found.short.cpu, found.short.slack) == (2.0, 1.5, 0.5)
    assert (found.long.stalls, found.short.stalls) == ("near", "cpu")
    assert not found.holds
    assert found.layer_seconds == 7.0


def test_equal_sides_hold() -> None:
    found = hide.hiding({**TIMES, "ca1": 4.0, "ca0": 2.0})
    assert found.holds
    assert found.long.slack == found.short.slack == 0.0


def test_launch_counts_for_the_cpu_where_it_has_work() -> None:
    found = hide.hiding({**TIMES, "ca0": 0.0}, launch=0.5)
    assert found.long.cpu == 5.5
    assert found.short.cpu == 0.0


def test_near_attention_of_batch_1_stands_beside_the_long_linear() -> None:
    assert hide.hiding({**TIMES, "ga1": 2.0}).long.near == 6.0


def test_capacity_rule_is_neos_example() -> None:
    """8 GB/s, T_l0 5 ms, 8B (8 KV heads of 128, 16 bits): about 9.8 thousand tokens."""
    assert hide.hidden_tokens(8e9, 5e-3, 2 * 8 * 128 * 2) == pytest.approx(9766, abs=1)
    with pytest.raises(UsageError, match="capacity rule"):
        hide.hidden_tokens(8e9, 0.0, 4096)


def costs(per_request: float, first: float = 8.0, second: float = 2.0) -> hide.Cost:
    def cost(kind: str, batch: Batch) -> float:
        if kind == "ca":
            return per_request * batch.cpu
        if kind == "ga":
            return 0.0
        return (first if batch.attends_near else second) / 2

    return cost


def test_decodes_are_cut_so_that_both_slacks_are_alike() -> None:
    few = hide.divide(Batch(64, 4, 10), costs(1.0))
    assert few == 2  # 8 beside a linear part of 8, 2 beside one of 2


def test_the_first_decode_goes_to_batch_1() -> None:
    assert hide.divide(Batch(64, 4, 1), costs(1.0)) == 0
    assert hide.divide(Batch(64, 4, 0), costs(1.0)) == 0


@given(st.integers(0, 40), st.floats(0.01, 3.0), st.floats(0.5, 9.0), st.floats(0.5, 9.0))
def test_no_single_move_would_make_the_longer_half_shorter(cpu: int, unit: float, first: float, second: float) -> None:
    batch, cost = Batch(1, 1, cpu), costs(unit, first, second)
    few = hide.divide(batch, cost)
    assert 0 <= few <= cpu
    assert not cpu or few < cpu

    def layer(n: int) -> float:
        return max(first, unit * (cpu - n)) + max(second, unit * n)

    others = [n for n in (few - 1, few + 1) if 0 <= n < cpu]
    assert all(layer(few) <= layer(n) + unit + 1e-9 for n in others)


def test_plan_knows_its_modes() -> None:
    assert hide.plan("asymmetric", 2, Batch(64, 4, 10), costs(1.0)).batches[0].cpu == 2
    assert hide.plan("simple", 2, Batch(64, 4, 10), costs(1.0)).mode == "simple"
    with pytest.raises(UsageError, match="gpu_only, simple, symmetric, asymmetric"):
        hide.plan("both", 2, Batch(cpu=1), costs(1.0))
