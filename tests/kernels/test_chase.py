"""The chase: one cycle through every line, at the position its hops lead to, and loaders that read what they count."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.team import Team

CPU = min(os.sched_getaffinity(0))


@pytest.fixture
def alone() -> Iterator[Team]:
    with Team([CPU]) as made:
        yield made


def lines(count: int) -> np.ndarray:
    """Return ``count`` lines of random words, shape (count, 8), on a 64-byte boundary."""
    words = np.random.default_rng(0).integers(0, 2**63, (count + 1) * 8, np.int64)
    start = -words.ctypes.data % 64 // 8
    return words[start : start + count * 8].reshape(count, 8)


def tour(memory: np.ndarray) -> list[int]:
    """Return the line numbers on the cycle from line 0, followed in Python."""
    base, order, at = memory.ctypes.data, [], 0
    while True:
        order.append(at)
        at = (int(memory[at, 0]) - base) // 64
        if at == 0 or len(order) > len(memory):
            return order


@pytest.mark.parametrize("nodes", [2, 3, 17, 4095, 4096, 4097, 10_000])
def test_one_cycle_through_every_line(nodes: int, alone: Team) -> None:
    from kvbench.kernels.chase import Chase

    memory = lines(nodes)
    rest = memory[:, 1:].copy()
    work = Chase(memory.ctypes.data, nodes * 64, alone, seed=1)
    assert sorted(tour(memory)) == list(range(nodes))
    for hops in (1, 7, 8, nodes, nodes + 5, 3 * nodes + 1):
        assert work.run(hops) > 0
        work.verify()
    assert np.array_equal(memory[:, 1:], rest), "only the pointers are written"


def test_the_seed_decides_the_order(alone: Team) -> None:
    from kvbench.kernels.chase import Chase

    memory = lines(1000)
    orders = []
    for seed in (1, 1, 2):
        Chase(memory.ctypes.data, memory.nbytes, alone, seed=seed)
        orders.append(tour(memory))
    assert orders[0] == orders[1] != orders[2]


def test_jumps_are_far_apart(alone: Team) -> None:
    """A random order has no stride to prefetch: neighbours in the cycle are neighbours in memory almost never."""
    from kvbench.kernels.chase import Chase

    memory = lines(10_000)
    Chase(memory.ctypes.data, memory.nbytes, alone)
    steps = np.abs(np.diff(tour(memory)))
    assert (steps > 64).mean() > 0.95


def test_runs_go_on_where_the_last_one_stopped(alone: Team) -> None:
    from kvbench.kernels.chase import Chase

    memory = lines(500)
    work = Chase(memory.ctypes.data, memory.nbytes, alone)
    work.run(100)
    first = work._position
    work.run(400)
    assert work._position == int(work._checkpoints[0]) != first


@pytest.mark.parametrize("fault", ["short", "outside", "skipped", "two"])
def test_a_broken_cycle_is_found(fault: str, alone: Team) -> None:
    from kvbench.kernels.chase import Chase

    memory = lines(9000)
    work = Chase(memory.ctypes.data, memory.nbytes, alone)
    work.run(10)
    work.verify()
    order = tour(memory)
    base = memory.ctypes.data
    if fault == "short":  # back to the start half way
        memory[order[4500], 0] = base + 64 * order[0]
    elif fault == "outside":
        memory[order[4500], 0] = base + memory.nbytes
    elif fault == "skipped":  # one node is left out
        memory[order[4500], 0] = base + 64 * order[4502]
    else:  # swapping two successors makes two cycles of one
        a, b = order[1000], order[7000]
        memory[[a, b], 0] = memory[[b, a], 0]
    with pytest.raises(VerifyError, match="one cycle"):
        work.verify()


def test_fewer_hops_than_claimed_are_found(alone: Team) -> None:
    from kvbench.kernels.chase import Chase

    memory = lines(5000)
    work = Chase(memory.ctypes.data, memory.nbytes, alone)
    honest = work.code
    work.code = lambda *args: honest(*args[:4], args[4] - 1, *args[5:])
    work.run(1234)
    with pytest.raises(VerifyError, match="another node"):
        work.verify()


def test_bad_requests(alone: Team) -> None:
    from kvbench.kernels.chase import Chase, LoadedChase

    memory = lines(100)
    with pytest.raises(UsageError):
        Chase(memory.ctypes.data, 64, alone)
    with pytest.raises(UsageError):
        Chase(memory.ctypes.data + 4, 640, alone)
    work = Chase(memory.ctypes.data, memory.nbytes, alone)
    with pytest.raises(VerifyError, match="nothing was run"):
        work.verify()
    with pytest.raises(UsageError):
        work.run(0)
    with pytest.raises(Unavailable, match="second CPU"):
        LoadedChase(work, memory.ctypes.data, memory.nbytes, alone)


@pytest.mark.parametrize(("members", "delay", "size"), [(2, 0, 100_032), (3, 50, 4096 + 17)])
def test_loaders_read_what_they_count(members: int, delay: int, size: int) -> None:
    from kvbench.kernels.chase import Chase, LoadedChase

    memory, loaded = lines(20_000), lines(size // 64 + 1)
    with Team([CPU] * members) as team:
        chase = Chase(memory.ctypes.data, memory.nbytes, team)
        with pytest.raises(UsageError, match="team of one"):
            chase.run(1)
        work = LoadedChase(chase, loaded.ctypes.data, size, team, block=1024, delay=delay)
        with pytest.raises(VerifyError, match="nothing was run"):
            work.verify()
        sample = work.sample(50_000)
        work.verify()
        assert sample.hops == 50_000
        assert sample.latency == pytest.approx(sample.seconds / 50_000)
        assert 0 <= sample.load_bytes <= sum(done for _, done, _ in work._loads)
        assert all(done > 0 for _, done, _ in work._loads)
        stopped = work._offsets.copy()
        assert work.run(100) > 0
        # starting over would read the first bytes of each share again and again, from a cache
        assert [at for at, _, _ in work._loads] == stopped.tolist()
        work.verify()
        begun, done, checksum = work._loads[0]
        work._loads[0] = (begun, done + 64, checksum)
        with pytest.raises(VerifyError, match="did not read"):
            work.verify()
