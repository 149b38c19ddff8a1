"""Calls through function pointers: what they move, and that every failure is named."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels import libc, uring
from kvbench.kernels.io_calls import IoCalls, Rows, call_row, io_kernel
from kvbench.kernels.team import Team
from tests.needs import require

CPU = min(os.sched_getaffinity(0))
PIECE, COUNT = 4096, 40


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team([CPU] * request.param) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, np.ndarray]]:
    content = np.random.default_rng(1).integers(0, 256, PIECE * COUNT, np.uint8)
    (tmp_path / "f").write_bytes(content.tobytes())
    fd = os.open(tmp_path / "f", os.O_RDWR)
    yield fd, content.reshape(COUNT, PIECE)
    os.close(fd)


def parts(rows: Rows, team: Team) -> Rows:
    return np.arange(len(team) + 1) * len(rows) // len(team)


def test_pread_and_pwrite_move_what_the_rows_say(file: tuple[int, np.ndarray], team: Team) -> None:
    fd, content = file
    order, got = np.random.default_rng(2).permutation(COUNT), np.zeros_like(content)
    at = got.ctypes.data
    rows = np.array([call_row("pread", fd, at + PIECE * i, PIECE, PIECE * int(j), returns=PIECE)
                     for i, j in enumerate(order)], np.int64)  # fmt: skip
    assert IoCalls(rows, parts(rows, team), team).run() > 0
    assert np.array_equal(got, content[order])
    rows = np.array([call_row("pwrite", fd, at + PIECE * i, PIECE, PIECE * i, returns=PIECE) for i in range(COUNT)])
    IoCalls(rows.astype(np.int64), parts(rows, team), team).run()
    assert os.pread(fd, PIECE * COUNT, 0) == got.tobytes()


def test_a_failed_call_is_named_with_its_errno(file: tuple[int, np.ndarray], team: Team) -> None:
    fd, content = file
    rows = np.array([call_row("pread", fd, content.ctypes.data, PIECE, 0, returns=PIECE)] * 5, np.int64)
    rows[3, 1] = 999_999  # no such descriptor
    with pytest.raises(Unavailable, match=r"call 3 of 5: pread failed, got 'Bad file descriptor \(errno 9\)'"):
        IoCalls(rows, parts(rows, team), team).run()


def test_a_read_past_the_end_is_not_success(file: tuple[int, np.ndarray], team: Team) -> None:
    fd, _ = file
    got = np.zeros(2 * PIECE, np.uint8)
    row = call_row("pread", fd, got.ctypes.data, 2 * PIECE, PIECE * (COUNT - 1), returns=2 * PIECE)
    rows = np.array([row], np.int64)
    with pytest.raises(Unavailable, match="got '4096 of 8192 bytes'"):
        IoCalls(rows, parts(rows, team), team).run()


def test_a_fragment_beyond_two_gibibytes_takes_further_calls() -> None:
    """The kernel moves at most 2 GiB - 4 KiB a call; a stand-in does the same without touching memory."""
    most, size = (1 << 31) - 4096, 3 << 30
    seen: list[tuple[int, int, int, int]] = []

    def short(fd: int, address: int, nbytes: int, offset: int) -> int:
        seen.append((fd, address, nbytes, offset))
        return min(nbytes, most)

    fake = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(short)
    address = ctypes.cast(fake, ctypes.c_void_p).value or 0
    rows = np.array([[address, 7, 1 << 40, size, 5 << 30, size]], np.int64)
    bounds = np.array([0, 1], np.int64)
    with Team([CPU]) as team:
        team.run(
            io_kernel, rows.ctypes.data, bounds.ctypes.data, address, 0, libc.address_of("__errno_location")
        )  # fmt: skip
        assert team.outputs[0, 0] == 0
    assert seen == [(7, 1 << 40, size, 5 << 30), (7, (1 << 40) + most, size - most, (5 << 30) + most)]


def test_bad_rows_are_refused(team: Team) -> None:
    row = np.array([call_row("labs", 1, returns=1)], np.int64)
    with pytest.raises(UsageError, match="not rows of calls"):
        IoCalls(row[:, :5], parts(row, team), team)
    with pytest.raises(UsageError, match="not parts of the rows"):
        IoCalls(row, np.zeros(len(team) + 1, np.int64), team)


def test_io_uring_moves_vectors_both_ways(file: tuple[int, np.ndarray], team: Team) -> None:
    require("io_uring", uring.probe() or None)
    fd, content = file
    order, got = np.random.default_rng(4).permutation(COUNT // 2), np.zeros_like(content)
    at = got.ctypes.data
    vectors = np.array([[at + PIECE * i, PIECE] for i in range(COUNT)], np.int64)  # two vectors a call
    starts = vectors.ctypes.data + 32 * np.arange(COUNT // 2)
    rows = np.stack((starts, np.full(COUNT // 2, 2), 2 * PIECE * order, np.full(COUNT // 2, 2 * PIECE)), 1)
    with uring.RingCalls(False, fd, rows, parts(rows, team), team, keep=vectors) as reads:
        for _ in range(3):  # the ring goes round: 32 entries a thread, more calls than that
            got[:] = 0
            assert reads.run() > 0
            assert np.array_equal(got.reshape(COUNT // 2, -1), content.reshape(COUNT // 2, -1)[order])
    got[:] = np.random.default_rng(5).integers(0, 256, got.shape, np.uint8)
    with uring.RingCalls(True, fd, rows, parts(rows, team), team, keep=vectors) as writes:
        writes.run()
    written = np.frombuffer(os.pread(fd, PIECE * COUNT, 0), np.uint8).reshape(COUNT // 2, -1)
    assert np.array_equal(written[order], got.reshape(COUNT // 2, -1))


def test_io_uring_names_what_failed(file: tuple[int, np.ndarray], team: Team) -> None:
    require("io_uring", uring.probe() or None)
    fd, content = file
    vectors = np.array([[content.ctypes.data, PIECE]], np.int64)
    rows = np.array([[vectors.ctypes.data, 1, PIECE * (COUNT + 2 * (i == 33)) - PIECE, PIECE] for i in range(50)])
    with (
        uring.RingCalls(False, fd, rows, parts(rows, team), team, keep=vectors) as calls,
        pytest.raises(Unavailable, match="call 33 of 50: io_uring failed, got '0 of 4096 bytes'"),
    ):
        calls.run()
    with pytest.raises(UsageError, match="rings are closed"):
        calls.run()


def test_a_refused_io_uring_is_unavailable_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring, "SETUP", 9999)  # a system call no kernel has: what seccomp's ENOSYS looks like
    uring.probe.cache_clear()
    try:
        assert "io_uring cannot be used, got 'Function not implemented'" in uring.probe()
    finally:
        monkeypatch.undo()
        uring.probe.cache_clear()
