"""Loops over C functions: which calls were made, which failed and why, and how long they took."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvbench.errors import UsageError
from kvbench.kernels.call_loop import Failure, Runner, TeamRunner, alone, touch_many
from kvbench.kernels.libc import address_of
from kvbench.kernels.team import Team
from kvbench.memory import libc

PAGE = libc.base_page_bytes()
RW = libc.PROT_READ | libc.PROT_WRITE


def mmap_rows(
    count: int, flags: int = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array([[0, PAGE, RW, flags, -1, 0]] * count, np.int64)


@pytest.fixture(params=["alone", "team"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    if request.param == "alone":
        yield alone
        return
    team = Team([min(os.sched_getaffinity(0))] * 2)
    yield TeamRunner(team)
    team.close()


def test_every_row_is_one_call_and_results_are_what_it_returned(runner: Runner) -> None:
    found = np.zeros(5, np.int64)
    assert runner(address_of("mmap"), mmap_rows(5), errno=True, results=found) is None
    assert len(set(found.tolist())) == 5
    for address in found.tolist():
        ctypes.memset(address, 3, PAGE)
    table = np.zeros((5, 6), np.int64)
    table[:, 0], table[:, 1] = found, PAGE
    assert runner(address_of("munmap"), table, errno=True) is None
    with pytest.raises(OSError, match="mincore"):
        libc.resident_pages(int(found[0]), PAGE)


def test_a_failing_call_is_named_with_its_errno_and_ends_its_thread() -> None:
    table = mmap_rows(6)
    table[2, 3] = 0  # neither shared nor private
    table[4, 1] = 0
    found = np.zeros(6, np.int64)
    failure = alone(address_of("mmap"), table, errno=True, results=found)
    assert isinstance(failure, Failure)
    assert (failure.index, failure.code) == (2, errno.EBADF)
    assert failure.made.tolist() == [True, True, False, False, False, False]
    for address in found[:2].tolist():
        libc.munmap(address, PAGE)


def test_members_of_a_team_stop_on_their_own() -> None:
    with Team([min(os.sched_getaffinity(0))] * 2) as team:
        table = mmap_rows(6)
        table[1, 3] = table[4, 3] = 0
        found = np.zeros(6, np.int64)
        failure = TeamRunner(team)(address_of("mmap"), table, errno=True, results=found)
        assert failure is not None
        assert (failure.index, failure.code) == (1, errno.EBADF)
        assert failure.made.tolist() == [True, False, False, True, False, False]
        for index in (0, 3):
            libc.munmap(int(found[index]), PAGE)


def test_a_code_is_what_the_function_returned() -> None:
    codes: list[int] = [0, 0, 700, 0]
    asked: list[tuple[int, ...]] = []

    def answer(*arguments: int) -> int:
        asked.append(arguments)
        return codes.pop(0)

    called = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 6)(answer)
    function = ctypes.cast(called, ctypes.c_void_p).value or 0
    table = np.arange(24, dtype=np.int64).reshape(4, 6)
    failure = alone(function, table, errno=False)
    assert failure is not None
    assert (failure.index, failure.code, failure.made.tolist()) == (2, 700, [True, True, False, False])
    assert asked == [tuple(row) for row in table[:3].tolist()]


def test_a_team_times_only_what_is_counted() -> None:
    with Team([min(os.sched_getaffinity(0))]) as team:
        runner = TeamRunner(team, stamps=True)
        table = np.array([[0] * 6] * 4, np.int64)
        getpid = address_of("getpid")
        found = np.zeros(4, np.int64)
        runner(getpid, table, errno=True, results=found)
        assert (runner.calls, runner.seconds, runner.each) == (0, 0.0, [])
        assert found.tolist() == [os.getpid()] * 4
        runner.begin()
        runner(getpid, table, errno=True)
        runner(getpid, table, errno=True)
        seconds = runner.end()
        runner(getpid, table, errno=True)
        assert runner.calls == 8
        assert [len(each) for each in runner.each] == [4, 4]
        assert 0.0 < sum(float(each.sum()) for each in runner.each) <= seconds
        runner.begin()
        assert (runner.calls, runner.seconds, runner.each) == (0, 0.0, [])


def test_touches_reach_every_step_and_nothing_between() -> None:
    room = np.zeros(4096, np.uint8)
    addresses = room.ctypes.data + np.array([0, 2048], np.int64)
    touch_many(addresses.ctypes.data, 2, 1024, 256, 9)
    wanted = np.zeros(4096, np.uint8)
    wanted[[0, 256, 512, 768, 2048, 2304, 2560, 2816]] = 9
    assert np.array_equal(room, wanted)


def test_rows_of_another_shape_are_refused() -> None:
    for wrong in (np.zeros((2, 5), np.int64), np.zeros((2, 6), np.int32), np.zeros(6, np.int64)):
        with pytest.raises(UsageError, match="not rows of arguments"):
            alone(0, wrong, errno=False)  # type: ignore[arg-type]
