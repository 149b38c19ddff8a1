"""Waiting without the interpreter's lock: what ends a wait, and that it does not end before."""

from __future__ import annotations

import threading
import time

import numpy as np

from kvbench.kernels import pace


def test_the_clock_is_the_hosts() -> None:
    block = pace.make_block()
    at = int(block.ctypes.data)
    assert at % 64 == 0
    before = time.perf_counter_ns()
    now = pace.ring(at)
    assert before <= now <= time.perf_counter_ns()
    assert block[pace.BELL // 8] == 1


def test_a_hold_lasts_to_its_deadline() -> None:
    at = int((block := pace.make_block()).ctypes.data)
    deadline = time.perf_counter_ns() + 2_000_000
    assert pace.hold(at, deadline, 0) >= deadline
    assert time.perf_counter_ns() >= deadline
    assert pace.hold(at, deadline - 10_000_000, 0) >= deadline
    del block


def test_a_bell_ends_a_hold_and_only_one_that_listens() -> None:
    at = int((block := pace.make_block()).ctypes.data)
    pace.ring(at)
    far = time.perf_counter_ns() + 60_000_000_000
    assert pace.hold(at, far, 0) < far  # it has rung since it was 0
    soon = time.perf_counter_ns() + 1_000_000
    assert pace.hold(at, soon, -1) >= soon
    threading.Timer(0.01, pace.ring, [at]).start()
    assert pace.hold(at, far, 1) < far
    assert block[pace.BELL // 8] == 2


def test_a_word_ends_a_wait() -> None:
    at = int((block := pace.make_block()).ctypes.data)
    words = np.zeros(1, np.int64)
    word = int(words.ctypes.data)
    threading.Timer(0.01, pace.publish, [word, 7]).start()
    assert pace.await_word(at, word, 60_000_000_000) > 0
    assert words[0] == 7
    del block


def test_silence_and_an_abort_end_a_wait_without_an_answer() -> None:
    block, words = pace.make_block(), np.zeros(1, np.int64)
    at, word = int(block.ctypes.data), int(words.ctypes.data)
    assert pace.await_word(at, word, 1_000_000) == -1
    block[pace.ABORT // 8] = 1
    assert pace.await_word(at, word, 60_000_000_000) == -1
    far = time.perf_counter_ns() + 60_000_000_000
    assert pace.hold(at, far, -1) < far
