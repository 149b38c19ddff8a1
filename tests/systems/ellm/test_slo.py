"""The logical size follows the objectives, within its bounds, by the law that was asked for."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.ellm.slo import Observation, Params, State, controller, reversals

MISS, FINE = 2.0, 0.5
BASE = Params(1024, 1.0, 1.0)


def run(params: Params, start: int, seen: list[tuple[float | None, float | None]]) -> list[int]:
    state, sizes = State(start), [start]
    for ttft, tpot in seen:
        state = controller(state, Observation(ttft, tpot), params)
        sizes.append(state.logical)
    return sizes


PARAMS = st.builds(
    Params,
    physical=st.just(1000),
    ttft=st.just(1.0),
    tpot=st.just(1.0),
    window=st.integers(3, 7),
    threshold=st.integers(1, 3),
    alpha=st.sampled_from([1.25, 1.5, 2.0, 4.0]),
    law=st.sampled_from(["multiply", "add"]),
    minimum=st.integers(1, 1000),
    step=st.integers(1, 300),
    both=st.sampled_from(["hold", "shrink", "grow"]),
    cooldown=st.integers(0, 4),
    forget=st.booleans(),
)
TIME = st.one_of(st.none(), st.sampled_from([FINE, 1.0, MISS]))
SEEN = st.lists(st.tuples(TIME, TIME), max_size=40)


@given(PARAMS, st.integers(0, 2000), SEEN)
def test_the_size_keeps_its_bounds(params: Params, start: int, seen: list[tuple[float | None, float | None]]) -> None:
    assert all(params.minimum <= size <= params.physical for size in run(params, start, seen)[1:])


@given(PARAMS, st.integers(1, 1000), SEEN)
def test_only_violations_move_it_and_each_its_way(
    params: Params, start: int, seen: list[tuple[float | None, float | None]]
) -> None:
    start = max(start, params.minimum)
    calm = [(None if a == MISS else a, None if b == MISS else b) for a, b in seen]
    assert set(run(params, start, calm)) == {start}
    late = run(params, start, [(a, None) for a, _ in seen])
    assert late == sorted(late)
    slow = run(params, start, [(None, b) for _, b in seen])
    assert slow == sorted(slow, reverse=True)


@given(PARAMS, st.integers(1, 1000), SEEN)
def test_it_is_a_pure_function(params: Params, start: int, seen: list[tuple[float | None, float | None]]) -> None:
    assert run(params, start, seen) == run(params, start, seen)


@given(PARAMS, SEEN)
def test_no_change_during_a_pause(params: Params, seen: list[tuple[float | None, float | None]]) -> None:
    sizes = run(params, max(500, params.minimum), seen)
    changed = [i for i, (a, b) in enumerate(pairwise(sizes)) if a != b]
    assert all(b - a > params.cooldown for a, b in pairwise(changed))


def test_three_of_five() -> None:
    two = [(MISS, None), (MISS, None), (FINE, None), (FINE, None), (FINE, None)]
    assert set(run(BASE, 256, two * 4)) == {256}
    spread = [(MISS, None), (FINE, None), (MISS, None), (FINE, None), (MISS, None)]
    assert run(BASE, 256, spread) == [256, 256, 256, 256, 256, 512]
    first_version = dataclasses.replace(BASE, threshold=5)
    assert set(run(first_version, 256, spread * 2)) == {256}
    assert run(first_version, 256, [(MISS, None)] * 5)[-1] == 512


def test_laws_and_bounds() -> None:
    late, slow = [(MISS, None)] * 12, [(None, MISS)] * 12
    assert run(BASE, 256, late) == [256] * 3 + [512] * 3 + [1024] * 7
    assert run(dataclasses.replace(BASE, minimum=100), 256, slow)[::3] == [256, 128, 100, 100, 100]
    add = dataclasses.replace(BASE, law="add", step=100, alpha=1.5)
    assert run(add, 256, late)[::3] == [256, 406, 556, 706, 856]
    assert run(add, 256, slow)[::3] == [256, 106, 1, 1, 1]
    keeping = dataclasses.replace(BASE, forget=False)
    assert run(keeping, 128, late)[:6] == [128, 128, 128, 256, 512, 1024]
    assert run(dataclasses.replace(keeping, cooldown=2), 128, late)[3:9] == [256, 256, 256, 512, 512, 512]


@pytest.mark.parametrize(("both", "size"), [("hold", 256), ("shrink", 128), ("grow", 512)])
def test_both_objectives_violated(both: Any, size: int) -> None:
    assert run(dataclasses.replace(BASE, both=both), 256, [(MISS, MISS)] * 3)[-1] == size


@pytest.mark.parametrize(
    "wrong",
    [
        {"physical": 0}, {"ttft": 0.0}, {"tpot": float("nan")}, {"window": 0}, {"threshold": 6}, {"threshold": 0},
        {"alpha": 1.0}, {"alpha": float("inf")}, {"law": "guess"}, {"minimum": 0}, {"minimum": 2048}, {"law": "add"},
        {"both": "neither"}, {"cooldown": -1},
    ],
)  # fmt: skip
def test_what_makes_no_controller(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="makes no controller"):
        dataclasses.replace(BASE, **wrong)


def test_reversals() -> None:
    assert reversals([1, 2, 2, 4, 2, 2, 1, 8]) == 2
    assert reversals([5]) == 0
