"""Bubble filling: when it is done, and what a prefill behind a load takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.strata.bubble import Bubble, filled, not_before, overlapped

SECONDS = st.floats(0.0, 10.0)


def test_it_is_filled_where_there_is_one_and_somebody_decodes() -> None:
    bubble = Bubble(ratio=100.0)
    assert bubble.fills(load=1001, new=10, decoding=1)
    assert not bubble.fills(load=1000, new=10, decoding=1), "the ratio itself is not above it"
    assert not bubble.fills(load=1001, new=10, decoding=0)
    assert not Bubble(ratio=100.0, enabled=False).fills(load=1001, new=10, decoding=1)
    with pytest.raises(UsageError, match="ratio"):
        Bubble(ratio=0.0)


@given(SECONDS, SECONDS, st.integers(1, 80))
def test_a_layer_wise_pass_followed_layer_by_layer(load: float, compute: float, layers: int) -> None:
    loaded = done = 0.0
    for _ in range(layers):
        loaded += load / layers
        done = max(done, loaded) + compute / layers
    assert overlapped(load, compute, layers) == pytest.approx(done, abs=1e-9)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 80))
def test_a_filled_bubble_followed_layer_by_layer(load: float, compute: float, decode: float, layers: int) -> None:
    loaded, done = 0.0, decode
    for _ in range(layers):
        loaded += load / layers
        done = max(done, loaded) + compute / layers
    assert filled(load, compute, decode, layers) == pytest.approx(done, abs=1e-9)
    apart = overlapped(load, compute, layers) + decode
    assert filled(load, compute, decode, layers) <= apart + 1e-9


def test_the_last_layer_is_left() -> None:
    assert not_before(7.0, compute=8.0, layers=4) == 9.0
