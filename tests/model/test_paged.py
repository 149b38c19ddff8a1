"""Block tables, ragged lengths, and attention in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.errors import UsageError
from kvbench.model.paged import attend, make_batch, merge, pages_of


def test_a_shuffled_batch_uses_distinct_blocks_once() -> None:
    batch = make_batch([1, 16, 17, 0, 40], 16, 12, seed=3)
    assert batch.pages.tolist() == [1, 1, 2, 0, 3]
    assert batch.table.shape == (5, 3)
    used = batch.blocks()
    assert len(set(used.tolist())) == len(used) == 7
    assert used.max() < 12
    assert used.tolist() != sorted(used.tolist())
    assert make_batch([1, 16, 17, 0, 40], 16, 12, order="sorted").blocks().tolist() == list(range(7))
    assert pages_of(np.array([0, 1, 8, 9]), 8).tolist() == [0, 1, 1, 2]


def test_impossible_batches() -> None:
    with pytest.raises(UsageError, match="too few blocks, got 2, expected at least 3"):
        make_batch([33], 16, 2)
    for lengths in ([], [-1], [[1]], [1 << 31]):
        with pytest.raises(UsageError, match="lengths"):
            make_batch(lengths, 16, 1 << 30)
    with pytest.raises(UsageError, match="page or order"):
        make_batch([1], 16, 2, order="random")  # type: ignore[arg-type]


def test_attention_is_what_its_formula_says() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4)), rng.standard_normal((5, 4)), rng.standard_normal((5, 4))
    out, lse = attend(q, k, v, 0.5)
    weights = np.exp(0.5 * q @ k.T)
    assert np.allclose(out, weights / weights.sum(1, keepdims=True) @ v, rtol=1e-13)
    assert np.allclose(lse, np.log(weights.sum(1)), rtol=1e-13)
    nothing, log = attend(q, k[:0], v[:0], 0.5)
    assert (nothing == 0).all()
    assert (log == -np.inf).all()


def test_parts_merge_to_the_whole() -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 4)), rng.standard_normal((9, 4)) * 30, rng.standard_normal((9, 4))
    parts = [attend(q, k[a:b], v[a:b], 1.0) for a, b in ((0, 2), (2, 2), (2, 9))]
    out, lse = merge(*(np.stack(half) for half in zip(*parts, strict=True)))
    want, log = attend(q, k, v, 1.0)
    assert np.allclose(out, want, rtol=1e-12)
    assert np.allclose(lse, log, rtol=1e-12)


def test_a_part_without_tokens_weighs_nothing_whatever_it_holds() -> None:
    outputs = np.array([[[np.nan, np.nan]], [[1.0, 2.0]]])
    out, lse = merge(outputs, np.array([[-np.inf], [0.0]]))
    assert out.tolist() == [[1.0, 2.0]]
    assert lse.tolist() == [0.0]
    out, lse = merge(outputs, np.full((2, 1), -np.inf))
    assert out.tolist() == [[0.0, 0.0]]
    assert lse.tolist() == [-np.inf]
