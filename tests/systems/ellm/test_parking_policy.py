"""Who leaves to the CPU buffer and who returns first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.ellm.parking import BufferRules, Parking, leaving


def test_victims() -> None:
    assert leaving([10, 50, 5], 100, "newest") == frozenset()
    assert leaving([10, 50, 5], 60, "newest") == {2}
    assert leaving([10, 50, 5], 20, "newest") == {1, 2}
    assert leaving([10, 50, 5], 20, "longest") == {1}
    assert leaving([5, 5], 5, "longest") == {1}
    assert leaving([10, 50], 0, "longest") == {0, 1}
    assert leaving([], 0, "newest") == frozenset()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 200), st.sampled_from(["newest", "longest"]))
def test_those_that_stay_fit_and_none_leaves_in_vain(prompts: list[int], room: int, victims: str) -> None:
    left = leaving(prompts, room, victims)  # type: ignore[arg-type]
    stay = sum(size for index, size in enumerate(prompts) if index not in left)
    assert stay <= room
    if left:
        last = min(left) if victims == "newest" else min(left, key=lambda index: (prompts[index], index))
        assert stay + prompts[last] > room


def test_a_smaller_logical_size_refuses_and_throws_nothing_out() -> None:
    parking = Parking(BufferRules(100), 60)
    parking.park(1, 50)
    assert parking.room(10)
    assert not parking.room(11)
    parking.resize(20)
    assert (1 in parking, parking.stored, parking.room(0)) == (True, 50, False)
    with pytest.raises(UsageError, match="cannot be parked"):
        parking.park(2, 1)
    parking.resize(100)
    parking.park(2, 50)
    with pytest.raises(UsageError, match="cannot be parked"):
        parking.park(2, 0)
    parking.check()
    assert (parking.take(1), parking.take(2), len(parking), parking.stored, parking.total) == (50, 50, 0, 0, 2)
    with pytest.raises(UsageError, match="not parked"):
        parking.take(1)


def test_order_of_return_and_no_overtaking() -> None:
    for order, wanted in (("oldest", [1, 2]), ("shortest", [3, 1])):
        parking = Parking(BufferRules(1000, order=order))  # type: ignore[arg-type]
        for key, tokens in ((1, 20), (2, 30), (3, 10)):
            parking.park(key, tokens)
        room = 50

        def fits(tokens: int) -> bool:
            nonlocal room
            room -= tokens
            return room >= 0

        found = parking.returning(fits)
        assert found[:2] == wanted
        assert len(parking) == 3  # only named, not taken
        assert parking.returning(lambda _: False) == []


@pytest.mark.parametrize(
    "wrong", [{"physical": 0}, {"layers_in_flight": 0}, {"victims": "oldest"}, {"order": "newest"}]
)
def test_bad_rules(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="CPU elastic buffer"):
        BufferRules(**{"physical": 10, **wrong})  # type: ignore[arg-type]
    for size in (-1, 11):
        with pytest.raises(UsageError, match="not a size"):
            Parking(BufferRules(10)).resize(size)
