"""The barrier protocol of the three groups: every interleaving at every depth, and planted faults are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.errors import UsageError
from kvbench.systems.directkv.barriers import (
    FAULTS,
    Broken,
    Protocol,
    check,
    early_release,
    far_and_near,
    three_groups,
    without,
    wrong_parity,
)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_no_interleaving_breaks_the_protocol(depth: int) -> None:
    states = [check(three_groups(depth, tiles)) for tiles in range(1, 10)]
    assert states == sorted(states)  # more tiles, more states: a checker that stops early would not see them
    assert states[0] > len(three_groups(depth, 1).groups)


@pytest.mark.parametrize(("depth", "steps", "rows", "near"), [(1, 3, 3, 2), (2, 4, 2, 2), (3, 5, 1, 2), (2, 3, 2, 1)])
def test_nor_that_of_the_kernel_with_its_two_rings(depth: int, steps: int, rows: int, near: int) -> None:
    assert check(far_and_near(depth, steps, rows, near)) > steps * rows


def test_more_buffers_allow_more_interleavings() -> None:
    assert check(three_groups(1, 9)) < check(three_groups(2, 9)) < check(three_groups(4, 9))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_step_left_out_is_found(fault: str, depth: int) -> None:
    with pytest.raises(Broken):
        check(without(three_groups(depth, 9), *FAULTS[fault]))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_buffer_given_back_early_and_a_parity_that_never_turns_are_found(depth: int) -> None:
    with pytest.raises(Broken, match="written before it is empty"):
        check(early_release(three_groups(depth, 9)))
    with pytest.raises(Broken, match="read before it is full"):
        check(wrong_parity(three_groups(depth, 9)))


def test_a_far_tile_given_back_after_its_first_row_is_found() -> None:
    fine = far_and_near(1, 2, 2, 2)
    steps = [s for s in fine.groups[1] if not (s.on == "empty far0" or (s.verb == "use" and s.on == "far0"))]
    first = next(k for k, s in enumerate(steps) if s.verb == "look")
    steps[first] = replace(steps[first], verb="use")
    steps.insert(first + 1, replace(steps[first], verb="arrive", on="empty far0"))
    with pytest.raises(Broken, match=r"far0|deadlock"):
        check(Protocol((fine.groups[0], tuple(steps), fine.groups[2]), fine.tiles))


def test_a_tile_never_stored_at_the_end_is_found() -> None:
    fine = three_groups(2, 3)
    short = Protocol((fine.groups[0], fine.groups[1], fine.groups[2][:-3]), 3)
    with pytest.raises(Broken, match="not every tile was stored once"):
        check(short)


def test_nothing_to_check_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to check"):
        three_groups(1, 0)
    with pytest.raises(UsageError, match="nothing to check"):
        far_and_near(1, 1, 0, 1)
