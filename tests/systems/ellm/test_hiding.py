"""What hides under what: the recurrences, the fit of a pass over its length, and where they cross."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.ellm import hiding


def test_recurrences() -> None:
    found = hiding.offload_time([1.0] * 4, [0.5] * 4)
    assert (found.both, found.hidden) == (4.5, pytest.approx(0.75))
    found = hiding.offload_time([1.0] * 4, [2.0] * 4)
    assert (found.both, found.hidden) == (9.0, pytest.approx(3 / 8))
    found = hiding.fetch_time([1.0] * 4, [2.0] * 4)
    assert (found.both, found.hidden) == (9.0, pytest.approx(3 / 8))
    for bad in (([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([-1.0], [1.0])):
        with pytest.raises(UsageError, match="one time a layer"):
            hiding.fetch_time(*bad)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=12),
)
def test_both_directions_are_bounded(layers: list[tuple[float, float]]) -> None:
    compute, copies = [c for c, _ in layers], [m for _, m in layers]
    for found in (hiding.offload_time(compute, copies), hiding.fetch_time(compute, copies)):
        assert max(found.compute, found.copy) - 1e-9 <= found.both <= found.compute + found.copy + 1e-9
        assert 0.0 <= found.hidden <= 1.0
    mirrored = hiding.fetch_time(compute[::-1], copies[::-1])  # a fetch is an offload run backwards
    assert hiding.offload_time(compute, copies).both == pytest.approx(mirrored.both)


@given(st.floats(1e-7, 1e-3), st.floats(1e-11, 1e-6))
def test_the_fit_gives_back_what_made_the_curve(a: float, b: float) -> None:
    tokens = [128, 256, 1024, 4096]
    found = hiding.fit_compute(tokens, [a * n + b * n * n for n in tokens])
    assert found == (pytest.approx(a, rel=1e-5, abs=1e-11), pytest.approx(b, rel=1e-5, abs=1e-14))


def test_crossover() -> None:
    assert hiding.crossover(1.0, 0.5, 0.5) == 0.0
    assert hiding.crossover(1.0, 0.5, 2.0) == 2.0
    assert hiding.crossover(1.0, 0.0, 2.0) is None
    with pytest.raises(UsageError, match="two prompt lengths"):
        hiding.fit_compute([5, 5], [1.0, 1.0])
    assert hiding.fit_compute([1, 2], [1.0, 1.0])[1] == 0.0
    assert hiding.fit_compute([1, 2], [1.0, 8.0])[0] == 0.0
