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
SPINS = 2000  # as in kernels.sync: then yield, for machines with fewer CPUs than threads
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
    """Return the time once it is ``deadline`` or the bell is no longer ``seen``. For the first thread."""
    spins = 0
    while True:
        now = now_ns(block, FIRST_SPEC)
        if now >= deadline or atomic_load(block + BELL) != seen or atomic_load(block + ABORT) != 0:
            return now
        pause()
        spins += 1
        if spins > SPINS and deadline - now > 200_000:
            call_yield(word_load(block + YIELD))


@kernel("int64(int64, int64, int64)")
def await_word(block: int, word: int, most: int) -> int:
    """Return the time once the word at address ``word`` is not 0; -1 when aborted or after ``most`` ns. Second thread."""
    begin = now_ns(block, SECOND_SPEC)
    spins = 0
    while atomic_load(word) == 0:
        if atomic_load(block + ABORT) != 0:
            return -1
        pause()
        spins += 1
        if spins > SPINS:
            spins = 0
            call_yield(word_load(block + YIELD))
            if now_ns(block, SECOND_SPEC) - begin > most:
                return -1
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
