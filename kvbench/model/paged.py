"""Block tables and ragged lengths of a paged KV cache, and decode attention over it in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError

Table = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]
Order = Literal["shuffled", "sorted"]
MOST_TOKENS = (1 << 31) - 1


def pages_of(lengths: npt.NDArray[Any], page_tokens: int) -> npt.NDArray[np.int64]:
    """Return how many pages each sequence of ``lengths`` tokens fills, shape (batch,)."""
    return -(-lengths.astype(np.int64) // page_tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """``table`` int32 (batch, most pages), block numbers in token order; ``lengths`` int32 (batch,), tokens each.

    Entries beyond a sequence's pages are 0 and mean nothing.
    """

    table: Table
    lengths: Lengths
    page_tokens: int

    @property
    def pages(self) -> npt.NDArray[np.int64]:
        """Pages of each sequence, shape (batch,)."""
        return pages_of(self.lengths, self.page_tokens)

    def blocks(self) -> npt.NDArray[np.int64]:
        """Return the blocks in the order a batch visits them: sequence after sequence, shape (pages of all,)."""
        rows = [row[:count] for row, count in zip(self.table, self.pages.tolist(), strict=True)]
        return np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, np.int64)


def make_batch(
    lengths: npt.ArrayLike, page_tokens: int, blocks: int, order: Order = "shuffled", seed: int = 0
) -> Batch:
    """Return a batch whose pages are distinct blocks of 0..blocks-1: a random permutation, or in their order.

    Raises UsageError for a negative length, a page without tokens, another order, or fewer blocks than pages.
    """
    counts = np.asarray(lengths, np.int64)
    if counts.ndim != 1 or len(counts) == 0 or int(counts.min()) < 0 or int(counts.max()) > MOST_TOKENS:
        raise UsageError("lengths", where="model.paged", got=counts.shape, expected="at least one, each 0 to 2^31 - 1")
    if page_tokens < 1 or order not in ("shuffled", "sorted"):
        raise UsageError("page or order", where="model.paged", got=(page_tokens, order), expected="shuffled or sorted")
    pages = pages_of(counts, page_tokens)
    total = int(pages.sum())
    if total > blocks:
        raise UsageError("too few blocks", where="model.paged", got=blocks, expected=f"at least {total}")
    numbers = np.random.default_rng(seed).permutation(blocks)[:total] if order == "shuffled" else np.arange(total)
    table = np.zeros((len(counts), max(1, int(pages.max()))), np.int32)
    ends = np.cumsum(pages)
    for row, first, end in zip(table, (ends - pages).tolist(), ends.tolist(), strict=True):
        row[: end - first] = numbers[first:end]
    return Batch(table, counts.astype(np.int32), page_tokens)


def check_array(array: object, where: str, expected: str) -> None:
    """Raise UsageError unless ``array`` is a numpy array; a list is not one, its type is for the caller to choose."""
    if not isinstance(array, np.ndarray):
        raise UsageError("not a numpy array", where=where, got=type(array).__name__, expected=expected)


def check_batch(table: npt.NDArray[Any], lengths: npt.NDArray[Any], page_tokens: int, blocks: int) -> None:
    """Raise UsageError unless ``table`` and ``lengths`` describe sequences in a cache of ``blocks``.

    One error each: types, shapes, contiguity, negative lengths, lengths beyond the table, entries out of range.
    """
    check_array(table, "attention.table", "int32 [batch, pages]")
    check_array(lengths, "attention.lengths", "int32 [batch]")
    if table.dtype != np.int32 or table.ndim != 2 or not table.flags.c_contiguous or table.shape[1] < 1:
        raise UsageError(
            "block table", where="attention.table", got=f"{table.dtype} {table.shape}",
            expected="int32 [batch, pages], contiguous",
        )  # fmt: skip
    if lengths.dtype != np.int32 or lengths.shape != table.shape[:1] or not lengths.flags.c_contiguous:
        raise UsageError(
            "lengths", where="attention.lengths", got=f"{lengths.dtype} {lengths.shape}",
            expected=f"int32 [{len(table)}], contiguous",
        )  # fmt: skip
    if len(lengths) == 0:
        raise UsageError("an empty batch", where="attention.lengths", got=0, expected="at least one sequence")
    least, most = int(lengths.argmin()), int(lengths.argmax())
    if lengths[least] < 0:
        raise UsageError(
            "negative length", where=f"attention.lengths[{least}]", got=int(lengths[least]), expected="0 or more"
        )
    room = table.shape[1] * page_tokens
    if lengths[most] > room:
        raise UsageError(
            "length beyond the table", where=f"attention.lengths[{most}]", got=int(lengths[most]),
            expected=f"at most {table.shape[1]} pages of {page_tokens} = {room} tokens",
        )  # fmt: skip
    used = np.arange(table.shape[1]) < pages_of(lengths, page_tokens)[:, None]
    bad = used & ((table < 0) | (table >= blocks))
    if bad.any():
        b, i = np.argwhere(bad)[0].tolist()
        raise UsageError(
            "block out of range", where=f"attention.table[{b}, {i}]", got=int(table[b, i]), expected=f"0..{blocks - 1}"
        )


def attend(q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, scale: float) -> tuple[Doubles, Doubles]:
    """Return (output, log-sum-exp) of query heads over one KV head's tokens, all in float64.

    ``q`` (heads, dim), ``k`` and ``v`` (tokens, dim); output (heads, dim) and the natural logarithm of the sum of
    exponentials, (heads,). No token: zeros and -inf.
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (q, k, v))
    if len(keys) == 0:
        return np.zeros(queries.shape), np.full(len(queries), -np.inf)
    scores = queries @ keys.T * scale
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ values, (top + np.log(total))[:, 0]


def merge(outputs: npt.ArrayLike, lses: npt.ArrayLike) -> tuple[Doubles, Doubles]:
    """Return attention over the union of disjoint parts from that over each (Flash-Decoding), in float64.

    ``outputs`` (parts, ..., dim), ``lses`` (parts, ...), -inf for a part without tokens, which then weighs nothing; if
    all are, the result is zeros and -inf. A log-sum-exp of 0 is a value like any other.
    """
    parts, logs = np.asarray(outputs, np.float64), np.asarray(lses, np.float64)
    top = logs.max(axis=0)
    weights = np.exp(logs - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=0)
    empty = total == 0.0
    shares = weights / np.where(empty, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, np.where(np.isfinite(top), top, 0.0) + np.log(total))
    # a part without weight may hold anything
    held = np.where(shares[..., None] > 0.0, parts, 0.0)
    return (shares[..., None] * held).sum(axis=0), lse
