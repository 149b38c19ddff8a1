"""The team: who is pinned where, when the clock is read, and that nothing ever waits for ever."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import pytest

from kvbench.errors import KvbenchError, UsageError
from kvbench.kernels import sync
from kvbench.kernels.team import Team

CPU = min(os.sched_getaffinity(0))


@pytest.fixture
def team() -> Iterator[Team]:
    """Three members on one CPU: more threads than cores on every machine."""
    with Team([CPU] * 3) as made:
        yield made


def meet(control: int, member: int, members: int) -> int:
    start = sync.enter(control, member, members)
    return -1 if start < 0 else sync.leave(control, member, members, start)


def test_members_are_pinned_and_the_affinity_comes_back() -> None:
    before = os.sched_getaffinity(0)
    cpus = sorted(before)[:2]
    with Team(cpus) as team:
        assert team.pinned
        assert team.pin_reason is None
        assert team.cpus == tuple(cpus)
        assert len(set(team.tids)) == len(cpus)
        assert team.tids[0] == threading.get_native_id()
        for tid, cpu in zip(team.tids, cpus, strict=True):
            assert os.sched_getaffinity(tid) == {cpu}
    assert os.sched_getaffinity(0) == before
    assert not any(t.name.startswith("kvbench-") for t in threading.enumerate())


def test_a_cpu_that_does_not_exist_leaves_a_reason() -> None:
    with Team([CPU, 100_000]) as team:
        assert not team.pinned
        assert "100000" in (team.pin_reason or "")
        assert team.run(meet) > 0


def test_no_cpu_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        Team([])


def test_every_member_runs_every_time(team: Team) -> None:
    seen: list[tuple[int, int, int]] = []

    def kernel(control: int, member: int, members: int, tag: int) -> int:
        seen.append((member, members, tag))
        return meet(control, member, members)

    for tag in range(20):
        assert team.run(kernel, tag) > 0
    assert sorted(seen) == sorted((m, 3, t) for m in range(3) for t in range(20))


def test_the_clock_starts_after_the_last_arrival_and_stops_after_the_last_finish(team: Team) -> None:
    """With a clock of our own: what had happened at each of its two readings, and that their difference is returned."""
    words = (ctypes.c_int64 * 64).from_address(team.control)
    states: list[tuple[int, int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64))
    def clock(_: int, time: ctypes._Pointer[ctypes.c_int64]) -> int:
        states.append((words[sync.ARRIVED // 8], words[sync.RELEASED // 8], words[sync.FINISHED // 8]))
        time[0], time[1] = len(states), 500_000_000
        return 0

    words[sync.CLOCK // 8] = ctypes.cast(clock, ctypes.c_void_p).value or 0
    assert team.run(meet) == pytest.approx(1.0)
    assert states == [(2, 0, 0), (2, 1, 2)]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_member_that_raises_releases_the_others(team: Team, failing: int, error: BaseException) -> None:
    def kernel(control: int, member: int, members: int) -> int:
        if member == failing:
            raise error
        return meet(control, member, members)

    with pytest.raises(type(error) if failing == 0 else KvbenchError) as caught:
        team.run(kernel)
    if failing:
        assert caught.value.__cause__ is error
    assert team.run(meet) > 0, "the team works on"


def test_failing_after_the_release_stops_the_clock_of_nobody(team: Team) -> None:
    def kernel(control: int, member: int, members: int) -> int:
        start = sync.enter(control, member, members)
        if member == 1:
            raise ValueError("mid-work")
        return sync.leave(control, member, members, start)

    with pytest.raises(KvbenchError, match="mid-work"):
        team.run(kernel)


def test_an_aborted_run_is_never_a_time(team: Team) -> None:
    with pytest.raises(KvbenchError, match="aborted"):
        team.run(lambda control, member, members: -1)


def test_closed_and_foreign_threads_are_refused() -> None:
    team = Team([CPU])
    caught: list[str] = []

    def foreign() -> None:
        try:
            team.run(meet)
        except KvbenchError as error:
            caught.append(str(error))

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert "only from the thread that built it" in caught[0]
    team.close()
    team.close()
    with pytest.raises(KvbenchError, match="closed"):
        team.run(meet)


def test_shares_cover_everything_once() -> None:
    for nbytes in (1, 63, 64, 65, 4096, 4096 + 13):
        for members in (1, 2, 3, 7, 100):
            edges = [sync.share_bytes(nbytes, m, members) for m in range(members + 1)]
            assert edges[0] == 0
            assert edges[-1] == nbytes
            assert edges == sorted(edges)
            assert all(edge % 64 == 0 for edge in edges[:-1])
