"""What a request may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.replay.request import Request, blocks_of, seconds


@given(st.integers(1, 100_000), st.integers(1, 600))
def test_a_block_is_started_by_its_first_token(tokens: int, block: int) -> None:
    number = blocks_of(tokens, block)
    assert (number - 1) * block < tokens <= number * block
    assert Request(0, 0.0, tokens, 1, block_tokens=block, hash_ids=tuple(range(number))).total_tokens == tokens + 1


@pytest.mark.parametrize(
    "changed",
    [
        {"arrival": -0.1}, {"arrival": float("nan")}, {"arrival": float("inf")}, {"input_tokens": 0},
        {"output_tokens": 0}, {"input_tokens": 1 << 40}, {"hash_ids": (1,)}, {"block_tokens": 16},
        {"block_tokens": 0, "hash_ids": ()}, {"block_tokens": 16, "hash_ids": (1,)},
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(changed: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"id": 7, "arrival": 0.0, "input_tokens": 20, "output_tokens": 1, **changed}
    with pytest.raises(UsageError, match="request 7"):
        Request(**fields)


@given(st.floats(0.0, 1e6))
def test_times_lie_on_a_grid_of_a_microsecond(value: float) -> None:
    found = seconds(value)
    assert abs(found - value) <= 0.5e-6 * 1.001 + 1e-9
    assert seconds(found) == found
