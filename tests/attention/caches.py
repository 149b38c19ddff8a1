"""Caches with known content and the float64 answer to a decode step over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbench.attention.cpu import DecodeAttention
from kvbench.attention.oracles import tolerance
from kvbench.attention.shapes import Array, Shape
from kvbench.model.paged import Batch, attend, make_batch


@dataclass
class Cache:
    """Plain keys and values of normal numbers, NaN in every slot without a token, and a table in random order."""

    shape: Shape
    lengths: Sequence[int]
    seed: int = 0
    spread: float = 1.0
    batch: Batch = field(init=False)
    k: Array = field(init=False)
    v: Array = field(init=False)
    q: Array = field(init=False)

    def __post_init__(self) -> None:
        rng, shape = np.random.default_rng(self.seed), self.shape
        pages = sum(-(-n // shape.page_tokens) for n in self.lengths)
        self.batch = make_batch(self.lengths, shape.page_tokens, pages + 3, seed=self.seed)
        plain = shape.plain_shape(pages + 3)
        k, v = (rng.standard_normal(plain) * scale for scale in (self.spread, 1.0))
        used = np.zeros((pages + 3, shape.page_tokens), bool)
        for row, n in zip(self.batch.table, self.lengths, strict=True):
            for i in range(-(-n // shape.page_tokens)):
                used[row[i], : n - i * shape.page_tokens] = True
        for half in (k, v):
            half[~np.broadcast_to(used[:, None, :, None], plain)] = np.nan
        self.k, self.v = shape.array(k), shape.array(v)
        self.q = shape.array(rng.standard_normal((len(self.lengths), shape.q_heads, shape.head_dim)))

    def tokens(self, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of one sequence and KV head as float64 [tokens, head_dim]."""
        n, rows = self.lengths[b], self.batch.table[b]
        k, v = (self.shape.floats(half)[rows, h].reshape(-1, self.shape.head_dim)[:n] for half in (self.k, self.v))
        return k.astype(np.float64), v.astype(np.float64)

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs [batch, q_heads, head_dim] and log-sum-exps [batch, q_heads]."""
        shape = self.shape
        out, lse = np.zeros(self.q.shape), np.zeros(self.q.shape[:2])
        for b, h in np.ndindex(len(self.lengths), shape.kv_heads):
            heads = slice(h * shape.group, (h + 1) * shape.group)
            out[b, heads], lse[b, heads] = attend(
                shape.floats(self.q)[b, heads], *self.tokens(b, h), 1.0 / math.sqrt(shape.head_dim)
            )
        return out, lse

    def decode(self, attention: DecodeAttention) -> tuple[np.ndarray, np.ndarray]:
        return attention.decode(self.q, *self.shape.pack(self.k, self.v), self.batch.table, self.batch.lengths)

    def check(self, attention: DecodeAttention, most: float | None = None) -> None:
        """Assert that the step is right to the tolerance of its dtype, or to ``most``."""
        out, lse = self.decode(attention)
        want, log = self.answer()
        tokens = np.asarray(self.lengths) > 0
        assert np.isfinite(out).all()
        assert (out[~tokens] == 0.0).all()
        assert (lse[~tokens] == -np.inf).all()
        if tokens.any():
            top = float(np.abs(log[tokens]).max())
            error = np.linalg.norm((out - want)[tokens], axis=2) / np.linalg.norm(want[tokens], axis=2)
            assert error.max() <= (tolerance(self.shape.dtype, top, self.shape.head_dim) if most is None else most)
            assert np.abs(lse[tokens] - log[tokens]).max() <= 2e-6 + 2.0**-20 * top
