"""Seeded, incompressible content, and the check that it is still there.

Constants and zeros are faster on some machines (traps T3, T4), and page merging, compressed swap and compressing disks
win on repeated pages. So: 1 MiB of random words, xor-ed with another random key in every block. No two pages agree and
no matcher finds a repeat, yet the cost is one cached read and one store.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["bits", "float64"]
KINDS: tuple[Kind, ...] = ("bits", "float64")

BLOCK_BYTES = 1 << 20
_WORDS = BLOCK_BYTES // 8
MASK64 = (1 << 64) - 1
MANTISSA = (1 << 52) - 1
_ONE = 0x3FF << 52  # exponent of [1, 2): sums stay normal numbers, never denormals (trap T49)

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


def splitmix(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=8)
def base_words(seed: int, kind: Kind) -> Words:
    words = np.random.SFC64(seed).random_raw(_WORDS)
    if kind == "float64":
        words = (words & np.uint64(MANTISSA)) | np.uint64(_ONE)
    words.flags.writeable = False
    return words


@lru_cache(maxsize=1)
def word_weights() -> Words:
    words = np.random.SFC64(0x6B76).random_raw(_WORDS) | np.uint64(1)
    words.flags.writeable = False
    return words


def _key(seed: int, kind: Kind, block: int) -> np.uint64:
    key = splitmix(splitmix(seed) ^ block)
    return np.uint64(key & MANTISSA if kind == "float64" else key)


def _as_bytes(array: npt.NDArray[Any]) -> Bytes:
    if not array.flags.c_contiguous:
        raise ValueError("payload functions need a C-contiguous array")
    return array.reshape(-1).view(np.uint8)


def fill(array: npt.NDArray[Any], seed: int = 1, kind: Kind = "bits", offset: int = 0) -> None:
    """Overwrite a C-contiguous array of any dtype with the payload of ``seed`` from byte ``offset`` on.

    ``kind`` "bits" is uniform random bits; "float64" is doubles in [1, 2) with random mantissas. The same seed, kind
    and offset give the same bytes, so pieces may be filled by several threads. Raises ValueError on an unknown kind or
    an ``offset`` that is not a multiple of 8.
    """
    if kind not in KINDS:
        raise ValueError(f"payload kind {kind!r}, expected one of {KINDS}")
    if offset % 8 or offset < 0:
        raise ValueError(f"payload offset {offset}, expected a multiple of 8 bytes, at least 0")
    target = _as_bytes(array)
    base, whole = base_words(seed, kind), target.size // 8 * 8
    words = target[:whole].view(np.uint64)
    done = 0
    while done < words.size:
        block, inside = divmod(offset // 8 + done, _WORDS)
        count = min(_WORDS - inside, words.size - done)
        np.bitwise_xor(base[inside : inside + count], _key(seed, kind, block), out=words[done : done + count])
        done += count
    if whole < target.size:
        block, inside = divmod((offset + whole) // 8, _WORDS)
        last = np.array([base[inside] ^ _key(seed, kind, block)], np.uint64)
        target[whole:] = last.view(np.uint8)[: target.size - whole]


def expected(nbytes: int, seed: int = 1, kind: Kind = "bits", offset: int = 0) -> Bytes:
    """Return the payload of ``seed`` from byte ``offset`` on as a fresh uint8 array of ``nbytes``."""
    out = np.empty(nbytes, np.uint8)
    fill(out, seed, kind, offset)
    return out


def checksum(array: npt.NDArray[Any]) -> int:
    """Return a 64-bit sum of an array's bytes that depends on where each 8-byte word stands.

    Words are mixed (``x ^ x >> 31``, else two flipped top bits would cancel), multiplied by a random odd weight of
    their place in the 1 MiB block and added; block sums are mixed with the block's number. Swapped words, pages or
    blocks, dropped tails and other lengths change it. Raises ValueError for an array that is not C-contiguous.
    """
    data = _as_bytes(array)
    weights, scratch = word_weights(), np.empty(min(_WORDS, data.size // 8 + 1), np.uint64)
    total = splitmix(data.size)
    for number, start in enumerate(range(0, data.size, BLOCK_BYTES)):
        piece = data[start : start + BLOCK_BYTES]
        if piece.size % 8:
            piece = np.concatenate([piece, np.zeros(-piece.size % 8, np.uint8)])
        words = piece.view(np.uint64)
        mixed = scratch[: words.size]
        np.right_shift(words, np.uint64(31), out=mixed)
        np.bitwise_xor(mixed, words, out=mixed)
        np.multiply(mixed, weights[: words.size], out=mixed)
        total = (total + splitmix(int(mixed.sum(dtype=np.uint64)) ^ splitmix(number))) & MASK64
    return total


def poison(array: npt.NDArray[Any]) -> None:
    """Overwrite an array with 0xFF bytes: NaN in every float format, so an output not rewritten shows (T21)."""
    _as_bytes(array)[:] = 0xFF
