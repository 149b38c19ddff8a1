"""Offsets and ranges of a request as arrays of 64-bit integers, checked, and as an index of granules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError
from kvbench.memory.vmm.protocol import Chunk, Span, check_whole

Ints = npt.NDArray[np.int64]


def check_chunk(chunk: object) -> None:
    """Raise UsageError for anything but a chunk."""
    if not isinstance(chunk, Chunk):
        raise UsageError("not a chunk", where="vmm", got=type(chunk).__name__, expected="what create() returned")


def whole_span(span: object, what: str) -> Span:
    """Return (offset, nbytes) as Python's integers. Raises UsageError for anything else."""
    if not isinstance(span, (Sequence, np.ndarray)) or len(span) != 2:
        raise UsageError("not a range", where=f"vmm {what}", got=repr(span), expected="(offset, nbytes)")
    for value in span:
        check_whole(value, "a range", f"vmm {what}")
    return int(span[0]), int(span[1])


def integers(values: Any, what: str, columns: int) -> Ints:
    """Return int64 [n] offsets or [n, 2] ranges. Raises UsageError for floats, other shapes and what does not fit."""
    try:
        table = np.asarray(values)
    except ValueError:  # rows of different lengths
        table = np.empty((0, 0))
    fits = table.dtype.kind == "i" or (table.dtype.kind == "u" and int(table.max(initial=0)) <= sys.maxsize)
    if not fits or table.shape[1:] != ((2,) if columns == 2 else ()):
        odd = next((v for v in values if columns == 1 and not isinstance(v, (int, np.integer))), values)
        raise UsageError(
            "not ranges" if columns == 2 else "not offsets", where=f"vmm {what}", got=repr(odd),
            expected="(offset, nbytes) each" if columns == 2 else "integers of 64 bits",
        )  # fmt: skip
    return table.astype(np.int64, copy=False)


def flat_index(low: Ints, count: Ints) -> Any:
    """Return an index of every granule of the ranges: a slice for one range, else an array."""
    first, end = int(low[0]), int(low[-1] + count[-1])
    if len(low) == 1 or (low[1:] == (low + count)[:-1]).all():
        return slice(first, end)  # ranges that follow each other are one; an index costs ten times a slice
    if int(count.max()) == 1:
        return low
    before = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(low - before, count)


def overlapping(low: Ints, count: Ints) -> bool:
    """Return whether two of the ranges have a granule in common."""
    if len(low) == 1:
        return False
    order = np.argsort(low, kind="stable")
    return bool((low[order][1:] < (low + count)[order][:-1]).any())
