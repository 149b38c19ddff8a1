"""Gathers: every variant moves the same bytes in the order asked for, and a wrong one never passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.team import Team

CPU = min(os.sched_getaffinity(0))


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team([CPU] * request.param) as made:
        yield made


def aligned(nbytes: int) -> np.ndarray:
    memory = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


def index(count: int, total: int) -> np.ndarray:
    return np.random.default_rng(total).permutation(total)[:count].astype(np.int64)


@pytest.mark.parametrize("fragment", [64, 192, 512, 4096, 4608, 65536])
@pytest.mark.parametrize("op", ["read", "copy"])
def test_every_variant_moves_the_fragments(op: str, fragment: int, team: Team) -> None:
    from kvbench.kernels.gather import Gather, variants

    total = max(7, 40_000 // fragment)
    source = aligned(total * fragment)
    for count in (total, total - 2, 1):
        order = index(count, total)
        for name in variants(op, fragment):
            target = aligned(count * fragment + 128) if op == "copy" else None
            tail = None if target is None else target[-128:].copy()
            address = None if target is None else int(target.ctypes.data)
            work = Gather(name, int(source.ctypes.data), source.nbytes, fragment, order, team, dst=address)
            assert work.link_bytes == count * fragment
            assert work.run(2) > 0
            work.verify()
            if target is not None:
                rows = source.reshape(total, fragment)[order]
                assert np.array_equal(target[:-128].reshape(count, fragment), rows)
                assert np.array_equal(target[-128:], tail)


def make(op: str, team: Team, fragment: int = 512) -> tuple[Any, np.ndarray, np.ndarray]:
    from kvbench.kernels.gather import Gather, variants

    source, target, order = aligned(100 * fragment), aligned(100 * fragment), index(100, 100)
    dst = int(target.ctypes.data) if op == "copy" else None
    name = variants(op, fragment)[-2]
    return Gather(name, int(source.ctypes.data), source.nbytes, fragment, order, team, dst=dst), source, target


@pytest.mark.parametrize("op", ["read", "copy"])
def test_one_wrong_byte_is_found(op: str, team: Team) -> None:
    work, source, _ = make(op, team)
    for at in (0, 25_000, source.nbytes - 1):
        work.run()
        source[at] ^= 1
        with pytest.raises(VerifyError):
            work.verify()
        source[at] ^= 1
        work.verify()


@pytest.mark.parametrize("op", ["read", "copy"])
def test_the_right_bytes_in_another_order_are_found(op: str, team: Team) -> None:
    """Reading sequentially what should be gathered is the mistake that makes a gather look best."""
    work, _, _ = make(op, team)
    honest: Callable[..., int] = work.code
    ordered = np.arange(100, dtype=np.int64)
    work.code = lambda *args: honest(*args[:6], int(ordered.ctypes.data), *args[7:])
    work.run()
    with pytest.raises(VerifyError):
        work.verify()


@pytest.mark.parametrize("op", ["read", "copy"])
def test_a_member_that_does_nothing_is_found(op: str) -> None:
    with Team([CPU] * 3) as team:
        work, _, _ = make(op, team)
        work.run()
        honest: Callable[..., int] = work.code
        work.code = lambda ctl, member, *args: honest(ctl, member, *args[:9], 0 if member == 2 else args[9], args[10])
        work.run()
        with pytest.raises(VerifyError):
            work.verify()


def test_checks_survive_other_work_on_the_same_team(team: Team) -> None:
    first, *_keep = make("read", team)
    second, *_keep_too = make("read", team, fragment=64)  # a work holds addresses only: the arrays must live on
    first.run()
    second.run()
    first.verify()
    second.verify()


def test_bad_requests(team: Team) -> None:
    from kvbench.kernels.gather import Gather, variants

    source, order = aligned(6400), index(100, 100)
    address = int(source.ctypes.data)
    for op, fragment in (("move", 64), ("read", 100), ("copy", 0)):
        with pytest.raises(UsageError):
            variants(op, fragment)
    with pytest.raises(UsageError, match="unknown gather variant"):
        Gather("read backwards", address, 6400, 64, order, team)
    for bad in (order.astype(np.int32), order[::2], np.append(order[1:], 100), np.append(order[1:], -1), order[:0]):
        with pytest.raises(UsageError, match="index"):
            Gather("read none", address, 6400, 64, bad, team)
    with pytest.raises(UsageError, match="twice"):
        Gather("read none", address, 6400, 64, np.append(order[1:], order[1]), team)
    for dst in (None, address + 640, address + 6400 + 8):
        with pytest.raises(UsageError, match="destination"):
            Gather("nt none", address, 6400, 64, order, team, dst=dst)
    work = Gather("read none", address, 6400, 64, order, team)
    with pytest.raises(VerifyError, match="nothing was run"):
        work.verify()
    source[:] = 0
    work.run()
    with pytest.raises(VerifyError, match="zero"):
        work.verify()
    with pytest.raises(UsageError):
        work.run(0)


@pytest.mark.parametrize("idle_runs", [1, 2, 3, 8])
def test_a_copy_that_stops_working_is_noticed_after_any_number_of_runs(idle_runs: int) -> None:
    from kvbench.kernels.gather import Gather

    source = np.random.default_rng(1).integers(0, 256, 64 * 100, np.uint8)
    raw = np.zeros(64 * 101, np.uint8)
    skip = -raw.ctypes.data % 64
    index = np.random.default_rng(2).permutation(100).astype(np.int64)
    with Team([min(os.sched_getaffinity(0))]) as team:
        work = Gather("memcpy none", source.ctypes.data, source.nbytes, 64, index, team, dst=raw.ctypes.data + skip)
        work.run(1)
        work.verify()
        work.code = lambda *args: 1000
        for _ in range(idle_runs):
            work.run(1)
        with pytest.raises(VerifyError):
            work.verify()
