"""Bytes at an address as numpy sees them: the independent side of every check."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
CHUNK = 8 << 20


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Return a uint8 array of shape (nbytes,) over live memory at ``address``; the caller keeps that memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def chunks(nbytes: int) -> Iterator[slice]:
    """Yield slices covering ``nbytes``, 8 MiB each: a check then needs no second buffer of the size checked."""
    for start in range(0, nbytes, CHUNK):
        yield slice(start, min(start + CHUNK, nbytes))


def words_sum(data: Bytes) -> int:
    """Return the sum modulo 2^64 of the 64-bit words of ``data``, whose length is a multiple of 8."""
    return int(data.view(np.uint64).sum(dtype=np.uint64))


def first_difference(a: Bytes, b: Bytes) -> int | None:
    """Return the first index at which two arrays of the same length differ, or None."""
    for piece in chunks(len(a)):
        if not np.array_equal(a[piece], b[piece]):
            return int(piece.start) + int(np.flatnonzero(a[piece] != b[piece])[0])
    return None
