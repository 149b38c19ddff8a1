"""Copies in the background: right bytes, honest progress, and proof of how long they were under way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.kernels.background import Background, Stretch
from kvbench.kernels.raw import bytes_at

FRAGMENT, COUNT = 4096, 64
ORDER = np.random.default_rng(1).permutation(COUNT).astype(np.int64)


@contextmanager
def copier(copiers: int = 2, variant: str = "nt l2+4096", index: object = ORDER) -> Iterator[tuple[Background, int]]:
    memory = np.random.default_rng(2).integers(0, 256, 2 * COUNT * FRAGMENT + 64, np.uint8)
    start = -memory.ctypes.data % 64 + memory.ctypes.data
    cpus = sorted(os.sched_getaffinity(0))
    target = start + COUNT * FRAGMENT
    with Background([cpus[-1]] * copiers, variant, start, target, FRAGMENT, index, COUNT * FRAGMENT) as made:  # type: ignore[arg-type]
        yield made, target
        assert len(memory)


def until_all(work: Background) -> None:
    deadline = time.monotonic() + 30.0
    while work.copied < 4 * COUNT and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("copiers", [1, 2])
@pytest.mark.parametrize("variant", ["nt l2+4096", "memcpy none"])
def test_it_copies_until_told_to_stop_and_says_since_when(copiers: int, variant: str) -> None:
    with copier(copiers, variant) as (work, target):
        for _ in range(2):
            before = time.perf_counter_ns()
            work.start()
            begin, first = time.perf_counter_ns(), work.copied
            assert first >= copiers
            until_all(work)
            end = time.perf_counter_ns()
            found = work.stop()
            assert before <= found.began <= begin
            assert end <= found.ended <= time.perf_counter_ns()
            assert found.covers(begin, end)
            assert not found.covers(before - 1, end)
            assert not found.covers(begin, time.perf_counter_ns())
            assert sum(found.copied) == work.copied
            assert len(found.copied) == copiers
            work.verify(found)
            bytes_at(target, 1)[0] ^= 1
            with pytest.raises(VerifyError, match="entry 0"):
                work.verify(found)


def test_a_copier_that_copied_nothing_is_noticed() -> None:
    with copier() as (work, _):
        work.start()
        found = work.stop()
        with pytest.raises(VerifyError, match="nothing"):
            work.verify(Stretch(found.began, found.ended, (found.copied[0], 0)))
        work.spoil()
        with pytest.raises(VerifyError, match="not copied"):
            work.verify(found)


def test_start_and_stop_come_in_pairs() -> None:
    with copier(1) as (work, _):
        with pytest.raises(KvbenchError, match="does not run"):
            work.stop()
        work.start()
        with pytest.raises(KvbenchError, match="already runs"):
            work.start()
    work.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"copiers": 0}, "copiers"), ({"copiers": COUNT + 1}, "copiers"), ({"variant": "read none"}, "no copy"),
        ({"index": ORDER + 1}, "does not fit"), ({"index": ORDER - 1}, "does not fit"),
    ],
)  # fmt: skip
def test_what_cannot_be_copied_is_refused(how: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words), copier(**how):  # type: ignore[arg-type]
        pass
