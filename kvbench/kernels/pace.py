"""Waiting to the microsecond without the interpreter's lock: until a moment, a bell, or a word another thread writes.

A block of words at ``block``, one cache line each: the clock (address of clock_gettime, clock id), a timespec for each
of the two threads that share it, the bell and the abort word.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbench.kernels import libc
from kvbench.kernels.intrinsics import (
    atomic_add,
    atomic_load,
    atomic_store,
    barrier,
    call_clock,
    call_yield,
    pause,
    word_load,
)
from kvbench.kernels.jit import kernel, part

CLOCK, CLOCK_ID, YIELD, FIRST_SPEC, SECOND_SPEC, BELL, ABORT = 0, 8, 16, 64, 128, 192, 256  # byte offsets
WORDS = 48
PATIENCE = 100_000_000  # ns of spinning; then yield in between. Yielding gives a whole slice to whoever else is there
FOREVER = (1 << 63) - 1

Words = np.ndarray[Any, np.dtype[np.int64]]


def make_block() -> Words:
    """Return a fresh block, 64-byte aligned, its bell at 0."""
    raw = np.zeros(WORDS + 8, np.int64)
    skip = -raw.ctypes.data % 64 // 8
    block = raw[skip : skip + WORDS]
    block[CLOCK // 8], block[CLOCK_ID // 8] = libc.address_of("clock_gettime"), libc.CLOCK
    block[YIELD // 8] = libc.address_of("sched_yield")
    return block


@part
def now_ns(block: int, spec: int) -> int:
    """Return nanoseconds of the monotonic clock; ``spec``: offset of the calling thread's timespec."""
    call_clock(word_load(block + CLOCK), word_load(block + CLOCK_ID), block + spec)
    barrier()
    now: int = word_load(block + spec) * 1_000_000_000 + word_load(block + spec + 8)
    return now


@kernel("int64(int64, int64, int64)")
def hold(block: int, deadline: int, seen: int) -> int:
    """Return the time once it is ``deadline``, the bell is no longer ``seen`` (negative: whatever it is), or aborted.

    For the first thread.
    """
    begin = now = now_ns(block, FIRST_SPEC)
    while now < deadline and (seen < 0 or atomic_load(block + BELL) == seen) and atomic_load(block + ABORT) == 0:
        pause()
        if now - begin > PATIENCE:
            call_yield(word_load(block + YIELD))
        now = now_ns(block, FIRST_SPEC)
    return now


@kernel("int64(int64, int64, int64)")
def await_word(block: int, word: int, most: int) -> int:
    """Return the time once the word at address ``word`` is not 0; -1 when aborted or after ``most`` ns.

    For the second thread.
    """
    begin = now = now_ns(block, SECOND_SPEC)
    while atomic_load(word) == 0:
        if atomic_load(block + ABORT) != 0 or now - begin > most:
            return -1
        pause()
        if now - begin > PATIENCE:
            call_yield(word_load(block + YIELD))
        now = now_ns(block, SECOND_SPEC)
    return now_ns(block, SECOND_SPEC)


@kernel("int64(int64)")
def ring(block: int) -> int:
    """Ring the bell; return the time just before. For the second thread."""
    now = now_ns(block, SECOND_SPEC)
    atomic_add(block + BELL, 1)
    return now


@kernel("int64(int64, int64)")
def publish(word: int, value: int) -> int:
    """Store ``value`` at address ``word`` behind everything stored before."""
    atomic_store(word, value)
    return value
