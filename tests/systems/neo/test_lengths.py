"""Lengths of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.neo.lengths import SKEWS, lengths


@given(st.sampled_from(SKEWS), st.integers(1, 64), st.integers(0, 10_000), st.integers(0, 9))
def test_they_sum_up_and_none_is_empty(skew: str, requests: int, more: int, seed: int) -> None:
    found = lengths(skew, requests, requests + more, seed)
    assert len(found) == requests
    assert sum(found) == requests + more
    assert min(found) >= 1
    assert found == lengths(skew, requests, requests + more, seed)


def test_skews_are_what_they_say() -> None:
    assert set(lengths("equal", 16, 4096)) == {256}
    assert max(lengths("one_long", 16, 16384)) / 16384 == pytest.approx(0.8, abs=0.01)
    assert 0.2 < max(lengths("tail", 16, 16384)) / 16384 < 0.5


def test_bad_lengths_are_refused() -> None:
    for bad in (("flat", 1, 1), ("equal", 0, 5), ("equal", 6, 5)):
        with pytest.raises(UsageError):
            lengths(*bad)
