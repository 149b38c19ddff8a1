"""A copy at a chosen rate: it copies, it stops, it does not exceed what was asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.kernels import paced_copy
from kvbench.kernels.paced_copy import PIECE, PacedCopy

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Made = tuple[PacedCopy, Bytes, Bytes]


@pytest.fixture
def copy() -> Iterator[Made]:
    source = np.random.default_rng(1).integers(0, 256, 3 * PIECE, dtype=np.uint8)
    target = np.zeros_like(source)
    cpu = sorted(os.sched_getaffinity(0))[-1]
    with PacedCopy(cpu, int(target.ctypes.data), int(source.ctypes.data), source.nbytes) as made:
        yield made, target, source


def test_it_copies_and_stops(copy: Made) -> None:
    made, target, source = copy
    made.verify()
    made.start()
    deadline = time.monotonic() + 10
    while not (target == source).all() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert made.stop() > 0.0
    assert (target == source).all()
    target[:] = 0
    time.sleep(0.005)
    assert not target.any()


def test_a_paced_copy_is_no_faster_than_asked(copy: Made) -> None:
    made, _, _ = copy
    made.start(PIECE / 0.01)
    time.sleep(0.05)
    rate = made.stop()
    assert 0.0 < rate <= 9 * PIECE / 0.01  # a pause of others is made up for by eight pieces at most


def test_a_piece_that_does_not_arrive_is_caught(copy: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = copy
    monkeypatch.setattr(paced_copy, "bytes_at", lambda address, count: np.zeros(count, np.uint8))
    with pytest.raises(VerifyError, match="not copied"):
        made.verify()


def test_order_of_calls(copy: Made) -> None:
    made, _, _ = copy
    with pytest.raises(KvbenchError, match="does not run"):
        made.stop()
    with pytest.raises(UsageError, match="not a rate"):
        made.start(0.0)
    made.start(1e9)
    with pytest.raises(KvbenchError, match="already runs"):
        made.start()
    made.stop()
    with pytest.raises(UsageError, match="nothing to copy"):
        PacedCopy(0, 0, 0, PIECE - 1)
